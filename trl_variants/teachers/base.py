"""What a teacher is asked and what it answers.

Shapes: b rows of this process, T completion tokens, H the teacher's hidden size, K entries of its distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..errors import VariantError

if TYPE_CHECKING:
    from ..divergence import Divergence
    from ..records import Scored
    from ..trainer.head import Head


@dataclass(frozen=True)
class Question:
    """Rows of a generation, on this process, after their rewards are known.

    Args:
        batch: `prompt_ids`, `prompt_mask` (b, P), `completion_ids`, `completion_mask` (b, T), image tensors where there
            are any, `ref_per_token_logps` where TRL computed them.
        rows: the b data set rows.
        index: (b,) their places in `scored`.
        scored: the whole generation, all processes.
        distribution: whether the next-token distributions are wanted too.
    """

    batch: Mapping[str, Any]
    rows: list[dict[str, Any]]
    index: Tensor
    scored: Scored
    distribution: bool = False

    def only(self, chosen: Tensor) -> Question:
        """The question about some of its rows, (c,) indices."""
        return replace(
            self,
            batch=rows_of(self.batch, chosen),
            rows=[self.rows[i] for i in chosen.tolist()],
            index=self.index[chosen.to(self.index.device)],
        )


def rows_of(batch: Mapping[str, Any], chosen: Tensor) -> dict[str, Any]:
    """Some rows of every tensor that has one entry for each row of `completion_mask`."""
    rows = len(batch["completion_mask"])
    pick = lambda v: v[chosen] if isinstance(v, Tensor) and v.dim() and len(v) == rows else v  # noqa: E731
    return {name: pick(value) for name, value in batch.items()}


@dataclass(frozen=True)
class Answer:
    """(b, T) log-probs of the completion tokens at the run's temperature, and where they hold.

    Args:
        logps: (b, T); what stands where `mask` is 0 is never read.
        mask: (b, T) 1 where the teacher has something to say; None: everywhere.
        hidden: (b, T, H) what the teacher's head turns into its distribution, where asked for.
        topk: ids and log-probs (b, T, K) of the teacher's most likely entries, where it knows no more.
    """

    logps: Tensor
    mask: Tensor | None = None
    hidden: Tensor | None = None
    topk: tuple[Tensor, Tensor] | None = None

    @property
    def said(self) -> Tensor:
        """(b, T) the mask, whether it was given or not."""
        return torch.ones_like(self.logps) if self.mask is None else self.mask.to(self.logps)

    def spread(self, chosen: Tensor, rows: int) -> Answer:
        """The answer for `rows` rows of which these are `chosen`; the others are silent."""

        def put(v: Tensor) -> Tensor:
            return v.new_zeros(rows, *v.shape[1:]).index_copy(0, chosen.to(v.device), v)

        return Answer(
            put(self.logps),
            put(self.said),
            None if self.hidden is None else put(self.hidden),
            None if self.topk is None else (put(self.topk[0]), put(self.topk[1])),
        )


def silence(question: Question) -> Answer:
    """The answer of a teacher that has nothing to say."""
    none = torch.zeros_like(question.batch["completion_mask"], dtype=torch.float)
    return Answer(none, none)


class Teacher(Protocol):
    """Bound to one trainer. Collective where its model is sharded: every process asks, with no rows if need be."""

    def answer(self, question: Question) -> Answer: ...

    @property
    def head(self) -> Head | None:
        """What turns `Answer.hidden` into logits, as it was when it answered; None for one that gives `topk`."""
        ...

    @property
    def entries(self) -> int:
        """K of the `topk` it answers with; 0 for one with a head."""
        ...

    def require(self, specs: tuple[Divergence, ...]) -> None:
        """Raises VariantError where it cannot be compared in this way; asked once, before anything is generated."""

    def after_step(self) -> None:
        """Called when the optimizer has moved the policy."""

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint must hold; empty for a frozen teacher."""
        ...

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None: ...


class Stateless:
    """The parts of a `Teacher` that a frozen one does not need."""

    head: Any = None
    entries: int = 0

    def require(self, specs: tuple[Divergence, ...]) -> None:
        pass

    def after_step(self) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        pass


class Around:
    """A teacher that asks another one: what it does not say itself is the other's."""

    def __init__(self, inner: Teacher):
        self.inner = inner

    @property
    def head(self) -> Head | None:
        return self.inner.head

    @property
    def entries(self) -> int:
        return self.inner.entries

    def require(self, specs: tuple[Divergence, ...]) -> None:
        self.inner.require(specs)

    def after_step(self) -> None:
        self.inner.after_step()

    def state_dict(self) -> dict[str, Tensor]:
        return self.inner.state_dict()

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.inner.load_state_dict(tensors)


def require_topk(specs: tuple[Divergence, ...], entries: int, how: str) -> None:
    """Raises VariantError unless the teacher's own top `entries` are enough for every divergence.

    Args:
        how: what sets their number, for the message.
    """
    for spec in specs:
        if spec.top_k is None or spec.support != "teacher" or spec.top_k > entries:
            wanted = "every entry" if spec.top_k is None else f"the {spec.support}'s top {spec.top_k}"
            raise VariantError(
                f"divergence {spec.key} compares {wanted} of the distribution and this teacher answers with its own "
                f"top {entries}: set {how}, and top_k at most that with support 'teacher' in the method's hook"
            )
