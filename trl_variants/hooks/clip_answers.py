"""Clip hooks in score-function form that weigh whole answers. Signature and result as in `clip.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import TokenBatch, bounded_exp
from .base import hook, param
from .clip import Clipped
from .metrics import Mean


def answer_log_ratio(log_ratio: Tensor, batch: TokenBatch) -> Tensor:
    """(B, 1), detached: a per-answer log-ratio as it is, a per-token one summed over the answer."""
    log_ratio = log_ratio.detach()
    return log_ratio if log_ratio.shape[1] == 1 else (log_ratio * batch.mask).sum(-1, keepdim=True)


def log_likelihood(advantage: Tensor, batch: TokenBatch) -> Tensor:
    """(B, 1) sum_t A lp_t over the active tokens."""
    return (advantage * batch.logps * batch.active).sum(-1, keepdim=True)


@hook("clip", "tapered")
@dataclass(frozen=True)
class Tapered:
    """sg[w] A log pi(y), (B, 1), w = 1 for A >= 0 and min(rho, cap) for A < 0. TOPR (2503.14286).

    rho is the answer's ratio (product of token ratios). An improbable failure is not pushed down further; a success
    needs no importance weight. `cap` is a bound on the ratio itself.
    """

    cap: float = param(1.0, above=0.0)

    math = "sg[1 if A >= 0 else min(rho, {cap})] A sum_t lp_t"
    silent_at_zero = True

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        rho = bounded_exp(answer_log_ratio(log_ratio, batch)).clamp(max=self.cap)
        weight = torch.where(advantage < 0, rho, torch.ones_like(rho))
        return Clipped(
            log_likelihood(weight * advantage, batch),
            metrics={"topr/taper_mean": Mean.over(rho, batch.mask)},
            over_tokens=True,
        )


@hook("clip", "self_normalised")
@dataclass(frozen=True)
class SelfNormalised:
    """sg[w_i / mean over the group of w] A log pi(y_i), (B, 1), w = clip(rho, 1-eps_low, 1+eps_high). StableDRL
    (2603.06743).

    The clip acts whatever the sign of A and its result is detached, so an answer outside the interval keeps a gradient
    with a bounded weight, and within a group the update is a convex combination: the mean over a group's G answers is
    sum_j w_j / (sum w) A_j log pi(y_j). The widths are offsets from 1; eps_low = 1, eps_high = 4 is the authors' code
    (only a cap at ratio 5).
    """

    eps_low: float = param(0.2, low=0.0, high=1.0)
    eps_high: float = param(0.2, low=0.0)

    math = "sg[w / mean_group(w)] A sum_t lp_t, w = clip(rho, 1-{eps_low}, 1+{eps_high})"
    scope = "window"

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        with torch.no_grad():
            rho = bounded_exp(answer_log_ratio(log_ratio, batch))
            weight = rho.clamp(1 - self.eps_low, 1 + self.eps_high).squeeze(1)
            live = (batch.mask.sum(-1) > 0).to(weight)
            index = torch.unique(batch.need("group"), return_inverse=True)[1]
            total, count = (weight.new_zeros(len(weight)).index_add(0, index, x) for x in (weight * live, live))
            mean = (total / count.clamp(min=1.0))[index]
            share = (weight * live / torch.where(mean > 0, mean, 1.0)).unsqueeze(1)
            outside = ((rho < 1 - self.eps_low) | (rho > 1 + self.eps_high)).to(rho)
        return Clipped(
            share * log_likelihood(advantage, batch),
            metrics={"stabledrl/bounded": Mean.over(outside, batch.mask)},
            over_tokens=True,
        )
