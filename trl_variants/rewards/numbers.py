"""Is the number a completion ends with the reference's?"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from .base import column, texts
from .text import boxed, last_number


def final_number(text: str) -> Decimal | None:
    r"""The number in the last \boxed{...}, else after the last `####`, else the last one after </think>.

    Thousands separators, currency and units are left out. None where there is no number.
    """
    inside = boxed(text)
    said = inside if inside is not None else text.rpartition("####")[2].rpartition("</think>")[2]
    found = last_number(said)
    return None if found is None else Decimal(found)


def final_number_reward(
    prompts: Any, completions: list[Any], completion_ids: Any = None, **columns: Any
) -> list[float | None]:
    """1.0 where the final number of the completion equals that of column `answer` (or `solution`), else 0.0.

    None where the reference has no number. Needs no optional package.
    """
    golds = [final_number(str(gold)) for gold in column(columns, "answer", "solution")]
    given = [final_number(text) for text in texts(completions)]
    return [None if gold is None else float(own == gold) for own, gold in zip(given, golds, strict=True)]
