"""Numbers that change with training progress: usable wherever a hook takes a number.

A schedule is a function of `progress` in [0, 1] (optimizer steps done / optimizer steps planned), so it means the same
whatever the length of the run and needs no state to resume.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from .errors import VariantError, did_you_mean


@dataclass(frozen=True)
class Schedule:
    """`start` before `begin`, `end` after `until`, and a `shape` ("linear", "cosine", "step") between them."""

    start: float
    end: float
    begin: float = 0.0
    until: float = 1.0
    shape: str = "linear"

    def __post_init__(self):
        if self.shape not in SHAPES:
            raise VariantError(f"unknown schedule shape {self.shape!r}{did_you_mean(self.shape, SHAPES)}")
        for name in ("begin", "until"):  # start and end are checked against the hook's field
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise VariantError(f"a schedule's {name} must be a number, got {value!r}")
        if not 0.0 <= self.begin <= self.until <= 1.0:
            raise VariantError(f"a schedule needs 0 <= begin <= until <= 1, got {self.begin} and {self.until}")

    def __call__(self, progress: float) -> float:
        if progress >= self.until:
            return self.end
        if progress <= self.begin:
            return self.start
        return self.start + (self.end - self.start) * SHAPES[self.shape](
            (progress - self.begin) / (self.until - self.begin)
        )


SHAPES = {
    "linear": lambda x: x,
    "cosine": lambda x: 0.5 * (1.0 - math.cos(math.pi * x)),
    "step": lambda x: 0.0,
}


def at(hook: Any, progress: float) -> Any:
    """Returns `hook` with every scheduled field replaced by its number at `progress` (the hook itself if none is)."""
    if not is_dataclass(hook) or isinstance(hook, type):
        return hook
    moving = {f.name: v(progress) for f in fields(hook) if isinstance(v := getattr(hook, f.name), Schedule)}
    return replace(hook, **moving) if moving else hook


def parse(value: Any) -> Any:
    """Turns the YAML form `{schedule: {start: .., end: ..}}` into a Schedule; other values pass through."""
    if isinstance(value, dict) and set(value) == {"schedule"}:
        body = value["schedule"]
        known = {f.name for f in fields(Schedule)}
        if not isinstance(body, dict) or not {"start", "end"} <= set(body) <= known:
            raise VariantError(f"a schedule takes start, end, begin, until and shape, got {body!r}")
        return Schedule(**body)
    return value
