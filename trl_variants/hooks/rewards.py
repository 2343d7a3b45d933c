"""Rewards hooks: what a trajectory is worth, before any baseline.

Signature: `(scored) -> scored`, or a tensor: (N,) replaces the combined reward, (N, F) the reward matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..records import Scored
from .base import hook, param
from .regularizers import k1_in_reward, kl_estimate


@hook("rewards", "kl_in_reward")
@dataclass(frozen=True)
class KLInReward:
    """Subtracts coef * KL(pi_old || pi_ref) from the reward, (N,) or (N, T), detached. RLHF as in InstructGPT
    (2203.02155) eq. 2.

    level "sequence": R - coef * sum_t k_t (RLOO); "token": the penalty stays on its token and the score goes to the
    last one, as `token_rewards` (PPO, REINFORCE++).
    """

    coef: float = param(0.05, low=0.0)
    level: str = param("sequence", choices=("sequence", "token"))
    estimator: str = param("k1", choices=("k1", "k2", "k3"))

    math = "R - {coef} {estimator}(pi_old || pi_ref)"
    needs = frozenset({"tokens", "old_logps", "ref_logps"})

    @torch.no_grad()
    def __call__(self, scored: Scored) -> Scored:
        mask = scored.need("mask")
        penalty = (
            kl_estimate(k1_in_reward(scored.need("old_logps"), scored.need("ref_logps"), mask), self.estimator) * mask
        )
        if self.level == "sequence":
            return scored.with_(reward=scored.reward - self.coef * penalty.sum(1))
        return scored.with_(token_rewards=score_on_last_token(scored) - self.coef * penalty)


@hook("rewards", "clip_reward")
@dataclass(frozen=True)
class ClipReward:
    """Clamps the combined reward, (N,), to [low, high]; NaN stays NaN. OpenRLHF's reward clipping."""

    low: float = -10.0
    high: float = 10.0

    math = "clip(R, {low}, {high})"

    def __call__(self, scored: Scored) -> torch.Tensor:
        return scored.reward.clamp(self.low, self.high)


def score_on_last_token(scored: Scored) -> torch.Tensor:
    """(N, T) with the row's reward on its last policy token; an unscorable or empty row is all zero."""
    if scored.token_rewards is not None:
        return scored.token_rewards
    return on_last_token(scored.reward, scored.need("mask"))


def on_last_token(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(N,) -> (N, T): x on the row's last token under `mask`, 0 elsewhere and where x is NaN."""
    out = torch.zeros_like(mask, dtype=x.dtype)
    position = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask > 0, position, -1).max(1).values
    rows = (last >= 0).nonzero().squeeze(1)
    out[rows, last[rows]] = x.nan_to_num(nan=0.0)[rows]
    return out
