"""Rewards of PPO from human feedback: the penalty of an unfinished answer, and a KL coefficient that holds a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..records import Scored
from .base import hook, param
from .regularizers import k1_in_reward
from .rewards import KLInReward, on_last_token


@hook("rewards", "missing_eos_penalty")
@dataclass(frozen=True)
class MissingEOSPenalty:
    """R - penalty for an answer that the length limit cut, (N,). TRL's PPOTrainer (missing_eos_penalty)."""

    penalty: float = param(1.0, low=0.0)

    math = "R - {penalty} [no end of text]"
    needs = frozenset({"truncated"})

    def __call__(self, scored: Scored) -> Scored:
        taken = self.penalty * scored.fact("truncated").to(scored.reward)
        per_token = scored.token_rewards
        if per_token is not None:
            per_token = per_token - on_last_token(taken, scored.need("mask"))
        return scored.with_(reward=scored.reward - taken, token_rewards=per_token)


@hook("rewards", "zero_truncated")
@dataclass(frozen=True)
class ZeroTruncated:
    """0 for an answer that the length limit cut, whatever it earned, (N,). Open-Reasoner-Zero (2503.24290)."""

    math = "R [ended by itself]"
    needs = frozenset({"truncated"})

    def __call__(self, scored: Scored) -> Tensor:
        return torch.where(scored.fact("truncated").bool() & ~torch.isnan(scored.reward), 0.0, scored.reward)


@hook("rewards", "adaptive_kl_in_reward")
@dataclass(frozen=True)
class AdaptiveKLInReward(KLInReward):
    """`kl_in_reward`, (N,) or (N, T), whose coefficient holds KL at `target`. Ziegler et al. (1909.08593) section 2.2.

    After each generation of n answers coef <- coef (1 + clip(KL/target - 1, -`clip`, `clip`) n / horizon), KL the mean
    over answers of the sum of k1 over their tokens, in nats an answer. `coef` is where it starts.
    """

    target: float = param(6.0, above=0.0)
    horizon: float = param(10000.0, above=0.0)
    clip: float = param(0.2, above=0.0)

    math = "R - c {estimator}(pi_old || pi_ref), c from {coef} towards KL = {target}"
    update_every = "generation"

    def init(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def __call__(self, scored: Scored, state: Mapping[str, Any]) -> Scored:  # type: ignore[override]
        return KLInReward(state["coef"], self.level, self.estimator)(scored)

    def update(self, state: Mapping[str, Any], seen: Scored) -> dict[str, Any]:
        mask = seen.need("mask")
        rows = mask.sum(1) > 0
        if not bool(rows.any()):
            return dict(state)
        kl = k1_in_reward(seen.need("old_logps"), seen.need("ref_logps"), mask).sum(1)[rows]
        error = float(kl.double().mean()) / self.target - 1
        moved = 1 + max(-self.clip, min(self.clip, error)) * len(kl) / self.horizon
        return {"coef": state["coef"] * moved}

    def report(self, state: Mapping[str, Any]) -> dict[str, float]:
        return {"kl_coef": float(state["coef"])}
