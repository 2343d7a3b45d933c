"""Problems, reward and the shipped model of the scratchpad task."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trl_variants.tasks import load_task, scratchpad_model_path, scratchpad_teacher_path
from trl_variants.tasks.base import COLUMNS
from trl_variants.tasks.scratchpad import TRAIN, carries, scratchpad_reward, split, steps, text, unsolved


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny():
    return load_task("scratchpad").load_model()


@pytest.fixture(scope="module")
def samples(tiny):
    """(64, 8) texts, rewards, lengths in tokens, and the entropy of each sampled token's distribution."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, tokenizer = tiny
    task = load_task("scratchpad", eval_size=64)
    batch = tokenizer(list(task.eval_dataset["prompt"]), return_tensors="pt", padding=True)
    torch.manual_seed(0)
    out = model.generate(
        **batch,
        do_sample=True,
        top_k=0,
        max_new_tokens=task.max_new_tokens,
        num_return_sequences=8,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = out.sequences[:, batch["input_ids"].shape[1] :]
    live = (new == tokenizer.eos_token_id).cumsum(1) - (new == tokenizer.eos_token_id).long() == 0
    logps = torch.stack(out.logits, 1).log_softmax(-1)
    texts = tokenizer.batch_decode(new, skip_special_tokens=True)
    answers = [answer for answer in task.eval_dataset["answer"] for _ in range(8)]
    torch.set_num_threads(threads)
    return {
        "reward": torch.tensor(scratchpad_reward(None, texts, answer=answers)).view(64, 8),
        "length": live.sum(1).view(64, 8).float(),
        "entropy": -(logps.exp() * logps).sum(-1)[live],
    }


def test_split_is_a_partition():
    train, held_out = split()
    assert len(held_out) == 500 and len(train) == TRAIN
    assert len(set(train) | set(held_out)) == TRAIN + 500
    assert {len(p) for p in held_out} == {4, 5} and {d for p in train for d in p} == set(range(1, 10))


def test_the_seed_moves_training_rows_only():
    a, b = load_task("scratchpad", train_size=50, seed=0), load_task("scratchpad", train_size=50, seed=1)
    assert a.train_dataset["id"][:] != b.train_dataset["id"][:]
    assert a.eval_dataset["id"][:] == b.eval_dataset["id"][:]
    assert not set(load_task("scratchpad").train_dataset["id"]) & set(a.eval_dataset["id"])


@pytest.mark.parametrize("sizes", [{"train_size": 0}, {"train_size": 9501}, {"eval_size": 501}, {"eval_size": 0}])
def test_sizes_are_checked(sizes):
    with pytest.raises(ValueError, match="must be in"):
        load_task("scratchpad", **sizes)


@pytest.mark.parametrize("conversational", [False, True])
def test_rows(conversational):
    task = load_task("scratchpad", train_size=64, conversational=conversational)
    rows = task.train_dataset
    assert set(COLUMNS) <= set(rows.column_names)
    prompt = rows[0]["prompt"][0]["content"] if conversational else rows[0]["prompt"]
    terms = tuple(map(int, prompt.rstrip("=").split("+")))
    assert rows[0]["answer"] == str(sum(terms)) and rows[0]["id"] == "scratchpad/" + "+".join(map(str, terms))
    assert rows[0]["difficulty"] == carries(terms)
    columns = {name: list(rows[name]) for name in rows.column_names if name != "prompt"}
    scores = task.reward_funcs[0](prompts=list(rows["prompt"]), completions=list(rows["solution"]), **columns)
    assert scores == [1.0] * 64
    assert all(len(solution) <= task.max_new_tokens - 1 for solution in rows["solution"])


def test_prompt_steps_and_carries():
    assert text((3, 8, 5, 9)) == "3+8+5+9="
    assert steps((3, 8, 5, 9)) == "3+8=11;11+5=16;16+9=25"
    # 3+8 and 6+9 pass ten, 1+5 does not
    assert carries((3, 8, 5, 9)) == 2
    assert carries((1, 1, 1, 1)) == 0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("3+8=11;11+5=16;16+9=25", 1.0),
        ("25", 1.0),
        ("16+9=25 \n", 1.0),
        ("16+9=35=25", 1.0),
        ("16+9=25=35", 0.0),
        ("16+9=25;", 0.0),
        ("16+9=25;25+", 0.0),
        ("16+9=255", 0.0),
        ("16+9=", 0.0),
        ("", 0.0),
    ],
)
def test_reward(completion, reward):
    chat = [{"role": "assistant", "content": completion}]
    assert scratchpad_reward(None, [completion, chat], answer=["25", "25"], id=["a", "b"]) == [reward] * 2


def test_reward_wants_one_answer_per_completion():
    with pytest.raises(ValueError):
        scratchpad_reward(None, ["25", "25"], answer=["25"])


@pytest.mark.parametrize(("path", "size"), [(scratchpad_model_path, 2.5e6), (scratchpad_teacher_path, 1.2e6)])
def test_shipped_files_are_small_and_readable(path, size):
    files = list(Path(path()).iterdir())
    assert sum(f.stat().st_size for f in files) <= size
    assert all(f.stat().st_mode & 0o044 == 0o044 for f in files)


def test_model_starts_below_half(tiny):
    assert 0.2 <= load_task("scratchpad").evaluate(*tiny, batch_size=500) <= 0.5


