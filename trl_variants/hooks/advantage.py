"""Advantage hooks: how good a trajectory is against the others.

Signature: `(scored) -> (N,)` or `(N, T)`, once per generation, on rows gathered from all processes. Statistics use
`scored.valid` rows only; a row that is not valid gets 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import VariantError, did_you_mean
from ..records import Scored
from .base import hook, param
from .rewards import on_last_token, score_on_last_token


def labels_of(scored: Scored, key: str) -> Tensor:
    """(N,) integer labels 0..K-1 of a key: "group", "batch" (one for all), or a key column of the data set."""
    if key == "group":
        raw = scored.group
    elif key == "batch":
        return torch.zeros_like(scored.group)
    elif key in scored.keys:
        raw = scored.keys[key]
    else:
        known = ["group", "batch", "none", *scored.keys]
        raise VariantError(
            f"no rows can be grouped by {key!r}{did_you_mean(key, known)}; known keys: {', '.join(known)}"
        )
    return torch.unique(raw, return_inverse=True)[1]


def sums_by(labels: Tensor, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Per label: sum of valid x and their count, both (K,). NaN in invalid rows does not spread."""
    size = int(labels.max()) + 1 if len(labels) else 0
    weight = valid.to(x.dtype)
    total = torch.zeros(size, dtype=x.dtype, device=x.device).index_add(0, labels, torch.where(valid, x, 0.0) * weight)
    return total, torch.zeros_like(total).index_add(0, labels, weight)


def mean_by(labels: Tensor, x: Tensor, valid: Tensor) -> Tensor:
    """(N,) mean of the valid x with the row's label; NaN where there is none."""
    total, count = sums_by(labels, x, valid)
    return (total / torch.where(count > 0, count, torch.nan))[labels]


def std_by(labels: Tensor, x: Tensor, valid: Tensor, ddof: int) -> Tensor:
    """(N,) standard deviation of the valid x with the row's label; NaN where count <= ddof."""
    total, count = sums_by(labels, (x - mean_by(labels, x, valid)) ** 2, valid)
    return (total / torch.where(count > ddof, count - ddof, torch.nan)).sqrt()[labels]


def grouped_normalise(
    x: Tensor, valid: Tensor, scored: Scored, mean: str, std: str, ddof: int, eps: float, singleton: str
) -> Tensor:
    """(x - mean_key) / (std_key + eps) over valid rows, (N,); see `Grouped` for the parameters."""
    result = x
    alone = torch.zeros_like(valid)
    if mean != "none":
        labels = labels_of(scored, mean)
        result = x - mean_by(labels, x, valid)
        alone = sums_by(labels, x, valid)[1][labels] == 1
    if std != "none":
        result = result / (std_by(labels_of(scored, std), x, valid, ddof) + eps)
    if singleton == "raw":
        result = torch.where(alone, x, result)
    return torch.where(valid, result, 0.0).nan_to_num(nan=0.0)


@hook("advantage", "grouped")
@dataclass(frozen=True)
class Grouped:
    """A = (R - mean over `mean` key) / (std over `std` key + eps), (N,). GRPO (2402.03300) section 4.1.2.

    Keys: "group" (the prompt's completions), "batch", "none", or an integer column of the data set. `ddof` 1 is the
    unbiased std (all public trainers), 0 the population std (most papers' formula). `singleton` says what a row alone
    in its mean group gets: "zero" (TRL) or "raw", its reward unchanged (verl).
    """

    mean: str = "group"
    std: str = "group"
    ddof: int = param(1, choices=(0, 1))
    eps: float = param(1e-4, low=0.0)
    singleton: str = param("zero", choices=("zero", "raw"))

    @property
    def math(self) -> str:
        centred = "R" if self.mean == "none" else "R - mean_{mean}"
        return f"A = {centred}" if self.std == "none" else f"A = ({centred}) / (std_{{std}} + {{eps}})"

    @property
    def keys(self) -> frozenset[str]:
        """Data set columns this hook groups by."""
        return frozenset({self.mean, self.std} - {"group", "batch", "none"})

    def __call__(self, scored: Scored) -> Tensor:
        return grouped_normalise(
            scored.reward, scored.valid, scored, self.mean, self.std, self.ddof, self.eps, self.singleton
        )


