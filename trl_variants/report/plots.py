"""Several curves in one picture: the panels of a card, the runs of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .curves import History, series

# shown in this order, those a run logged
PANELS = ("reward_std", "completions/mean_length", "entropy", "kl", "teacher/kl", "grad_norm", "accuracy/greedy")
_COLUMNS = 3


def figure_of(width: float, height: float) -> Any:
    """A matplotlib figure without a screen; None, and one sentence, where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        text = 'no picture: matplotlib is missing, pip install "trl_variants[plots]"'
        Console().print(text, style="dim", markup=False)
        return None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def panels_png(history: History, path: str | Path, metrics: Sequence[str] = PANELS) -> Path | None:
    """One small panel for each of `metrics` logged at least twice; None where there are fewer than two panels."""
    drawn = [(name, found) for name in metrics if len((found := series(history, name))[0]) > 1]
    if len(drawn) < 2 or (figure := figure_of(9, 2.4 * -(-len(drawn) // _COLUMNS))) is None:
        return None
    for i, (name, (steps, values)) in enumerate(drawn):
        axes = figure.add_subplot(-(-len(drawn) // _COLUMNS), _COLUMNS, i + 1)
        axes.plot(steps, values, linewidth=1.2)
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
    path = Path(path)
    figure.savefig(path, dpi=110)
    return path


def bands_png(
    runs: Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]], path: str | Path, label: str
) -> Path | None:
    """Mean over runs as a line and their range as a band, for each name; a run is (steps, values).

    Runs of one name are compared at the steps that all of them logged. None where nothing was logged.
    """
    if not any(steps for curves in runs.values() for steps, _ in curves):
        return None
    if (figure := figure_of(7, 4.2)) is None:
        return None
    axes = figure.add_subplot()
    for name, curves in runs.items():
        known = [dict(zip(steps, values, strict=True)) for steps, values in curves if steps]
        shared = sorted(set.intersection(*map(set, known))) if known else []
        if not shared:
            continue
        columns = [[run[step] for run in known] for step in shared]
        (line,) = axes.plot(shared, [sum(c) / len(c) for c in columns], linewidth=1.5, label=f"{name} ({len(known)})")
        if len(known) > 1:
            axes.fill_between(
                shared, list(map(min, columns)), list(map(max, columns)), alpha=0.2, color=line.get_color()
            )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend()
    path = Path(path)
    figure.savefig(path, dpi=120)
    return path