def test_samples_leave_room_to_learn(samples):
    right = samples["reward"].mean(1)
    assert 0.2 <= right.mean() <= 0.5
    # groups of 8: the right answer is among most, and a good part has none
    assert 0.15 <= (right == 0).float().mean() <= 0.5


def test_length_and_entropy_can_move(samples):
    length, wrong = samples["length"], samples["reward"] == 0
    assert (length <= 3).float().mean() >= 0.15 and (length >= 20).float().mean() >= 0.4
    assert length[wrong].std() > 1.2 * length[~wrong].std()  # wrong answers are the shortest and the longest
    assert 0.2 <= samples["entropy"].mean() <= 0.5
    assert (samples["entropy"] > 0.5).float().mean() >= 0.2  # real choices, among tokens that are certain


def test_a_few_steps_already_help(tmp_path, tiny):
    from trl_variants import VariantGRPOConfig, VariantGRPOTrainer

    task = load_task("scratchpad", train_size=500)
    before = task.evaluate(*tiny, batch_size=500)
    model, tokenizer = task.load_model()
    args = VariantGRPOConfig(
        str(tmp_path),
        seed=0,
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        disable_tqdm=True,
        self_test=False,
        save_strategy="no",
        lr_scheduler_type="constant",
        learning_rate=2.5e-4,
        adam_beta2=0.99,
        max_completion_length=task.max_new_tokens,
        num_generations=8,
        per_device_train_batch_size=128,
        num_iterations=2,
        max_steps=16,
    )
    VariantGRPOTrainer(
        model, task.reward_funcs, args, task.train_dataset, processing_class=tokenizer, variant="dapo"
    ).train()
    # seed 0 gains 0.45
    assert task.evaluate(model, tokenizer, batch_size=500) >= before + 0.2


# --- the split nobody solves, and the teacher -----------------------------------------------------------------------


def test_the_unsolved_split_is_new_and_a_partition():
    train, held_out = unsolved()
    assert (len(train), len(held_out)) == (1917, 243) and len(set(train) | set(held_out)) == 2160
    assert not set(train + held_out) & set(sum(split(), []))
    task = load_task("scratchpad", split="unsolved", train_size=100)
    assert not set(task.train_dataset["id"]) & set(task.eval_dataset["id"])
    assert {len(s) + 1 for s in task.train_dataset["solution"]} == {24}  # with the end token
    assert (
        scratchpad_reward(None, task.train_dataset["solution"][:], answer=task.train_dataset["answer"][:])
        == [1.0] * 100
    )


def test_the_model_never_solves_it(tiny):
    """4096 samples: of 256 for each of 16 problems none is right, and no greedy answer is."""
    model, tokenizer = tiny
    task = load_task("scratchpad", split="unsolved")
    assert task.evaluate(model, tokenizer, batch_size=500) == 0.0
    rows = task.eval_dataset.select(range(16))
    batch = tokenizer(list(rows["prompt"]), return_tensors="pt", padding=True)
    torch.manual_seed(0)
    out = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=48, num_return_sequences=256)
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [answer for answer in rows["answer"] for _ in range(256)]
    assert sum(scratchpad_reward(None, texts, answer=answers)) == 0


@pytest.mark.parametrize("name", ["standard", "unsolved"])
def test_the_teacher_solves_both(name):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    task = load_task("scratchpad", split=name)
    path = task.teacher_path()
    teacher, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert task.evaluate(teacher, tokenizer, batch_size=500) >= 0.98


def test_the_teacher_has_the_models_tokenizer():
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    paths = (Path(scratchpad_model_path()), Path(scratchpad_teacher_path()))
    assert all((paths[0] / n).read_text() == (paths[1] / n).read_text() for n in names)


def test_a_task_without_a_teacher_says_so():
    with pytest.raises(ValueError, match="arithmetic has no teacher"):
        load_task("arithmetic").teacher_path()


@pytest.mark.parametrize("bad", [{"split": "unsolvd"}, {"traces": -1}])
def test_wrong_options_are_refused(bad):
    with pytest.raises(ValueError, match="must be"):
        load_task("scratchpad", train_size=8, **bad)


@pytest.mark.parametrize("conversational", [False, True])
def test_traces_carry_the_teachers_own_log_probs(conversational):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    state = torch.get_rng_state()
    rows = load_task("scratchpad", train_size=6, traces=3, conversational=conversational).train_dataset
    assert torch.equal(state, torch.get_rng_state())
    again = load_task("scratchpad", train_size=6, traces=3, conversational=conversational).train_dataset
    assert rows["target"][:] == again["target"][:]
    path = scratchpad_teacher_path()
    teacher, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert len({len(text) for texts in rows["target"] for text in texts}) > 1  # prompts and answers of several lengths
    for row in rows:
        prompt = row["prompt"][0]["content"] if conversational else row["prompt"]
        assert len(row["target"]) == len(row["target_logps"]) == 3
        for said, logps in zip(row["target"], row["target_logps"], strict=True):
            ids = [*tokenizer.encode(said), tokenizer.eos_token_id]
            before = tokenizer.encode(prompt)
            with torch.no_grad():
                whole = teacher(torch.tensor([before + ids])).logits[0, len(before) - 1 : -1].log_softmax(-1)
            assert logps == pytest.approx(whole[range(len(ids)), ids].tolist(), abs=1e-4)
