"""Which reward function scores which row, and when: domains and phases of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..errors import VariantError, did_you_mean
from .base import Reward, column

Function = Callable[..., "Sequence[float | None]"]
_OF_THE_RUN = ("trainer_state", "log_metric", "environments")


class DomainReward(Reward):
    """Each row is scored by the function of its domain. QwQ-32B, GLM-4.5V (2507.01006).

    functions: domain -> reward function. column: the data set column that names the domain. phases: pairs (steps,
    domains), one after the other, the last one open-ended; a domain that is not in the phase gets None, so that its
    group carries no signal: the data's mix should change with it. Without phases every domain is scored.

    Scores of different domains share no scale: normalise within groups.
    """

    def __init__(
        self,
        functions: Mapping[str, Function],
        column: str = "domain",
        phases: Sequence[tuple[int, Collection[str]]] = (),
    ):
        super().__init__("domain_reward")
        self.functions, self.column, self.phases = dict(functions), column, list(phases)
        for _, domains in self.phases:
            for name in domains:
                self._function(name)

    def _function(self, domain: str) -> Function:
        if domain not in self.functions:
            raise VariantError(
                f"no reward function for domain {domain!r}{did_you_mean(domain, self.functions)}; "
                f"there are {', '.join(self.functions)}"
            )
        return self.functions[domain]

    def enabled(self, step: int) -> Collection[str]:
        """The domains that are scored at an optimizer step."""
        for steps, domains in self.phases:
            if step < steps:
                return domains
            step -= steps
        return self.phases[-1][1] if self.phases else self.functions

    def __call__(
        self, prompts: Any, completions: list[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        names = [str(n) for n in column(columns, self.column)]
        state = columns.get("trainer_state")
        enabled = self.enabled(state.global_step if state is not None else 0)
        scores: list[float | None] = [None] * len(names)
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
        for domain in dict.fromkeys(names):
            function = self._function(domain)
            rows = [i for i, n in enumerate(names) if n == domain]
            if domain in enabled:
                for i, value in zip(rows, function(**_of_rows(given, rows, len(names))), strict=True):
                    scores[i] = value
        return scores


def _of_rows(given: Mapping[str, Any], rows: Sequence[int], count: int) -> dict[str, Any]:
    per_row = {
        k: [v[i] for i in rows]
        for k, v in given.items()
        if k not in _OF_THE_RUN and isinstance(v, (list, tuple)) and len(v) == count
    }
    return per_row | {k: given[k] for k in _OF_THE_RUN if k in given and k not in per_row}


class DuringSteps(Reward):
    """A reward function that applies from step `first` to `last` (exclusive), or in the last `final` steps of the run.

    Outside it returns None. DeepSeek-R1 (2501.12948): preference reward models in the last 400 of 1700 steps.
    """

    def __init__(self, function: Function, first: int = 0, last: int | None = None, final: int | None = None):
        super().__init__(getattr(function, "__name__", type(function).__name__))
        self.function, self.first, self.last, self.final = function, first, last, final

    def applies(self, step: int, max_steps: int) -> bool:
        """Whether the function scores at this step of a run of `max_steps`."""
        if self.final is not None and step < max_steps - self.final:
            return False
        return step >= self.first and (self.last is None or step < self.last)

    def __call__(
        self, prompts: Any, completions: list[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        state = columns.get("trainer_state")
        if state is None:
            raise VariantError("a reward that depends on the step needs the trainer's `trainer_state`")
        if not self.applies(state.global_step, state.max_steps):
            return [None] * len(completions)
        return list(self.function(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns))
