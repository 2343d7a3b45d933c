"""An advantage from rewards of steps, as a process reward model gives them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import Scored
from .advantage import Grouped, labels_of, reward_to_go
from .advantage_credit import moments_by
from .base import hook, param


@hook("advantage", "step_rewards")
@dataclass(frozen=True)
class StepRewards:
    """A_t = sum of z_ij over the steps j of row i that end at t or later, (N, T). GRPO with process supervision,
    DeepSeekMath (2402.03300) 4.1.3.

    z = (s - mean) / (std + eps) over ALL step rewards of the group together; the paper does not say which std (`ddof`
    1: unbiased). A reward function gives the steps: a list with one value per token of the completion, None where no
    step ends (see `ProcessRewardModel`). A longer chain collects more terms; `per_step` divides by the row's number of
    steps. Where functions give one number an answer it is one step: the grouped advantage, (N,).
    """

    ddof: int = param(1, choices=(0, 1), ours=True)
    eps: float = param(1e-4, low=0.0, ours=True)
    per_step: bool = False

    math = "A_t = sum_j: end_j >= t (s_ij - mean) / (std + {eps}), over all steps of the group"
    needs = frozenset({"tokens"})
    reads_token_rewards = False  # of a per-token KL: those are no steps

    def __call__(self, scored: Scored) -> Tensor:
        if not scored.spread or scored.token_rewards is None:
            return Grouped(ddof=self.ddof, eps=self.eps)(scored)
        s, mask = scored.token_rewards, scored.need("mask").to(scored.token_rewards)
        inside = (scored.need("steps") > 0) & (mask > 0) & scored.valid.unsqueeze(1)
        labels = labels_of(scored, "group").unsqueeze(1).expand_as(s)
        mean, variance = moments_by(labels, s, inside)
        count = torch.zeros(int(labels.max()) + 1, dtype=s.dtype, device=s.device)
        count = count.index_add(0, labels[inside], torch.ones_like(s[inside]))[labels]
        std = (variance * count / (count - self.ddof).clamp(min=1.0)).sqrt()
        z = torch.where(inside & (count > self.ddof) & (std > 0), (s - mean) / (std + self.eps), 0.0)
        z = z.nan_to_num(nan=0.0)
        if self.per_step:
            z = z / inside.sum(1, keepdim=True).clamp(min=1)
        return reward_to_go(z, mask, 1.0)
