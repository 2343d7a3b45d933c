"""Ratio hooks: at what granularity the policy moves, and against which policy.

Signature: `(batch) -> log_ratio`, (B, T) or (B, 1), in log space. The anchor is the old policy (start of the update
phase) unless a hook says otherwise; an on-policy batch has log-ratio 0 with the gradient of `logps`. Anchor "rollout"
is the engine's own log-probs, "sampler" those where the engine gave them and the old policy's elsewhere (a sampler that
is the trainer's own model *is* the old policy).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import TokenBatch, masked_mean
from .base import hook, param

_BOTH = {"old_logps", "rollout_logps"}


@dataclass(frozen=True)
class _Anchored:
    anchor: str = param("old", choices=("old", "rollout", "sampler"))

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"old": {"old_logps"}, "rollout": {"rollout_logps"}}.get(self.anchor, _BOTH))

    def token_log_ratio(self, batch: TokenBatch) -> Tensor:
        if self.anchor == "old" or (self.anchor == "sampler" and batch.rollout_logps is None):
            return batch.logps - batch.anchor
        if self.anchor == "sampler":
            return batch.logps - torch.where(batch.rollout_logps.isnan(), batch.anchor, batch.rollout_logps)  # type: ignore[union-attr,arg-type]
        # a token the engine could not score carries NaN: no evidence of a move, ratio 1, gradient kept
        return batch.logps - batch.need("rollout_logps").nan_to_num(nan=0.0).where(
            ~batch.need("rollout_logps").isnan(), batch.logps.detach()
        )


@hook("ratio", "token")
@dataclass(frozen=True)
class TokenRatio(_Anchored):
    """r_t = pi(y_t) / pi_old(y_t), (B, T). GRPO (2402.03300) eq. 3; PPO (1707.06347) eq. 6."""

    math = "r_t = exp(lp_t - lp_{anchor},t)"

    def __call__(self, batch: TokenBatch) -> Tensor:
        return self.token_log_ratio(batch)


@hook("ratio", "sequence")
@dataclass(frozen=True)
class SequenceRatio(_Anchored):
    """s = (pi(y) / pi_old(y))^(1/|y|), the geometric mean of token ratios, (B, 1). GSPO (2507.18071) eq. 7."""

    math = "s = exp(1/|y| sum_t lp_t - lp_{anchor},t)"

    def __call__(self, batch: TokenBatch) -> Tensor:
        return masked_mean(self.token_log_ratio(batch), batch.mask)


@hook("ratio", "sequence_token")
@dataclass(frozen=True)
class SequenceTokenRatio(_Anchored):
    """Value of the sequence ratio, gradient of the own token: s_t = sg[s] pi(y_t) / sg[pi(y_t)], (B, T).

    GSPO-token (2507.18071) eq. 14.
    """

    math = "s_t = sg[s] * exp(lp_t - sg[lp_t]), s = exp(1/|y| sum_t lp_t - lp_{anchor},t)"

    def __call__(self, batch: TokenBatch) -> Tensor:
        level = masked_mean(self.token_log_ratio(batch).detach(), batch.mask)
        return level + batch.logps - batch.logps.detach()


@hook("ratio", "product")
@dataclass(frozen=True)
class ProductRatio(_Anchored):
    """The whole answer as one action: W = pi(y) / pi_old(y), (B, 1). RLOO with reuse, as TRL's RLOOTrainer."""

    math = "W = exp(sum_t lp_t - lp_{anchor},t)"

    def __call__(self, batch: TokenBatch) -> Tensor:
        return (self.token_log_ratio(batch) * batch.mask).sum(-1, keepdim=True)


@hook("ratio", "on_policy")
@dataclass(frozen=True)
class OnPolicy:
    """Ratio 1 with the gradient of log pi: plain REINFORCE, whatever policy sampled, (B, T)."""

    math = "r_t = exp(lp_t - sg[lp_t])"

    def __call__(self, batch: TokenBatch) -> Tensor:
        return batch.logps - batch.logps.detach()
