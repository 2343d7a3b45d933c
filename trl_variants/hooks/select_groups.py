"""Select hooks about whole groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..records import Scored
from .advantage import labels_of, sums_by
from .base import hook, param


@hook("select", "drop_solved")
@dataclass(frozen=True)
class DropSolved:
    """Groups whose scorable rows all earn `r_max`, (N,), leave the loss; all-wrong groups stay. NGRPO (2509.18851).

    `r_max` is in units of reward.
    """

    r_max: float = 1.0

    math = "groups with R = {r_max} throughout out of the loss"

    def __call__(self, scored: Scored) -> Scored:
        labels, valid = labels_of(scored, "group"), scored.valid
        short = (scored.reward < self.r_max - 1e-8).to(scored.reward)
        missing, count = (s[labels] for s in sums_by(labels, torch.where(valid, short, 0.0), valid))
        return scored.with_(keep=scored.keep & ~((missing == 0) & (count > 0)))


@hook("select", "accuracy_band")
@dataclass(frozen=True)
class AccuracyBand:
    """Keeps groups of which a share in [low, high] is right, (N,), in loss and statistics. PRIME (2502.01456).

    The share is over scorable rows; nothing replaces what is dropped.
    """

    low: float = param(0.2, low=0.0, high=1.0)
    high: float = param(0.8, low=0.0, high=1.0)

    math = "groups with a share right outside [{low}, {high}] out"

    def __call__(self, scored: Scored) -> torch.Tensor:
        return (scored.solved >= self.low - 1e-6) & (scored.solved <= self.high + 1e-6)
