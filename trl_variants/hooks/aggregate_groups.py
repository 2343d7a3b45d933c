"""Aggregations by answers: their sum inside a prompt, and a batch loss that never goes below zero."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..records import TokenBatch, masked_mean
from .aggregate import SequenceMean
from .base import hook


@hook("aggregate", "prompt_sum")
@dataclass(frozen=True)
class PromptSum:
    """Mean over prompts of the sum over their answers of the token mean, (B, T) -> scalar: no 1/G. DCPO
    (2509.02333)."""

    math = "1/N_prompts sum_q sum_i 1/|y_i| sum_t"
    silent_at_zero = True

    def __call__(self, per_token: Tensor, batch: TokenBatch) -> Tensor:
        return masked_mean(per_token, batch.mask).sum() / max(batch.window.prompts, 1.0)


@hook("aggregate", "floored_sequence_mean")
@dataclass(frozen=True)
class FlooredSequenceMean(SequenceMean):
    """`sequence_mean`, (B, T) -> scalar, of a loss that is floored: L <- max(0, L) over the whole window, KL and
    other terms included. The loss clip of AGPO (2503.15952).

    A window whose loss is negative has no gradient at all. On-policy with centred advantages the loss is near 0 and
    its sign is noise, so about half of the windows are skipped.
    """

    math = "max(0, .) of 1/N_rows sum_i 1/|y_i| sum_t"
    scope = "window"
    silent_at_zero = True

    def bound(self, loss: Tensor) -> Tensor:
        """The loss the window is trained on."""
        return loss.clamp(min=0.0)
