"""The learning curve three ways: live in the terminal, as a sparkline, as a PNG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

BARS = "▁▂▃▄▅▆▇█"
PLAIN_LINES = 20  # of a whole run, where the output is a file or a pipe

History = Sequence[Mapping[str, Any]]


def sparkline(values: Sequence[float | None], width: int = 40) -> str:
    """Returns at most `width` bars, each the mean of its bin, lowest ▁ to highest █; skips None, NaN and inf.

    A constant series is a line at half height; an empty one is "".
    """
    known = [float(v) for v in values if v is not None and math.isfinite(v)]
    if not known or width < 1:
        return ""
    bins = min(width, len(known))
    edges = [round(i * len(known) / bins) for i in range(bins + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[3] * bins
    return "".join(BARS[min(7, int((m - low) / (high - low) * 8))] for m in means)


def series(history: History, metric: str) -> tuple[list[int], list[float]]:
    """Returns the steps and the finite values of one metric of a trainer's log history, equally long."""
    points = [
        (int(row.get("step", i)), float(row[metric]))
        for i, row in enumerate(history)
        if isinstance(row.get(metric), (int, float)) and math.isfinite(row[metric])
    ]
    return [step for step, _ in points], [value for _, value in points]


def learning_curve_png(
    history: History,
    path: str | Path,
    metric: str = "reward",
    *,
    title: str | None = None,
    before: float | None = None,
    after: float | None = None,
) -> Path | None:
    """Draws `metric` over optimizer steps, with the accuracies before and after as dashed lines where given.

    Returns the path written; without matplotlib or anything to draw, prints one sentence and returns None.
    """
    steps, values = series(history, metric)
    if not steps:
        Console().print(f"no learning curve: the log holds no {metric!r}", style="dim", markup=False)
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        message = 'no curve.png: matplotlib is missing, pip install "trl_variants[plots]"'
        Console().print(message, style="dim", markup=False)
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, values, marker="." if len(steps) < 60 else None, linewidth=1.5, label=metric)
    for name, value, colour in (
        ("accuracy before", before, "tab:gray"),
        ("accuracy after", after, "tab:green"),
    ):
        if value is not None:
            axes.axhline(value, linestyle="--", linewidth=1, color=colour, label=f"{name} {value:.2f}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(metric)
    axes.set_title(title or "learning curve")
    axes.grid(alpha=0.3)
    axes.legend()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def before_after_table(result: Mapping[str, Any]) -> Table:
    """Returns the closing table of a run: accuracy before and after where the task has one, time, steps.

    `result` is what `write_result` writes; keys that are missing or None are left out.
    """
    table = Table(title=str(result.get("variant") or "trl"), title_style="bold")
    for column in ("", "before", "after", "change"):
        table.add_column(column, justify="left" if not column else "right")
    for name, first, last in (
        ("accuracy", "accuracy_before", "accuracy_after"),
        ("reward", "reward_first", "reward_last"),
    ):
        a, b = result.get(first), result.get(last)
        if a is not None and b is not None:
            table.add_row(name, f"{a:.3f}", f"{b:.3f}", f"{b - a:+.3f}")
    caption = []
    if result.get("steps") is not None:
        caption.append(f"{result['steps']} steps")
    if result.get("train_seconds") is not None:
        caption.append(f"{result['train_seconds']:.1f} s of training")
    table.caption = ", ".join(caption) or None
    return table


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else "-"


class LiveCurve(TrainerCallback):
    """Keeps the log history and shows one live line: step, reward, loss, sparkline of the reward.

    Where the output is no terminal it prints about twenty plain lines over the run instead. Only the main
    process prints. `history` is the trainer's own log history, one dict per log, complete after a resume too.
    """

    def __init__(self, metric: str = "reward", console: Console | None = None):
        self.metric = metric
        self.console = console or Console()
        self.history: list[dict[str, Any]] = []
        self._progress: Progress | None = None
        self._task: Any = None
        self._last_plain = 0

    def attach(self, trainer: Any) -> LiveCurve:
        """Adds itself to a transformers Trainer in place of its bar and its printed dicts; returns itself."""
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)
        return self

    def on_train_begin(self, args, state, control, **kwargs):
        self._last_plain = state.global_step
        if state.is_world_process_zero and self.console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=20),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False),
                console=self.console,
            )
            self._task = self._progress.add_task("", total=state.max_steps, completed=state.global_step)
            self._progress.start()

    def on_step_end(self, args, state, control, **kwargs):
        if self._progress is not None:
            self._progress.update(self._task, completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.history = list(state.log_history)
        if self._progress is not None:
            self._progress.update(self._task, description=self.line(width=24))
            return
        due = state.global_step - self._last_plain >= max(1, state.max_steps // PLAIN_LINES)
        if state.is_world_process_zero and self.metric in (logs or {}) and due:
            self._last_plain = state.global_step
            self.console.print(
                f"step {state.global_step}/{state.max_steps}  {self.line(width=0)}",
                markup=False,
                highlight=False,
            )

    def on_train_end(self, args, state, control, **kwargs):
        self.history = list(state.log_history)
        self.close()

    def close(self) -> None:
        """Stops the live line. Safe to call at any time, also after a failure in the middle of training."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def line(self, width: int = 24) -> str:
        """Returns the latest reward and loss as text, with a sparkline of up to `width` bars."""
        last: dict[str, Any] = {}
        for row in self.history:
            last.update(row)
        text = f"{self.metric} {_number(last.get(self.metric))}  loss {_number(last.get('loss'))}"
        bars = sparkline(series(self.history, self.metric)[1], width)
        return f"{text}  {bars}" if bars else text
