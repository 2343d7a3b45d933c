"""Answers about fixed traces, kept on disk: a trace is the same in every epoch and every run, its teacher too.

One sqlite file. An answer's name is a hash of who was asked (its weights, or a server's model) at which temperature,
the prompt's tokens and the completion's tokens. Rows the policy sampled are never kept.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from ..answers import AnswerFile
from .base import Answer, Around, Question, Teacher

if TYPE_CHECKING:
    from ..trainer.grpo import VariantGRPOTrainer

TRACE = 1  # the origin of rows a teacher wrote


def cached(trainer: VariantGRPOTrainer, inner: Teacher, path: str | None, identity: Any) -> Any:
    """`inner` with its answers about traces kept in the file `path`; `inner` itself without one.

    Args:
        identity: what the answers depend on apart from the tokens, as JSON can hold it.
    """
    return inner if path is None else Cached(trainer, inner, path, identity)


class Cached(Around):
    """Asks about the rows of traces that are not in the file, and about all others."""

    def __init__(self, trainer: VariantGRPOTrainer, inner: Teacher, path: str, identity: Any):
        super().__init__(inner)
        self.trainer = trainer
        self.who = json.dumps([identity, trainer.temperature], sort_keys=True)
        self.file = AnswerFile(path, "the teacher's")

    def answer(self, question: Question) -> Answer:
        traces = self._traces(question)
        if not traces:
            return self.inner.answer(question)
        names = {i: self._name(question, i) for i in traces}
        known = {name: load(blob) for name, blob in self.file.read(set(names.values())).items()}
        missing = torch.tensor(
            [i for i in range(len(question.rows)) if names.get(i) not in known],
            device=question.index.device,
            dtype=torch.long,
        )
        width = question.batch["completion_ids"].shape[1]
        rows: list[dict[str, Tensor]] = [known.get(names.get(i, ""), {}) for i in range(len(question.rows))]
        if len(missing):
            fresh = self.inner.answer(question.only(missing))
            for j, i in enumerate(missing.tolist()):
                rows[i] = _row(fresh, j, int(question.batch["completion_mask"][i].sum()))
            fresh_rows = {names[i]: rows[i] for i in missing.tolist() if i in names}
            self.file.write({name: _packed(row) for name, row in fresh_rows.items()})
        return _answer(rows, width, question.batch["completion_ids"].device)

    def _traces(self, question: Question) -> list[int]:
        """Rows that are traces from their first token to their last; none where more is asked than a file can hold."""
        if (
            question.distribution
            and not self.entries
            or self.trainer.sharded
            or self.trainer.has_images(question.batch)
        ):
            return []
        row, tokens = question.scored.origin, question.batch.get("origin")
        if tokens is not None:
            whole = ((tokens == TRACE) | (question.batch["completion_mask"] == 0)).all(1)
        elif row is not None:
            whole = row[question.index.to(row.device)] == TRACE
        else:
            return []
        return whole.nonzero().squeeze(1).tolist()

    def _name(self, question: Question, i: int) -> str:
        ids = [
            question.batch[f"{part}_ids"][i][question.batch[f"{part}_mask"][i] > 0].tolist()
            for part in ("prompt", "completion")
        ]
        return hashlib.sha256(f"{self.who}{json.dumps([ids, question.distribution])}".encode()).hexdigest()


def _packed(row: dict[str, Tensor]) -> bytes:
    return save({k: v.contiguous() for k, v in row.items()})


def _row(answer: Answer, j: int, length: int) -> dict[str, Tensor]:
    parts = {"logps": answer.logps, "said": answer.said}
    if answer.topk is not None:
        parts |= {"ids": answer.topk[0], "topk": answer.topk[1]}
    return {name: value[j, :length].detach().cpu() for name, value in parts.items()}


def _answer(rows: list[dict[str, Tensor]], width: int, device: torch.device) -> Answer:
    parts = {}
    for name, first in rows[0].items():
        whole = first.new_zeros(len(rows), width, *first.shape[1:])
        for i, row in enumerate(rows):
            whole[i, : len(row[name])] = row[name]
        parts[name] = whole.to(device)
    topk = (parts["ids"], parts["topk"]) if "ids" in parts else None
    return Answer(parts["logps"], parts["said"], topk=topk)


def of_weights(model: nn.Module) -> str:
    """A hash of what the weights are: names, shapes and up to 1024 values of each, the same on every device."""
    seen = hashlib.sha256()
    for name, p in model.named_parameters():
        flat = p.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 1024)].contiguous().cpu().view(torch.uint8)
        seen.update(f"{name} {tuple(p.shape)} {p.dtype}".encode())
        seen.update(sample.numpy().tobytes())
    return seen.hexdigest()
