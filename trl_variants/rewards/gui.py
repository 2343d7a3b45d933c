"""Rewards for one step on a screen: action, place, and a moderate thinking length; for any structured action."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from .base import Reward, column, texts
from .reasoning import reasoning, think_answer_reward
from .text import tagged_answer

_ACTION = re.compile(r"""["']action["']\s*:\s*["']\s*([\w ]+?)\s*["']""")
_NUMBERS = re.compile(r"[\[(]\s*(-?\d+(?:\.\d+)?(?:\s*,\s*-?\d+(?:\.\d+)?)+)\s*[\])]")


def action_of(text: str) -> tuple[str | None, list[float]]:
    """(action type, coordinates) of {'action': 'click', 'coordinate': [x, y]} in the <answer> part, or the text."""
    answer = tagged_answer(text)
    answer = text if answer is None else answer
    name, numbers = _ACTION.search(answer), _NUMBERS.search(answer)
    return (
        name[1].lower() if name else None,
        [float(x) for x in numbers[1].split(",")] if numbers else [],
    )


class ActionReward(Reward):
    """Format + action type + coordinate, each 0 or 1. UI-R1 (2503.21620) 3.2.

    The coordinate counts where the type is right and (the action is no click, or the point, scaled and cut to
    integers, lies in the box, borders included). Columns: `gt_action`, `gt_bbox` (x1, y1, x2, y2), optional `scale`
    (factor of x, factor of y).
    """

    def __init__(self):
        super().__init__("action_reward")

    def __call__(
        self, prompts: Any, completions: list[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        actions, boxes = column(columns, "gt_action"), column(columns, "gt_bbox")
        scales = columns.get("scale") or [None] * len(actions)
        formats = think_answer_reward(prompts, completions)
        rows = zip(texts(completions), formats, actions, boxes, scales, strict=True)
        return [float(f or 0.0) + self.action(text, a, b, s or (1.0, 1.0)) for text, f, a, b, s in rows]

    def action(self, text: str, gold: str, box: Sequence[float] | None, scale: Sequence[float]) -> float:
        name, numbers = action_of(text)
        if name != str(gold).lower():
            return 0.0
        if name != "click":
            return 2.0
        point = [int(x * s) for x, s in zip(numbers[:2], scale, strict=False)]
        return 1.0 + float(len(point) == 2 and box is not None and inside(point, box))


def inside(point: Sequence[float], box: Sequence[float]) -> bool:
    """Whether (x, y) lies in (x1, y1, x2, y2), borders included."""
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]


def centre_reward(point: Sequence[float], box: Sequence[float], alpha: float = 4.0) -> float:
    """1 + exp(-alpha d^2) inside the box, 0 outside; d is the Chebyshev distance to the centre in half sizes."""
    if not inside(point, box):
        return 0.0
    d = 0.0
    for x, low, high in zip(point, box[:2], box[2:], strict=True):
        half = (high - low) / 2
        d = max(d, abs(x - (low + high) / 2) / half if half > 0 else 0.0)
    return 1.0 + math.exp(-alpha * d * d)


def box_overlap(a: Sequence[float], b: Sequence[float]) -> float:
    """Intersection over union of two boxes (x1, y1, x2, y2)."""
    area = lambda c: max(0.0, c[2] - c[0]) * max(0.0, c[3] - c[1])  # noqa: E731
    shared = area([max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])])
    union = area(a) + area(b) - shared
    return shared / union if union > 0 else 0.0


class GroundingReward(Reward):
    """How near the click is to the target's centre: 0, or 1.018 to 2. UI-AGILE (2507.22025) 3.2.

    A predicted box earns 2 IoU, the right action that is no click 1, a wrong action 0. Columns: `gt_bbox`, and
    `gt_action` (a click where there is none).
    """

    def __init__(self, alpha: float = 4.0):
        super().__init__("grounding_reward")
        self.alpha = alpha

    def __call__(
        self, prompts: Any, completions: list[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        boxes = column(columns, "gt_bbox")
        actions = columns.get("gt_action") or ["click"] * len(boxes)
        return [self.score(t, a, b) for t, a, b in zip(texts(completions), actions, boxes, strict=True)]

    def score(self, text: str, gold: str, box: Sequence[float]) -> float:
        name, numbers = action_of(text)
        if (name or "click") != str(gold).lower():
            return 0.0
        if str(gold).lower() != "click":
            return 1.0
        if len(numbers) == 4:
            return 2.0 * box_overlap(numbers, box)
        return centre_reward(numbers, box, self.alpha) if len(numbers) == 2 else 0.0


def length_window(characters: int) -> float:
    """1 for 121 to 200 characters, cosine slopes down to 50 and 300, else 0."""
    rise = lambda x: (1.0 - math.cos(math.pi * x)) / 2.0  # noqa: E731
    if 120 < characters <= 200:
        return 1.0
    if 50 < characters <= 120:
        return rise((characters - 50) / 70)
    return 1.0 - rise((characters - 200) / 100) if 200 < characters < 300 else 0.0


class ThinkingLengthReward(Reward):
    """0.8 for a thought of moderate length in characters + 0.2 if it ends a sentence; 0 where grounding failed.

    UI-AGILE (2507.22025) 3.1. Columns as `GroundingReward`.
    """

    def __init__(self, grounding: GroundingReward | None = None):
        super().__init__("thinking_length_reward")
        self.grounding = grounding or GroundingReward()

    def __call__(
        self, prompts: Any, completions: list[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        grounded = self.grounding(prompts, completions, completion_ids, **columns)
        return [self.score(t) if g else 0.0 for t, g in zip(texts(completions), grounded, strict=True)]

    def score(self, text: str) -> float:
        thought = reasoning(text).strip()
        return 0.8 * length_window(len(thought)) + 0.2 * thought.endswith((".", "!", "?", "。", "！", "？"))
