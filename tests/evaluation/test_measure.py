"""Models measured on problems: by the library, on the command line, and during training."""

from __future__ import annotations

import json

import pytest
import torch
from datasets import Dataset

from tests.trainer import toy
from trl_variants import VariantError
from trl_variants.cli import main
from trl_variants.evaluation import EvaluateEvery, Problems, evaluate_model
from trl_variants.tasks import load_task, tiny_model_path


@pytest.fixture(scope="module")
def loaded():
    return load_task("arithmetic", train_size=1).load_model()


def problems(reward, rows=None, **changes):
    task = load_task("arithmetic", train_size=1, eval_size=12)
    return Problems("arithmetic", "arithmetic", rows or task.eval_dataset, reward, 4, **changes)


def test_greedy_accuracy_is_the_tasks_own(loaded):
    task = load_task("arithmetic", train_size=1, eval_size=40)
    found = evaluate_model(*loaded, problems(task.reward_funcs[0], task.eval_dataset), k=2, limit=30)
    assert found["metrics"]["greedy accuracy"]["value"] == task.evaluate(*loaded, limit=30)
    assert found["n"] == found["metrics"]["avg@2"]["n"] == 30 and found["metrics"]["avg@2"]["k"] == 2


def test_samples_reach_the_reward_in_order_and_are_seeded(loaded):
    seen = []

    def reward(prompts, completions, answer, **_):
        seen.append((prompts, completions, answer))
        return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]

    first = evaluate_model(*loaded, problems(reward), k=3, seed=5)
    again = evaluate_model(*loaded, problems(reward), k=3, seed=5)
    other = evaluate_model(*loaded, problems(reward), k=3, seed=6)
    greedy, sampled = seen[0], seen[1]
    assert len(greedy[0]) == 12 and len(sampled[0]) == 36
    assert sampled[0] == [prompt for prompt in greedy[0] for _ in range(3)]
    assert sampled[2] == [answer for answer in greedy[2] for _ in range(3)]
    assert sampled == seen[3] != seen[5] and first["metrics"] == again["metrics"] and other["seed"] == 6
    by_hand = sum(text.strip() == right for text, right in zip(sampled[1], sampled[2], strict=True)) / 36
    assert first["metrics"]["avg@3"]["value"] == pytest.approx(by_hand)


def test_what_cannot_be_scored_counts_as_wrong_and_is_said(loaded):
    found = evaluate_model(*loaded, problems(lambda completions, **_: [None] + [2.0] * (len(completions) - 1)))
    assert found["metrics"]["greedy accuracy"]["value"] == pytest.approx(11 / 12) and found["unscorable"] == 1
    none = evaluate_model(*loaded, problems(lambda completions, **_: [2.0] * len(completions), right_from=2.5))
    assert none["metrics"]["greedy accuracy"]["value"] == 0.0


def test_messages_reach_the_reward_as_in_training(loaded):
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": "1+1="}]]})
    seen = []
    evaluate_model(*loaded, problems(lambda completions, **_: seen.extend(completions) or [1.0], rows))
    assert [message["role"] for message in seen[0]] == ["assistant"]


def test_state_of_model_and_generator_is_kept(loaded):
    model, tokenizer = loaded
    model.train()
    before, side = torch.get_rng_state(), tokenizer.padding_side
    evaluate_model(model, tokenizer, problems(lambda completions, **_: [1.0] * len(completions)), k=2)
    assert model.training and torch.equal(before, torch.get_rng_state()) and tokenizer.padding_side == side
    model.eval()


@pytest.mark.parametrize("changes", [{"k": -1}, {"k": 2, "temperature": 0.0}, {"limit": 0}])
def test_impossible_numbers(loaded, changes):
    with pytest.raises(VariantError):
        evaluate_model(*loaded, problems(lambda completions, **_: [1.0] * len(completions)), **changes)


