"""The optimal token baseline: one baseline per time step, weighted by accumulated squared score norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import Scored
from .advantage import labels_of, reward_to_go, sums_by
from .base import hook, param
from .rewards import score_on_last_token


@hook("advantage", "optimal_token_baseline")
@dataclass(frozen=True)
class OptimalTokenBaseline:
    """G_{i,t} - B_t with B_t = sum_i W_{i,t} G_{i,t} / sum_i W_{i,t} over the group, (N, T). OTB (2602.07078).

    W_{i,t} accumulates w = 1 - 2 pi(y_s) + sum_v pi(v)^2, the squared norm of the softmax score, over s <= t. A step is
    the t-th token of the policy: tool tokens take no step. `zero_tail`: where only the longest answer is left (and only
    one is that long) its baseline is 0. A row alone in its group gets 0.
    """

    eps: float = param(1e-8, low=0.0)
    zero_tail: bool = True

    math = "A_t = G_t - sum_i W_it G_it / sum_i W_it, W_t = sum_s<=t (1 - 2 pi_s + sum_v pi_v^2)"
    needs = frozenset({"tokens", "old_logps", "sum_sq_probs"})

    def __call__(self, scored: Scored) -> Tensor:
        valid, labels = scored.valid, labels_of(scored, "group")
        real = scored.need("mask").to(scored.reward) * valid.unsqueeze(1)
        mask = real > 0
        returns = reward_to_go(score_on_last_token(scored).to(scored.reward), real, 1.0)
        norm = (1 - 2 * scored.need("old_logps").exp() + scored.need("sum_sq_probs")).clamp(0.0, 2.0)  # its range
        weight = torch.where(mask, norm, 0.0).cumsum(1)
        step = (real.cumsum(1) - 1).clamp(min=0).long()  # which token of the policy this is
        groups, width = int(labels.max()) + 1 if len(labels) else 0, real.shape[1]
        cell = labels.unsqueeze(1) * width + step
        top, bottom = (
            torch.zeros(groups * width, dtype=x.dtype, device=x.device).index_add(0, cell[mask], x[mask])
            for x in (weight * returns, weight)
        )
        baseline = (top / (bottom + self.eps).clamp(min=torch.finfo(top.dtype).tiny))[cell]
        if self.zero_tail:
            alive = torch.zeros_like(top).index_add(0, cell[mask], real[mask])[cell]
            baseline = torch.where(alive > 1, baseline, 0.0)
        rows = sums_by(labels, scored.reward, valid)[1][labels]
        return torch.where(mask & (rows > 1).unsqueeze(1), returns - baseline, 0.0)
