"""Rows above their group. Signature as in `select.py`."""

from __future__ import annotations

from dataclasses import dataclass

from ..records import Scored
from .advantage import labels_of, mean_by
from .base import hook, param


@hook("select", "winners")
@dataclass(frozen=True)
class Winners:
    """Only rows whose reward exceeds their group's mean enter the loss, (N,); all stay in the baseline. WAPO
    (2606.16154).

    `margin` is relative to 1 + |mean|: rounding in a mean of equal rewards makes no winner.
    """

    margin: float = param(1e-6, low=0.0, ours=True)

    math = "only rows with R > mean_group"

    def __call__(self, scored: Scored) -> Scored:
        mean = mean_by(labels_of(scored, "group"), scored.reward, scored.valid)
        return scored.with_(keep=scored.keep & (scored.reward - mean > self.margin * (1 + mean.abs())))
