"""Clip hooks: how far the policy may move.

Signature: `(log_ratio, advantage, batch) -> Clipped` (or just the objective), to be maximised, (B, T) or (B, 1).
`log_ratio` is (B, T) or (B, 1), `advantage` (B, T) or (B, 1) and detached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import TokenBatch, bounded_exp
from .base import hook, param
from .metrics import Mean, Metric
from .weight import SamplerCorrection


@dataclass(frozen=True)
class Clipped:
    """A bounded objective. `low`/`high` mark where the bound took the gradient away (None: this clip has no such
    notion).

    `over_tokens`: the hook has already reduced over `batch.active`, so a token selection is not applied again.
    """

    objective: Tensor
    low: Tensor | None = None
    high: Tensor | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    over_tokens: bool = False

    @property
    def clipped(self) -> Tensor:
        """Bool, shape of the objective."""
        none = torch.zeros_like(self.objective, dtype=torch.bool)
        return (none if self.low is None else self.low) | (none if self.high is None else self.high)


def choose(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """torch.where on two numbers in the precision of `like`; between plain numbers it would round to float32."""
    return torch.where(condition, torch.tensor(yes, dtype=like.dtype, device=like.device), no)


@hook("clip", "ppo")
@dataclass(frozen=True)
class PPOClip:
    """min(r A, clip(r, 1-eps_low, 1+eps_high) A), (B, T) or (B, 1). PPO (1707.06347) eq. 7, DAPO (2503.14476) eq.
    8 for two widths.

    `delta` caps the unclipped branch at r <= delta, which bounds negative advantages (INTELLECT-2, 2505.07291);
    `floor` is dual-clip's c: max(., c A) for A < 0 (1912.09729 eq. 5). With delta = c the two are the same.
    """

    eps_low: float = param(0.2, low=0.0)
    eps_high: float = param(0.2, low=0.0)
    delta: float | None = param(None, above=0.0)
    floor: float | None = param(None, above=1.0)

    math = "min(r A, clip(r, 1-{eps_low}, 1+{eps_high}) A)"
    silent_at_zero = True

    def __post_init__(self):
        for name, bound in (("delta", self.delta), ("floor", self.floor)):
            if (
                isinstance(bound, (int, float))
                and isinstance(self.eps_high, (int, float))
                and bound <= 1 + self.eps_high
            ):
                raise VariantError(
                    f"ppo.{name} must exceed 1 + eps_high = {1 + self.eps_high:g}, got {bound}: "
                    "it would clip ordinary samples"
                )

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        ratio = bounded_exp(log_ratio)
        inside = ratio.clamp(1 - self.eps_low, 1 + self.eps_high)
        capped = ratio if self.delta is None else ratio.clamp(max=self.delta)
        objective = torch.min(capped * advantage, inside * advantage)
        if self.floor is not None:
            objective = torch.where(advantage < 0, torch.max(objective, self.floor * advantage), objective)
        low = (capped < 1 - self.eps_low) & (advantage < 0)
        high = (capped > 1 + self.eps_high) & (advantage > 0)
        return Clipped(objective, low, high)


@hook("clip", "none")
@dataclass(frozen=True)
class Unclipped:
    """r A, (B, T) or (B, 1): the importance-weighted surrogate without a bound. PPO (1707.06347) eq. 6."""

    math = "r A"
    silent_at_zero = True

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        return Clipped(bounded_exp(log_ratio) * advantage)


@hook("clip", "cispo")
@dataclass(frozen=True)
class CISPO:
    """sg[clamp(r, floor, cap)] A log pi, (B, T): bounded weight, every token keeps a gradient. MiniMax-M1
    (2506.13585) eq. 4-5.

    `cap` and `floor` are bounds on the ratio itself, not widths around 1.
    """

    cap: float = param(5.0, above=0.0)
    floor: float | None = param(None, low=0.0)

    math = "sg[min(r, {cap})] A lp"
    silent_at_zero = True

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        ratio = bounded_exp(log_ratio.detach())
        weight = ratio.clamp(min=self.floor, max=self.cap)
        over = (ratio > self.cap) & (advantage > 0)
        # no gradient is taken away, so nothing is reported as clipped; TRL counts the capped tokens of positive rows
        return Clipped(
            weight * advantage * batch.logps,
            metrics={"cispo_clip_ratio": Mean.over(over.to(ratio), batch.mask)},
        )


@hook("clip", "sapo")
@dataclass(frozen=True)
class SoftGate:
    """(4/tau) sigmoid(tau (r - 1)) A, (B, T), tau by the sign of A. Soft Adaptive Policy Optimization (2511.20347)
    eq. 5-6.

    d/dlp = sech^2(tau (r-1)/2) r A: 1 on-policy; the value at r = 1 is 2/tau.
    """

    tau_pos: float = param(1.0, above=0.0)
    tau_neg: float = param(1.05, above=0.0)

    math = "4/tau sigmoid(tau (r - 1)) A, tau = {tau_pos} if A > 0 else {tau_neg}"
    silent_at_zero = True

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        tau = choose(advantage > 0, self.tau_pos, self.tau_neg, log_ratio)
        return Clipped(torch.sigmoid(tau * (bounded_exp(log_ratio) - 1)) * 4 / tau * advantage)


@hook("clip", "gamma_weight")
@dataclass(frozen=True)
class GammaWeight:
    """sg[phi(W)] A log pi, phi(W) = W^k exp(lambda (1 - W)) of the product ratio W, (B, T). VESPO (2602.10693).

    W always comes from the old policy's token log-ratios, whatever the ratio hook; a sampler correction is folded into
    W (`sampler` names its token mode), never multiplied again.
    """

    k_pos: float = param(2.0, low=0.0)
    lambda_pos: float = param(3.0, low=0.0)
    k_neg: float = param(3.0, low=0.0)
    lambda_neg: float = param(2.0, low=0.0)
    sampler: str | None = param(None, choices=(None, "token_truncate", "token_mask"))
    sampler_min: float | None = None
    sampler_max: float | None = 3.0

    math = "sg[W^k exp(l (1-W))] A lp, (k, l) = ({k_pos}, {lambda_pos}) if A >= 0 else ({k_neg}, {lambda_neg})"
    folds_sampler = True
    silent_at_zero = True

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"old_logps"} | ({"rollout_logps"} if self.sampler else set()))

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        smallest = math.log(1e-8)
        with torch.no_grad():
            token = (batch.logps - batch.anchor).clamp(-20.0, 20.0)
            log_w = (token * batch.mask).sum(-1, keepdim=True)
            if self.sampler and batch.rollout_logps is not None:
                correction = SamplerCorrection(self.sampler, self.sampler_min, self.sampler_max)(batch)
                log_w = log_w + correction.log().clamp(smallest, 20.0).sum(-1, keepdim=True)
            log_w = log_w.clamp(smallest, 20.0)
            k = choose(advantage >= 0, self.k_pos, self.k_neg, log_w)
            lam = choose(advantage >= 0, self.lambda_pos, self.lambda_neg, log_w).clamp(min=1e-4)
            phi = (lam + k * log_w - lam * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        return Clipped(phi * advantage * batch.logps, metrics={"vespo/phi_seq_mean": Mean.over(phi, batch.mask)})


@hook("clip", "geometric_mean")
@dataclass(frozen=True)
class GeometricMean:
    """exp(mean_t c_t) A, c_t the token log-ratio clipped one-sidedly in log space by the sign of A. GMPO (2507.20673).

    The widths are half-widths in log space: 0.4 means ratio bounds (exp(-0.4), exp(0.4)). Takes a token ratio and
    returns one value per row, (B, 1).
    """

    eps_low: float = param(0.4, low=0.0)
    eps_high: float = param(0.4, low=0.0)

    math = "exp(1/|y| sum_t clip_A(log r_t, -{eps_low}, {eps_high})) A"
    silent_at_zero = True

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        clamped = log_ratio.clamp(-self.eps_low, self.eps_high)
        one_sided = torch.where(advantage > 0, torch.minimum(log_ratio, clamped), torch.maximum(log_ratio, clamped))
        kept = batch.active
        mean = (one_sided * kept).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp(min=1.0)
        low = (log_ratio < -self.eps_low) & (advantage < 0)
        high = (log_ratio > self.eps_high) & (advantage > 0)
        # with token advantages the row's value is its mean advantage over the tokens
        row_advantage = (
            advantage
            if advantage.shape[1] == 1
            else (advantage * kept).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp(min=1.0)
        )
        return Clipped(bounded_exp(mean) * row_advantage, low, high, over_tokens=True)
