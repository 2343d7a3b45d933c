"""`trl-variants compare`: one protocol, runs that are kept, a table whose figures are those of the run folders."""

from __future__ import annotations

import json
import statistics

import pytest
import yaml

from trl_variants.cli import compare, main
from trl_variants.report.compare import Arm, Spread
from trl_variants.report.record import RunRecord

SMALL = {
    "task": {"name": "arithmetic", "eval_size": 10},
    "max_steps": 2,
    "num_generations": 4,
    "per_device_train_batch_size": 16,
    "max_completion_length": 4,
    "learning_rate": 1e-3,
    "use_cpu": True,
    "bf16": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "self_test": False,
}


@pytest.fixture
def two(tmp_path):
    paths = []
    for name in ("dapo", "gspo"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**SMALL, "variant": name}))
        paths.append(str(path))
    return paths


@pytest.fixture
def here(monkeypatch):
    """Runs in this process instead of one each, which take seconds to start; the words of every launch."""
    launched = []

    def launch(words, said):
        launched.append(words)
        return main(words)

    monkeypatch.setattr(compare, "launch_train", launch)
    return launched


def test_runs_table_and_picture_and_nothing_twice(two, here, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["compare", *two, "--seeds", "2", "--out", str(out)]
    assert main(words) == 0
    assert [w[w.index("--seed") + 1] for w in here] == ["0", "0", "1", "1"]  # every recipe once before any twice
    found = {
        name: [json.loads((out / name / f"seed-{s}" / "result.json").read_text()) for s in (0, 1)]
        for name in ("dapo", "gspo")
    }
    body = json.loads((out / "compare.json").read_text())
    for arm in body["recipes"]:
        after = [r["accuracy_after"] for r in found[arm["name"]]]
        assert arm["accuracy_after"]["mean"] == pytest.approx(statistics.fmean(after))
        assert arm["accuracy_after"]["sd"] == pytest.approx(statistics.stdev(after))
        assert all(run["tokens"] > 0 for run in arm["runs"].values())
    assert [r["seed"] for r in found["dapo"]] == [0, 1] and found["dapo"][0]["variant"] == "dapo"
    table = (out / "compare.md").read_text()
    assert "| dapo | dapo | 0, 1 |" in table and "10 held-out problems" in table and '* variant: dapo "dapo"' in table
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")

    here.clear()
    (out / "gspo" / "seed-1" / "result.json").unlink()
    assert main([*words, "--table"]) == 0 and here == []
    assert "| gspo | gspo | 0 |" in (out / "compare.md").read_text()


def test_other_settings_in_the_same_folder_are_refused(two, here, tmp_path, capsys):
    out = ["--out", str(tmp_path / "out"), "--seeds", "1"]
    assert main(["compare", two[0], *out]) == 0
    assert main(["compare", two[0], *out, "--learning_rate", "0.5"]) == 2
    assert "holds a run of other settings" in capsys.readouterr().err


def test_different_tasks_are_refused_and_budgets_said(two, here, tmp_path, capsys):
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump({**SMALL, "task": "scratchpad", "max_steps": 1}))
    assert main(["compare", two[0], str(other), "--out", str(tmp_path / "out")]) == 2
    assert "these recipes measure different things (task is" in capsys.readouterr().err
    other.write_text(yaml.safe_dump({**SMALL, "max_steps": 1}))
    assert main(["compare", two[0], str(other), "--out", str(tmp_path / "out"), "--table"]) == 0
    assert "the recipes differ in max_steps: 2, 1" in capsys.readouterr().out


def test_a_run_that_fails_leaves_the_others(two, tmp_path, monkeypatch, capsys):
    def launch(words, said):
        if two[0] in words:
            said.write("error: it broke\n")
            said.flush()
            return 2
        return main(words)

    monkeypatch.setattr(compare, "launch_train", launch)
    assert main(["compare", *two, "--seeds", "1", "--out", str(tmp_path / "out")]) == 1
    table = (tmp_path / "out" / "compare.md").read_text()
    assert "* dapo, seed 0 failed: exit code 2: error: it broke" in table and "| gspo | gspo | 0 |" in table


def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(compare, "launch_train", lambda words, said: seen.append(words) or 1)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("{}")
    compare.train("a.yaml", [], 0, tmp_path)
    assert seen[0][-1] == "--resume"


def test_spread_and_pairs_by_hand():
    assert Spread.of([None, 2.0]) == Spread(2.0, None, 2.0, 2.0, 1) and Spread.of([None]) is None
    assert Spread.of([1.0, 2.0, 6.0]) == Spread(3.0, pytest.approx(7**0.5), 1.0, 6.0, 3)  # (4 + 1 + 9) / 2 = 7
    a, b = (
        Arm(name, "", {seed: RunRecord(name, {"accuracy_after": value}) for seed, value in runs.items()})
        for name, runs in (("a", {0: 0.5, 1: 0.7, 2: 0.1}), ("b", {0: 0.6, 1: 0.9}))
    )
    gap = b.against(a)
    assert gap.n == 2 and gap.mean == pytest.approx(0.15) and gap.sd == pytest.approx(0.005**0.5)


@pytest.mark.slow
def test_in_processes_of_their_own(two, tmp_path):
    assert main(["compare", two[0], "--seeds", "1", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "dapo" / "seed-0" / "result.json").is_file()
