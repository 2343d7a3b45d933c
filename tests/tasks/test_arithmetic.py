"""Registry, split, reward and the shipped model of the arithmetic task."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trl_variants.tasks import load_task, register_task, tiny_model_path
from trl_variants.tasks.arithmetic import arithmetic_reward, carries, split
from trl_variants.tasks.base import COLUMNS
from trl_variants.tasks.evaluation import greedy_completions

# reaches 0.93-0.96 on seeds 0, 1, 2
SETTINGS = dict(
    per_device_train_batch_size=128,
    num_generations=8,
    max_completion_length=4,
    max_steps=120,
    learning_rate=3e-4,
    lr_scheduler_type="constant",
    loss_type="dr_grpo",
    scale_rewards=False,
    epsilon_high=0.28,
    temperature=1.0,
    beta=0.0,
    adam_beta2=0.99,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny():
    return load_task("arithmetic").load_model()


def train(model, tokenizer, task, out: Path, seed: int, **changes):
    from trl import GRPOConfig, GRPOTrainer

    GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=task.reward_funcs,
        train_dataset=task.train_dataset,
        args=GRPOConfig(output_dir=str(out), seed=seed, **{**SETTINGS, **changes}),
    ).train()


def test_unknown_name_gets_a_hint():
    with pytest.raises(ValueError, match="did you mean 'arithmetic'"):
        load_task("arithmetics")
    with pytest.raises(ValueError, match="known tasks: arithmetic, gsm8k, reasoning_gym"):
        load_task("qqq")


def test_a_name_registers_once():
    with pytest.raises(ValueError, match="registered already"):
        register_task("arithmetic")(lambda: None)


def test_import_is_cheap():
    code = (
        "import sys, trl_variants.tasks\n"
        "heavy = {'trl', 'transformers', 'datasets', 'reasoning_gym', 'peft'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


def test_split_is_a_partition():
    train_side, held_out = split()
    assert len(held_out) == 500
    assert len(set(train_side) | set(held_out)) == 10_000 == len(train_side) + len(held_out)


def test_the_seed_moves_training_rows_only():
    a, b = load_task("arithmetic", train_size=50, seed=0), load_task("arithmetic", train_size=50, seed=1)
    assert a.train_dataset["id"][:] != b.train_dataset["id"][:]
    assert a.eval_dataset["id"][:] == b.eval_dataset["id"][:]
    again = load_task("arithmetic", train_size=50, seed=0)
    assert a.train_dataset["id"][:] == again.train_dataset["id"][:]
    assert not set(load_task("arithmetic").train_dataset["id"]) & set(a.eval_dataset["id"])


@pytest.mark.parametrize("sizes", [{"train_size": 0}, {"train_size": 9501}, {"eval_size": 501}, {"eval_size": 0}])
def test_sizes_are_checked(sizes):
    with pytest.raises(ValueError, match="must be in"):
        load_task("arithmetic", **sizes)


@pytest.mark.parametrize("conversational", [False, True])
def test_rows(conversational):
    task = load_task("arithmetic", train_size=64, conversational=conversational)
    rows = task.train_dataset
    assert set(COLUMNS) <= set(rows.column_names)
    prompt = rows[0]["prompt"][0]["content"] if conversational else rows[0]["prompt"]
    a, b = map(int, prompt.rstrip("=").split("+"))
    assert rows[0]["answer"] == str(a + b) and rows[0]["id"] == f"arithmetic/{a}+{b}"
    assert rows[0]["difficulty"] == carries(a, b)
    columns = {name: list(rows[name]) for name in rows.column_names if name != "prompt"}
    scores = task.reward_funcs[0](prompts=list(rows["prompt"]), completions=list(rows["solution"]), **columns)
    assert scores == [1.0] * 64


@pytest.mark.parametrize(("pair", "count"), [((12, 34), 0), ((18, 34), 1), ((60, 70), 1), ((65, 38), 2), ((55, 45), 2)])
def test_carries(pair, count):
    assert carries(*pair) == count


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("85", 1.0),
        (" 85\n", 1.0),
        ("8", 0.0),
        ("855", 0.0),
        ("85=", 0.0),
        ("-85", 0.0),
        ("", 0.0),
        ("84", 0.0),
    ],
)
def test_reward(completion, reward):
    chat = [{"role": "assistant", "content": completion}]
    assert arithmetic_reward(["47+38="] * 2, [completion, chat], answer=["85", "85"], id=["a", "b"]) == [reward] * 2


def test_reward_wants_one_answer_per_completion():
    with pytest.raises(ValueError):
        arithmetic_reward(["47+38="], ["85", "85"], answer=["85"])


def test_shipped_files_are_small_and_readable():
    files = list(Path(tiny_model_path()).iterdir())
    assert sum(f.stat().st_size for f in files) <= 2.5e6
    assert all(f.stat().st_mode & 0o044 == 0o044 for f in files)


def test_model_starts_below_half(tiny):
    model, tokenizer = tiny
    assert 0.25 <= load_task("arithmetic").evaluate(model, tokenizer, batch_size=500) <= 0.5
    assert (model.config.head_dim, tokenizer.padding_side, tokenizer.pad_token_id) == (32, "left", 0)


def test_right_answers_are_among_the_samples(tiny):
    model, tokenizer = tiny
    task = load_task("arithmetic", eval_size=200)
    batch = tokenizer(list(task.eval_dataset["prompt"]), return_tensors="pt", padding=True)
    torch.manual_seed(0)
    out = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=4, num_return_sequences=16)
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [answer for answer in task.eval_dataset["answer"] for _ in range(16)]
    hits = torch.tensor(arithmetic_reward(None, texts, answer=answers)).view(200, 16).amax(1).mean()
    assert hits >= 0.8


def test_evaluate_leaves_no_trace(tiny):
    model, tokenizer = tiny
    model.train()
    tokenizer.padding_side = "right"
    try:
        assert load_task("arithmetic").evaluate(model, tokenizer, limit=8) <= 1.0
        assert model.training and tokenizer.padding_side == "right"
    finally:
        model.eval()
        tokenizer.padding_side = "left"


@pytest.mark.parametrize("conversational", [False, True])
def test_completions_do_not_depend_on_the_batch(tiny, conversational):
    prompts = list(load_task("arithmetic", conversational=conversational, eval_size=40).eval_dataset["prompt"])
    plain = list(load_task("arithmetic", eval_size=40).eval_dataset["prompt"])
    alone = greedy_completions(*tiny, plain, max_new_tokens=4, batch_size=1)
    assert greedy_completions(*tiny, prompts, max_new_tokens=4, batch_size=7) == alone
    assert len(set(alone)) > 20


def test_a_few_steps_already_help(tmp_path):
    task = load_task("arithmetic")
    model, tokenizer = task.load_model()
    train(model, tokenizer, task, tmp_path, seed=0, max_steps=20)
    assert task.evaluate(model, tokenizer, batch_size=500) >= 0.6


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_plain_grpo_learns_the_carry(tmp_path, seed):
    task = load_task("arithmetic", seed=seed)
    model, tokenizer = task.load_model()
    train(model, tokenizer, task, tmp_path, seed=seed)
    assert task.evaluate(model, tokenizer, batch_size=500) >= 0.88
