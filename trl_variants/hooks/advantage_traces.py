"""Advantages of groups with trajectories, or beginnings of them, from elsewhere. Signature as in `advantage.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..records import Scored
from .advantage import grouped_normalise, labels_of, mean_by, sums_by
from .base import hook, param

TEACHER, PREFIX = 1, 3  # origins


@hook("advantage", "prefix_baseline")
@dataclass(frozen=True)
class PrefixBaseline:
    """Own rows, a given prefix and what follows it each have their baseline, (N, T). Prefix-RFT (2507.01679).

    Own rows R - m, m the mean of the group's own rows (those that begin with no prefix); prefix tokens (origin 3)
    (R - m) / number of hybrid rows of the group; the policy's tokens after a prefix R, no other row having that prefix.
    No std. A group without own rows has m = 0.
    """

    math = "A = R - mean_own; prefix tokens (R - mean_own) / #hybrid, tokens after it R"
    needs = frozenset({"tokens"})

    def __call__(self, scored: Scored) -> Tensor:
        reward, valid, labels = scored.reward, scored.valid, labels_of(scored, "group")
        mask = scored.need("mask") > 0
        given = mask & (scored.tokens["origin"] == PREFIX) if "origin" in scored.tokens else torch.zeros_like(mask)
        hybrid = given.any(1)
        centred = reward - mean_by(labels, reward, valid & ~hybrid).nan_to_num(nan=0.0)
        count = sums_by(labels, reward, valid & hybrid)[1][labels].clamp(min=1.0)
        per_row = torch.where(hybrid, reward, centred).unsqueeze(1)
        advantage = torch.where(given, (centred / count).unsqueeze(1), per_row)
        return torch.where(valid.unsqueeze(1), advantage, 0.0)


@hook("advantage", "student_history")
@dataclass(frozen=True)
class StudentHistory:
    """A teacher's rows (origin 1): R - p(x); the policy's own: the group's z-score, (N,), GRPO's (2402.03300).

    Gap 1 of the survey of GRPO-OPD hybrids (8.5); the design is ours.

    p(x) is the running mean success of the policy on the prompt, p <- (1 - rate) p + rate (share of its own rows that
    are right), read before this generation enters. A group that is right throughout then still teaches. A prompt the
    policy has not tried counts as solved with probability `start`. Own rows are compared with own rows. `capacity`
    prompts are remembered; the one not tried for longest goes.
    """

    rate: float = param(0.1, low=0.0, high=1.0, ours=True)
    start: float = param(0.0, low=0.0, high=1.0, ours=True)
    ddof: int = param(1, choices=(0, 1))
    eps: float = param(1e-4, low=0.0)
    capacity: int = param(100_000, low=1, ours=True)

    math = "A = R - p(x) on a teacher's rows, p the policy's running success; z-score of own rows on its own"
    needs = frozenset({"prompt_key"})
    update_every = "generation"

    def init(self) -> dict[str, float]:
        """{prompt_key: p}, longest untried first."""
        return {}

    def __call__(self, scored: Scored, state: Mapping[str, float]) -> Tensor:
        theirs = self._theirs(scored)
        solved = [state.get(key, self.start) for key in scored.fact("prompt_key")]
        p = torch.tensor(solved, dtype=scored.reward.dtype, device=scored.reward.device)
        own = grouped_normalise(
            scored.reward, scored.valid & ~theirs, scored, "group", "group", self.ddof, self.eps, "zero"
        )
        return torch.where(scored.valid, torch.where(theirs, scored.reward - p, own), 0.0)

    def update(self, state: Mapping[str, float], seen: Scored) -> dict[str, float]:
        """The shares with this generation's own rows in them."""
        history: dict[str, Any] = dict(state)
        own, labels = seen.valid & ~self._theirs(seen), labels_of(seen, "group")
        keys = seen.fact("prompt_key")
        for label in torch.unique(labels[own]).tolist():
            rows = own & (labels == label)
            key, right = keys[int(rows.nonzero()[0])], float(seen.correct[rows].float().mean())
            before = history.pop(key, self.start)
            history[key] = (1 - self.rate) * before + self.rate * right
        for key in list(history)[: max(0, len(history) - self.capacity)]:
            del history[key]
        return history

    def _theirs(self, scored: Scored) -> Tensor:
        return torch.zeros_like(scored.valid) if scored.origin is None else scored.origin == TEACHER
