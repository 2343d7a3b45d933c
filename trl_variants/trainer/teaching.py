"""The run's teacher: asked once per generation, about the rows that some gate lets through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..records import Scored
from ..teachers import Question, Teacher
from .head import Head
from .scoring import scoring_needs
from .statistics import compare, hidden_states, loss_divergences, scoring_divergences

if TYPE_CHECKING:
    from .grpo import VariantGRPOTrainer


class Teaching:
    """Owns the teacher and the heads that turn stored hidden states into distributions.

    Writes into a generation: `teacher_logps`, `teacher_mask` (B, T) and, where a divergence is read, `teacher_hidden`
    (B, T, H) or `teacher_topk_ids` and `teacher_topk_logps` (B, T, K); the same for the anchor `ref`.
    """

    def __init__(self, trainer: VariantGRPOTrainer):
        self.trainer = trainer
        spec = trainer.variant.teacher
        self.teacher: Teacher | None = None if spec is None else spec.build(trainer)
        specs = (*loss_divergences(trainer.variant), *scoring_divergences(trainer.variant))
        self.distributions = {s.anchor for s in specs}
        self.heads: dict[str, Head] = {}

    def wanted_rows(self, scored: Scored) -> Tensor:
        """(N,) bool, rows whose teacher log-probs some hook reads; all of them where none says, so that its KL is logged."""
        readers = [h for _, h in self.trainer.variant.hooks() if h.needs & {"teacher_logps", "distribution"}]
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
        like = output["completion_mask"].float()
        output["teacher_logps"], output["teacher_mask"] = torch.zeros_like(like), torch.zeros_like(like)
        distribution = "teacher" in self.distributions
        if not len(chosen) and not (distribution or trainer.sharded):
            return
        asked = chosen if len(chosen) else index[:1] - first  # a sharded model, and the width of what it answers
        question = Question(
            batch=_rows_of(output, asked),
            rows=[rows[i] for i in asked.tolist()],
            index=index[asked],
            scored=scored,
            distribution=distribution,
        )
        answer = self.teacher.answer(question)  # type: ignore[union-attr]
        said = torch.ones_like(answer.logps) if answer.mask is None else answer.mask
        said = said.to(like) * question.batch["completion_mask"]
        said = said if len(chosen) else torch.zeros_like(said)
        output["teacher_mask"][asked] = said
        output["teacher_logps"][asked] = torch.where(said > 0, answer.logps.float(), 0.0)
        if not distribution:
            return
        if answer.hidden is not None:
            self.heads["teacher"] = self.teacher.head  # type: ignore[union-attr,assignment]
            _put(output, "teacher_hidden", asked, answer.hidden)
        elif answer.topk is not None:
            _put(output, "teacher_topk_ids", asked, answer.topk[0])
            _put(output, "teacher_topk_logps", asked, answer.topk[1])

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
            model = trainer.model
            with trainer.scoring(), hidden_states(trainer, model) as seen:
                trainer.logps_and_entropy(model, output, batch_size=trainer.args.per_device_train_batch_size)
                width = output["completion_ids"].shape[1]
                found = compare(trainer, torch.cat(seen)[:, -width - 1 : -1], output, wanted)
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


def _rows_of(output: dict, chosen: Tensor) -> dict[str, Any]:
    rows = len(output["completion_mask"])
    pick = lambda v: v[chosen] if isinstance(v, Tensor) and v.dim() and len(v) == rows else v  # noqa: E731
    return {name: pick(value) for name, value in output.items()}


def _put(output: dict, name: str, chosen: Tensor, value: Tensor) -> None:
    whole = value.new_zeros(len(output["completion_mask"]), *value.shape[1:])
    whole[chosen] = value
    output[name] = whole
