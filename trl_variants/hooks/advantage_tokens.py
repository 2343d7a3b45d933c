"""Advantages that read tokens: per-task statistics over tokens, length weights, the policy's own confidence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import Scored
from .advantage import Grouped, labels_of, mean_by, std_by, sums_by
from .base import hook, param


@hook("advantage", "clamped")
@dataclass(frozen=True)
class Clamped(Grouped):
    """The grouped advantage clamped to [-limit, limit], (N,). Flow-GRPO's rule, as Resonate (2603.11661) runs it.

    `limit` is an absolute cap on the advantage.
    """

    limit: float = param(5.0, above=0.0)

    @property
    def math(self) -> str:
        return f"clamp({super().math}, -{{limit}}, {{limit}})"

    def __call__(self, scored: Scored) -> Tensor:
        return super().__call__(scored).clamp(-self.limit, self.limit)


@hook("advantage", "task_whitened")
@dataclass(frozen=True)
class TaskWhitened(Grouped):
    """The grouped advantage a, standardised over the tokens of its task: (a - mean_S) / (std_S + eps_task), (N,).
    AgentRL (2510.04206).

    S = the policy tokens of all scored rows with the same value of column `task`, so a row counts by its tokens. A task
    whose tokens all have one advantage gets 0.
    """

    task: str = "task"
    ddof_task: int = param(0, choices=(0, 1), ours=True)
    eps_task: float = param(1e-6, low=0.0, ours=True)

    needs = frozenset({"tokens"})
    reads_token_rewards = False

    @property
    def math(self) -> str:
        return super().math + "; (A - mean) / (std + {eps_task}) over tokens of a {task}"

    @property
    def keys(self) -> frozenset[str]:
        """Data set columns this hook groups by."""
        return frozenset({self.mean, self.std, self.task} - {"group", "batch", "none"})

    def __call__(self, scored: Scored) -> Tensor:
        a, labels = super().__call__(scored), labels_of(scored, self.task)
        tokens = scored.need("mask").sum(1).to(a.dtype)
        count = _by(labels, tokens, scored.valid)
        centred = a - _by(labels, tokens * a, scored.valid) / count
        squares = _by(labels, tokens * centred**2, scored.valid)
        std = (squares / torch.where(count > self.ddof_task, count - self.ddof_task, torch.nan)).sqrt()
        result = torch.where(std > 1e-12, centred / (std + self.eps_task), 0.0)
        return torch.where(scored.valid, result, 0.0)


@hook("advantage", "length_weighted_leave_one_out")
@dataclass(frozen=True)
class LengthWeightedLeaveOneOut:
    """A_i = R_i - sum_{j != i} w_j R_j / sum_{j != i} w_j, w_j the policy tokens of row j of the group, (N,). Laguna
    (2605.27605).

    0 where the others of the group have no token.
    """

    math = "A = R - mean of the others in the group, weighted by their tokens"
    needs = frozenset({"tokens"})
    reads_token_rewards = False

    def __call__(self, scored: Scored) -> Tensor:
        labels, valid = labels_of(scored, "group"), scored.valid
        w = torch.where(valid, scored.need("mask").sum(1), 0.0).to(scored.reward.dtype)
        reward = torch.where(valid, scored.reward, 0.0)
        others = _by(labels, w, valid) - w
        baseline = (_by(labels, w * reward, valid) - w * reward) / torch.where(others > 0, others, torch.nan)
        return torch.where(valid & (others > 0), reward - baseline, 0.0)


@hook("advantage", "reward_confidence")
@dataclass(frozen=True)
class RewardConfidence:
    """A = (R - b) / (std_group + eps), b = mean R + 2 cov(R, delta) over the group, (N,). RCC (2603.13134).

    delta = mean over the row's tokens of log pi_old - log pi_ref (`length` "sum": the whole answer's), held within
    +-`bound`. b is the first-order form of the variance-minimising baseline E[w^2 R]/E[w^2], w = e^delta. cov and, with
    `ddof` 0, std are the population's: with a constant delta this is the population z-score.
    """

    length: str = param("mean", choices=("mean", "sum"), ours=True)
    bound: float = param(20.0, above=0.0, ours=True)
    ddof: int = param(0, choices=(0, 1))
    eps: float = param(1e-6, low=0.0, ours=True)

    math = "A = (R - mean - 2 cov(R, {length}_t log pi_old/pi_ref)) / (std + {eps})"
    needs = frozenset({"tokens", "old_logps", "ref_logps"})
    reads_token_rewards = False

    def __call__(self, scored: Scored) -> Tensor:
        labels, reward, valid = labels_of(scored, "group"), scored.reward, scored.valid
        mask = scored.need("mask")
        gap = torch.where(mask > 0, scored.need("old_logps") - scored.need("ref_logps"), 0.0).sum(1).to(reward.dtype)
        if self.length == "mean":
            gap = gap / mask.sum(1).clamp(min=1.0)
        gap = gap.clamp(-self.bound, self.bound)
        mean = mean_by(labels, reward, valid)
        covariance = mean_by(labels, (reward - mean) * (gap - mean_by(labels, gap, valid)), valid)
        advantage = (reward - mean - 2 * covariance) / (std_by(labels, reward, valid, self.ddof) + self.eps)
        return torch.where(valid, advantage, 0.0).nan_to_num(nan=0.0)


def _by(labels: Tensor, x: Tensor, valid: Tensor) -> Tensor:
    """(N,) sum of the valid x with the row's label."""
    return sums_by(labels, x, valid)[0][labels]
