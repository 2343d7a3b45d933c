"""Credit hooks for tokens that were given. Signature as in `credit.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import TokenBatch
from .base import hook, param

PREFIX = 3


@hook("credit", "prefix_entropy")
@dataclass(frozen=True)
class PrefixEntropy:
    """Of the tokens of a given prefix (origin 3) only the `keep` share of highest entropy keep A, (B, T). Prefix-RFT
    (2507.01679).

    All n prefix tokens of the optimizer window are ranked together by the current policy's entropy, detached; the
    floor((1 - keep) n) lowest get 0, ties at the cut stay. Other tokens are left alone.
    """

    keep: float = param(0.2, above=0.0, high=1.0, ours=True)

    math = "A_t = 0 on prefix tokens outside the top {keep} by entropy"
    needs = frozenset({"entropy"})
    scope = "window"

    @torch.no_grad()
    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        entropy = batch.need("entropy")
        if batch.origin is None:
            return advantage
        given = (batch.origin == PREFIX) & (batch.mask > 0)
        ranked = entropy[given].sort().values
        if not len(ranked):
            return advantage
        lowest = ranked[min(int((1 - self.keep) * len(ranked) + 1e-9), len(ranked) - 1)]
        return advantage * (~given | (entropy >= lowest)).to(advantage)
