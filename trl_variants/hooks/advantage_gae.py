"""Generalised advantage estimation: one advantage per token from token rewards and a critic's values.

V_t is the value of the state before token t. A terminated answer ends in a state of value 0, one cut by the length
limit in the state whose value the critic gives (`Scored.bootstrap`). Tokens outside the mask (tool output) are skipped:
values and advantages are carried over them, rewards that come after them still flow back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import Scored
from .base import hook, param
from .rewards import score_on_last_token


def gae(rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: Tensor, gamma: float, lam: float | Tensor) -> Tensor:
    """A_t = d_t + gamma lam A_{t+1}, d_t = r_t + gamma V_{t+1} - V_t, over the tokens of the mask, (N, T).

    Args:
        rewards, values, mask: (N, T). bootstrap: (N,) value of the state after the last token.
        lam: a number, or (N,) one for each row.
    """
    next_value, running = bootstrap, torch.zeros_like(bootstrap)
    out = torch.zeros_like(values)
    for t in range(values.shape[1] - 1, -1, -1):
        inside = mask[:, t] > 0
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(inside, delta + gamma * lam * running, running)
        next_value = torch.where(inside, values[:, t], next_value)
        out[:, t] = torch.where(inside, running, 0.0)
    return out


def length_adaptive(length: Tensor, alpha: float) -> Tensor:
    """lambda = 1 - 1 / (alpha l), never below 0, (N,) for lengths (N,). VAPO (2504.05118): sum_t lambda^t ~ alpha l."""
    return (1.0 - 1.0 / (alpha * length.clamp(min=1.0))).clamp(min=0.0)


def whitened(x: Tensor, mask: Tensor, ddof: int, eps: float, shift: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + eps) over the tokens of the mask, 0 elsewhere, (N, T); `shift=False` keeps the mean."""
    count = mask.sum().clamp(min=1.0)
    mean = (x * mask).sum() / count
    variance = ((x - mean) ** 2 * mask).sum() / (count - ddof).clamp(min=1.0)
    scaled = (x - mean) * torch.rsqrt(variance + eps)
    return (scaled if shift else scaled + mean) * mask


@hook("advantage", "gae")
@dataclass(frozen=True)
class GAE:
    """Generalised advantage estimation, (N, T). Schulman et al. (1506.02438) eq. 16; PPO as TRL and verl run it.

    `lam` 1 is reward-to-go minus value; with `length_alpha` the policy's lambda is 1 - 1/(alpha l) instead (VAPO).
    `whiten` standardises over all policy tokens of the generation, (A - mean) / sqrt(var + eps) with `ddof`;
    `whiten_rewards` does so to the token rewards first and keeps their mean. `bootstrap=False` treats an answer cut by
    the length limit as ended (TRL 1.12, verl, OpenRLHF). `score_after_end` puts the score one step after the last
    token, in a state with a value of its own, for answers shorter than the limit (TRL 1.12's PPOTrainer).
    """

    gamma: float = param(1.0, above=0.0, high=1.0)
    lam: float = param(0.95, low=0.0, high=1.0)
    length_alpha: float | None = param(None, above=0.0)
    whiten: bool = True
    ddof: int = param(1, choices=(0, 1))
    eps: float = param(1e-8, low=0.0)
    bootstrap: bool = True
    whiten_rewards: bool = False
    score_after_end: bool = False

    @property
    def needs(self) -> frozenset[str]:
        told_apart = self.bootstrap and not self.score_after_end  # the cut from the ended
        return frozenset({"tokens", "values"} | ({"truncated"} if told_apart else set()))

    @property
    def math(self) -> str:
        lam = "{lam}" if self.length_alpha is None else "max(0, 1 - 1/({length_alpha} l))"
        body = "sum_k>=t ({gamma} * " + lam + ")^(k-t) d_k, d_t = r_t + {gamma} V_t+1 - V_t"
        return f"A_t = whiten_tokens({body})" if self.whiten else f"A_t = {body}"

    def __call__(self, scored: Scored) -> Tensor:
        advantage, _, mask = self.unrolled(scored)
        width = scored.need("mask").shape[1]
        entering = scored.need("mask").to(mask.dtype) * scored.valid.unsqueeze(1)
        advantage, mask = advantage[:, :width], entering * mask[:, :width]
        return whitened(advantage, mask, self.ddof, self.eps) if self.whiten else advantage * mask

    def value_targets(self, scored: Scored, lam: float | None = None) -> tuple[Tensor, Tensor]:
        """What the critic regresses on: A + V before any whitening, and which states count.

        Returns two (N, T) tensors, (N, T + 1) with `score_after_end`: column t is the state before token t. `lam` is
        the critic's own; None takes the policy's.
        """
        advantage, values, mask = self.unrolled(scored, lam)
        return (advantage + values) * mask, mask

    def unrolled(self, scored: Scored, lam: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Raw advantages, values and mask of the states that count, each (N, T) or (N, T + 1)."""
        token_rewards = score_on_last_token(scored)
        values = scored.need("values").detach().to(token_rewards)
        # a row that a select hook took out of the policy's loss still has a return, and teaches the critic
        mask = scored.need("mask").to(values) * (~torch.isnan(scored.reward)).unsqueeze(1)
        lengths = mask.sum(1)
        after = self._end_values(scored, values)
        if self.score_after_end:
            token_rewards, values, mask, after = _with_end_state(scored, token_rewards, values, mask, after)
        elif self.bootstrap:
            after = torch.where(scored.fact("truncated").bool(), after, 0.0)
        if not self.bootstrap:
            after = torch.zeros_like(after)
        if self.whiten_rewards:
            token_rewards = whitened(token_rewards, mask, 1, 1e-8, shift=False)
        number: float | Tensor = self.lam if lam is None else lam
        if lam is None and self.length_alpha is not None:
            number = length_adaptive(lengths, self.length_alpha)
        return gae(token_rewards * mask, values * mask, mask, after, self.gamma, number), values * mask, mask

    def _end_values(self, scored: Scored, values: Tensor) -> Tensor:
        if scored.bootstrap is not None:
            return scored.bootstrap.to(values)
        if self.score_after_end or (self.bootstrap and bool(scored.fact("truncated").any())):
            raise VariantError(
                "this method needs `bootstrap` per row, the value of the state after the last token, where answers are "
                "cut by the length limit or score_after_end is set: pass bootstrap=, or gae.bootstrap: false"
            )
        return torch.zeros_like(values[:, 0])


def _with_end_state(
    scored: Scored, rewards: Tensor, values: Tensor, mask: Tensor, after: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One more column: the state after the last token of a row below the limit, with its value and the row's score."""
    rewards, values, mask = (torch.nn.functional.pad(x, (0, 1)) for x in (rewards, values, mask))
    position = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask > 0, position, -1).max(1).values
    limit = scored.run.max_completion_length or mask.shape[1] - 1
    length = last + 1 if scored.length is None else torch.maximum(last + 1, scored.length)
    rows = ((last >= 0) & (length < limit)).nonzero().squeeze(1)
    score = scored.reward.nan_to_num(nan=0.0)[rows] * (not scored.spread)
    rewards, values, mask = rewards.clone(), values.clone(), mask.clone()
    rewards[rows, last[rows]] -= score
    rewards[rows, last[rows] + 1] += score
    values[rows, last[rows] + 1] = after[rows]
    mask[rows, last[rows] + 1] = 1.0
    ended = torch.zeros_like(after, dtype=torch.bool)
    ended[rows] = True
    return rewards, values, mask, torch.where(ended, 0.0, after)
