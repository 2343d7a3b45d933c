"""Advantage hooks about the best of a group: virtual best samples, the winner's lead, pass@k."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import Scored
from .advantage import labels_of, std_by, sums_by
from .advantage_baselines import SAME
from .base import hook, param


@hook("advantage", "virtual_best")
@dataclass(frozen=True)
class VirtualBest:
    """(R_i - mu) / (sd + eps), mu and sd over the group and `n_virtual` samples of reward `r_max`, (N,). NGRPO
    (2509.18851).

    An all-wrong group gets a negative advantage, an all-right one (R = r_max) none. Virtual samples enter nothing but
    mu and sd. `r_max` is the best reward there is, in units of reward: with bonuses it is not 1. A row alone gets 0.
    """

    n_virtual: int = param(1, low=0)
    r_max: float = 1.0
    ddof: int = param(1, choices=(0, 1))
    eps: float = param(1e-6, low=0.0)

    math = "A = (R - mu) / (sd + {eps}) over the group and {n_virtual} x R = {r_max}"

    def __call__(self, scored: Scored) -> Tensor:
        labels, reward, valid = labels_of(scored, "group"), scored.reward, scored.valid
        total, count = (s[labels] for s in sums_by(labels, reward, valid))
        n = count + self.n_virtual
        mean = (total + self.n_virtual * self.r_max) / n.clamp(min=1.0)
        squares = sums_by(labels, (reward - mean) ** 2, valid)[0][labels] + self.n_virtual * (self.r_max - mean) ** 2
        scale = (squares / (n - self.ddof).clamp(min=1.0)).sqrt() + self.eps
        off = (reward - mean).abs() > SAME  # an all-right group's rounding noise is no signal
        return torch.where(valid & (count > 1) & off, (reward - mean) / scale, 0.0)


@hook("advantage", "winner_lead")
@dataclass(frozen=True)
class WinnerLead:
    """The best row of a group gets its lead over the second best, everyone else 0, (N,). GRPO pass@k (2503.19595).

    A = R_(1) - R_(2), divided by the group's std + eps where `by_std`. k is the group size; two best rows give nothing.
    """

    by_std: bool = True
    ddof: int = param(1, choices=(0, 1))
    eps: float = param(1e-6, low=0.0)

    math = "A = [i best] (R_(1) - R_(2)) / (std_group + {eps})"

    def __call__(self, scored: Scored) -> Tensor:
        labels, reward, valid = labels_of(scored, "group"), scored.reward, scored.valid
        lowest = torch.where(valid, reward, -torch.inf)
        groups = int(labels.max()) + 1 if len(labels) else 0
        empty = torch.full((groups,), -torch.inf, dtype=reward.dtype, device=reward.device)
        best = empty.scatter_reduce(0, labels, lowest, "amax")[labels]
        is_best = valid & (lowest == best)
        second = empty.scatter_reduce(0, labels, torch.where(is_best, -torch.inf, lowest), "amax")[labels]
        alone_at_top = sums_by(labels, is_best.to(reward), valid)[0][labels] == 1
        lead = torch.where(is_best & alone_at_top & torch.isfinite(second), best - second, 0.0)
        if not self.by_std:
            return lead
        return torch.where(lead != 0, lead / (std_by(labels, reward, valid, self.ddof) + self.eps), 0.0)


@hook("advantage", "pass_at_k")
@dataclass(frozen=True)
class PassAtK:
    """The average advantage of a row over all k-subsets of its group, rewarded 1 where one row is correct, (N,).
    Pass@k training (2508.10751).

    n rows, w of them wrong: Rbar = 1 - C(w, k)/C(n, k), sigma = sqrt(Rbar (1 - Rbar)); a correct row gets
    (1 - Rbar)/sigma, a wrong one (1 - Rbar - C(w-1, k-1)/C(n-1, k-1))/sigma; all 0 where sigma = 0 or n < k. Reads
    correctness, not the reward. k = 1 is GRPO with the population std.
    """

    k: int = param(2, low=1, ours=True)

    math = "A = (miss - [wrong] C(w-1,k-1)/C(n-1,k-1)) / sigma, miss = C(w,k)/C(n,k), k = {k}"

    def __call__(self, scored: Scored) -> Tensor:
        labels, valid = labels_of(scored, "group"), scored.valid
        right = scored.correct.bool() & valid
        correct, n = (s[labels] for s in sums_by(labels, right.to(scored.reward), valid))
        miss = _share(n - correct, n, self.k)  # 1 - Rbar
        sigma = (miss * (1 - miss)).sqrt()
        advantage = torch.where(right, miss, miss - _share(n - correct - 1, n - 1, self.k - 1))
        usable = valid & (n >= self.k) & (sigma > 0)
        return torch.where(usable, advantage / torch.where(sigma > 0, sigma, 1.0), 0.0)


def _share(w: Tensor, n: Tensor, k: int) -> Tensor:
    """C(w, k) / C(n, k), elementwise: the chance that k of n rows are all among w. 0 where w < k."""
    out = torch.ones_like(n)
    for j in range(k):
        out = out * (w - j).clamp(min=0.0) / (n - j).clamp(min=1.0)
    return out
