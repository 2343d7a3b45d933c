"""Credit hooks that weight parts of an answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import TokenBatch
from .base import hook, param


@hook("credit", "phase_weights")
@dataclass(frozen=True)
class PhaseWeights:
    """A_t = w_p(t) A, p(t) the phase of a token, (B, T). The part of HT-GRPO (2605.16842) that any policy can use.

    `by` "position" cuts the answer's own tokens into as many equal parts as there are weights; another name is a tensor
    of the batch with integer ids, (B, T): "turn", "segment", or one a hook attached. Ids past the last weight use the
    last one. `rescale` makes the mean weight over each answer's tokens 1. Weights are factors >= 0.
    """

    weights: tuple | list = param((2.0, 1.0), ours=True)
    by: str = "position"
    rescale: bool = True

    math = "A_t = w A, w = {weights} by {by}"
    silent_at_zero = True

    def __post_init__(self):
        good = all(
            isinstance(w, (int, float)) and not isinstance(w, bool) and 0 <= w < float("inf") for w in self.weights
        )
        if not self.weights or not good:
            raise VariantError(f"phase_weights.weights are numbers >= 0, one a phase, got {self.weights!r}")
        object.__setattr__(self, "weights", tuple(self.weights))

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        mask, phases = batch.mask, len(self.weights)
        count = mask.sum(1, keepdim=True)
        if self.by == "position":
            place = mask.cumsum(1) - 1
            phase = torch.div(place * phases, count.clamp(min=1.0), rounding_mode="floor")
        else:
            phase = batch.need(self.by)
        weight = torch.tensor(self.weights, dtype=mask.dtype, device=mask.device)[phase.long().clamp(0, phases - 1)]
        if self.rescale:
            total = (weight * mask).sum(1, keepdim=True)
            weight = weight * torch.where(total > 0, count / torch.where(total > 0, total, 1.0), 0.0)
        return advantage * weight
