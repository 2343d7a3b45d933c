"""Reward functions that never raise: what they did wrong waits until every process can raise it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import VariantError
from .token_rewards import summed


class RewardGuard:
    """Around the reward functions of one batch.

    Args:
        ids: token ids of the completions, for functions that reward tokens.
    """

    def __init__(self, ids: list):
        self.ids = ids
        self.errors: list[str] = []
        self.cause: Exception | None = None
        self.token_rewards: dict[str, Any] = {}

    def guarded(self, function: Callable, name: str) -> Callable:
        """A reward function that never raises: its error waits until every process can raise it."""

        def checked(values: Any, rows: int) -> list:
            if isinstance(values, str) or not isinstance(values, Iterable):
                raise VariantError(f"it returned {values!r} instead of a list of numbers, one for each completion")
            values = list(values)
            if len(values) != rows:
                raise VariantError(f"it returned {len(values)} rewards for {rows} completions")
            values, self.token_rewards[name] = summed(values, self.ids)
            if wrong := [v for v in values if isinstance(v, str)]:
                raise VariantError(f"it returned the text {wrong[0]!r} where a number or None is expected")
            numbers = [math.nan if v is None else float(v) for v in values]
            if any(map(math.isinf, numbers)):
                raise VariantError("it returned an infinite reward, which would erase its whole group")
            return numbers

        def report(error: Exception, rows: int) -> list:
            self.cause = self.cause or error
            self.errors.append(
                f"reward function {name!r} failed: {error if isinstance(error, VariantError) else repr(error)}"
            )
            return [0.0] * rows

        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004

            async def run_async(**kwargs: Any) -> list:
                try:
                    return checked(await function(**kwargs), len(kwargs["prompts"]))
                except Exception as error:  # whatever user code raises is reported on all processes
                    return report(error, len(kwargs["prompts"]))

            return run_async

        def run(**kwargs: Any) -> list:
            try:
                return checked(function(**kwargs), len(kwargs["prompts"]))
            except Exception as error:
                return report(error, len(kwargs["prompts"]))

        return run