def test_training_is_the_same_with_accuracies_in_its_log():
    def share_of_prompts_with_digits(model, tokenizer, limit):
        from trl_variants.tasks.evaluation import greedy_completions

        texts = greedy_completions(model, tokenizer, list(toy.PROMPTS[:limit]), max_new_tokens=3)
        return sum(any(c.isdigit() for c in text) for text in texts) / limit

    def watch(trainer):
        trainer.add_callback(EvaluateEvery(trainer, share_of_prompts_with_digits, steps=2, limit=5))

    plain, watched = toy.train(variant="dapo", max_steps=3), toy.train(variant="dapo", max_steps=3, patch=watch)
    assert torch.equal(plain.change, watched.change)
    rows = [row for row in watched.logs if "accuracy/greedy" in row]
    assert [row["step"] for row in rows] == [0, 2, 3] and {row["accuracy/problems"] for row in rows} == {5}
    keep = [
        {k: v for k, v in row.items() if k in ("step", "reward", "loss")} for row in watched.logs if row not in rows
    ]
    assert keep == [{k: v for k, v in row.items() if k in ("step", "reward", "loss")} for row in plain.logs]


@pytest.mark.parametrize("task, steps", [("arithmetic", 0), ("arithmatic", 1)])
def test_mistakes_of_the_callback(task, steps):
    with pytest.raises(VariantError):
        EvaluateEvery(None, task, steps)


def test_command_line_on_a_model(capsys, tmp_path):
    words = ["eval", tiny_model_path(), "--task", "arithmetic", "--task.conversational", "true", "--limit", "6"]
    assert main([*words, "--k", "2", "--json", "--out", str(tmp_path / "figures.json")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "figures.json").read_text())
    assert printed["n"] == 6 and printed["label"] == 'arithmetic {"conversational": true}'
    assert set(printed["metrics"]) == {"greedy accuracy", "avg@2", "pass@2"}


def test_command_line_on_own_data(capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(3))
    )
    words = ["eval", tiny_model_path(), "--dataset_name", str(tmp_path / "rows.jsonl"), "--max_new_tokens", "4"]
    words += ["--reward_funcs", "trl_variants.tasks.arithmetic.arithmetic_reward"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n"] == 3


def test_run_folder_of_an_adapter_keeps_its_figures(capsys, tmp_path):
    folder = tmp_path / "run"
    train = ["train", "recipes/quickstart.yaml", "--output_dir", str(folder), "--max_steps", "1", "--use_peft", "true"]
    train += ["--per_device_train_batch_size", "16", "--task.eval_size", "8", "--accuracy_every", "1"]
    assert main([*train, "--accuracy_problems", "4"]) == 0
    for k in ("1", "2", "2"):
        assert main(["eval", str(folder), "--limit", "5", "--k", k]) == 0
    result = json.loads((folder / "result.json").read_text())
    assert [e["k"] for e in result["evaluations"]] == [1, 2]  # the same measurement again replaces the first
    assert result["accuracy_before"] is not None and result["eval_problems"] == 8
    card = (folder / "README.md").read_text()
    assert "| pass@2 |" in card and "greedy accuracy during training" in card and "Evaluated on 5 problems" in card


@pytest.mark.parametrize(
    "words, sentence",
    [
        ([], "eval needs --task NAME, or --dataset_name and --reward_funcs"),
        (["--task", "arithmetic", "--k", "-1"], "--k must be at least 0"),
        (["--task", "arithmetic", "--samples", "4"], "unknown setting 'samples'"),
        (["--dataset_name", "x.jsonl"], "--dataset_name needs --reward_funcs"),
    ],
)
def test_mistakes_on_the_command_line(words, sentence, capsys):
    assert main(["eval", tiny_model_path(), *words]) == 2
    assert sentence in capsys.readouterr().err


def test_without_the_extra(monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "evaluate", None)
    assert main(["eval", tiny_model_path(), "--task", "arithmetic"]) == 2
    assert 'pip install "trl_variants[eval]"' in capsys.readouterr().err


def test_a_four_bit_model(capsys):
    pytest.importorskip("bitsandbytes")
    assert main(["eval", tiny_model_path(), "--task", "arithmetic", "--limit", "8", "--load_in_4bit", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["greedy accuracy"]["n"] == 8
