"""Is the answer the reference's? By mathematics, by text, by edit distance."""

from __future__ import annotations

import logging
import threading
from typing import Any

from ..errors import MissingExtra
from .base import Reward, column, texts
from .text import boxed, canonical, edit_distance, tagged_answer


def same_mathematics(text: str, gold: str) -> bool | None:
    """Whether the mathematics in the text equals the gold answer; None when the gold is no mathematics.

    Raises:
        MissingExtra: math-verify is not installed.
    """
    try:
        from math_verify import parse, verify
    except ImportError:
        raise MissingExtra("comparing answers as mathematics", "math") from None
    # its timeouts are signals, which only the main thread may set
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    if limit is None:
        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).setLevel(logging.ERROR)
    reference = parse(gold, parsing_timeout=limit) or parse(f"${gold}$", parsing_timeout=limit)
    if not reference:
        return None
    return bool(verify(reference, parse(text, parsing_timeout=limit), timeout_seconds=limit))


def is_answer(text: str, gold: str) -> bool:
    """Equal as mathematics, or the <answer> part or last box is the gold's text."""
    if same_mathematics(text, gold):
        return True
    given = tagged_answer(text)
    given = boxed(text) if given is None else given
    return given is not None and canonical(given) == canonical(gold)


def accuracy_reward(
    prompts: Any, completions: list[Any], completion_ids: Any = None, **columns: Any
) -> list[float | None]:
    """1.0 where the text after </think> equals the column `answer` (or `solution`) as mathematics, else 0.0.

    None where the gold is no mathematics. DeepSeek-R1 (2501.12948) 2.2.2. Needs math-verify.
    """
    pairs = zip(texts(completions), column(columns, "answer", "solution"), strict=True)
    verdicts = [same_mathematics(text.rpartition("</think>")[2], str(gold)) for text, gold in pairs]
    return [None if v is None else float(v) for v in verdicts]


class AnswerMatchReward(Reward):
    """1.0 where the completion equals the gold as mathematics, else where its <answer> is the gold's text, else 0.0.

    R1-V. Gold: column `solution` (or `answer`), with or without its own <answer> tags. Needs math-verify.
    """

    def __init__(self):
        super().__init__("answer_match_reward")

    def __call__(
        self, prompts: Any, completions: list[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        golds = [str(g) for g in column(columns, "solution", "answer")]
        golds = [g if tagged_answer(g) is None else tagged_answer(g) for g in golds]  # type: ignore[misc]
        found: list[float | None] = []
        for text, gold in zip(texts(completions), golds, strict=True):
            answer = tagged_answer(text)
            same = bool(same_mathematics(text, gold)) or (answer is not None and answer == gold.strip())
            found.append(float(same))
        return found


class EditSimilarityReward(Reward):
    r"""1 - edit distance / longer length, in characters, between the last \boxed{...} and column `answer`; 0 without
    a box. GLM-4.5V's (2507.01006) reward for reading text; its own box tokens are the model's.
    """

    def __init__(self):
        super().__init__("edit_similarity_reward")

    def __call__(
        self, prompts: Any, completions: list[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        pairs = zip(map(boxed, texts(completions)), column(columns, "answer", "solution"), strict=True)
        return [0.0 if given is None else edit_similarity(given, str(gold)) for given, gold in pairs]


def edit_similarity(a: str, b: str) -> float:
    """1 - edit(a, b) / max(|a|, |b|); two empty texts are equal."""
    return 1.0 - edit_distance(a, b) / max(len(a), len(b), 1)
