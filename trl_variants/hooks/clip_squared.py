"""Objectives without PPO's minimum: the log-ratio itself (mirror descent, DRO) and the ratio held inside two bounds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..errors import VariantError
from ..records import TokenBatch, bounded_exp
from .base import hook, param
from .clip import Clipped


@hook("clip", "log_linear")
@dataclass(frozen=True)
class LogLinear:
    """log r A, (B, T) or (B, 1): REINFORCE with the policy's move as its value. Kimi k1.5 (2501.12599) section 2.3.2.

    No exp and no bound: regularizer squared_log_ratio is what keeps the policy near. With the product ratio log r
    is the
    answer's log-ratio summed over tokens; verl's `dro` has lp A for log r A, the same gradient.
    """

    math = "log r A"
    silent_at_zero = True

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        return Clipped(log_ratio * advantage)


@hook("clip", "ratio_clamp")
@dataclass(frozen=True)
class RatioClamp:
    """clip(r, low, high) A, (B, T) or (B, 1), without a minimum: outside [low, high] no gradient for either sign of A.

    Kimi K2.5 (2602.02276) eq. 1. `low` and `high` bound the ratio itself; for a log-ratio in [a, b] take exp(a),
    exp(b).
    """

    low: float = param(0.8, low=0.0, ours=True)
    high: float = param(1.2, above=0.0, ours=True)

    math = "clip(r, {low}, {high}) A"
    silent_at_zero = True

    def __post_init__(self):
        numbers = [x for x in (self.low, self.high) if isinstance(x, (int, float))]
        if len(numbers) == 2 and not self.low < 1 < self.high:
            raise VariantError(
                f"ratio_clamp needs low < 1 < high, got {self.low} and {self.high}: it would mask on-policy tokens"
            )

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        ratio = bounded_exp(log_ratio)
        moved = advantage != 0
        return Clipped(
            ratio.clamp(self.low, self.high) * advantage, (ratio < self.low) & moved, (ratio > self.high) & moved
        )
