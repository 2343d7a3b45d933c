"""No advantage: what a method is that learns from its regularizers alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import Scored
from .base import hook


@hook("advantage", "none")
@dataclass(frozen=True)
class NoAdvantage:
    """A = 0, (N,): rewards are logged and never enter the loss. On-policy distillation (GKD, 2306.13649)."""

    math = "A = 0"

    def __call__(self, scored: Scored) -> Tensor:
        return torch.zeros_like(scored.reward)
