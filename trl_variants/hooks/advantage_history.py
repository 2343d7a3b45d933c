"""An advantage that blends a group's own statistics with those of all answers its prompt ever got."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..records import Scored
from .advantage import labels_of
from .advantage_baselines import SAME
from .base import hook, param

History = Sequence[float]  # visits, mean, std


@hook("advantage", "smooth_standardized")
@dataclass(frozen=True)
class SmoothStandardized:
    """The smaller in absolute value of ((i-1) A_new + A_tot)/i and (A_new + (i-1) A_tot)/i, (N,). DCPO (2509.02333).

    A_new = (R - mu)/sd over the group at hand, A_tot the same over every answer the prompt got in its i visits, this
    one included; each is 0 where its sd is. Every visit counts the same, whatever its size. Unbiased std. A row alone
    has no A_new. `capacity` prompts are remembered, keyed by prompt_key; the one not seen for longest goes.
    """

    capacity: int = param(100_000, low=1, ours=True)

    math = "A = the smaller in |.| of ((i-1) A_new + A_tot)/i, (A_new + (i-1) A_tot)/i"
    needs = frozenset({"prompt_key"})
    update_every = "generation"

    def init(self) -> dict[str, list[float]]:
        """{prompt_key: [visits, mean, std]}, longest unseen first."""
        return {}

    def __call__(self, scored: Scored, state: Mapping[str, History]) -> Tensor:
        out = torch.zeros_like(scored.reward)
        for key, rows in _groups(scored):
            reward = scored.reward[rows]
            if len(rows) < 2:
                continue
            new = _statistics(reward)
            visits, *total = merged(state.get(key), new)
            fresh, whole = _standardized(reward, *new), _standardized(reward, *total)
            first = ((visits - 1) * fresh + whole) / visits
            second = (fresh + (visits - 1) * whole) / visits
            out[rows] = torch.where(first.abs() < second.abs(), first, second)
        return out

    def update(self, state: Mapping[str, History], seen: Scored) -> dict[str, Any]:
        """The histories with this generation's groups merged in."""
        history: dict[str, Any] = dict(state)
        for key, rows in _groups(seen):
            if len(rows):
                history[key] = merged(history.pop(key, None), _statistics(seen.reward[rows]))
        for key in list(history)[: max(0, len(history) - self.capacity)]:
            del history[key]
        return history


def merged(history: History | None, new: tuple[float, float]) -> list[float]:
    """[visits, mean, std] after one more visit with (mean, std) `new`."""
    if history is None:
        return [1.0, *new]
    before, mean, std = history
    i = before + 1
    variance = (before * std**2 + new[1] ** 2 + before / i * (new[0] - mean) ** 2) / i
    return [i, (before * mean + new[0]) / i, math.sqrt(variance)]


def _statistics(reward: Tensor) -> tuple[float, float]:
    reward = reward.double()
    if len(reward) < 2 or float(reward.max() - reward.min()) <= SAME:
        return float(reward.mean()), 0.0
    return float(reward.mean()), float(reward.std())


def _standardized(reward: Tensor, mean: float, std: float) -> Tensor:
    return (reward - mean) / std if std > SAME else torch.zeros_like(reward)


def _groups(scored: Scored) -> list[tuple[str, Tensor]]:
    """(prompt_key, row numbers of the scorable rows) of each group, in order."""
    keys, labels = scored.fact("prompt_key"), labels_of(scored, "group")
    groups = int(labels.max()) + 1 if len(labels) else 0
    out = []
    for label in range(groups):
        members = (labels == label).nonzero().squeeze(1)
        out.append((keys[int(members[0])], members[scored.valid[members]]))
    return out
