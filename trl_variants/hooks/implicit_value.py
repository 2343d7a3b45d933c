"""A value function read off the policy: z_t = beta (lp_t - lp_ref,t - KL_t), the advantage that the policy implies.

KL_t = KL(pi || pi_ref) at position t over the whole vocabulary, so that z has mean 0 over the next token. An estimate
from the sampled token would not do: k1 is lp - lp_ref itself, and z would be 0 everywhere. z has gradient through lp
alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..divergence import Divergence
from ..records import TokenBatch, masked_mean
from .aggregate import SequenceMean
from .base import hook, param
from .credit_future import discounted_future
from .metrics import Mean
from .regularizers import Term

_KL = Divergence("rkl", anchor="ref")


def implied_advantage(batch: TokenBatch, beta: float) -> Tensor:
    """(B, T) z_t on the tokens in the loss, 0 elsewhere. VIMPO (2606.20008)."""
    gap = batch.logps - batch.need("ref_logps") - batch.divergence(_KL).detach()
    return torch.where(batch.mask > 0, beta * gap, 0.0)


@hook("credit", "implicit_value")
@dataclass(frozen=True)
class ImplicitValue:
    """A_t = coef whiten(sum_k>=t lam^(k-t) z_k) instead of A, (B, T): GAE of the current z. VIMPO (2606.20008).

    whiten is (x - mean) / sqrt(var + eps) over the tokens of the optimizer step, var dividing by n. z is about `beta`
    times a few tenths, so an `eps` of 1e-4 would flatten it. The reward enters only through
    `implicit_value_regression`. `coef` scales the policy term, whose clip is homogeneous in A.
    """

    beta: float = param(5e-4, above=0.0)
    lam: float = param(1.0, low=0.0, high=1.0)
    coef: float = param(5e-3, low=0.0)
    eps: float = param(1e-8, above=0.0)

    math = "A_t = {coef} whiten(sum_k>=t {lam}^(k-t) z_k), z = {beta} (lp - lp_ref - KL(pi || pi_ref))"
    needs = frozenset({"ref_logps", "distribution"})
    divergences = (_KL,)
    scope = "window"
    adds = True

    @torch.no_grad()
    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        ahead = discounted_future(implied_advantage(batch, self.beta), batch.mask, self.lam)
        count = batch.mask.sum().clamp(min=1.0)
        mean = ahead.sum() / count
        centred = (ahead - mean) * batch.mask
        return self.coef * centred * torch.rsqrt((centred**2).sum() / count + self.eps)


@hook("regularizers", "implicit_value_regression")
@dataclass(frozen=True)
class ImplicitValueRegression:
    """coef 0.5 mean_rows (sum_t z_t - A)^2, (B, 1), A what the advantage hook gave: R - mean_group. VIMPO (2606.20008).

    The square is on the whole residual. A row without a reward is left out, one without tokens counts as 0. Of an
    advantage per token the mean over the answer counts.
    """

    beta: float = param(5e-4, above=0.0)
    coef: float = param(1.0, low=0.0)

    math = "+ {coef} 0.5 mean_rows (sum_t z_t - A)^2, z = {beta} (lp - lp_ref - sg[KL(pi || pi_ref)])"
    needs = frozenset({"ref_logps", "distribution"})
    divergences = (_KL,)

    def __call__(self, batch: TokenBatch) -> Term:
        outcome = batch.uncredited
        if outcome.shape[1] > 1:
            outcome = masked_mean(outcome, batch.mask)
        total = implied_advantage(batch, self.beta).sum(1, keepdim=True)
        residual = total - outcome
        if batch.reward is not None:
            residual = torch.where(batch.reward.isnan().unsqueeze(1), 0.0, residual)
        metrics = {
            "kl": Mean.over(batch.divergence(_KL), batch.mask),
            "implicit_value/sum": Mean.over(total, batch.mask),
        }
        return Term(0.5 * residual**2, self.coef, SequenceMean(), metrics=metrics)
