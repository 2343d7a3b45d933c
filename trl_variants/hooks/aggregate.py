"""Aggregate hooks: how per-token values become one number. Unit (what counts as one) x span (over what it is counted).

Signature: `(per_token, batch) -> scalar`, the share of these rows in the window's value: summed over the micro-batches
of all processes it is the value. Denominators come from `batch` (window totals), never from what is local, so the sum
does not depend on the split. A per-row (B, 1) value stands for that value on each of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..errors import VariantError
from ..records import TokenBatch, masked_mean
from .base import hook, param


@hook("aggregate", "token_mean")
@dataclass(frozen=True)
class TokenMean:
    """Every token counts the same: sum_it x / number of tokens, (B, T) -> scalar. DAPO (2503.14476) eq. 8.

    `span`: "window" (exact), "generation" (TRL's dapo/cispo/vespo: tokens of the generation batch, scaled to a window)
    or "micro-batch" (TRL's bnpo: mean of local means, depends on the split).
    """

    span: str = param("window", choices=("window", "generation", "micro-batch"))

    math = "1/N_tokens[{span}] sum_i sum_t"
    silent_at_zero = True

    def __call__(self, per_token: Tensor, batch: TokenBatch) -> Tensor:
        per_row = (per_token * batch.mask).sum(-1)
        if self.span == "window":
            return per_row.sum() / max(batch.window.tokens, 1.0)
        if self.span == "generation":
            return (per_row / batch.need("generation_tokens").clamp(min=1.0)).sum()
        return (per_row / batch.need("micro_tokens").clamp(min=1.0)).sum() / batch.window.micro_batches


@hook("aggregate", "sequence_mean")
@dataclass(frozen=True)
class SequenceMean:
    """Every row counts the same: mean over rows of the mean over its tokens. GRPO (2402.03300) eq. 3.

    A sequence-level objective, (B, 1), is averaged over rows. `rows`: "all" divides by every row, an empty one
    included; "live" by the rows that have a token in the loss.
    """

    rows: str = param("all", choices=("all", "live"))

    math = "1/N_rows sum_i 1/|y_i| sum_t"
    silent_at_zero = True

    def __call__(self, per_token: Tensor, batch: TokenBatch) -> Tensor:
        rows = batch.window.rows if self.rows == "all" else batch.window.live_rows
        return masked_mean(per_token, batch.mask).sum() / max(rows, 1.0)


@hook("aggregate", "sequence_sum")
@dataclass(frozen=True)
class SequenceSum:
    """Mean over rows of the sum over tokens, (B, T) -> scalar: the whole answer as one action (REINFORCE, RLOO),
    LUSPO (2602.05261)."""

    math = "1/N_rows sum_i sum_t"
    silent_at_zero = True

    def __call__(self, per_token: Tensor, batch: TokenBatch) -> Tensor:
        return (per_token * batch.mask).sum() / max(batch.window.rows, 1.0)


@hook("aggregate", "constant")
@dataclass(frozen=True)
class ConstantLength:
    """sum_it x / (number of rows * L), (B, T) -> scalar. Dr. GRPO (2503.20783).

    L is constant; default: the run's max_completion_length.
    """

    length: int | None = param(None, above=0)

    math = "1/(N_rows L) sum_i sum_t"
    silent_at_zero = True

    def __call__(self, per_token: Tensor, batch: TokenBatch) -> Tensor:
        length = self.length or batch.run.max_completion_length
        if not length:
            raise VariantError(
                "constant aggregation needs a length: set aggregate.constant.length or max_completion_length"
            )
        return (per_token * batch.mask).sum() / (max(batch.window.rows, 1.0) * length)


@hook("aggregate", "prompt_mean")
@dataclass(frozen=True)
class PromptMean:
    """Every prompt counts the same: mean over groups of the token mean inside the group, (B, T) -> scalar.

    DAPO (2503.14476) eq. 8 as printed.
    """

    math = "1/N_prompts sum_q 1/|tokens of q| sum_i,t"
    silent_at_zero = True

    def __call__(self, per_token: Tensor, batch: TokenBatch) -> Tensor:
        per_row = (per_token * batch.mask).sum(-1)
        return (per_row / batch.need("prompt_tokens").clamp(min=1.0)).sum() / max(batch.window.prompts, 1.0)
