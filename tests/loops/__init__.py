"""Slow loop references and battery compositions of method families, one module each, found by `tests/references.py`.

A module registers a loop per hook with `@loop(seam, hook_name)` and may define `COMPOSED = {label: Variant}` (extra
cases for the battery), `STATES = {hook_name: state}` (a stateful hook's memory in the middle of a run),
`ABSOLUTE = {advantage hook_name: why}` (hooks that give signal to equal rewards or to a row alone by definition),
`BY_POSITION = {advantage or select hook_name: why}` (hooks to which the order of the rows inside a group matters),
`OVER_TOKENS = {clip hook_name: why}` (clips that reduce over the active tokens themselves)
and `NOT_ONE = {ratio hook_name: why}` (ratios that are not 1 on-policy).
Signatures (Table: rows x tokens, per-row values repeated; numbers are Python floats or 0-d tensors with gradient):

    rewards      (h, batch, reward: list[float]) -> list[float]
    select       (h, batch, reward) -> (enters the loss: list[bool], in the baseline: list[bool])
    advantage    (h, batch, reward) -> list[float] or Table
    credit       (h, advantage: Table, batch) -> Table
    ratio        (h, batch) -> Table
    clip         (h, log_ratio: Table, advantage: Table, batch, active: list[list[bool]]) -> Table
    weight       (h, batch, advantage: Table, log_ratio: Table) -> Table
    aggregate    (h, x: Table, batch, counted) -> scalar
    bound        (h, total loss) -> scalar, for aggregate hooks with a rule about the whole loss
    regularizers (h, variant, batch, log_ratio, active, state) -> scalar, coefficient included
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

LOOPS: dict[tuple[str, str], Callable] = {}


def loop(seam: str, name: str) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        assert (seam, name) not in LOOPS, f"two loop references for {seam} {name}"
        LOOPS[seam, name] = function
        return function

    return register


def modules() -> list[Any]:
    """Every family's module, imported."""
    return [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]


def collected(name: str) -> dict[str, Any]:
    """The union of a dict that modules may define, e.g. COMPOSED."""
    return {k: v for module in modules() for k, v in getattr(module, name, {}).items()}
