"""Questions for a teacher without a run, what a run's generations hold, and counts of rows in a model's forwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.trainer import toy
from trl_variants import Scored, hook
from trl_variants.divergence import Divergence
from trl_variants.hooks.regularizers import Term
from trl_variants.teachers import Question

ROWS = (("a1", "23"), ("bc2", "d4e"), ("d", "0"), ("ef34", "77ab"))  # prompts and completions, all but one end


def encode(text: str) -> list[int]:
    return toy.tokenizer().encode(text, add_special_tokens=False)


def padded(rows: Sequence[list[int]], side: str) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    fill = [[toy.PAD] * (width - len(r)) for r in rows]
    marks = [[0] * (width - len(r)) for r in rows]
    order = (lambda a, b: a + b) if side == "left" else (lambda a, b: b + a)
    return (
        torch.tensor([order(f, r) for f, r in zip(fill, rows, strict=True)]),
        torch.tensor([order(m, [1] * len(r)) for m, r in zip(marks, rows, strict=True)]),
    )


def question(
    rows: Sequence[tuple[str, str]] = ROWS,
    *,
    distribution: bool = False,
    origin: Sequence[int] | None = None,
    columns: Sequence[dict] | None = None,
    group: Sequence[int] | None = None,
    correct: Sequence[bool] | None = None,
) -> Question:
    """What the trainer would ask about these rows; every completion but the last ends."""
    completions = [encode(c) + ([toy.EOS] if i < len(rows) - 1 else []) for i, (_, c) in enumerate(rows)]
    prompt_ids, prompt_mask = padded([encode(p) for p, _ in rows], "left")
    completion_ids, completion_mask = padded(completions, "right")
    right = torch.tensor([0.0] * len(rows) if correct is None else [float(c) for c in correct])
    scored = Scored(
        rewards=right.unsqueeze(1),
        weights=torch.ones(1),
        group=torch.zeros(len(rows), dtype=torch.long) if group is None else torch.tensor(group),
        origin=None if origin is None else torch.tensor(origin),
        texts={"prompts": [p for p, _ in rows], "completions": [c for _, c in rows]},
    )
    given = columns or [{}] * len(rows)
    return Question(
        batch={
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
        },
        rows=[{"prompt": p, **extra} for (p, _), extra in zip(rows, given, strict=True)],
        index=torch.arange(len(rows)),
        scored=scored,
        distribution=distribution,
    )


def by_hand(model: nn.Module, asked: Question, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(b, T) log-probs and (b, T, V) log-distributions, one row at a time without padding; 0 on padding."""
    ids, mask = asked.batch["completion_ids"], asked.batch["completion_mask"]
    logps, whole = torch.zeros(ids.shape), torch.zeros(*ids.shape, model.config.vocab_size)
    for i in range(len(ids)):
        prompt = asked.batch["prompt_ids"][i][asked.batch["prompt_mask"][i] > 0]
        completion = ids[i][mask[i] > 0]
        with torch.no_grad():
            logits = model(torch.cat([prompt, completion]).unsqueeze(0)).logits[0] / temperature
        here = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
        whole[i, : len(completion)] = here
        logps[i, : len(completion)] = here.gather(1, completion.unsqueeze(1)).squeeze(1)
    return logps, whole


def teacher_of(trainer: Any) -> Any:
    return trainer.teaching.teacher


def keep_generations(into: list[dict]) -> Callable[[Any], None]:
    """A `patch` for toy.train: copies of what each generation holds once it is scored, rows in the order sampled."""

    def patch(trainer: Any) -> None:
        inner = trainer.scored_generation

        def recorded(rows: list, generate: Callable) -> dict:
            output = inner(rows, generate)
            into.append({k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in output.items()})
            return output

        trainer.scored_generation = recorded

    return patch


@contextlib.contextmanager
def counted(module: nn.Module, when: Callable[[], bool] = lambda: True) -> Iterator[list[int]]:
    """The number of rows of each forward of a model's backbone, of those for which `when()` holds."""
    seen: list[int] = []

    def count(_module: Any, args: tuple, kwargs: dict) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if when():
            seen.append(len(ids))

    handle = module.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@hook("regularizers", "test_pull_wrong_rows")
@dataclass(frozen=True)
class PullWrongRows:
    """-lp |gap|, or the exact RKL, where the row is wrong: a gated reader of the teacher, for counting."""

    coef: float = 0.1
    exact: bool = False

    math = "{coef} * -lp |gap| on wrong rows"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"teacher_logps", "distribution"} if self.exact else {"teacher_logps"})

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        return (Divergence("rkl"),) if self.exact else ()

    def teacher_rows(self, scored: Scored) -> Tensor:
        return ~scored.correct

    def __call__(self, batch: Any) -> Term:
        value = batch.divergence(Divergence("rkl")) if self.exact else -batch.logps * batch.teacher_gap("old").abs()
        return Term(value * (1 - batch.correct.float()).unsqueeze(1), self.coef)
