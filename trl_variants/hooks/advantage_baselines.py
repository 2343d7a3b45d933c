"""Advantage hooks that change the baseline or the scale: constants, running means, length weights, batch scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..records import Scored
from .advantage import grouped_normalise, labels_of, mean_by, reward_to_go, std_by, sums_by
from .base import hook, param
from .rewards import score_on_last_token

SAME = 1e-8  # rewards this close are equal: the tolerance of the logged share of dead groups


def spread_by(labels: Tensor, x: Tensor, valid: Tensor) -> Tensor:
    """(N,) max - min of the valid x with the row's label; 0 or less where fewer than two are valid."""
    size = int(labels.max()) + 1 if len(labels) else 0
    index, seen = labels[valid], x[valid]
    low = torch.full((size,), torch.inf, dtype=x.dtype, device=x.device).scatter_reduce(0, index, seen, "amin")
    high = torch.full((size,), -torch.inf, dtype=x.dtype, device=x.device).scatter_reduce(0, index, seen, "amax")
    return (high - low)[labels]


@hook("advantage", "returns")
@dataclass(frozen=True)
class Returns:
    """G_t - b, G_t = sum_{k >= t} gamma^(k-t) r_k over the policy's tokens, (N, T). REINFORCE (Williams, 1992).

    A terminal score sits on the last token, so gamma = 1 gives G_t = R. `baseline` is a constant in units of reward.
    """

    gamma: float = param(1.0, above=0.0, high=1.0)
    baseline: float = 0.0

    math = "A_t = sum_k>=t {gamma}^(k-t) r_k - {baseline}"
    needs = frozenset({"tokens"})

    def __call__(self, scored: Scored) -> Tensor:
        mask = scored.need("mask").to(scored.reward.dtype) * (~torch.isnan(scored.reward)).unsqueeze(1)
        return (reward_to_go(score_on_last_token(scored), mask, self.gamma) - self.baseline) * mask


@hook("advantage", "running_mean")
@dataclass(frozen=True)
class RunningMean:
    """R - b, (N,), b the mean of all rewards of earlier generations: REINFORCE's reinforcement baseline (Williams,
    1992).

    b does not see the rewards it is subtracted from, so the expected gradient is unchanged. The first generation uses
    `initial`, in units of reward.
    """

    initial: float = param(0.0, ours=True)

    math = "A = R - mean of earlier rewards"
    update_every = "generation"

    def init(self) -> dict[str, Any]:
        return {"mean": self.initial, "count": 0}

    def __call__(self, scored: Scored, state: Mapping[str, Any]) -> Tensor:
        return torch.where(scored.valid, scored.reward - state["mean"], 0.0)

    def update(self, state: Mapping[str, Any], seen: Scored) -> dict[str, Any]:
        rewards = seen.reward[seen.valid].double()
        count = state["count"] + len(rewards)
        if not count:
            return dict(state)
        return {"mean": (state["mean"] * state["count"] + float(rewards.sum())) / count, "count": count}

    def report(self, state: Mapping[str, Any]) -> dict[str, float]:
        return {"advantage/running_mean": float(state["mean"])}


@hook("advantage", "live_rescaled")
@dataclass(frozen=True)
class LiveRescaled:
    """alpha (R - mean_group) / F, alpha = B / (B - M), (N,). GPG (2504.02546).

    B scorable rows of the generation, M of them in groups whose rewards are all equal: alpha makes up for groups
    without signal. F = 1 (`std="none"`) or the group's std. With no live group everything is 0.
    """

    std: str = param("none", choices=("none", "group"))
    ddof: int = param(1, choices=(0, 1))
    eps: float = param(1e-4, low=0.0)

    math = "A = B/(B - M) (R - mean_group) / F, F = std_{std}"

    def __call__(self, scored: Scored) -> Tensor:
        labels, valid = labels_of(scored, "group"), scored.valid
        live = valid & (spread_by(labels, scored.reward, valid) > SAME)
        alpha = valid.sum() / live.sum().clamp(min=1).to(scored.reward)
        centred = grouped_normalise(scored.reward, valid, scored, "group", self.std, self.ddof, self.eps, "zero")
        return torch.where(live, alpha * centred, 0.0)


