"""A rewards hook that replaces raw scores by their rank in the run's history."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import Scored, weighted_sum
from .base import hook, param


@hook("rewards", "history_rank")
@dataclass(frozen=True)
class HistoryRank:
    """Each score becomes round(share of its history <= it, decimals); then the weighted sum, (N,). Dr. Seg
    (2603.00152).

    `functions` are the positions of the reward functions that are ranked (None: all); the others (format) enter as
    they are. A history holds a function's last `capacity` scores and starts as `zeros` zeros; a generation's scores
    join it after they were ranked. The rounding is half to even.

    State: one list of scores per reward function.
    """

    functions: tuple | list | None = None
    capacity: int = param(2048, low=1)
    zeros: int = param(128, low=1)
    decimals: int = param(1, low=0)

    math = "R = sum_f w_f round(share of history_f <= R_f, {decimals})"
    update_every = "generation"
    combined = True

    def __post_init__(self):
        if self.functions is not None:
            object.__setattr__(self, "functions", tuple(self.functions))

    def init(self) -> dict[str, Any]:
        return {"history": {}}

    def _ranked(self, scored: Scored) -> list[int]:
        count = scored.rewards.shape[1]
        chosen = list(range(count)) if self.functions is None else list(self.functions)
        if wrong := [f for f in chosen if not isinstance(f, int) or not 0 <= f < count]:
            raise VariantError(f"history_rank.functions names {wrong[0]!r}, and there are {count} reward functions")
        return chosen

    def _history(self, state: Mapping[str, Any], f: int) -> list[float]:
        return state["history"].get(str(f)) or [0.0] * self.zeros

    def __call__(self, scored: Scored, state: Mapping[str, Any]) -> Tensor:
        matrix = scored.rewards.clone()
        for f in self._ranked(scored):
            history = sorted(self._history(state, f))
            ranks = [
                x if math.isnan(x) else round(bisect_right(history, x) / len(history), self.decimals)
                for x in matrix[:, f].tolist()
            ]
            matrix[:, f] = torch.tensor(ranks, dtype=matrix.dtype, device=matrix.device)
        return weighted_sum(matrix, scored.weights)

    def update(self, state: Mapping[str, Any], seen: Scored) -> dict[str, Any]:
        history = dict(state["history"])
        for f in self._ranked(seen):
            new = [x for x in seen.rewards[:, f].tolist() if not math.isnan(x)]
            history[str(f)] = [*self._history(state, f), *new][-self.capacity :]
        return {"history": history}
