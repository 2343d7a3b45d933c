from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from trl_variants.report import LiveCurve, before_after_table, learning_curve_png, series, sparkline

HISTORY = [{"step": 5 * i, "reward": i / 10, "loss": 0.1} for i in range(1, 11)] + [{"step": 50, "train_runtime": 3.0}]


def test_sparkline_rises_and_is_as_wide_as_asked():
    # eight values, eight levels: (v - 0) / 7 * 8 rounds down to 0, 1, ..., 6, then 7 is capped from 8
    assert sparkline(range(8)) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(range(1000), width=12)) == 12
    assert sparkline(range(1000), width=12)[0] == "▁"


def test_sparkline_means_its_bins():
    # bins (0, 0), (0, 1), (1, 1) -> 0, 0.5, 1 -> levels 0, 4, 7
    assert sparkline([0, 0, 0, 1, 1, 1], width=3) == "▁▅█"


@pytest.mark.parametrize("values, expected", [([], ""), ([None, float("nan")], ""), ([2, 2, 2], "▄▄▄"), ([1], "▄")])
def test_sparkline_of_little(values, expected):
    assert sparkline(values) == expected


def test_series_skips_rows_without_the_metric():
    steps, values = series([*HISTORY, {"step": 55, "reward": float("nan")}], "reward")
    assert steps == [5 * i for i in range(1, 11)]
    assert values[-1] == 1.0


def test_png_is_written(tmp_path):
    path = learning_curve_png(HISTORY, tmp_path / "new" / "curve.png", before=0.4, after=0.9)
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_one_sentence(tmp_path, capsys):
    assert learning_curve_png(HISTORY, tmp_path / "curve.png", "accuracy") is None
    assert "no learning curve" in capsys.readouterr().out


def test_missing_matplotlib_names_the_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert learning_curve_png(HISTORY, tmp_path / "curve.png") is None
    assert 'pip install "trl_variants[plots]"' in capsys.readouterr().out
    assert not (tmp_path / "curve.png").exists()


def text_of(renderable) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(renderable)
    return console.file.getvalue()


def test_table_shows_both_accuracies():
    result = {
        "variant": "dapo",
        "accuracy_before": 0.45,
        "accuracy_after": 0.9,
        "steps": 150,
        "train_seconds": 21.5,
    }
    text = text_of(before_after_table(result))
    for part in ("dapo", "0.450", "0.900", "+0.450", "150 steps", "21.5 s"):
        assert part in text


def test_table_without_an_accuracy_keeps_the_reward():
    result = {
        "variant": None,
        "accuracy_before": None,
        "accuracy_after": None,
        "reward_first": 0.1,
        "reward_last": 0.5,
    }
    text = text_of(before_after_table(result))
    assert "accuracy" not in text and "+0.400" in text


def drive(curve: LiveCurve, steps: int = 100, every: int = 1, main: bool = True) -> None:
    state = SimpleNamespace(global_step=0, max_steps=steps, log_history=[], is_world_process_zero=main)
    curve.on_train_begin(None, state, None)
    for step in range(1, steps + 1):
        state.global_step = step
        curve.on_step_end(None, state, None)
        if step % every == 0:
            row = {"step": step, "reward": step / steps, "loss": 0.5}
            state.log_history.append(row)
            curve.on_log(None, state, None, logs=row)
    curve.on_train_end(None, state, None)


def test_plain_lines_where_there_is_no_terminal():
    console = Console(file=io.StringIO(), width=120)
    curve = LiveCurve(console=console)
    drive(curve)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 20
    assert lines[-1] == "step 100/100  reward 1  loss 0.5"
    assert len(curve.history) == 100


def test_live_line_on_a_terminal():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    drive(LiveCurve(console=console), steps=10)
    assert "step 10/10" in console.file.getvalue()
    assert "█" in console.file.getvalue()


def test_other_processes_are_silent():
    console = Console(file=io.StringIO(), width=120)
    drive(LiveCurve(console=console), main=False)
    assert console.file.getvalue() == ""


def test_attach_replaces_the_bars_of_transformers():
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    removed, added = [], []
    trainer = SimpleNamespace(remove_callback=removed.append, add_callback=added.append)
    curve = LiveCurve().attach(trainer)
    assert set(removed) == {PrinterCallback, ProgressCallback} and added == [curve]
