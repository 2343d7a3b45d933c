"""Advantages with memory: reward statistics of a label's history, and multipliers of constraints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import Scored
from .advantage import grouped_normalise
from .base import hook, param


@hook("advantage", "history_norm")
@dataclass(frozen=True)
class HistoryNorm:
    """A = (R - m_c) / (s_c + eps), m_c and s_c the running mean and std of all earlier rewards of label c, (N,).
    Personalized GRPO (2603.10009).

    c is the row's value of column `key`. Rewards are used first and enter the history (Welford) afterwards. While a
    label has fewer than `warmup_groups` x group size rewards its rows get the group's z-score. Every generation
    multiplies the weight of the history by `decay`. `capacity` labels are remembered; the one not seen for longest
    goes.
    """

    key: str = param("task", ours=True)
    eps: float = param(1e-4, low=0.0, ours=True)
    ddof: int = param(1, choices=(0, 1))
    warmup_groups: float = param(2.0, low=0.0, ours=True)
    decay: float = param(1.0, above=0.0, high=1.0, ours=True)
    capacity: int = param(10_000, low=1, ours=True)

    math = "A = (R - history mean_{key}) / (history std_{key} + {eps})"
    update_every = "generation"

    @property
    def keys(self) -> frozenset[str]:
        """Data set columns this hook groups by."""
        return frozenset({self.key} - {"group", "batch", "none"})

    def init(self) -> dict[str, list[float]]:
        """{label: [count, mean, sum of squared deviations]}, longest unseen first."""
        return {}

    def __call__(self, scored: Scored, state: Mapping[str, list[float]]) -> Tensor:
        reward, valid = scored.reward, scored.valid
        advantage = grouped_normalise(reward, valid, scored, "group", "group", self.ddof, self.eps, "zero")
        for label, rows in self._rows(scored).items():
            count, mean, squares = state.get(label, (0.0, 0.0, 0.0))
            if count > self.ddof and count >= self.warmup_groups * scored.run.group_size:
                value = (reward - mean) / (math.sqrt(squares / (count - self.ddof)) + self.eps)
                advantage = torch.where(rows, value, advantage)
        return torch.where(valid, advantage, 0.0).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def update(self, state: Mapping[str, list[float]], seen: Scored) -> dict[str, list[float]]:
        """The histories with this generation's rewards merged in (Chan's rule)."""
        history = dict(state)
        for label, rows in self._rows(seen).items():
            new = seen.reward[rows].double()
            if not len(new):
                continue
            count, mean, squares = history.pop(label, (0.0, 0.0, 0.0))
            count, squares = count * self.decay, squares * self.decay
            n, gap = float(len(new)), float(new.mean()) - mean
            total = count + n
            squares += float(((new - new.mean()) ** 2).sum()) + gap**2 * count * n / total
            history[label] = [total, mean + gap * n / total, squares]
        for label in list(history)[: max(0, len(history) - self.capacity)]:
            del history[label]
        return history

    def _rows(self, scored: Scored) -> dict[str, Tensor]:
        """{label: (N,) bool, its scored rows}."""
        if self.key == "batch":
            return {"batch": scored.valid}
        if self.key not in scored.keys:
            raise VariantError(f"history_norm reads column {self.key!r}, and there is none")
        column = scored.keys[self.key]
        return {str(x): (column == x) & scored.valid for x in torch.unique(column).tolist()}


@hook("advantage", "constrained")
@dataclass(frozen=True)
class Constrained:
    """A = reward_weight z(R) - sum_k lambda_k z(C_k), each z over the group on its own, (N,). Constrained GRPO
    (2602.05863).

    Costs C_k count violations, positive: the last reward functions, one per limit ("functions"; they leave the reward),
    or whether an answer was "truncated". Dual ascent after every generation: lambda_k <- max(0, lambda_k + rate (mean
    C_k - limit_k)); `limits` are in the units of the costs.
    """

    limits: Any = param((0.1,), ours=True)
    costs: str = param("truncated", choices=("functions", "truncated"), ours=True)
    reward_weight: float = param(1.0, low=0.0, ours=True)
    start: float = param(0.5, low=0.0, ours=True)
    rate: float = param(0.1, low=0.0, ours=True)
    ddof: int = param(1, choices=(0, 1))
    eps: float = param(1e-6, low=0.0, ours=True)

    math = "A = {reward_weight} z(R) - sum_k lambda_k z(C_k), lambda_k += {rate} (mean C_k - limit_k), limits {limits}"
    update_every = "generation"

    def __post_init__(self):
        limits = self.limits if isinstance(self.limits, (list, tuple)) else (self.limits,)
        if not limits or not all(isinstance(x, (int, float)) and math.isfinite(x) for x in limits):
            raise VariantError(f"constrained.limits must be numbers, one per cost, got {self.limits!r}")
        if self.costs == "truncated" and len(limits) > 1:
            raise VariantError(f"constrained.costs 'truncated' is one cost and takes one limit, got {len(limits)}")
        object.__setattr__(self, "limits", tuple(float(x) for x in limits))

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"truncated"} if self.costs == "truncated" else ())

    def init(self) -> dict[str, list[float]]:
        return {"lambda": [self.start] * len(self.limits)}

    def __call__(self, scored: Scored, state: Mapping[str, list[float]]) -> Tensor:
        reward, costs = self._split(scored)
        valid = ~torch.isnan(reward) & scored.valid
        z = grouped_normalise(reward, valid, scored, "group", "group", self.ddof, self.eps, "zero")
        advantage = self.reward_weight * z
        for k, multiplier in enumerate(state["lambda"]):
            valid = scored.valid & ~torch.isnan(costs[:, k])
            cost = grouped_normalise(costs[:, k], valid, scored, "group", "group", self.ddof, self.eps, "zero")
            advantage = advantage - multiplier * cost
        return torch.where(scored.valid, advantage, 0.0)

    def update(self, state: Mapping[str, list[float]], seen: Scored) -> dict[str, list[float]]:
        """Dual ascent on the mean cost of this generation; a cost that no row has leaves its multiplier."""
        _, costs = self._split(seen)
        moved = []
        for k, (multiplier, limit) in enumerate(zip(state["lambda"], self.limits, strict=True)):
            applies = costs[:, k][seen.valid & ~torch.isnan(costs[:, k])]
            step = self.rate * (float(applies.mean()) - limit) if len(applies) else 0.0
            moved.append(max(0.0, multiplier + step))
        return {"lambda": moved}

    def report(self, state: Mapping[str, list[float]]) -> dict[str, float]:
        return {f"constrained/lambda_{k}": x for k, x in enumerate(state["lambda"])}

    def _split(self, scored: Scored) -> tuple[Tensor, Tensor]:
        """Reward (N,) without the costs, and costs (N, K)."""
        if self.costs == "truncated":
            return scored.reward, scored.fact("truncated").to(scored.reward).unsqueeze(1)
        count, functions = len(self.limits), scored.rewards.shape[1]
        if functions <= count:
            raise VariantError(
                f"constrained takes the last {count} reward functions as costs: of {functions} none is left as reward"
            )
        costs = scored.rewards[:, -count:]
        reward = scored.reward - (costs * scored.weights[-count:].to(costs)).nansum(1)
        return torch.where(torch.isnan(scored.rewards[:, :-count]).all(1), torch.nan, reward), costs
