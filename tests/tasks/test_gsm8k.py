"""GSM8K's rows as a task: the number after `####`, and the completions that state it."""

from __future__ import annotations

import json

import pytest

from trl_variants.rewards import final_number_reward
from trl_variants.tasks import load_task
from trl_variants.tasks.base import COLUMNS

WORKED = "She sold 48/2 = <<48/2=24>>24 clips.\nThat is 48+24 = <<48+24=72>>72 clips in all.\n#### 72"


@pytest.fixture
def folder(tmp_path):
    def write(answer: str = WORKED, **more) -> str:
        for split in ("train", "test"):
            rows = [{"question": f"{split} {i}: how many clips?", "answer": answer, **more} for i in range(5)]
            (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return str(tmp_path)

    return write


def test_rows(folder):
    task = load_task("gsm8k", path=folder(), train_size=3, eval_size=2)
    assert set(task.train_dataset.column_names) == set(COLUMNS)
    assert len(task.train_dataset) == 3 and len(task.eval_dataset) == 2
    row = task.train_dataset[0]
    assert row["answer"] == "72" and row["difficulty"] == 2.0
    assert "<<" not in row["solution"] and row["solution"].endswith("The answer is \\boxed{72}.")
    assert row["prompt"][0]["content"].startswith("train ")
    assert not set(task.train_dataset["id"]) & set(task.eval_dataset["id"])
    said = dict(prompts=[row["prompt"]] * 2, answer=[row["answer"]] * 2)
    messages = [[{"role": "assistant", "content": text}] for text in (row["solution"], "72 clips? No: 73.")]
    assert task.reward_funcs[0](completions=messages, **said) == [1.0, 0.0]


def test_what_is_not_gsm8k(folder):
    with pytest.raises(ValueError, match="ends in '#### number'"):
        load_task("gsm8k", path=folder("seventy-two"))
    with pytest.raises(ValueError, match="give the folder of a copy"):
        load_task("gsm8k", path="no/such-data-set")


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("so it is \\boxed{1,234}", 1.0),
        ("so it is \\boxed{\\$1234.00} and not 5", 1.0),
        ("#### 1234\n", 1.0),
        ("1234 of 5", 0.0),
        ("<think>5</think> It makes 1234 clips.", 1.0),
        ("It makes -1234.", 0.0),
        ("\\boxed{many} 1234", 0.0),
        ("", 0.0),
    ],
)
def test_final_number(text, reward):
    assert final_number_reward(None, [text], answer=["1,234"]) == [reward]


def test_a_reference_without_a_number_is_not_scored():
    assert final_number_reward(None, ["7", "7"], answer=["none", "7"]) == [None, 1.0]


def test_evaluation_renders_prompts_as_the_run_does(folder, monkeypatch):
    import trl_variants.tasks.evaluation as evaluation

    given = {}
    monkeypatch.setattr(evaluation, "greedy_completions", lambda *a, **kwargs: given.update(kwargs) or ["72", "0"])
    task = load_task("gsm8k", path=folder(), eval_size=2, max_new_tokens=9)
    assert task.evaluate(None, None, chat_template_kwargs={"enable_thinking": False}) == 0.5
    assert given["chat_template_kwargs"] == {"enable_thinking": False} and given["max_new_tokens"] == 9


def test_greedy_completions_pass_the_template_its_arguments():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_variants.tasks import tiny_model_path
    from trl_variants.tasks.evaluation import greedy_completions

    model, words = (c.from_pretrained(tiny_model_path()) for c in (AutoModelForCausalLM, AutoTokenizer))
    words.chat_template = "{{ messages[0]['content'] }}{% if more %}+3={% endif %}"
    chat = [[{"role": "user", "content": "12"}]]
    how = dict(max_new_tokens=3)
    assert greedy_completions(model, words, chat, **how, chat_template_kwargs={"more": True}) == greedy_completions(
        model, words, ["12+3="], **how
    )
    assert greedy_completions(model, words, chat, **how) == greedy_completions(model, words, ["12"], **how)
