"""What every reward function here shares: completions as text, and columns by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import VariantError
from .text import completion_text


def texts(completions: Sequence[Any]) -> list[str]:
    """The completions as text, whether TRL passed strings or messages."""
    return [completion_text(c) for c in completions]


def column(columns: Mapping[str, Any], *names: str) -> list[Any]:
    """The first of these data set columns that is there, one value a completion.

    Raises:
        VariantError: none is there.
    """
    for name in names:
        if columns.get(name) is not None:
            return list(columns[name])
    raise VariantError(f"the reward reads the data set's column {' or '.join(map(repr, names))}, and there is none")


class Reward:
    """Base of reward functions with settings; `__name__` is what TRL logs them under."""

    def __init__(self, name: str):
        self.__name__ = name
