"""Credit hooks: which tokens earned the advantage.

Signature: `(advantage, batch) -> advantage`, always 2-D: (B, 1) or (B, T) in, (B, 1) or (B, T) out, detached.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import TokenBatch
from .base import hook, param


@hook("credit", "discount")
@dataclass(frozen=True)
class Discount:
    """Multiplies by gamma^(tokens still to come), (B, T): late tokens are nearer to the outcome.

    The reward-to-go of REINFORCE with a terminal score (REINFORCE++, 2501.03262, has gamma = 1).
    """

    gamma: float = param(1.0, above=0.0, high=1.0)

    math = "A_t = gamma^(|y|-t) A, gamma = {gamma}"
    silent_at_zero = True

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        to_come = batch.mask.flip(1).cumsum(1).flip(1) - batch.mask
        return advantage * torch.as_tensor(self.gamma, dtype=batch.mask.dtype).pow(to_come)
