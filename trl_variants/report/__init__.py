"""What a run leaves behind: a live progress line, the learning curve, the closing table, the run folder."""

from __future__ import annotations

from .curves import LiveCurve, before_after_table, learning_curve_png, series, sparkline
from .run_folder import read_result, write_result

__all__ = [
    "LiveCurve",
    "before_after_table",
    "learning_curve_png",
    "read_result",
    "series",
    "sparkline",
    "write_result",
]
