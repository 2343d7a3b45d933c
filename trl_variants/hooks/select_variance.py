"""Select hooks that read rewards: groups without spread, and rows with a small advantage, leave the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..records import Scored
from .advantage import grouped_normalise, labels_of
from .base import hook, param


@hook("select", "zero_variance")
@dataclass(frozen=True)
class ZeroVariance:
    """Keeps groups with max - min > tol over their scorable rows, (N,); no replacement. ScaleRL (2510.13786).

    Dropped groups leave every count and every regularizer; divide by what is kept (sequence_mean rows "live",
    token_mean, prompt_mean). They stay in statistics of the batch, such as its std. `by`: the combined reward,
    before any
    normalisation, with `tol` in its units, or raw correctness (then a group is kept when it holds both kinds).
    """

    tol: float = param(0.0, low=0.0)
    by: str = param("reward", choices=("reward", "correct"))

    math = "groups with max - min of the {by} <= {tol} out of the loss"

    def __call__(self, scored: Scored) -> Scored:
        labels, valid = labels_of(scored, "group"), scored.valid
        x = scored.reward if self.by == "reward" else scored.correct.to(scored.reward)
        groups = int(labels.max()) + 1 if len(labels) else 0

        def extreme(sign: float) -> torch.Tensor:
            start = torch.full((groups,), -torch.inf, dtype=x.dtype, device=x.device)
            return start.scatter_reduce(0, labels, torch.where(valid, sign * x, -torch.inf), "amax")

        spread = extreme(1.0) + extreme(-1.0)  # -inf for a group without a scorable row
        return scored.with_(keep=scored.keep & (spread > self.tol)[labels])


@hook("select", "top_advantage")
@dataclass(frozen=True)
class TopAdvantage:
    """Keeps the max(1, floor(G (1 - rate))) scorable rows of largest |A| in each group of G, (N,). CPPO (2503.22342).

    |A| is the group-normalised advantage over all G rows (unbiased std, eps 1e-4), which the advantage hook still sees:
    nothing is recomputed on the kept ones. Ties go to the earlier row. `within="batch"` ranks the whole generation.
    """

    rate: float = param(0.5, low=0.0, high=1.0, ours=True)
    within: str = param("group", choices=("group", "batch"))

    math = "all but the (1 - {rate}) share of largest |A| per {within} out of the loss"

    def __call__(self, scored: Scored) -> Scored:
        size = grouped_normalise(scored.reward, scored.valid, scored, "group", "group", 1, 1e-4, "zero").abs()
        size = (size * 1e5).round()  # so that +A and -A tie whatever their rounding
        labels = labels_of(scored, self.within)
        keep = torch.zeros_like(scored.keep)
        for label in torch.unique(labels[scored.valid]):
            rows = ((labels == label) & scored.valid).nonzero().squeeze(1)
            count = max(1, int(len(rows) * (1 - self.rate) + 1e-9))  # 10 * (1 - 0.9) is 0.99... in floats
            keep[rows[size[rows].argsort(descending=True, stable=True)[:count]]] = True
        return scored.with_(keep=scored.keep & keep)
