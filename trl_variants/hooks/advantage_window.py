"""Advantages of the whole-group losses: labels that balance right and wrong, and the soft baseline of mirror
descent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import Scored
from .advantage import labels_of, sums_by
from .base import hook, param


@hook("advantage", "balanced_labels")
@dataclass(frozen=True)
class BalancedLabels:
    """A = 1/|right| for a right answer, -1/|wrong| for a wrong one, (N,); 0 without both kinds in the group.

    DisCO-b (2505.12366): every prompt weighs the same, without GRPO's sqrt(p (1 - p)). Right and wrong are raw
    correctness, never the shaped reward; only the sign matters to the whole-group clips.
    """

    math = "A = 1/|right| if correct else -1/|wrong|"

    def __call__(self, scored: Scored) -> Tensor:
        labels, valid, correct = labels_of(scored, "group"), scored.valid, scored.correct.bool()
        right, count = (s[labels] for s in sums_by(labels, correct.to(scored.reward), valid))
        wrong = count - right
        advantage = torch.where(correct, 1 / right.clamp(min=1.0), -1 / wrong.clamp(min=1.0))
        return torch.where(valid & (right > 0) & (wrong > 0), advantage, 0.0)


@hook("advantage", "log_partition")
@dataclass(frozen=True)
class LogPartition:
    """A = R - tau log mean_group exp(R / tau), (N,): the soft value of the KL-regularised problem as baseline.

    Kimi k1.5 (2501.12599) section 2.3.2, before tau log Z is replaced by the mean reward. It tends to R - mean for
    a large
    tau and to R - max for a small one; `tau` is in units of reward.
    """

    tau: float = param(0.5, above=0.0, ours=True)

    math = "A = R - {tau} log mean_group exp(R / {tau})"

    def __call__(self, scored: Scored) -> Tensor:
        labels, valid = labels_of(scored, "group"), scored.valid
        reward = torch.where(valid, scored.reward, 0.0)
        groups = int(labels.max()) + 1 if len(labels) else 0
        best = torch.full((groups,), -torch.inf, dtype=reward.dtype, device=reward.device)
        best = best.scatter_reduce(0, labels, torch.where(valid, reward, -torch.inf), "amax")[labels]
        total, count = (s[labels] for s in sums_by(labels, torch.exp((reward - best) / self.tau), valid))
        baseline = best + self.tau * (total / count).log()
        return torch.where(valid, reward - baseline, 0.0)