@hook("advantage", "length_weighted")
@dataclass(frozen=True)
class LengthWeighted:
    """R_i - b, b = sum_j |y_j| R_j / sum_j |y_j| over the group, (N,). OPO (2505.23585).

    |y| counts the policy's own tokens. A row alone has no baseline and gets 0.
    """

    math = "A = R - sum_j |y_j| R_j / sum_j |y_j|"
    needs = frozenset({"tokens"})
    reads_token_rewards = False

    def __call__(self, scored: Scored) -> Tensor:
        labels, reward, valid = labels_of(scored, "group"), scored.reward, scored.valid
        length = scored.need("mask").sum(1).to(reward)
        weighted = torch.where(valid, length * reward, 0.0)
        top, count = (s[labels] for s in sums_by(labels, weighted, valid))
        bottom = sums_by(labels, length, valid)[0][labels]
        usable = valid & (count > 1) & (bottom > 0)
        return torch.where(usable, reward - top / torch.where(bottom > 0, bottom, 1.0), 0.0)


@hook("advantage", "batch_scaled")
@dataclass(frozen=True)
class BatchScaled:
    """c_i / (sigma + eps), c_i = R_i - mean_group, sigma the root mean square of c over the whole generation, (N,).
    ScaleRL (2510.13786); Lite PPO (2508.08221).

    The c of every group add up to 0, so sigma is their std over the batch; `ddof` 0 divides by n, 1 by n - 1.
    """

    ddof: int = param(0, choices=(0, 1), ours=True)
    eps: float = param(1e-4, low=0.0)

    math = "A = c / (std_batch(c) + {eps}), c = R - mean_group"

    def __call__(self, scored: Scored) -> Tensor:
        centred = _centred(scored)
        everyone = labels_of(scored, "batch")
        scale = std_by(everyone, centred, scored.valid, self.ddof) + self.eps
        # no spread anywhere: every c is 0, and 0 / 0 would not be
        return torch.where(centred != 0, centred / scale, 0.0)


@hook("advantage", "ema_scaled")
@dataclass(frozen=True)
class EMAScaled:
    """c_i / (sigma + eps), c_i = R_i - mean_group, sigma^2 a moving average of the mean c^2, (N,). TRL's ScaleRL code.

    `rate` is the weight of the newest generation, which enters before it is scaled; the first one starts the average.
    """

    rate: float = param(0.001, above=0.0, high=1.0)
    eps: float = param(1e-4, low=0.0)

    math = "A = c / (sigma + {eps}), c = R - mean_group, sigma^2 = EMA_{rate}(c^2)"
    update_every = "generation"

    def init(self) -> dict[str, Any]:
        return {"second_moment": None}

    def _moved(self, state: Mapping[str, Any], scored: Scored) -> float | None:
        squares = _centred(scored)[scored.valid].double() ** 2
        before = state["second_moment"]
        if not len(squares):
            return before
        now = float(squares.mean())
        return now if before is None else (1 - self.rate) * before + self.rate * now

    def __call__(self, scored: Scored, state: Mapping[str, Any]) -> Tensor:
        centred = _centred(scored)
        scale = (self._moved(state, scored) or 0.0) ** 0.5 + self.eps
        return torch.where(centred != 0, centred / scale, 0.0)

    def update(self, state: Mapping[str, Any], seen: Scored) -> dict[str, Any]:
        return {"second_moment": self._moved(state, seen)}


def _centred(scored: Scored) -> Tensor:
    """(N,) R - mean_group; 0 for a row that is not valid and in a group without spread, rounding noise included."""
    labels, valid = labels_of(scored, "group"), scored.valid
    live = valid & (spread_by(labels, scored.reward, valid) > SAME)
    return torch.where(live, scored.reward - mean_by(labels, scored.reward, valid), 0.0)
