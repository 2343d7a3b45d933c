"""Entropy control by the covariance of advantage and log-prob: Clip-Cov and, as a regularizer, KL-Cov."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import TokenBatch
from .base import hook, param
from .clip import Clipped, PPOClip
from .metrics import Mean
from .regularizers import Term


@torch.no_grad()
def covariance(advantage: Tensor, batch: TokenBatch) -> Tensor:
    """(B, T) (A_t - mean A)(lp_t - mean lp), means over the window's active tokens; 0 on the others.

    The Entropy Mechanism (2505.22617): where it is large and positive, the update lowers entropy most.
    """
    count = batch.active.sum().clamp(min=1.0)
    spread = lambda x: x - (x * batch.active).sum() / count  # noqa: E731
    return spread(advantage.expand_as(batch.mask)) * spread(batch.logps.detach()) * batch.active


@hook("clip", "clip_cov")
@dataclass(frozen=True)
class ClipCov:
    """PPO's clip, and a few random tokens of high covariance lose their term, (B, T). Clip-Cov (2505.22617).

    Candidates are tokens with cov_low < cov < cov_high that PPO leaves unclipped; min(number of candidates,
    max(1, int(share * N))) of them are drawn, N the window's tokens. Their terms are 0 and stay in the divisor. `share`
    is a fraction, cov in units of advantage times nats, eps offsets from 1 (1, 1: interval [0, 2], as the authors run
    it).
    """

    share: float = param(2e-4, low=0.0, high=1.0)
    cov_low: float = 1.0
    cov_high: float = 5.0
    eps_low: float = param(1.0, low=0.0)
    eps_high: float = param(1.0, low=0.0)

    math = "[not drawn from {cov_low} < cov(A, lp) < {cov_high}] min(r A, clip(r, 1-{eps_low}, 1+{eps_high}) A)"
    scope = "window"
    random = True

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch, rng: torch.Generator) -> Clipped:
        inner = PPOClip(self.eps_low, self.eps_high)(log_ratio, advantage, batch)
        cov = covariance(advantage, batch)
        candidate = (cov > self.cov_low) & (cov < self.cov_high) & ~inner.clipped & (batch.active > 0)
        where = candidate.flatten().nonzero().squeeze(1)
        # drawn from the order of the covariances: the choice does not depend on the order of rows
        where = where[cov.flatten()[where].argsort(stable=True)]
        allowed = max(1, int(self.share * float(batch.active.sum())))
        drawn = torch.zeros_like(batch.mask).flatten()
        drawn[where[torch.randperm(len(where), generator=rng).to(where.device)[:allowed]]] = 1.0
        drawn = drawn.view_as(batch.mask)
        return Clipped(
            inner.objective * (1 - drawn),
            inner.low,
            inner.high,
            {"clip_cov/drawn": Mean.over(drawn, batch.mask), "clip_cov/candidates": Mean.over(candidate, batch.mask)},
        )


@hook("regularizers", "kl_cov")
@dataclass(frozen=True)
class KLCov:
    """coef |log r_t|, (B, T), on the max(1, int(share * N)) tokens with the largest covariance. KL-Cov (2505.22617).

    Averaged by the policy's aggregate over all tokens, N the window's. `share` is a fraction (the authors' scripts
    give percent: 0.2 is 0.002). On-policy |0| has gradient 0.
    """

    coef: float = param(1.0, low=0.0)
    share: float = param(0.002, low=0.0, high=1.0)

    math = "+ {coef} |log r_t| [cov(A, lp) in top {share}]"
    needs = frozenset({"old_logps"})
    scope = "window"

    def __call__(self, batch: TokenBatch) -> Term:
        cov = covariance(batch.advantage, batch).masked_fill(batch.active == 0, -torch.inf).flatten()
        tokens = int(batch.active.sum())
        chosen = torch.zeros_like(cov)
        chosen[cov.topk(min(max(1, int(self.share * tokens)), tokens)).indices] = 1.0
        moved = (batch.logps - batch.anchor).abs() * chosen.view_as(batch.mask)
        return Term(moved, self.coef, metrics={"kl_cov/penalty": Mean.over(moved, batch.mask)})
