"""Rewards hooks that read an answer's length or how often its prompt is solved; they replace the combined reward, (N,).

Lengths are tokens of the policy. Group statistics are over `scored.valid` rows; a NaN reward stays NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import Scored
from .advantage import labels_of, mean_by, sums_by
from .base import hook, param


def lengths(scored: Scored) -> Tensor:
    """(N,) tokens the policy produced, in the rewards' precision."""
    return scored.fact("length").to(scored.reward)


def is_right(scored: Scored) -> Tensor:
    """(N,) bool, raw correctness of the scorable rows."""
    return (scored.correct > 0.5) & scored.valid


def limit_of(scored: Scored, given: int | None = None) -> float:
    """Tokens: the given limit, else the run's max_completion_length, else the longest answer."""
    return float(given or scored.run.max_completion_length or lengths(scored).max())


def extreme_by(labels: Tensor, x: Tensor, valid: Tensor, which: str) -> Tensor:
    """(N,) "amin" or "amax" of the valid x with the row's label; +-inf where there is none."""
    fill = math.inf if which == "amin" else -math.inf
    size = int(labels.max()) + 1 if len(labels) else 0
    start = torch.full((size,), fill, dtype=x.dtype, device=x.device)
    return start.scatter_reduce(0, labels[valid], x[valid], which)[labels]


@hook("rewards", "outcome_reward")
@dataclass(frozen=True)
class OutcomeReward:
    """Right answers get `right`, others min(`wrong`, R): a penalty a function gave below `wrong` (bad format)
    stays, (N,).

    +-1 is DAPO's (2503.14476) 2.4; 1, -0.5 and -1 for bad format are LASER's (2505.15612) 3.1.
    """

    right: float = 1.0
    wrong: float = -1.0

    math = "R = {right} if correct else min({wrong}, R)"
    combined = True

    def __call__(self, scored: Scored) -> Tensor:
        right = torch.full_like(scored.reward, self.right)
        value = torch.where(scored.correct > 0.5, right, scored.reward.clamp(max=self.wrong))
        return torch.where(torch.isnan(scored.reward), scored.reward, value)


@hook("rewards", "soft_overlong")
@dataclass(frozen=True)
class SoftOverlong:
    """R + weight * clip((L_max - L_cache - |y|) / L_cache, -1, 0), (N,). DAPO (2503.14476) eq. 13.

    L_max is `max_length` in tokens (None: the run's limit) and L_cache = cache_share * L_max: the paper's 4096 of
    20480. verl leaves the penalty uncapped below -1; an answer cannot be longer than L_max there either.
    """

    cache_share: float = param(0.2, above=0.0, high=1.0)
    max_length: int | None = param(None, low=1)
    weight: float = param(1.0, low=0.0)

    math = "R + {weight} clip((L_max (1 - {cache_share}) - |y|) / ({cache_share} L_max), -1, 0)"
    combined = True

    def __call__(self, scored: Scored) -> Tensor:
        limit = limit_of(scored, self.max_length)
        cache = self.cache_share * limit
        return scored.reward + self.weight * ((limit - cache - lengths(scored)) / cache).clamp(-1.0, 0.0)


@hook("rewards", "relative_length")
@dataclass(frozen=True)
class RelativeLength:
    """R + weight * l, (N,): l = 0.5 - (|y| - min) / (max - min) over the group; wrong answers get min(0, l).

    Kimi k1.5 (2501.12599) 2.3.3. A group whose answers are equally long gets 0. The paper's warm-up is a schedule of
    `weight`.
    """

    weight: float = param(0.4, low=0.0, ours=True)

    math = "R + {weight} (0.5 - (|y| - min_group) / (max_group - min_group); <= 0 if wrong)"
    combined = True

    def __call__(self, scored: Scored) -> Tensor:
        labels, length = labels_of(scored, "group"), lengths(scored)
        shortest = extreme_by(labels, length, scored.valid, "amin")
        span = extreme_by(labels, length, scored.valid, "amax") - shortest
        bonus = 0.5 - (length - shortest) / torch.where(span > 0, span, 1.0)
        bonus = torch.where(is_right(scored), bonus, bonus.clamp(max=0.0))
        return scored.reward + self.weight * torch.where(scored.valid & (span > 0), bonus, 0.0)


