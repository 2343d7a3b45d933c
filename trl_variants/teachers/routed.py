"""Several teachers, one for each value of a data set column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..divergence import Divergence
from ..errors import VariantError
from ..hooks.base import hook, instantiate, param
from .base import Answer, Question, Teacher, require_topk, silence

if TYPE_CHECKING:
    from ..trainer.grpo import VariantGRPOTrainer
    from ..trainer.head import Head


@hook("teacher", "routed")
@dataclass(frozen=True)
class RoutedTeacher:
    """Each row asks the teacher its tag names; each teacher is asked once, about all of its rows.

    Args:
        teachers: tag -> teacher, such as {math: {model: {path: ...}}, code: {adapter: {name: code}}}.
        column: data set column that holds the tag.
        default: the teacher of rows with another tag; None: they have none.
    """

    teachers: dict = param()
    column: str = "teacher"
    default: Any = None

    def __post_init__(self):
        if not self.teachers:
            raise VariantError("routed.teachers is empty: give tag -> teacher, such as {math: {model: {path: ...}}}")
        named = {str(tag): instantiate("teacher", spec) for tag, spec in self.teachers.items()}
        object.__setattr__(self, "teachers", named)
        if self.default is not None:
            object.__setattr__(self, "default", instantiate("teacher", self.default))

    @property
    def math(self) -> str:
        listed = [f"{tag}: {spec.hook_name}" for tag, spec in self.teachers.items()]
        return f"pi_T by column {self.column} ({', '.join(listed)})"

    @property
    def needs(self) -> frozenset[str]:
        every = [*self.teachers.values(), *([] if self.default is None else [self.default])]
        return frozenset().union(*(spec.needs for spec in every))

    def build(self, trainer: VariantGRPOTrainer) -> Routed:
        return Routed(trainer, self)

    def tags(self, rows: list[dict[str, Any]]) -> list[str | None]:
        """The name of each row's teacher, "" for the default; None for a row without one."""
        for row in rows:
            if self.column not in row:
                raise VariantError(
                    f"teacher routed reads column {self.column!r}, and the data set has only "
                    f"{', '.join(sorted(row))}: set its column"
                )
        other = None if self.default is None else ""
        return [tag if (tag := str(row[self.column])) in self.teachers else other for row in rows]


class Routed:
    """The runtime of `RoutedTeacher`; the teachers in the order of their tags."""

    def __init__(self, trainer: VariantGRPOTrainer, spec: RoutedTeacher):
        self.trainer, self.spec = trainer, spec
        specs = {**({} if spec.default is None else {"": spec.default}), **spec.teachers}
        # one teacher under two tags is held once
        self.built: dict[str, Teacher] = {}
        for tag in sorted(specs):
            twin = next((t for t in self.built if specs[t] == specs[tag]), None)
            self.built[tag] = specs[tag].build(trainer) if twin is None else self.built[twin]

    @property
    def _each(self) -> dict[str, Teacher]:
        """Every teacher once, by its first tag."""
        return {next(t for t, other in self.built.items() if other is one): one for one in self.built.values()}

    @property
    def head(self) -> Head | None:
        return next(iter(self.built.values())).head

    @property
    def entries(self) -> int:
        return min(teacher.entries for teacher in self.built.values())

    def require(self, specs: tuple[Divergence, ...]) -> None:
        if not specs:
            return
        each = self._each
        for teacher in each.values():
            teacher.require(specs)
        heads = [teacher.head for teacher in each.values()]
        if all(head is None for head in heads):
            return require_topk(specs, self.entries, "the same top_k for every server")
        first = heads[0]
        # a head that is copied belongs to one teacher, even where its values are another's
        shared = first is not None and all(
            h is not None and not h.is_copy and h.weight is first.weight and h.bias is first.bias for h in heads
        )
        if len(each) > 1 and not shared:
            raise VariantError(
                f"divergence {specs[0].key} compares whole distributions and the routed teachers {', '.join(each)} "
                "have heads of their own: use adapters of one base, servers that answer with top_k, or a method that "
                "reads log-probs of the sampled tokens alone"
            )

    def answer(self, question: Question) -> Answer:
        tags = self.spec.tags(question.rows)
        parts: list[tuple[Tensor, Answer]] = []
        for teacher in self._each.values():
            mine = [i for i, t in enumerate(tags) if t is not None and self.built[t] is teacher]
            chosen = torch.tensor(mine, dtype=torch.long, device=question.index.device)
            if len(mine):
                parts.append((chosen, teacher.answer(question.only(chosen))))
            elif self.trainer.sharded:  # its forward is collective
                teacher.answer(question.only(chosen.new_zeros(1)))
        return _joined(question, parts)

    def after_step(self) -> None:
        for teacher in self._each.values():
            teacher.after_step()

    def state_dict(self) -> dict[str, Tensor]:
        return {f"routed/{tag}/{k}": v for tag, teacher in self._each.items() for k, v in teacher.state_dict().items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        for tag, teacher in self._each.items():
            prefix = f"routed/{tag}/"
            own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            teacher.load_state_dict(own)


def _joined(question: Question, parts: list[tuple[Tensor, Answer]]) -> Answer:
    if not parts:
        return silence(question)
    entries = min((a.topk[0].shape[-1] for _, a in parts if a.topk is not None), default=0)
    spread = [
        (a if a.topk is None else replace(a, topk=(a.topk[0][..., :entries], a.topk[1][..., :entries]))).spread(
            chosen, len(question.rows)
        )
        for chosen, a in parts
    ]
    whole = spread[0]
    for other in spread[1:]:  # rows are disjoint and zero elsewhere, so that sums put them together
        whole = Answer(
            whole.logps + other.logps,
            whole.said + other.said,
            None if whole.hidden is None or other.hidden is None else whole.hidden + other.hidden,
            None
            if whole.topk is None or other.topk is None
            else (whole.topk[0] + other.topk[0], whole.topk[1] + other.topk[1]),
        )
    return whole
