"""Clip hooks that replace the hard bound by a smooth one. Signature and result as in `clip.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import TokenBatch, bounded_exp, masked_mean
from .base import hook, param
from .clip import Clipped, choose
from .metrics import Mean

_GATES = {  # f with f'(0) = 1 in x = tau (r - 1), falling on both sides
    "sigmoid": lambda x: 4 * torch.sigmoid(x),
    "erf": lambda x: math.sqrt(math.pi) / 2 * torch.erf(x),
    "arctan": torch.atan,
    "softsign": lambda x: x / (1 + x.abs()),
}


@hook("clip", "smooth_gate")
@dataclass(frozen=True)
class SmoothGate:
    """f(tau (r - 1)) / tau A, (B, T) or (B, 1), tau by the sign of A. Gate functions for SAPO (2602.19345).

    d/dr = f', with x = tau (r - 1): sigmoid 4 s(x) (1 - s(x)); erf exp(-x^2); arctan 1 / (1 + x^2); softsign
    1 / (1 + |x|)^2. All are 1 at r = 1, so on-policy the gradient is that of r A. `tau` is a sharpness per unit of
    r - 1; at equal tau the gates are not equally wide. Constants that f leaves free are not added: only sigmoid, SAPO's
    own gate, has a value other than 0 at r = 1.
    """

    gate: str = param("erf", choices=tuple(_GATES), ours=True)
    tau_pos: float = param(1.0, above=0.0)
    tau_neg: float = param(1.05, above=0.0)

    math = "{gate}(tau (r - 1)) / tau A, tau = {tau_pos} if A > 0 else {tau_neg}"
    silent_at_zero = True

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        tau = choose(advantage > 0, self.tau_pos, self.tau_neg, log_ratio)
        return Clipped(_GATES[self.gate](tau * (bounded_exp(log_ratio) - 1)) / tau * advantage)


@hook("clip", "gaussian_weight")
@dataclass(frozen=True)
class GaussianWeight:
    """sg[exp(-(log r / sigma)^2 / 2)] r A, (B, T) or (B, 1): stale samples fade. GIPO (2603.03955).

    `sigma` is a width in log r: at r = exp(+-sigma) the weight is exp(-1/2), whatever the sign of A. r keeps its
    gradient, the weight has none (with one, the gradient would change sign above r = exp(sigma^2)).
    """

    sigma: float = param(0.5, above=0.0)

    math = "sg[exp(-(log r / {sigma})^2 / 2)] r A"
    silent_at_zero = True

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        weight = torch.exp(-0.5 * (log_ratio.detach() / self.sigma) ** 2)
        return Clipped(
            weight * bounded_exp(log_ratio) * advantage, metrics={"gipo/weight_mean": Mean.over(weight, batch.mask)}
        )


@hook("clip", "soft_sequence")
@dataclass(frozen=True)
class SoftSequence:
    """exp(mean_t arctan(log r_t)) A, (B, 1). Soft Sequence Policy Optimization (2602.19327).

    GMPO with a smooth gate on every token's log-ratio instead of a clip: the answer's weight stays inside
    exp(+-pi/2) = (0.208, 4.810). With token advantages the row's value is their mean.
    """

    math = "exp(1/|y| sum_t arctan(log r_t)) A"
    token_ratio_only = True
    silent_at_zero = True

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        kept = batch.active
        weight = torch.exp(masked_mean(torch.atan(log_ratio), kept))
        row_advantage = advantage if advantage.shape[1] == 1 else masked_mean(advantage, kept)
        return Clipped(
            weight * row_advantage,
            metrics={"sspo/weight_mean": Mean.over(weight, batch.mask)},
            over_tokens=True,
        )


@hook("clip", "hazard")
@dataclass(frozen=True)
class Hazard:
    """exp(psi - sg[zeta]) A, (B, T) or (B, 1). MHPO (2603.16929).

    psi = c tanh(log r / c) is the bounded log-ratio and carries the gradient; zeta = (s(psi) / lambda_pos)^k_pos +
    (s(-psi) / lambda_neg)^k_neg with s = softplus is a Weibull hazard, detached. `c` bounds |psi|, in log r; lambda are
    scales in log r, k shapes without unit. The hazard is not 0 at r = 1: with the defaults the on-policy gradient is
    0.2651 of the unclipped one.
    """

    c: float = param(1.5, above=0.0)
    k_pos: float = param(1.5, low=0.0)
    lambda_pos: float = param(1.0, above=0.0)
    k_neg: float = param(2.0, low=0.0)
    lambda_neg: float = param(0.8, above=0.0)

    math = (
        "exp(psi - sg[(s(psi)/{lambda_pos})^{k_pos} + (s(-psi)/{lambda_neg})^{k_neg}]) A, psi = {c} tanh(log r / {c})"
    )
    silent_at_zero = True

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        psi = self.c * torch.tanh(log_ratio / self.c)
        with torch.no_grad():
            up, down = torch.nn.functional.softplus(psi), torch.nn.functional.softplus(-psi)
            hazard = (up / self.lambda_pos) ** self.k_pos + (down / self.lambda_neg) ** self.k_neg
        weight = torch.exp(psi - hazard)
        return Clipped(weight * advantage, metrics={"mhpo/weight_mean": Mean.over(weight, batch.mask)})
