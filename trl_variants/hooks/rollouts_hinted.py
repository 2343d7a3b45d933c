"""Rollouts hooks that sample again where a whole group failed. Signature: `(rollouts, services) -> rollouts`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..errors import VariantError
from ..records import Rollouts
from ..teachers.privileged import TEMPLATE, PrivilegedTeacher
from .base import hook, param


@hook("rollouts", "hinted")
@dataclass(frozen=True)
class HintedRollouts:
    """Where no completion of a group is right, the policy tries again, shown the solution. HDPO (2603.23871).

    Right answers replace failed ones, written under the plain prompt: origin (N,) 1, out of the baseline, so that the
    policy loss gets no gradient from them; a term over rows of origin 1 learns from them. The failed rows they replace
    had advantage 0, their group having no spread, so the policy loss loses nothing. Where the hint does not help, or a
    row has none, nothing changes. Metrics: hinted/groups, hinted/kept.

    Args:
        column: data set column with the solution. template: with {prompt} and {context}, as the privileged teacher's.
        per_group: how many of the group's rows are tried again, None: all.
    """

    column: str = "solution"
    per_group: int | None = param(None, low=1, ours=True)
    template: str = param(TEMPLATE, ours=True)

    needs = frozenset({"extra_rollouts"})
    math = "failed groups again with column {column} in the prompt; right answers replace failed rows"

    def __call__(self, rollouts: Rollouts, services: Any) -> Rollouts:
        rows = services.rows
        right = [ok for _, ok in services.verify(rollouts)]
        failed = [not any(group) for group in services.in_groups(right)]
        tried = [
            i
            for i, row in enumerate(rows)
            if failed[i] and self._hint(row) and (self.per_group is None or services.place(i)[1] < self.per_group)
        ]
        asking = PrivilegedTeacher(column=self.column, template=self.template)
        prompts = [asking.prompt(rows[i]["prompt"], str(self._hint(rows[i]))) for i in tried]
        answers, _ = services.generate(services.tokenize(prompts) if prompts else [])
        ids = list(rollouts.completion_ids)
        for i, answer in zip(tried, answers, strict=True):
            ids[i] = list(answer) or ids[i]
        again = replace(rollouts, completion_ids=ids)
        kept = {i for i, (_, ok) in zip(tried, services.verify(again, tried), strict=True) if ok}
        services.log("hinted/groups", sum(services.place(i)[1] == 0 for i, f in enumerate(failed) if f))
        services.log("hinted/kept", len(kept))
        keep = lambda old, new: [new if i in kept else x for i, x in enumerate(old)]  # noqa: E731
        return replace(
            rollouts,
            completion_ids=[ids[i] if i in kept else row for i, row in enumerate(rollouts.completion_ids)],
            mask=None
            if rollouts.mask is None
            else [[1] * len(ids[i]) if i in kept else m for i, m in enumerate(rollouts.mask)],
            logps=None if rollouts.logps is None else keep(rollouts.logps, None),
            origin=keep(rollouts.origin, 1),
            in_baseline=keep(rollouts.in_baseline, False),
        )

    def _hint(self, row: dict[str, Any]) -> Any:
        if self.column not in row:
            raise VariantError(
                f"hinted reads column {self.column!r}, and the data set has only {', '.join(sorted(row))}: "
                "set its `column`"
            )
        return row[self.column]
