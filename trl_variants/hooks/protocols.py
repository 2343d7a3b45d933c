"""Signatures of the seams whose first hooks come with later methods; the trainer calls all of them already.

prompts    (rows, services) -> rows           before generation, train only; `observe(scored)` afterwards
rollouts   (rollouts, services) -> rollouts   after generation, before rewards, train only; rows 1:1
learners   attach(trainer); observe(scored, output) -> extra batch entries; learn() -> metrics, once per optimizer step
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..records import Rollouts, Scored


class PromptsHook(Protocol):
    """Which prompts: replaces this process's data set rows; rows of a group stay adjacent.

    The decision must be the same on every process (groups may straddle them).
    """

    def __call__(self, rows: list[dict[str, Any]], services: Any) -> list[dict[str, Any]]: ...


class RolloutsHook(Protocol):
    """Which trajectories enter the group: may replace completions, mark their origin and where they count."""

    def __call__(self, rollouts: Rollouts, services: Any) -> Rollouts: ...


class Learner(Protocol):
    """What is learned beside the policy. Its loss, backward and optimizer are its own, never summed with the
    policy's."""

    def attach(self, trainer: Any) -> None: ...

    def observe(self, scored: Scored, output: dict[str, Any]) -> dict[str, Any] | None: ...

    def learn(self) -> dict[str, float] | None: ...
