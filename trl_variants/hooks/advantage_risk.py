"""Bundles of questions valued by the tails of their score distribution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import Scored
from .advantage import labels_of, mean_by, std_by, sums_by
from .base import hook, param

LEVELS = tuple(round(0.05 * k, 2) for k in range(1, 20))


@dataclass(frozen=True)
class Bundles:
    """Bundle scores of a generation: S (M,) over M pairs (bundle, k), and where each row belongs."""

    score: Tensor  # (M,) sum over the bundle's questions of the reward of their k-th answer
    bundle: Tensor  # (M,) label of the pair's bundle
    pair: Tensor  # (N,) the row's place in `score`; 0 for a row without a score
    questions: Tensor  # (N,) scored questions in the row's bundle
    deviation: Tensor  # (M,) the same sum over R - mean of the question
    valid: Tensor  # (N,)


@hook("advantage", "mixed_risk")
@dataclass(frozen=True)
class MixedRisk:
    """A_k = (w cv + rv) / (w + 1) / (std of the bundle's scores + 1e-6), shared among the answers k, (N,). RiskPO
    (2510.00911).

    `bundle` consecutive questions are scored together: S_k = sum of the rewards of their k-th answers (answers are
    paired in the order they were generated; a question without a k-th scored answer adds its mean). With tracked
    quantiles q_a, q_b of S at the levels `low` and `high`:
        rv = (relu(S-q_a) - relu(S-q_b) [+ q_a - q_b if natural_baseline]) / (high - low + 1e-6)
        cv = -relu(q_a - S) / (low + 1e-6)
    `share`: "uniform" A_k; "std" A_k / std of the question (1 where below 1e-3); "sum_mean" A_k (R - mean) / D_k, D_k
    the bundle's sum of R - mean at k (A_k / questions where |D_k| <= 1e-6). The advantage uses the quantiles of before
    this generation; in the first each bundle has those of its own scores.
    """

    bundle: int = param(5, low=1)
    low: float = param(0.2, choices=LEVELS)
    high: float = param(0.8, choices=LEVELS)
    w: float = param(1.5, low=0.0)
    share: str = param("sum_mean", choices=("sum_mean", "std", "uniform"))
    natural_baseline: bool = False
    rate: float = param(0.1, low=0.0)

    math = "A = ({w} cv_{low} + rv_{low},{high})(S of {bundle} questions) / ({w} + 1) / std S, share {share}"
    update_every = "generation"

    def __post_init__(self):
        if isinstance(self.low, float) and isinstance(self.high, float) and self.low >= self.high:
            raise VariantError(f"mixed_risk.low {self.low} must be below high {self.high}")

    def init(self) -> dict[str, Any]:
        """{"quantiles": one number per level of LEVELS, or None before the first generation}."""
        return {"quantiles": None}

    def __call__(self, scored: Scored, state: Mapping[str, Any]) -> Tensor:
        b = self.bundles(scored)
        if not len(b.score):
            return torch.zeros_like(scored.reward)
        low, high = (self._quantile(level, b, state["quantiles"]) for level in (self.low, self.high))
        relu = torch.relu
        middle = relu(b.score - low) - relu(b.score - high)
        if self.natural_baseline:
            middle = middle + low - high
        tail = -relu(low - b.score) / (self.low + 1e-6)
        value = (self.w * tail + middle / (self.high - self.low + 1e-6)) / (self.w + 1)
        spread = std_by(b.bundle, b.score, torch.ones_like(b.bundle, dtype=torch.bool), 1)
        value = value / (spread.nan_to_num(nan=1.0) + 1e-6)
        return torch.where(b.valid, self._shared(value[b.pair], b, scored), 0.0)

    def _shared(self, value: Tensor, b: Bundles, scored: Scored) -> Tensor:
        labels, reward = labels_of(scored, "group"), scored.reward
        if self.share == "uniform":
            return value
        if self.share == "std":
            std = std_by(labels, reward, b.valid, 1).nan_to_num(nan=0.0)
            return value / (torch.where(std < 1e-3, torch.ones_like(std), std) + 1e-6)
        total = b.deviation[b.pair]
        flat = total.abs() <= 1e-6
        share = (reward - mean_by(labels, reward, b.valid)) / torch.where(flat, torch.ones_like(total), total)
        return value * torch.where(flat, 1.0 / b.questions, share)

    def update(self, state: Mapping[str, Any], seen: Scored) -> dict[str, Any]:
        """q_u <- q_u + rate (u - share of scores below q_u); the first generation's own quantiles start it."""
        score = self.bundles(seen).score
        if not len(score):
            return dict(state)
        levels = torch.tensor(LEVELS, dtype=score.dtype, device=score.device)
        if state["quantiles"] is None:
            return {"quantiles": torch.quantile(score, levels).tolist()}
        q = torch.tensor(state["quantiles"], dtype=score.dtype, device=score.device)
        below = (score.unsqueeze(1) < q).to(score.dtype).mean(0)
        return {"quantiles": (q + self.rate * (levels - below)).tolist()}

    def _quantile(self, level: float, b: Bundles, tracked: list[float] | None) -> Tensor:
        """(M,) the quantile every pair is compared with."""
        if tracked is not None:
            return torch.full_like(b.score, tracked[LEVELS.index(level)])
        out = torch.zeros_like(b.score)
        for label in torch.unique(b.bundle).tolist():
            out[b.bundle == label] = torch.quantile(b.score[b.bundle == label], level)
        return out

    def bundles(self, scored: Scored) -> Bundles:
        """The bundle scores of the scored rows; a bundle is `bundle` consecutive groups that have a score."""
        reward, valid = scored.reward, scored.valid
        rows = valid.nonzero().squeeze(1)
        empty = torch.zeros_like(reward)
        if not len(rows):
            none = reward[:0]
            return Bundles(none, none.long(), empty.long(), empty, none, valid)
        question = torch.unique(scored.group[rows], return_inverse=True)[1]
        same = question.unsqueeze(1) == question.unsqueeze(0)
        order = torch.arange(len(rows), device=rows.device)
        k = (same & (order < order.unsqueeze(1))).sum(1)  # how many answers to the same question came before
        bundle, width = question // self.bundle, int(k.max()) + 1
        pairs, pair = torch.unique(bundle * width + k, return_inverse=True)
        everyone = torch.ones_like(pair, dtype=torch.bool)
        mean = mean_by(question, reward[rows], everyone)
        deviation = sums_by(pair, reward[rows] - mean, everyone)[0]
        # S_k = sum of the questions' means + the deviations of the k-th answers: a missing one adds its mean
        first = k == 0
        base, count = sums_by(bundle[first], mean[first], first[first])
        of_pair = pairs // width
        place, questions = torch.zeros_like(valid, dtype=torch.long), torch.ones_like(reward)
        place[rows], questions[rows] = pair, count[bundle]
        return Bundles(base[of_pair] + deviation, of_pair, place, questions, deviation, valid)
