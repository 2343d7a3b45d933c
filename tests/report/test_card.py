"""The page of a run says what its files say."""

import json

from trl_variants.report.card import keep


def test_page_and_evidence_are_kept(tmp_path):
    run = tmp_path / "runs" / "demo"
    run.mkdir(parents=True)
    result = {
        "accuracy_before": 0.25,
        "accuracy_after": 0.75,
        "train_seconds": 12.4,
        "steps": 3,
        "variant": "gspo",
        "settings": {"max_steps": 3, "output_dir": "secret"},
        "versions": {"trl": "1.16.0"},
    }
    (run / "result.json").write_text(json.dumps(result))
    (run / "log.jsonl").write_text("".join(json.dumps({"step": i, "reward": 0.1 * i}) + "\n" for i in range(3)))
    page = keep(run, tmp_path / "cards")
    text = page.read_text()
    assert "| 0.250 | 0.750 |" in text and "**gspo**" in text and "trl 1.16.0" in text and "secret" not in text
    assert (tmp_path / "cards" / "demo.log.jsonl").read_text() == (run / "log.jsonl").read_text()
