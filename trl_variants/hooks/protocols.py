"""Signatures of the seams around generation and beside the loss. `services` is `trainer.services.Services`.

prompts    (rows, services) -> rows           before generation, train only; `observe(scored)` afterwards
rollouts   given(rows, services) -> [Given or None]   before generation, train only: these rows are not sampled, or
                                              sampled from where the given beginning ends
           (rollouts, services) -> rollouts   after generation, before rewards, train only; rows 1:1. May sample
                                              again and ask `services.verify` what a trajectory earns: each is
                                              rewarded once
           keeps(scored) -> (N,) bool         with `draws_prompts = True`: groups that stay; the trainer samples fresh
                                              prompts for the others, in rounds (trainer/resampling.py). One such hook a
                                              variant; the others run in every round. It takes its prompts from the
                                              data set itself, in the sampler's order, so that none is drawn twice a
                                              pass; prompts hooks see what was drawn
any seam   attachments(scored) -> {name: (N, ...)}   optional, for hooks of the loss: values that need whole groups or
                                              texts, once per generation; each row finds its own in batch.extra[name]
learners   attach(trainer, path) -> worker    once, when the trainer is built; see trl_variants/learners/__init__.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from ..records import Given, Rollouts, Scored


class PromptsHook(Protocol):
    """Which prompts: replaces this process's data set rows; rows of a group stay adjacent.

    The decision must be the same on every process (groups may straddle them).
    """

    def __call__(self, rows: list[dict[str, Any]], services: Any) -> list[dict[str, Any]]: ...


class RolloutsHook(Protocol):
    """Which trajectories enter the group: may replace completions, mark their origin and where they count.

    Any of the three methods is enough. What a row depends on must not depend on how rows are dealt to processes:
    `services.place(i)` and `services.draw(i, purpose)` do not.
    """

    def given(self, rows: list[dict[str, Any]], services: Any) -> list[Given | None]: ...

    def __call__(self, rollouts: Rollouts, services: Any) -> Rollouts: ...

    def keeps(self, scored: Scored) -> Tensor: ...


class Learner(Protocol):
    """What is learned beside the policy. `trl_variants.learners` says what its worker does, and when."""

    def attach(self, trainer: Any, path: str) -> Any: ...