@hook("advantage", "normalize_each")
@dataclass(frozen=True)
class NormalizeEach:
    """Each reward function is normalised in its group, then weighted, summed and normalised over the batch, (N,).

    GDPO (2601.05242).
    """

    eps: float = param(1e-4, low=0.0)
    ddof: int = param(1, choices=(0, 1))

    math = "A = batch-norm(sum_f w_f (R_f - mean_group) / (std_group + {eps}))"

    def __call__(self, scored: Scored) -> Tensor:
        labels, matrix = labels_of(scored, "group"), scored.rewards
        parts = []
        for f in range(matrix.shape[1]):
            valid = scored.valid & ~torch.isnan(matrix[:, f])
            centred = matrix[:, f] - mean_by(labels, matrix[:, f], valid)
            part = centred / (std_by(labels, matrix[:, f], valid, self.ddof) + self.eps)
            parts.append(torch.where(valid, part, torch.nan))
        total = (torch.stack(parts, 1) * scored.weights.to(matrix)).nansum(1)
        return grouped_normalise(total, scored.valid, scored, "batch", "batch", self.ddof, self.eps, "zero")


@hook("advantage", "leave_one_out")
@dataclass(frozen=True)
class LeaveOneOut:
    """A_i = R_i - mean of the other rows of its group = k/(k-1) (R_i - mean), (N,). RLOO (2402.14740) eq. 8.

    Missing scores leave both the sum and the count; a row alone has no baseline and gets 0. `normalize` whitens over
    the batch afterwards (TRL's normalize_advantages).
    """

    normalize: bool = False
    eps: float = param(1e-4, low=0.0)

    math = "A = R - mean of the others in the group"

    def __call__(self, scored: Scored) -> Tensor:
        labels, reward, valid = labels_of(scored, "group"), scored.reward, scored.valid
        total, count = (s[labels] for s in sums_by(labels, reward, valid))
        advantage = torch.where(count > 1, reward - (total - reward) / (count - 1).clamp(min=1.0), 0.0)
        if self.normalize:
            return grouped_normalise(advantage, valid & (count > 1), scored, "batch", "batch", 1, self.eps, "zero")
        return torch.where(valid, advantage, 0.0)


@hook("advantage", "token_whitened")
@dataclass(frozen=True)
class TokenWhitened:
    """Reward-to-go per token, whitened over all policy tokens of the batch, (N, T). REINFORCE++ (2501.03262).

    `center="group"` first subtracts the group's mean reward (REINFORCE++-baseline). Statistics are token-weighted:
    `ddof` 0 with the variance floored at `var_floor` is OpenRLHF's (the authors'), 1 is verl's. `shift_mean=False` only
    divides, which keeps a dead group at zero.
    """

    center: str = param("none", choices=("none", "group"))
    gamma: float = param(1.0, above=0.0, high=1.0)
    ddof: int = param(0, choices=(0, 1))
    var_floor: float = param(1e-8, low=0.0)
    shift_mean: bool = True

    math = "A_t = whiten_tokens(sum_k>=t gamma^(k-t) r_k), center {center}"
    needs = frozenset({"tokens"})

    def __call__(self, scored: Scored) -> Tensor:
        valid = scored.valid
        token_rewards = score_on_last_token(scored)
        if self.center == "group":
            baseline = mean_by(labels_of(scored, "group"), scored.reward, valid)
            token_rewards = token_rewards - on_last_token(baseline, scored.need("mask"))
        mask = scored.need("mask").to(scored.reward.dtype) * valid.unsqueeze(1)
        returns = reward_to_go(token_rewards, mask, self.gamma)
        count = mask.sum().clamp(min=1.0)
        mean = (returns * mask).sum() / count
        variance = ((returns - mean) ** 2 * mask).sum() / (count - self.ddof).clamp(min=1.0)
        shifted = returns - mean if self.shift_mean else returns
        return shifted / variance.clamp(min=self.var_floor).sqrt() * mask


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = sum over policy tokens k >= t of gamma^(k-t) r_k, (N, T). Tokens outside the mask neither earn nor
    discount."""
    running = torch.zeros_like(rewards[:, 0])
    out = torch.zeros_like(rewards)
    for t in range(rewards.shape[1] - 1, -1, -1):
        inside = mask[:, t] > 0
        running = torch.where(inside, rewards[:, t] + gamma * running, running)
        out[:, t] = running
    return out * mask
