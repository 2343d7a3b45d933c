"""The run's teacher: asked once per generation, about the rows that some gate lets through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import Scored
from ..teachers import Answer, Question, Teacher
from ..teachers.base import silence
from .head import Head
from .scoring import scoring_needs
from .statistics import compare, loss_divergences, scoring_divergences

if TYPE_CHECKING:
    from .grpo import VariantGRPOTrainer

Result = TypeVar("Result")


class Teaching:
    """Owns the teacher and the heads that turn stored hidden states into distributions.

    Writes into a generation: `teacher_logps`, `teacher_mask` (B, T) and, where a divergence is read, `teacher_hidden`
    (B, T, H) or `teacher_topk_ids` and `teacher_topk_logps` (B, T, K); the same for the anchor `ref`.
    """

    def __init__(self, trainer: VariantGRPOTrainer):
        self.trainer = trainer
        spec = trainer.variant.teacher
        specs = (*loss_divergences(trainer.variant), *scoring_divergences(trainer.variant))
        self.distributions = {s.anchor for s in specs}
        self.teacher: Teacher | None = self._together(lambda: None if spec is None else spec.build(trainer))
        if self.teacher is not None:
            self.teacher.require(tuple(s for s in specs if s.anchor == "teacher"))
        self.heads: dict[str, Head] = {}

    def wanted_rows(self, scored: Scored) -> Tensor:
        """(N,) bool, rows whose teacher log-probs some hook reads; every row where none does, for the logged KL."""
        readers = [
            h
            for _, h in self.trainer.variant.hooks()
            if "teacher_logps" in h.needs or any(d.anchor == "teacher" for d in h.divergences)
        ]
        some = torch.zeros_like(scored.keep)
        for h in readers:
            if h.teacher_rows is None:
                return torch.ones_like(some)
            some = some | h.teacher_rows(scored)
        return some if readers else torch.ones_like(some)

    def teach(self, rows: list[dict], output: dict, scored: Scored) -> Scored:
        """Asks the teacher about this process's rows; returns `scored` with what scoring hooks read."""
        if "ref" in self.distributions:
            self._hidden_of_reference(output)
        if self.teacher is not None:
            self._ask(rows, output, scored)
        return self._for_scoring(output, scored)

    def _ask(self, rows: list[dict], output: dict, scored: Scored) -> None:
        trainer = self.trainer
        first = trainer.accelerator.process_index * len(rows)
        index = torch.arange(first, first + len(rows), device=scored.group.device)
        wanted = self.wanted_rows(scored)[index] & (output["completion_mask"].sum(1) > 0)
        if trainer.has_images(output):  # image tensors do not divide by row
            wanted = torch.ones_like(wanted)
        chosen = wanted.nonzero().squeeze(1)
        trainer._metrics["train" if trainer.training else "eval"]["teacher/rows"].append(
            float(trainer.accelerator.reduce(wanted.sum().float(), reduction="sum")) / len(scored.group)
        )
        # a forward of a sharded model is collective, so a process without rows asks about one and forgets the answer
        asked = chosen if len(chosen) or not trainer.sharded else index[:1] - first
        question = Question(output, rows, index, scored, "teacher" in self.distributions).only(asked)
        answer = self._together(lambda: self.teacher.answer(question) if len(asked) else silence(question))  # type: ignore[union-attr]
        said = answer.said * question.batch["completion_mask"] * wanted[asked].unsqueeze(1)
        output["teacher_mask"] = _put(output, asked, said)
        logps = answer.logps.to(torch.promote_types(answer.logps.dtype, torch.float32))
        output["teacher_logps"] = _put(output, asked, logps.masked_fill(said == 0, 0.0))
        if question.distribution:
            self._keep_distribution(output, asked, answer)

    def _keep_distribution(self, output: dict, asked: Tensor, answer: Answer) -> None:
        """Writes what the divergences are computed from; zeros where nothing was asked."""
        teacher: Any = self.teacher
        if (head := teacher.head) is not None:
            self.heads["teacher"] = head
            width = (len(asked), answer.logps.shape[1], head.weight.shape[1])
            hidden = head.weight.new_zeros(width) if answer.hidden is None else answer.hidden
            output["teacher_hidden"] = _put(output, asked, hidden)
            return
        blank = answer.logps.new_zeros(*answer.logps.shape, teacher.entries)
        ids, logps = (blank.long(), blank) if answer.topk is None else answer.topk
        output["teacher_topk_ids"], output["teacher_topk_logps"] = _put(output, asked, ids), _put(output, asked, logps)

    def _together(self, function: Callable[[], Result]) -> Result:
        """Its result; what it raises on one process is raised on all of them, which would wait for ever otherwise."""
        result, raised = None, None
        try:
            result = function()
        except Exception as error:
            raised = error
            if self.trainer.world == 1:
                raise
        kind = VariantError if isinstance(raised, VariantError) else RuntimeError
        text = str(raised) if kind is VariantError else f"the teacher failed: {raised!r}"
        self.trainer.fail_together(None if raised is None else text, kind, raised)
        return result  # type: ignore[return-value]

    def _hidden_of_reference(self, output: dict) -> None:
        with self.trainer.reference() as model:
            _, output["ref_hidden"] = self.trainer.frozen_pass(model, output, True)
        self.heads["ref"] = self._reference_head()

    def _reference_head(self) -> Head:
        with self.trainer.reference() as model:
            return self.trainer.head_of(model).frozen()

    def _for_scoring(self, output: dict, scored: Scored) -> Scored:
        trainer, gather = self.trainer, self.trainer.gather_rows
        needs = scoring_needs(trainer.variant)
        tokens: dict[str, Any] = {}
        if self.teacher is not None and "teacher_logps" in needs:
            tokens = {name: gather(output[name], 0) for name in ("teacher_logps", "teacher_mask")}
        if wanted := scoring_divergences(trainer.variant):
            _, hidden = trainer.frozen_pass(trainer.model, output, True)
            with torch.no_grad():
                found = {} if hidden is None else compare(trainer, hidden, output, wanted)
            tokens |= {f"divergence/{key}": gather(value, 0) for key, value in found.items()}
            if self.teacher is not None:
                tokens["teacher_mask"] = gather(output["teacher_mask"], 0)
        return replace(scored, tokens={**scored.tokens, **tokens}) if tokens else scored

    def forget(self, output: dict) -> None:
        """Drops from a generation what only the scoring hooks read."""
        if not loss_divergences(self.trainer.variant):
            for name in [n for n in output if n.endswith(("_hidden", "_topk_ids", "_topk_logps"))]:
                del output[name]

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint must hold: moving weights, and heads copied for a generation that is still in use."""
        heads = {f"head/{anchor}/{k}": v for anchor, head in self.heads.items() for k, v in head.copied().items()}
        return heads if self.teacher is None else {**heads, **self.teacher.state_dict()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        if self.teacher is not None:
            self.teacher.load_state_dict({k: v for k, v in tensors.items() if not k.startswith("head/")})
        for anchor in self.distributions:
            head = self._reference_head() if anchor == "ref" else self.teacher.head  # type: ignore[union-attr]
            if head is not None:
                self.heads[anchor] = head.with_copied(
                    {k.split("/")[2]: v for k, v in tensors.items() if k.startswith(f"head/{anchor}/")}
                )


def _put(output: dict, chosen: Tensor, value: Tensor) -> Tensor:
    return value.new_zeros(len(output["completion_mask"]), *value.shape[1:]).index_copy(0, chosen, value)
