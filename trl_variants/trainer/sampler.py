"""Prompt order as a function of (seed, epoch), so that a resumed run sees what the uninterrupted one would have
seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler


class ResumableRepeatSampler(Sampler):
    """TRL's RepeatSampler whose epoch e always draws the e-th permutation of its generator.

    An uninterrupted run gets TRL's order; a run that resumes in a later epoch gets the same one, where the stock
    sampler
    would start again with the first permutation.
    """

    def __init__(self, stock: Any, epoch: Callable[[], int]):
        self.stock = stock
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if getattr(self.stock, "shuffle", False) and getattr(self.stock, "seed", None) is not None:
            generator = torch.Generator().manual_seed(self.stock.seed)
            for _ in range(self.epoch()):
                torch.randperm(self.stock.num_samples, generator=generator)
            self.stock.generator = generator
        return iter(self.stock)

    def __len__(self) -> int:
        return len(self.stock)
