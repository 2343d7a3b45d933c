"""Metrics as mergeable parts: what a micro-batch measured can be summed over micro-batches and processes exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mean:
    """total / count, both scalars. Merging adds both."""

    total: Tensor
    count: Tensor

    @classmethod
    def over(cls, x: Tensor, mask: Tensor) -> Mean:
        """Mean over tokens of (B, T) under `mask`; of (B, 1) over the rows."""
        if x.shape[1] == 1:
            return cls(x.detach().sum(), torch.tensor(float(x.shape[0]), device=x.device))
        return cls((x.detach() * mask).sum(), mask.sum())

    def value(self) -> float:
        return float(self.total / self.count.clamp(min=1.0))


@dataclass(frozen=True)
class Extreme:
    """A scalar of which merging keeps one end; NaN when nothing was measured."""

    at: Tensor

    @classmethod
    def over_rows(cls, x: Tensor, mask: Tensor) -> Extreme:
        """The extreme over rows of the row means of (B, T) under `mask`, rows without tokens left out; (B, 1) as is."""
        rows = x.detach().squeeze(1) if x.shape[1] == 1 else (x.detach() * mask).sum(-1) / mask.sum(-1)
        rows = rows[~torch.isnan(rows)]
        return cls(cls._pick(rows) if len(rows) else torch.tensor(torch.nan, device=x.device))

    @staticmethod
    def _pick(x: Tensor) -> Tensor:
        raise NotImplementedError

    def value(self) -> float:
        return float(self.at)


class Min(Extreme):
    """Keeps the smallest."""

    @staticmethod
    def _pick(x: Tensor) -> Tensor:
        return x.min()


class Max(Extreme):
    """Keeps the largest."""

    @staticmethod
    def _pick(x: Tensor) -> Tensor:
        return x.max()


Metric = Mean | Extreme
