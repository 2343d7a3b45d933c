"""Clip hooks with another trust region than PPO's interval. Signature and result as in `clip.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import TokenBatch, bounded_exp, masked_mean
from .base import hook, param
from .clip import Clipped
from .metrics import Mean


@hook("clip", "upper_cap")
@dataclass(frozen=True)
class UpperCap:
    """min(r, 1 + eps_high) A for both signs of A, (B, T) or (B, 1); no lower bound. TIC-GRPO (2508.02833), WAPO
    (2606.16154).

    `eps_high` is an offset from 1 (9 means a cap at ratio 10). Above the cap the gradient is 0 whatever the sign of A;
    PPO's min would leave A < 0 unbounded there. The cap is applied in log space.
    """

    eps_high: float = param(0.28, above=-1.0, ours=True)

    math = "min(r, 1+{eps_high}) A"
    silent_at_zero = True

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        cap = math.log1p(self.eps_high)
        high = (log_ratio > cap) & (advantage != 0)
        return Clipped(bounded_exp(log_ratio.clamp(max=cap)) * advantage, torch.zeros_like(high), high)


@hook("clip", "widening")
@dataclass(frozen=True)
class WideningClip:
    """min(R A, exp(clip(log R, -eps_low pos^p, eps_high pos^p)) A), (B, T). CTPO (2605.07331).

    `eps_low`, `eps_high`, `dual` are half-widths in log space at the first token; `pos` counts the policy's tokens up
    to t, so the region widens with the position (the log of a product of t ratios spreads like sqrt t). `dual`: for
    A < 0 the objective is at least exp(dual pos^p) A, as in the authors' code; None leaves it out.
    """

    eps_low: float = param(0.025, low=0.0)
    eps_high: float = param(0.05, low=0.0)
    power: float = 0.5
    dual: float | None = param(0.05, low=0.0)
    silent_at_zero = True

    @property
    def math(self) -> str:
        floor = "" if self.dual is None else ", at least exp({dual} pos^{power}) A"
        return "min(R A, exp(clip(log R, -{eps_low} pos^{power}, {eps_high} pos^{power})) A)" + floor

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        width = batch.mask.cumsum(-1).clamp(min=1.0) ** self.power
        inside = torch.minimum(torch.maximum(log_ratio, -self.eps_low * width), self.eps_high * width)
        objective = torch.min(bounded_exp(log_ratio) * advantage, bounded_exp(inside) * advantage)
        low = (log_ratio < -self.eps_low * width) & (advantage < 0)
        high = (log_ratio > self.eps_high * width) & (advantage > 0)
        if self.dual is not None:
            floor = bounded_exp(self.dual * width) * advantage
            high = high | ((advantage < 0) & (objective < floor))
            objective = torch.where(advantage < 0, torch.max(objective, floor), objective)
        return Clipped(objective, low, high)


@hook("clip", "hybrid")
@dataclass(frozen=True)
class HybridClip:
    """min(m A, m~ A), m = w r + (1 - w) s, m~ the same of clipped branches, (B, T). DHPO (2601.05607).

    r is the token ratio; s the length-normalised sequence ratio in its own-token form, sg[s] r / sg[r] (GSPO-token).
    Each branch is clipped before mixing. The widths are offsets from 1, `_seq` those of the sequence branch. `mix`:
    "averaged" mixes with `w`, "entropy" with the token's entropy over the window's largest, H / max H, detached.
    """

    mix: str = param("averaged", choices=("averaged", "entropy"))
    w: float = param(0.5, low=0.0, high=1.0)
    eps_low: float = param(0.2, low=0.0, ours=True)
    eps_high: float = param(0.28, low=0.0, ours=True)
    eps_low_seq: float = param(3e-4, low=0.0, ours=True)
    eps_high_seq: float = param(4e-4, low=0.0, ours=True)

    token_ratio_only = True
    silent_at_zero = True

    @property
    def math(self) -> str:
        mixed = "{w} r + (1-{w}) s" if self.mix == "averaged" else "w r + (1-w) s with w = H_t / max H"
        return f"min(m A, m~ A), m = {mixed}, m~ of clip(r, 1-{{eps_low}}, 1+{{eps_high}}), " + (
            "clip(s, 1-{eps_low_seq}, 1+{eps_high_seq})"
        )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"old_logps"} | ({"entropy"} if self.mix == "entropy" else set()))

    @property
    def scope(self) -> str:
        return "window" if self.mix == "entropy" else "local"

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        token = bounded_exp(log_ratio)
        level = masked_mean(log_ratio.detach(), batch.mask)
        sequence = bounded_exp(level + log_ratio - log_ratio.detach())
        w = self._weight(batch)
        mixed = w * token + (1 - w) * sequence
        bounded = w * token.clamp(1 - self.eps_low, 1 + self.eps_high)
        bounded = bounded + (1 - w) * sequence.clamp(1 - self.eps_low_seq, 1 + self.eps_high_seq)
        acts = ((mixed - bounded) * advantage > 0).to(token)
        return Clipped(
            torch.min(mixed * advantage, bounded * advantage),
            metrics={"dhpo/clip_ratio": Mean.over(acts, batch.mask)},
        )

    def _weight(self, batch: TokenBatch) -> Tensor | float:
        if self.mix == "averaged":
            return self.w
        entropy = batch.need("entropy").detach().to(batch.logps.dtype) * batch.mask
        return entropy / entropy.amax().clamp(min=1e-12)


@hook("clip", "divergence_mask")
@dataclass(frozen=True)
class DivergenceMask:
    """sg[min(r, cap)] M A log pi, (B, T): trust region in probability, not in ratio. DPPO (2602.04879).

    With p, mu the probabilities of the sampled token now and at the anchor, M = 0 where the move has gone further than
    `delta` in the direction A pushes: A > 0, p > mu, D > delta, or A <= 0, p < mu, D > delta. D of (sampled, rest):
    "tv" |p - mu|, an absolute probability; "kl" mu log(mu/p) + (1-mu) log((1-mu)/(1-p)), in nats. A rare token may
    double or halve freely. `cap` is a bound on the ratio itself.
    """

    divergence: str = param("tv", choices=("tv", "kl"))
    delta: float = param(0.15, low=0.0)
    cap: float = param(20.0, above=0.0)

    math = "sg[min(r, {cap})] [{divergence}(p, mu) <= {delta} or moving back] A lp"
    token_ratio_only = True
    silent_at_zero = True

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        with torch.no_grad():
            log_p = batch.logps.clamp(max=0.0)
            log_mu = (batch.logps - log_ratio).clamp(max=0.0)
            p, mu = log_p.exp(), log_mu.exp()
            if self.divergence == "tv":
                distance = (p - mu).abs()
            else:
                rest_p, rest_mu = -torch.expm1(log_p), -torch.expm1(log_mu)
                distance = mu * (log_mu - log_p) + torch.xlogy(rest_mu, rest_mu) - torch.xlogy(rest_mu, rest_p)
            far = distance > self.delta
            high, low = far & (p > mu) & (advantage > 0), far & (p < mu) & (advantage <= 0)
            weight = bounded_exp(log_ratio).clamp(max=self.cap) * ~(high | low)
        return Clipped(weight * advantage * batch.logps, low & (advantage < 0), high)
