"""The reasoning-gym adapter."""

from __future__ import annotations

import json
import sys

import pytest

from trl_variants.rewards.text import last_number
from trl_variants.tasks import load_task, tiny_model_path
from trl_variants.tasks.base import COLUMNS
from trl_variants.tasks.smollm2 import smollm2_path

ONE_DIGIT = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1)


def score(task, rows, completions):
    columns = {name: list(rows[name]) for name in rows.column_names if name != "prompt"}
    return task.reward_funcs[0](prompts=list(rows["prompt"]), completions=completions, **columns)


@pytest.fixture(scope="module")
def chain_sum():
    pytest.importorskip("reasoning_gym")
    return load_task("reasoning_gym", dataset="chain_sum", size=100, eval_size=32, params=ONE_DIGIT)


def test_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r'pip install "trl_variants\[tasks\]"'):
        load_task("reasoning_gym")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5", "5"),
        ("The answer is 12.", "12"),
        ("3 + 4 = 7", "7"),
        ("2 - 6 = -4", "-4"),
        ("9-5", "5"),
        ("-3", "-3"),
        ("1,234 apples", "1234"),
        ("3.50", "3.50"),
        ("nothing", None),
        ("", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


def test_rows(chain_sum):
    row = chain_sum.train_dataset[0]
    assert set(COLUMNS) <= set(row)
    assert [m["role"] for m in row["prompt"]] == ["user"]
    assert row["prompt"][0]["content"].endswith("Answer with only the number.")
    metadata = json.loads(row["metadata"])
    assert row["solution"] == f"{metadata['expression']} = {row['answer']}"
    assert eval(metadata["expression"]) == int(row["answer"])
    assert row["difficulty"] == 1.5
    assert chain_sum.model is smollm2_path and chain_sum.max_new_tokens == 12


def test_held_out_is_disjoint_and_nothing_repeats(chain_sum):
    train, held_out = list(chain_sum.train_dataset["id"]), list(chain_sum.eval_dataset["id"])
    assert len(train) == len(set(train)) == 100 and len(held_out) == len(set(held_out)) == 32
    assert not set(train) & set(held_out)


def test_a_small_space_shrinks_the_training_set_and_an_empty_one_is_an_error():
    pytest.importorskip("reasoning_gym")
    digits = dict(min_terms=1, max_terms=1, min_digits=1, max_digits=1)
    task = load_task("reasoning_gym", size=100, eval_size=4, params=digits)
    assert len(task.train_dataset) == 6 and len(task.eval_dataset) == 4
    with pytest.raises(ValueError, match="lower eval_size"):
        load_task("reasoning_gym", size=100, eval_size=100, params=digits)


def test_seed_decides(chain_sum):
    same = load_task("reasoning_gym", dataset="chain_sum", size=100, eval_size=32, params=ONE_DIGIT)
    other = load_task("reasoning_gym", dataset="chain_sum", size=100, eval_size=32, params=ONE_DIGIT, seed=1)
    assert same.train_dataset["id"][:] == chain_sum.train_dataset["id"][:]
    assert other.train_dataset["id"][:] != chain_sum.train_dataset["id"][:]
    assert other.eval_dataset["id"][:] != chain_sum.eval_dataset["id"][:]


def test_numeric_reward(chain_sum):
    rows = chain_sum.eval_dataset
    assert score(chain_sum, rows, list(rows["solution"])) == [1.0] * 32
    chats = [[{"role": "assistant", "content": f"It is {answer}."}] for answer in rows["answer"]]
    assert score(chain_sum, rows, chats) == [1.0] * 32
    assert score(chain_sum, rows, [str(int(answer) + 100) for answer in rows["answer"]]) != [1.0] * 32
    assert score(chain_sum, rows, ["no number"] * 32) == [0.0] * 32


def test_text_reward_uses_the_library_scorer():
    pytest.importorskip("reasoning_gym")
    task = load_task("reasoning_gym", dataset="countdown", size=4, eval_size=2)
    rows = task.train_dataset
    expressions = [json.loads(metadata)["expression"] for metadata in rows["metadata"]]
    # countdown accepts any expression that hits its target, so the answer is not compared as text
    assert score(task, rows, [f"({e})" for e in expressions]) == [1.0] * 4
    assert score(task, rows, [f"I think <answer>{e}</answer> works" for e in expressions]) == [1.0] * 4
    assert max(score(task, rows, ["1 + 1"] * 4)) < 1.0


def test_a_foreign_row_is_an_error(chain_sum):
    with pytest.raises(KeyError):
        chain_sum.reward_funcs[0](prompts=[""], completions=["1"], id=["elsewhere/1"])


def test_evaluate_scores_greedy_chat_completions(chain_sum, monkeypatch):
    import trl_variants.tasks.evaluation as evaluation

    rows = chain_sum.eval_dataset
    right = dict(zip((p[0]["content"] for p in rows["prompt"]), rows["answer"], strict=True))

    def fake(model, tokenizer, prompts, *, max_new_tokens, batch_size, chat_template_kwargs):
        assert (max_new_tokens, batch_size, chat_template_kwargs) == (12, 64, None)
        return [right[p[0]["content"]] if i % 4 else "?" for i, p in enumerate(prompts)]

    monkeypatch.setattr(evaluation, "greedy_completions", fake)
    assert chain_sum.evaluate(None, None) == 0.75
    assert chain_sum.evaluate(None, None, limit=2) == 0.5


def test_two_steps_of_grpo(chain_sum, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path())
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=chain_sum.reward_funcs,
        train_dataset=chain_sum.train_dataset,
        args=GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=4,
            max_steps=2,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    logged = [h for h in trainer.state.log_history if "rewards/reasoning_gym_reward/mean" in h]
    assert len(logged) == 2 and all(0.0 <= h["reward"] <= 1.0 for h in logged)
    assert 0.0 <= chain_sum.evaluate(model, tokenizer, limit=8) <= 1.0
