"""PPO's clip with bounds that are searched for in every optimizer window. Signature and result as in `clip.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import TokenBatch, bounded_exp
from .base import hook, param
from .clip import Clipped
from .metrics import Mean


@hook("clip", "balanced")
@dataclass(frozen=True)
class BalancedClip:
    """min(r A, clip(r, c_low, c_high) A), (B, T) or (B, 1), bounds chosen per window so that positive tokens supply a
    share >= rho0 of the loss's magnitude. BAPO (2510.18927) eq. 8 and algorithm 1.

    All c are bounds on the ratio itself, not offsets from 1. The search starts at the lower ends and moves `first` by
    its step up to its maximum, then the other; it stops at the first pair with share P / (P + N) >= rho0, and keeps
    both maxima if there is none. Bounds are constants in the gradient and restart with every window. P and N by
    `measure`, over the window's tokens:
    * "active": r |A| of the tokens PPO leaves unclipped, A > 0 with r <= c_high against A < 0 with r >= c_low;
    * "surrogate" (authors' code): min(r, c_high) A against max(r, c_low) |A|. Raising c_low only lowers the share;
    * "paper": as surrogate, each token weighted by its probability under the old policy.
    `floor`: dual-clip's c, the objective is at least floor * A for A < 0.
    """

    rho0: float = param(0.4, low=0.0, high=1.0)
    c_low_min: float = param(0.6, above=0.0, high=1.0)
    c_low_max: float = param(0.9, above=0.0, high=1.0)
    step_low: float = param(0.02, above=0.0)
    c_high_min: float = param(1.2, low=1.0)
    c_high_max: float = param(3.0, low=1.0)
    step_high: float = param(0.05, above=0.0)
    first: str = param("high", choices=("high", "low"))
    measure: str = param("active", choices=("active", "surrogate", "paper"), ours=True)
    floor: float | None = param(3.0, above=1.0)

    math = "min(r A, clip(r, c_low, c_high) A), bounds searched until positives' {measure} share >= {rho0}"
    scope = "window"

    def __post_init__(self):
        for name in ("low", "high"):
            start, end = getattr(self, f"c_{name}_min"), getattr(self, f"c_{name}_max")
            if isinstance(start, (int, float)) and isinstance(end, (int, float)) and start > end:
                raise VariantError(f"balanced.c_{name}_min {start} is above c_{name}_max {end}")

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        ratio = bounded_exp(log_ratio)
        low, high, share = self._search(ratio.detach(), advantage, batch)
        objective = torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)
        below, above = (ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0)
        if self.floor is not None:
            above = above | ((advantage < 0) & (ratio > self.floor))
            objective = torch.where(advantage < 0, torch.max(objective, self.floor * advantage), objective)
        one = torch.ones((), device=ratio.device)
        seen = {"bapo/c_low": low, "bapo/c_high": high, "bapo/positive_share": share}
        return Clipped(objective, below, above, {name: Mean(one * x, one) for name, x in seen.items()})

    @torch.no_grad()
    def _search(self, ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> tuple[float, float, float]:
        share = 0.0
        for low, high in self._pairs():
            share = self._share(ratio, advantage, batch, low, high)
            if share >= self.rho0:
                return low, high, share
        return self.c_low_max, self.c_high_max, share

    def _pairs(self) -> Iterator[tuple[float, float]]:
        lows = _steps(self.c_low_min, self.c_low_max, self.step_low)
        highs = _steps(self.c_high_min, self.c_high_max, self.step_high)
        if self.first == "high":
            yield from ((lows[0], high) for high in highs)
            yield from ((low, highs[-1]) for low in lows[1:])
        else:
            yield from ((low, highs[0]) for low in lows)
            yield from ((lows[-1], high) for high in highs[1:])

    def _share(self, ratio: Tensor, advantage: Tensor, batch: TokenBatch, low: float, high: float) -> float:
        if self.measure == "active":
            kept = torch.where(advantage > 0, ratio <= high, ratio >= low).to(ratio)
            value = ratio * advantage * kept
        else:
            value = torch.where(advantage >= 0, ratio.clamp(max=high), ratio.clamp(min=low)) * advantage
            if self.measure == "paper":
                value = value * bounded_exp(batch.anchor)
        value = value * batch.active
        positive, negative = value.clamp(min=0.0).sum(), -value.clamp(max=0.0).sum()
        total = float(positive + negative)
        return float(positive) / total if total > 0 else 1.0


def _steps(start: Any, end: Any, step: float) -> list[float]:
    """start, start + step, ..., the last one exactly `end`."""
    count = int((end - start) / step - 1e-9) + 1 if end > start else 0
    return [start + k * step for k in range(count)] + [end]
