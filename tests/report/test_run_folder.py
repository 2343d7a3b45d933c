from __future__ import annotations

import json

import pytest
import torch

from trl_variants.report import read_result, write_result

RESULT = {
    "variant": "dapo",
    "steps": 10,
    "accuracy_before": 0.4,
    "accuracy_after": 0.9,
    "train_seconds": 1.5,
    "seed": 3,
}
HISTORY = [{"step": i, "reward": i / 10, "grad_norm": float("nan")} for i in range(1, 5)]


def test_all_four_files(tmp_path):
    path = write_result(tmp_path / "run", RESULT, history=HISTORY, composition="dapo = ...\n")
    assert path == tmp_path / "run" / "result.json"
    assert {p.name for p in path.parent.iterdir()} == {
        "result.json",
        "log.jsonl",
        "composition.txt",
        "curve.png",
    }
    rows = [json.loads(line) for line in (path.parent / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["grad_norm"] is None  # NaN is no JSON
    assert (path.parent / "composition.txt").read_text() == "dapo = ...\n"


def test_result_holds_the_five_keys_first_and_what_else_was_given(tmp_path):
    write_result(tmp_path, RESULT)
    result = read_result(tmp_path)
    assert list(result)[:5] == ["accuracy_before", "accuracy_after", "train_seconds", "steps", "variant"]
    assert result["seed"] == 3 and result["versions"]["trl"].startswith("1.16")
    assert not (tmp_path / "curve.png").exists()


def test_tensors_and_objects_become_plain(tmp_path):
    write_result(tmp_path, {**RESULT, "x": torch.tensor(0.5), "y": [torch.float32], "z": float("inf")})
    result = read_result(tmp_path)
    assert (result["x"], result["y"], result["z"]) == (0.5, ["torch.float32"], None)


def test_a_missing_key_is_named(tmp_path):
    with pytest.raises(KeyError, match="train_seconds"):
        write_result(tmp_path, {k: v for k, v in RESULT.items() if k != "train_seconds"})