@hook("rewards", "adaptive_budget")
@dataclass(frozen=True)
class AdaptiveBudget:
    """A prompt's budget from its success rate p, (N,): L_b = p L_r + (1 - p) L_max, x = (|y| - L_b) / L_b;

    right: max(-right_slope x + right_offset, right_floor), wrong: min(wrong_slope x - wrong_offset, -wrong_offset).
    DAST (2503.04472) eqs. 1-3. L_r is the mean length of the group's right answers, L_max the run's limit or
    (`limit` "group") the group's longest answer. `add` adds to the reward instead of replacing it; `success` counts
    rewards of at least that value as right instead of raw correctness (UI-R1, 2503.21620: 3).
    """

    limit: str = param("run", choices=("run", "group"))
    add: bool = False
    success: float | None = None
    right_slope: float = param(0.5, low=0.0)
    right_offset: float = 0.5
    right_floor: float = 0.1
    wrong_slope: float = param(0.9, low=0.0)
    wrong_offset: float = 0.1

    math = (
        "R = max({right_offset} - {right_slope} x, {right_floor}) or, wrong, min({wrong_slope} x - {wrong_offset}, "
        "-{wrong_offset}); x = |y| / (p L_r + (1 - p) L_max) - 1"
    )
    combined = True

    def __call__(self, scored: Scored) -> Tensor:
        labels, length, valid = labels_of(scored, "group"), lengths(scored), scored.valid
        right = is_right(scored) if self.success is None else valid & (scored.reward >= self.success)
        count, solved = sums_by(labels, right.to(length), valid)[1], sums_by(labels, length, right)[1]
        rate = (solved / count.clamp(min=1.0))[labels]
        typical = mean_by(labels, length, right).nan_to_num(nan=0.0)  # nothing solved: rate is 0 anyway
        longest = (
            torch.full_like(length, limit_of(scored))
            if self.limit == "run"
            else extreme_by(labels, length, valid, "amax")
        )
        budget = rate * typical + (1.0 - rate) * longest
        excess = torch.where(budget > 0, (length - budget) / torch.where(budget > 0, budget, 1.0), 0.0)
        paid = (self.right_offset - self.right_slope * excess).clamp(min=self.right_floor)
        fined = (self.wrong_slope * excess - self.wrong_offset).clamp(max=-self.wrong_offset)
        value = torch.where(right, paid, fined)
        value = value + scored.reward if self.add else value
        return torch.where(valid, value, scored.reward)


@hook("rewards", "staged_limit")
@dataclass(frozen=True)
class StagedLimit:
    """R where the answer is complete within the stage's limit, 0 elsewhere, (N,). ThinkPrune (2504.01296) section 3.

    `stages` are shares of the run's max_completion_length, one after the other over the run in equal parts: the
    paper's 4000, 3000, 2000 tokens are 1, 3/4, 1/2.
    """

    stages: tuple | list = (1.0, 0.75, 0.5)

    math = "R [complete within {stages} of the limit]"
    needs = frozenset({"truncated"})
    combined = True

    def __post_init__(self):
        object.__setattr__(self, "stages", tuple(self.stages))
        if not self.stages or not all(isinstance(s, (int, float)) and 0.0 < s <= 1.0 for s in self.stages):
            raise VariantError(f"staged_limit.stages are shares of the limit in (0, 1], got {self.stages!r}")

    def __call__(self, scored: Scored) -> Tensor:
        stage = self.stages[min(int(scored.progress * len(self.stages)), len(self.stages) - 1)]
        done = (lengths(scored) <= stage * limit_of(scored)) & ~scored.fact("truncated").bool()
        return torch.where(done | torch.isnan(scored.reward), scored.reward, 0.0)
