"""A teacher that is shown more than the policy: the same completion after another prompt."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import VariantError
from ..hooks.base import hook, instantiate, param
from .base import Answer, Around, Question, silence

if TYPE_CHECKING:
    from ..records import Scored
    from ..trainer.grpo import VariantGRPOTrainer

TEMPLATE = (
    "{prompt}\n\nHere is a solution to this problem:\n\n{context}\n\n"
    "With this solution in mind, answer the problem in your own words."
)


@hook("teacher", "privileged")
@dataclass(frozen=True)
class PrivilegedTeacher:
    """`of` with a context the policy does not see, scoring the policy's own completions.

    OPSD (2601.18734) shows it the solution, SDPO (2601.20802) a sibling's success or feedback. Completions are aligned
    by their last T positions. A row without a context has no teacher there.

    Args:
        of: the teacher that reads it: "live", "base", "ema", {"adapter": ...}, {"model": ...}.
        column: data set column with the context, such as a solution or an environment's feedback; read where there is
            no sibling.
        siblings: "right": a correct completion of the same group, never the row itself; "any": a random other one where
            no completion of the group is correct; "none".
        pick: which of several: the "first" of the group or a "random" one.
        reach: which tokens of a completion it speaks of: "all", or, where it was shown a wrong sibling, as many first
            ones as that "sibling" has (SC-GRPO, 2606.18810).
        template: with {prompt} and {context}; in a conversation it replaces the last user message.
    """

    of: Any = "live"
    column: str | None = "solution"
    siblings: str = param("none", choices=("none", "right", "any"))
    pick: str = param("first", choices=("first", "random"))
    reach: str = param("all", choices=("all", "sibling"))
    template: str = TEMPLATE

    def __post_init__(self):
        object.__setattr__(self, "of", instantiate("teacher", self.of))
        for field in ("{prompt}", "{context}"):
            if field not in self.template:
                raise VariantError(f"privileged.template has no {field}")
        if self.column is None and self.siblings == "none":
            raise VariantError("privileged needs a context: name a data set column, or siblings: right")

    @property
    def math(self) -> str:
        return f"pi_T = {self.of.hook_name} shown " + (
            f"column {self.column}" if self.siblings == "none" else "a sibling"
        )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"texts"}) if self.siblings != "none" else frozenset()

    def build(self, trainer: VariantGRPOTrainer) -> Privileged:
        return Privileged(trainer, self)

    def contexts(self, question: Question, seed: int) -> list[str | None]:
        """The b contexts; None where there is none. The choice depends on seed, step and row, not on the process."""
        return [
            self._context(i, row, question, seed) for i, row in zip(question.index.tolist(), question.rows, strict=True)
        ]

    def sibling(self, i: int, scored: Scored, seed: int) -> int | None:
        """The row of `scored` whose completion row i is shown, if any."""
        if self.siblings == "none":
            return None
        others = ((scored.group == scored.group[i]) & ~torch.isnan(scored.reward)).nonzero().squeeze(1).tolist()
        right = [j for j in others if scored.correct[j]]
        found = [j for j in right if j != i]
        if self.siblings == "any" and not right:
            found = [j for j in others if j != i]
        if not found:
            return None
        return found[0] if self.pick == "first" else random.Random(f"{seed}/{scored.step}/{i}").choice(found)

    def within(self, question: Question, seed: int) -> Tensor:
        """(b, T) bool, tokens inside `reach`."""
        mask = question.batch["completion_mask"]
        longest = [mask.shape[1]] * len(mask)
        for row, i in enumerate(question.index.tolist() if self.reach == "sibling" else []):
            j = self.sibling(i, question.scored, seed)
            if j is not None and not question.scored.correct[j]:
                longest[row] = int(question.scored.fact("length")[j])
        return mask.cumsum(1) <= torch.tensor(longest, device=mask.device).unsqueeze(1)

    def _context(self, i: int, row: dict[str, Any], question: Question, seed: int) -> str | None:
        j = self.sibling(i, question.scored, seed)
        if j is not None:
            return str(question.scored.texts["completions"][j])
        if self.column is None:
            return None
        if self.column not in row:
            raise VariantError(
                f"teacher privileged reads column {self.column!r}, and the data set has only {', '.join(sorted(row))}: "
                "set its column, or siblings: right"
            )
        return None if row[self.column] in (None, "") else str(row[self.column])

    def prompt(self, plain: Any, context: str) -> Any:
        """The prompt with the context, as text or as the conversation it came as."""
        if isinstance(plain, str):
            return self.template.format(prompt=plain, context=context)
        last = max(i for i, message in enumerate(plain) if message["role"] == "user")
        shown = self.template.format(prompt=plain[last]["content"], context=context)
        return [{**m, "content": shown} if i == last else m for i, m in enumerate(plain)]


class Privileged(Around):
    """The runtime of `PrivilegedTeacher`: other prompts for the inner teacher, and only rows that have a context."""

    def __init__(self, trainer: VariantGRPOTrainer, spec: PrivilegedTeacher):
        super().__init__(spec.of.build(trainer))
        self.trainer, self.spec = trainer, spec

    def answer(self, question: Question) -> Answer:
        contexts = self.spec.contexts(question, self.trainer.args.seed)
        told = torch.tensor([c is not None for c in contexts], device=question.index.device)
        # a sharded model is asked on every process, and image tensors do not divide by row
        every = self.trainer.sharded or self.trainer.has_images(question.batch)
        asked = (told | every).nonzero().squeeze(1)
        if not len(asked):
            return silence(question)
        part = question.only(asked)
        prompts = [
            row["prompt"] if contexts[i] is None else self.spec.prompt(row["prompt"], contexts[i])
            for i, row in zip(asked.tolist(), part.rows, strict=True)
        ]
        ids, mask = self.trainer.tokenized(prompts)
        batch = {
            **{name: value for name, value in part.batch.items() if not name.startswith("ref_")},  # another prompt's
            "prompt_ids": ids,
            "prompt_mask": mask,
        }
        shown = [{**row, "prompt": prompt} for row, prompt in zip(part.rows, prompts, strict=True)]
        answer = self.inner.answer(replace(part, batch=batch, rows=shown)).spread(asked, len(contexts))
        told = told.unsqueeze(1) & self.spec.within(question, self.trainer.args.seed)
        return replace(answer, mask=answer.said * told.to(answer.logps))
