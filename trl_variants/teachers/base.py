"""What a teacher is asked and what it answers.

Shapes: b rows of this process, T completion tokens, H the teacher's hidden size, K entries of its distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from ..records import Scored
    from ..trainer.head import Head


@dataclass(frozen=True)
class Question:
    """Rows of a generation, on this process, after their rewards are known.

    Args:
        batch: `prompt_ids`, `prompt_mask` (b, P), `completion_ids`, `completion_mask` (b, T), image tensors where there are
            any, `ref_per_token_logps` where TRL computed them.
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


class Teacher(Protocol):
    """Bound to one trainer. Collective where its model is sharded: every process asks, with no rows if need be."""

    def answer(self, question: Question) -> Answer: ...

    @property
    def head(self) -> Head | None:
        """What turns `Answer.hidden` into logits, as it was when it answered; None for one that gives `topk`."""
        ...

    def after_step(self) -> None:
        """Called when the optimizer has moved the policy."""

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint must hold; empty for a frozen teacher."""
        ...

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None: ...


class Stateless:
    """The parts of a `Teacher` that a frozen one does not need."""

    head: Any = None

    def after_step(self) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        pass
