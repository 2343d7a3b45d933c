"""Aggregates that divide by a fixed length. Signature as in `aggregate.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import VariantError
from ..records import TokenBatch, masked_mean
from .base import hook, param


def _length(h: Any, batch: TokenBatch) -> int:
    length = h.length or batch.run.max_completion_length
    if not length:
        name = h.hook_name
        raise VariantError(f"{name} aggregation needs a length: set {name}.length or max_completion_length")
    return length


@hook("aggregate", "sequence_constant")
@dataclass(frozen=True)
class SequenceConstant:
    """One term per answer over a constant length: sum_i x_i / (N_rows L), (B, 1) -> scalar. TIC-GRPO (2508.02833).

    Of a per-token value, (B, T), x_i is the answer's mean. L is constant; default: the run's max_completion_length.
    """

    length: int | None = param(None, above=0)

    math = "1/(N_rows L) sum_i 1/|y_i| sum_t"
    silent_at_zero = True

    def __call__(self, per_token: Tensor, batch: TokenBatch) -> Tensor:
        return masked_mean(per_token, batch.mask).sum() / (max(batch.window.rows, 1.0) * _length(self, batch))


@hook("aggregate", "prompt_constant")
@dataclass(frozen=True)
class PromptConstant:
    """sum_it x / (number of prompts * G * L), (B, T) -> scalar. WAPO (2606.16154).

    Counts the prompts that have a token in the loss, so a group whose rows all left it does not dilute the others. G is
    the run's group size, L constant; default: the run's max_completion_length.
    """

    length: int | None = param(None, above=0)

    math = "1/(N_prompts G L) sum_i sum_t"
    silent_at_zero = True

    def __call__(self, per_token: Tensor, batch: TokenBatch) -> Tensor:
        answers = max(batch.window.prompts, 1.0) * max(batch.run.group_size, 1)
        return (per_token * batch.mask).sum() / (answers * _length(self, batch))
