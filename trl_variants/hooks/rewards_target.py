"""Rewards hooks with a length target per run (LASER), per difficulty (LASER-D) or per prompt (effort budgets)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import Scored
from ..rewards.text import repeats
from .advantage import labels_of, sums_by
from .base import hook, param
from .rewards_length import is_right, lengths, limit_of

BUCKETS = ("easy", "medium", "hard")


@dataclass(frozen=True)
class _TargetBonus:
    """R + bonus for a right answer of at most the target's length; `explore` pays it also to wrong, well-formed
    answers (R > bad_format) that are longer than the target and repeat no run of `ngram` words."""

    bonus: float = param(0.5, low=0.0)
    explore: bool = False
    bad_format: float = -1.0
    ngram: int = param(20, low=1, ours=True)

    combined = True

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"texts"} if self.explore else ())

    def paid(self, scored: Scored, target: Tensor) -> Tensor:
        length, right = lengths(scored), is_right(scored)
        earned = right & (length <= target)
        if self.explore:
            texts = scored.fact("texts")["completions"]
            fresh = torch.tensor([not repeats(t, self.ngram) for t in texts], device=length.device)
            wrong = scored.valid & ~right & (scored.reward > self.bad_format)
            earned = earned | (wrong & (length > target) & fresh)
        return scored.reward + self.bonus * earned.to(scored.reward)


@hook("rewards", "target_length_bonus")
@dataclass(frozen=True)
class TargetLengthBonus(_TargetBonus):
    """R + bonus * 1[right and |y| <= target], (N,). LASER (2505.15612) section 3.2: a step, no slope.

    `target` in tokens; None is half the run's limit (8192 of 16384). `explore` is LASER-DE's bonus for long wrong
    answers without repetition.
    """

    target: int | None = param(None, low=1, ours=True)

    math = "R + {bonus} [right and |y| <= {target}]"

    def __call__(self, scored: Scored) -> Tensor:
        target = limit_of(scored) / 2 if self.target is None else float(self.target)
        return self.paid(scored, torch.full_like(scored.reward, target))


def smallest_target(
    lengths: list[float], expected: float, lower: int, step: int, limit: float, otherwise: float
) -> float:
    """Smallest L in {lower, lower + step, ..., limit} at which int(share of lengths <= L times `expected`) >= 1."""
    target = float(lower)
    while lengths and target <= limit:
        if int(sum(n <= target for n in lengths) / len(lengths) * expected) >= 1:
            return target
        target += step
    return otherwise


@hook("rewards", "difficulty_target_bonus")
@dataclass(frozen=True)
class DifficultyTargetBonus(_TargetBonus):
    """R + bonus * 1[right and |y| <= L_b], (N,), L_b the target of the prompt's difficulty b. LASER-D (2505.15612) 3.3.

    easy: the group solves at least 2/3, hard: below 1/3. Every `every` steps L_b becomes the smallest length on a grid
    at which the share of the bucket's answers within it times the answers expected right (int(2G/3), int(G/3), 1)
    reaches 1. `lower_share`, `step_share`: grid start and step as shares of the run's limit (1024 of 16384). The
    answers watched are those to the last `monitor` prompts.

    State: targets in tokens, step of the last refresh, answers watched.
    """

    every: int = param(20, low=1)
    lower_share: float = param(0.0625, above=0.0, high=1.0)
    step_share: float = param(0.0625, above=0.0, high=1.0)
    monitor: int = param(500, low=1)

    math = "R + {bonus} [right and |y| <= L_difficulty]"
    update_every = "generation"

    def init(self) -> dict[str, Any]:
        return {"targets": {}, "refreshed": -1, "seen": []}

    def __call__(self, scored: Scored, state: Mapping[str, Any]) -> Tensor:
        longest = float(torch.where(scored.valid, lengths(scored), 0.0).max())
        targets = [state["targets"].get(b, longest) for b in BUCKETS]
        choices = torch.tensor(targets, dtype=scored.reward.dtype, device=scored.reward.device)
        return self.paid(scored, choices[difficulty(scored)])

    def update(self, state: Mapping[str, Any], seen: Scored) -> dict[str, Any]:
        bucket, length = difficulty(seen).tolist(), lengths(seen).tolist()
        labels, usable = labels_of(seen, "group").tolist(), seen.valid.tolist()
        groups: dict[int, list] = {}
        for label, b, n, u in zip(labels, bucket, length, usable, strict=True):
            if u:
                groups.setdefault(label, [b, []])[1].append(n)
        watched = [*state["seen"], *groups.values()][-self.monitor :]
        due = state["refreshed"] < 0 or seen.step - state["refreshed"] >= self.every
        if not due:
            return {**state, "seen": watched}
        size, limit = seen.run.group_size, limit_of(seen)
        expected = (int(2 * size / 3), int(size / 3), 1)
        lower, step = max(1, round(self.lower_share * limit)), max(1, round(self.step_share * limit))
        longest = max((n for _, part in watched for n in part), default=limit)
        targets = {
            name: smallest_target(
                [n for b, part in watched if b == k for n in part], expected[k], lower, step, limit, longest
            )
            for k, name in enumerate(BUCKETS)
        }
        return {"targets": targets, "refreshed": int(seen.step), "seen": watched}


def difficulty(scored: Scored) -> Tensor:
    """(N,) 0 easy, 1 medium, 2 hard: 3c >= 2n, 3c >= n or less of the group's n scorable answers are right."""
    labels = labels_of(scored, "group")
    right, count = sums_by(labels, is_right(scored).to(scored.reward), scored.valid)
    return torch.where(3 * right >= 2 * count, 0, torch.where(3 * right >= count, 1, 2))[labels]


