"""The card of a run says what its files say, and is rendered again from them alone."""

import json
import re

import pytest
import yaml

from trl_variants import VariantError, variant
from trl_variants.cli import main
from trl_variants.report.card import BESIDE, MARK, README, keep, render, write_card
from trl_variants.report.citations import bibtex
from trl_variants.report.record import RunRecord, hub_id

RESULT = {
    "accuracy_before": 0.25,
    "accuracy_after": 0.75,
    "eval_problems": 64,
    "train_seconds": 12.4,
    "steps": 3,
    "seed": 5,
    "variant": "gspo",
    "composition": variant("gspo").to_mapping(),
    "command": "trl-variants train demo.yaml --max_steps 3",
    "task": "arithmetic",
    "model": "tiny",
    "completions_per_log": 32,
    "settings": {"task": "arithmetic", "max_steps": 3, "output_dir": "/home/somebody/runs", "hub_token": "hf_secret"},
    "versions": {"trl": "1.16.0"},
}
LORA = {"kind": "LORA", "r": 16, "alpha": 32, "targets": ["k_proj", "q_proj"]}
HISTORY = [{"step": i, "reward": 0.1 * i, "entropy": 1.0 - 0.1 * i, "grad_norm": 1.0} for i in (1, 2, 3, 4)]


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(RESULT))
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in HISTORY))
    return folder


def head_of(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


def test_page_and_evidence_are_kept(run, tmp_path, capsys):
    assert main(["card", str(run), "--out", str(tmp_path / "cards")]) == 0
    page = tmp_path / "cards" / "demo.md"
    assert capsys.readouterr().out.strip() == str(page)
    text = page.read_text()
    # Wilson's interval of 48 right of 64: centre (0.75 + 1.9208 / 64) / (1 + 3.8415 / 64) = 0.73585, half width 0.10386
    assert (
        "| greedy accuracy | 0.250 [0.160, 0.368] | 0.750 [0.632, 0.840] |" in text and "64 held-out problems" in text
    )
    # first and last tenth of four values are one value each
    assert "| 0.100 | 0.400 | 0.400 (step 4) | 32 completions a logged value, 4 logged |" in text
    assert "**gspo**" in text and "trl 1.16.0" in text and "demo.yaml --max_steps 3" in text and "seed 5" in text
    assert "hf_secret" not in text and "somebody" not in text
    assert (tmp_path / "cards" / "demo.log.jsonl").read_text() == (run / "log.jsonl").read_text()
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (tmp_path / "cards" / picture).read_bytes().startswith(b"\x89PNG")


def test_composition_objective_and_papers(run):
    card = render(RunRecord.load(run))
    assert "| clip | `ppo` | eps_low 0.0003, eps_high 0.0004" in card
    assert "| ratio | `sequence` |" in card and "[2507.18071](https://arxiv.org/abs/2507.18071)" in card
    assert "loss = -" in card and "Edited" not in card
    for deviation in variant("gspo").about.deviations:
        assert f"* {deviation}" in card
    edited = RunRecord.load(run)
    edited.composition = variant("gspo", clip="sapo")
    assert "**Edited: clip**" in render(edited)


def test_a_name_that_means_something_else_by_now(run):
    record = RunRecord.load(run)
    record.result["settings"] = {"variant": "gspo"}
    assert "another composition under this name" not in render(record)
    record.composition = variant("gspo", clip="sapo")
    card = render(record)
    whole = yaml.safe_load(card.split("the one of this run:\n\n```yaml\n")[1].split("```")[0])
    assert variant(whole["variant"]) == record.composition


def test_citations_have_the_methods_paper_once():
    text = bibtex(variant("gspo"))
    assert (
        text.count("eprint        = {2507.18071},") == 1
        and "title         = {{Group Sequence Policy Optimization}}" in text
    )
    assert "@software{trl," in text and text.count("{") == text.count("}")


def test_head_names_results_and_no_local_base(run):
    record = RunRecord.load(run)
    head = head_of(render(record))
    (result,) = head["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == 0.75 and head["library_name"] == "transformers"
    assert "base_model" not in head
    record.result |= {"adapter": LORA, "base_model": "Qwen/Qwen3-0.6B", "quantization": "4-bit nf4"}
    card = render(record)
    head = head_of(card)
    assert head["library_name"] == "peft" and head["base_model"] == "Qwen/Qwen3-0.6B" and "lora" in head["tags"]
    assert "load_in_4bit=True" in card and 'from_pretrained("Qwen/Qwen3-0.6B"' in card
    compile(re.search(r"```python\n(.*?)```", card, re.S)[1], "card", "exec")


def test_an_adapter_of_a_local_base_says_so(run):
    record = RunRecord.load(run)
    record.result |= {"adapter": LORA, "base_model": None}
    assert "It was trained on a local folder (tiny), not on a model of the Hub" in render(record)


def test_a_readme_of_somebody_else_is_kept(run):
    (run / README).write_text("# Mine\n")
    assert write_card(RunRecord.load(run), run).name == BESIDE
    assert (run / README).read_text() == "# Mine\n" and MARK in (run / BESIDE).read_text()
    (run / README).unlink()
    page = write_card(RunRecord.load(run), run)
    assert page.name == README and write_card(RunRecord.load(run), run) == page  # ours is renewed


def test_evaluations_are_shown_with_their_intervals(run):
    record = RunRecord.load(run)
    estimate = {"value": 0.5, "low": 0.4, "high": 0.6, "interval": "Wilson 95 %", "n": 90, "k": 1}
    record.result["evaluations"] = [
        {
            "name": "arithmetic",
            "label": "arithmetic",
            "n": 90,
            "k": 4,
            "temperature": 1.0,
            "max_new_tokens": 4,
            "seed": 0,
            "metrics": {"greedy accuracy": estimate, "pass@4": {**estimate, "k": 4}},
        }
    ]
    card = render(record)
    assert "| pass@4 | 0.500 | [0.400, 0.600], Wilson 95 % | 90 x 4 |" in card
    found = [m["type"] for r in head_of(card)["model-index"][0]["results"] for m in r["metrics"]]
    assert sorted(found) == ["accuracy", "accuracy", "pass@k"]


def test_the_newer_of_run_and_result_counts(run):
    record = RunRecord.load(run)
    record.result["steps"] = 9
    record.save(run)
    assert RunRecord.load(run).result["steps"] == 9


def test_no_run_folder_is_one_sentence(tmp_path):
    with pytest.raises(VariantError, match="is no run folder"):
        keep(tmp_path, tmp_path / "cards")


def test_what_can_be_a_hub_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me").mkdir()
    (tmp_path / "me" / "here").mkdir()
    assert hub_id("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B" and hub_id("gpt2") == "gpt2"
    for name in ("me/here", "./gone", "/models/gone", "a/b/c", "with space", "", None):
        assert hub_id(name) is None


def test_card_of_a_trainer_without_a_variant(tmp_path):
    from tests.trainer import toy

    trainer = toy.build(output_dir=str(tmp_path), beta=0.01)
    trainer.create_model_card(dataset_name="me/numbers", tags=["mine"])
    card = (tmp_path / README).read_text()
    head = head_of(card)
    assert "TRL's own GRPO settings" in card and "| regularizers | `kl` |" in card and "![" not in card
    assert head["datasets"] == ["me/numbers"] and "mine" in head["tags"]
    assert render(RunRecord.load(tmp_path), pictures=()).split("## Results")[1] == card.split("## Results")[1]
