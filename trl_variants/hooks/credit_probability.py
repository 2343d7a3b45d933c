"""Credit hooks that look at how likely the sampling policy found a token, q_t = pi_old(y_t)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import TokenBatch, bounded_exp
from .base import hook, param


def old_probability(batch: TokenBatch) -> Tensor:
    """(B, T) pi_old of the sampled token, detached."""
    return bounded_exp(batch.anchor.detach())


def rank_in_row(x: Tensor, mask: Tensor) -> Tensor:
    """(B, T) place of each token among its row's, 0 for the smallest; equal values in order, masked tokens last."""
    order = torch.where(mask > 0, x, torch.inf).argsort(dim=1, stable=True)
    places = torch.arange(x.shape[1], device=x.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


@hook("credit", "probability_weight")
@dataclass(frozen=True)
class ProbabilityWeight:
    """A_t = A (alpha q_t + 1 - alpha), (B, T): advantage reweighting of AR-Lopti (2505.12929) section 4.

    Both signs of A; the weight lies in [1 - alpha, 1], `alpha` is a share. alpha = 0 changes nothing.
    """

    alpha: float = param(0.3, low=0.0, high=1.0)

    math = "A_t = A ({alpha} q_t + 1 - {alpha}), q = pi_old"
    needs = frozenset({"old_logps"})
    silent_at_zero = True

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        return advantage * (self.alpha * old_probability(batch) + 1 - self.alpha)


@hook("credit", "low_probability_first")
@dataclass(frozen=True)
class LowProbabilityFirst:
    """A_t = A on the tokens of this pass, else 0, (B, T): Lopti of AR-Lopti (2505.12929) section 4.

    Even passes over a generation train on q_t < eta, odd ones on q_t >= eta, against the same pi_old: the second pass
    sees the policy the first has moved. `eta` is a probability. Denominators keep counting every token, as the authors'
    code, which zeroes advantages.
    """

    eta: float = param(0.5, low=0.0, high=1.0)

    math = "A_t = A [q_t < {eta}] in even passes, A [q_t >= {eta}] in odd ones"
    needs = frozenset({"old_logps"})
    passes = 2  # num_iterations must be a multiple
    silent_at_zero = True

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        return advantage * tokens_of_pass(batch, self.eta)


def tokens_of_pass(batch: TokenBatch, eta: float) -> Tensor:
    """(B, T) 1 on the tokens that `LowProbabilityFirst` trains on in this pass over the generation."""
    low = old_probability(batch) < eta
    return (low if batch.iteration % 2 == 0 else ~low).to(batch.mask)


@hook("credit", "polarity_boost")
@dataclass(frozen=True)
class PolarityBoost:
    """A_t = m A on the k = max(1, floor(share |y|)) tokens of S, else A, (B, T). A3PO (2512.21625).

    S: of a correct answer (the verifier's word, not the sign of A) the tokens with the lowest q_t, of a wrong one those
    with the highest. m = max(start - decay * step, 1), `step` counting optimizer steps. `start` multiplies the
    advantage, `decay` is per step.
    """

    share_correct: float = param(0.2, low=0.0, high=1.0)
    share_wrong: float = param(0.2, low=0.0, high=1.0)
    start: float = param(2.0, low=1.0)
    decay: float = param(0.005, low=0.0)

    math = "A_t = max({start} - {decay} step, 1) A on {share_correct} least likely or (wrong) {share_wrong} likeliest"
    needs = frozenset({"old_logps"})
    silent_at_zero = True

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        right = batch.need("correct").bool().unsqueeze(1)
        q = batch.anchor.detach()  # ranks by log-prob are ranks by probability
        length = batch.mask.sum(1, keepdim=True).double()
        rank = rank_in_row(torch.where(right, q, -q), batch.mask)
        size = torch.where(right, length * self.share_correct, length * self.share_wrong).floor().clamp(min=1.0)
        multiplier = max(self.start - self.decay * batch.step, 1.0)
        return advantage * (1 + (multiplier - 1) * (rank < size).to(batch.mask))