@hook("rewards", "effort_budget")
@dataclass(frozen=True)
class EffortBudget:
    """`failure` where |y| > tau * b0(prompt), else R, (N,). Kimi K3 (2607.24653): -1; K2.5's rule is 0.

    b0 is the data set's number `column`, else measured once, as the mean length of the answers at the prompt's first
    visit. `tau` is a factor, scheduled from large to small.

    State: b0 in tokens by prompt, for the last `capacity` prompts.
    """

    tau: float = param(1.5, above=0.0, ours=True)
    failure: float = -1.0
    column: str | None = None
    capacity: int = param(100_000, low=1, ours=True)

    math = "R = {failure} if |y| > {tau} b0"
    update_every = "generation"
    combined = True

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"prompt_key"} if self.column is None else ())

    @property
    def columns(self) -> frozenset[str]:
        """Data set columns this hook reads."""
        return frozenset({self.column} if self.column else ())

    def init(self) -> dict[str, Any]:
        return {"b0": {}}

    def __call__(self, scored: Scored, state: Mapping[str, Any]) -> Tensor:
        length = lengths(scored)
        if self.column is None:
            known = {**first_lengths(scored), **state["b0"]}
            base = [known.get(k, torch.inf) for k in scored.fact("prompt_key")]
        else:
            base = [_number(v, self.column) for v in scored.column(self.column)]
        over = length > self.tau * torch.tensor(base, dtype=length.dtype, device=length.device)
        return torch.where(over & scored.valid, torch.full_like(length, self.failure), scored.reward)

    def update(self, state: Mapping[str, Any], seen: Scored) -> dict[str, Any]:
        if self.column is not None:
            return dict(state)
        merged = {**state["b0"], **{k: v for k, v in first_lengths(seen).items() if k not in state["b0"]}}
        return {"b0": dict(list(merged.items())[-self.capacity :])}


def first_lengths(scored: Scored) -> dict[str, float]:
    """Mean length of the scorable answers by prompt key."""
    by_key: dict[str, list[float]] = {}
    rows = zip(scored.fact("prompt_key"), lengths(scored).tolist(), scored.valid.tolist(), strict=True)
    for key, n, usable in rows:
        if usable:
            by_key.setdefault(key, []).append(n)
    return {key: sum(part) / len(part) for key, part in by_key.items()}


def _number(value: Any, column: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise VariantError(f"column {column!r} holds {value!r} where a number of tokens is expected") from None
