"""`trl-variants check RECIPE.yaml`: what a run would stumble over, found without loading a model."""

from __future__ import annotations

from typing import Any

from ..errors import VariantError, did_you_mean
from . import recipe as recipes

HELP = """usage: trl-variants check RECIPE.yaml [--any.override VALUE ...]

Prints one line per finding and, where the recipe names its model, the memory a run needs. Exit code 2 where a finding
is an error.
"""


def run(words: list[str]) -> int:
    """Prints the findings of a recipe; returns 2 if any is an error, else 0."""
    if "-h" in words or "--help" in words:
        print(HELP)
        return 0
    from .memory import memory_lines

    path, overrides = recipes.take_recipe(words, "check")
    spec = recipes.load(path, overrides)
    chosen, found = findings(spec)
    for finding in found:
        print(finding)
    for line in memory_lines(spec, chosen):
        print(line)
    errors, warnings = (sum(finding.level == level for finding in found) for level in ("error", "warning"))
    name = chosen.name if chosen is not None else "TRL's own settings"
    print(f"{path}: {name}, {errors} errors, {warnings} warnings")
    return 2 if errors else 0


def findings(spec: recipes.RunSpec) -> tuple[Any, list[Any]]:
    """Returns the run's Variant (None where the recipe names none) and what `check` says about it.

    Raises VariantError for an unknown variant, hook, parameter or task.
    """
    from .. import check
    from ..trainer.config import variant_of
    from .precision import precision_findings
    from .warm_up import warm_up_of

    chosen = variant_of(spec.config)
    _known_task(spec)
    warm_up_of(spec)
    found = [] if chosen is None else list(check(chosen, spec.config))
    return chosen, [*found, *precision_findings(spec, chosen)]


def _known_task(spec: recipes.RunSpec) -> None:
    task = spec.recipe.task
    if task is None:
        if spec.recipe.dataset_name is None:
            raise VariantError("a recipe needs a task (task: arithmetic) or data (dataset_name and reward_funcs)")
        return
    name = task.get("name") if isinstance(task, dict) else task
    if not isinstance(name, str):
        raise VariantError("task must be a name, or a mapping with a name and the task's parameters")
    from ..tasks import task_names

    known = task_names()
    if name not in known:
        raise VariantError(f"unknown task {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}")
