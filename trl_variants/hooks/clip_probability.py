"""Clip bounds that depend on the token's own probability."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import TokenBatch, bounded_exp
from .base import hook, param
from .clip import Clipped


@hook("clip", "probability_bounds")
@dataclass(frozen=True)
class ProbabilityBounds:
    """min(r A, clip(r, low(q), high(q)) A), (B, T), q = sg[pi_old(y_t)]: rare tokens may move further. DCPO
    (2509.02333).

    From |(r - 1) r q| <= eps: low = 1/2 + 1/2 sqrt(max(1 - 4 eps_low/q, 0)), high = min(1/2 + 1/2 sqrt(1 + 4
    eps_high/q), cap). `eps_low`, `eps_high` are in units of probability, `cap` bounds the ratio itself; for A < 0 the
    objective is also at least A cap. Takes a token ratio.
    """

    eps_low: float = param(0.16, low=0.0)
    eps_high: float = param(0.2, low=0.0)
    cap: float = param(10.0, above=1.0)

    math = "min(r A, clip(r, low(q), high(q)) A), |(r-1) r q| <= {eps_low}, {eps_high}; r <= {cap}"
    needs = frozenset({"old_logps"})
    silent_at_zero = True

    def bounds(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """(low, high), each of the shape of the probabilities q."""
        q = q.clamp(min=torch.finfo(q.dtype).tiny)
        low = 0.5 + 0.5 * (1 - 4 * self.eps_low / q).clamp(min=0.0).sqrt()
        return low, (0.5 + 0.5 * (1 + 4 * self.eps_high / q).sqrt()).clamp(max=self.cap)

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        low, high = self.bounds(bounded_exp(batch.anchor.detach()))
        ratio = bounded_exp(log_ratio)
        objective = torch.min(ratio * advantage, torch.clamp(ratio, low, high) * advantage)
        objective = torch.where(advantage < 0, torch.max(objective, self.cap * advantage), objective)
        return Clipped(objective, (ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0))
