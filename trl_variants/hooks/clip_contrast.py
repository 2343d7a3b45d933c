"""Whole-group objectives: scores of right answers against those of the wrong answers to the same prompt.

Each row carries its group's value, so `prompt_mean` is the mean over prompts. The advantage's sign is the label.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import TokenBatch, bounded_exp, masked_mean
from .base import hook, param
from .clip import Clipped


def row_scores(kind: str, log_ratio: Tensor, batch: TokenBatch) -> Tensor:
    """(B,) mean over the row's active tokens of the log-likelihood, or of the likelihood ratio."""
    token = batch.logps if kind == "log_likelihood" else bounded_exp(log_ratio)
    return masked_mean(token.expand_as(batch.active), batch.active).squeeze(1)


def members(advantage: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Right and wrong rows of each group, (K, B) bool each, and the group of each row, (B,). Empty rows are neither."""
    label = advantage.squeeze(1) if advantage.shape[1] == 1 else masked_mean(advantage, batch.active).squeeze(1)
    live = batch.active.sum(-1) > 0
    groups, index = torch.unique(batch.need("group"), return_inverse=True)
    own = torch.arange(len(groups), device=index.device).unsqueeze(1) == index
    return own & live & (label > 0), own & live & (label < 0), index


def mean_of(score: Tensor, rows: Tensor) -> Tensor:
    """(K,) mean of the scores (B,) or (K, B) over each group's `rows`; 0 where there are none."""
    return torch.where(rows, score, 0.0).sum(1) / rows.sum(1).clamp(min=1)


def log_sum_exp(score: Tensor, rows: Tensor) -> Tensor:
    """(K,) log sum of exp(score) over each group's `rows`; a finite number without gradient where there are none."""
    some = rows.any(1, keepdim=True)
    return torch.where(some, torch.where(rows, score, -torch.inf), 0.0).logsumexp(1)


def spread(value: Tensor, right: Tensor, wrong: Tensor, index: Tensor) -> Clipped:
    """The groups' values (K,) on their rows, (B, 1); 0 for a group without both kinds."""
    both = right.any(1) & wrong.any(1)
    return Clipped(torch.where(both, value, 0.0)[index].unsqueeze(1), over_tokens=True)


@hook("clip", "group_contrast")
@dataclass(frozen=True)
class GroupContrast:
    """Mean score of the right answers minus the soft maximum of the wrong ones, (B, 1). DisCO (2505.12366).

    J_q = 1/|P| sum_P s_i - tau log(1/|N| sum_N exp(s_j / tau)) on every row of the prompt; 0 without both kinds. Right
    and wrong are the signs of the advantage. `score`: the answer's mean log-probability (paper: tau 10), or its mean
    ratio, unclipped (paper: tau 1). `tau=None`: plain mean of the wrong scores (DisCO-b, the limit of a large tau).
    """

    score: str = param("log_likelihood", choices=("log_likelihood", "likelihood_ratio"))
    tau: float | None = param(10.0, above=0.0)

    math = "(mean_right s - {tau} log mean_wrong exp(s / {tau})), s = mean_t {score}"
    scope = "window"
    whole_groups = True

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        score = row_scores(self.score, log_ratio, batch)
        right, wrong, index = members(advantage, batch)
        if self.tau is None:
            worst = mean_of(score, wrong)
        else:
            count = wrong.sum(1).clamp(min=1).to(score)
            worst = self.tau * (log_sum_exp(score / self.tau, wrong) - count.log())
        return spread(mean_of(score, right) - worst, right, wrong, index)


@hook("clip", "info_nce")
@dataclass(frozen=True)
class InfoNCE:
    """Each right answer against the sum of the wrong ones, with a margin, (B, 1). ConSPO (2605.12969).

    J_i = tau log[ e^((s_i - m)/tau) / (e^((s_i - m)/tau) + sum_N e^(s_j/tau)) ], s = the answer's mean log-probability,
    `margin` m and `tau` in its nats per token; J_q = mean over the right answers, on every row of the prompt; 0 without
    both kinds (leave such prompts out of the mean with select zero_variance). Labels are the advantage's signs.
    """

    tau: float = param(10.0, above=0.0)
    margin: float = param(0.0)

    math = "mean_right {tau} log sigmoid((s - m)/{tau} - log sum_wrong e^(s_j/{tau})), m = {margin}"
    scope = "window"
    whole_groups = True

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        score = row_scores("log_likelihood", log_ratio, batch)
        right, wrong, index = members(advantage, batch)
        wrong_sum = log_sum_exp(score / self.tau, wrong).unsqueeze(1)
        # log[a / (a + b)] = log sigmoid(log a - log b)
        pair = self.tau * torch.nn.functional.logsigmoid((score - self.margin) / self.tau - wrong_sum)
        return spread(mean_of(pair, right), right, wrong, index)
