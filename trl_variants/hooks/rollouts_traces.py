"""Rollouts hooks: trajectories, or their beginnings, from a data set column.

Signature: `given(rows, services) -> [Given or None]`, one for each data set row of this process, before anything is
sampled. The last places of a group are given, so that its first completions stay the policy's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..errors import VariantError
from ..records import Given
from .base import hook, param


@hook("rollouts", "traces")
@dataclass(frozen=True)
class TraceInjection:
    """Traces of a stronger model stand in for some of a group's completions, origin (N,) 1. LUFFY (2504.14945).

    They are verified by the run's reward functions like any completion, and take part in the group's baseline. A row
    of the data set without a trace is sampled as usual. Of several traces one is drawn per generation, then the next
    ones in order. Metrics: traces/rows, traces/wrong, traces/truncated.

    Args:
        column: text or assistant messages, one or a list of them (LUFFY's public data: `target`).
        per_group: completions of each group that are replaced, at most the group.
        share: the same as a share of the group, rounded; replaces `per_group`.
        logps: column with the traces' log-probs under the model that wrote them, one number a token.
    """

    column: str = "target"
    per_group: int = param(1, low=0)
    share: float | None = param(None, low=0.0, high=1.0)
    logps: str | None = None

    @property
    def math(self) -> str:
        count = f"{self.per_group}" if self.share is None else f"{self.share} of"
        return f"{count} a group from column {self.column}"

    @property
    def reports_logps(self) -> bool:
        return self.logps is not None

    def given(self, rows: list[dict[str, Any]], services: Any) -> list[Given | None]:
        size = services.group_size
        count = int(self.per_group) if self.share is None else round(self.share * size)
        return [self._trace(i, row, size - min(count, size), services) for i, row in enumerate(rows)]

    def _trace(self, i: int, row: dict[str, Any], first: int, services: Any) -> Given | None:
        _, place = services.place(i)
        texts = services.traces.texts(row, self.column)
        if place < first or not texts:
            return None
        start = services.draw(i - place + first, "traces").randrange(len(texts))  # one draw for the whole group
        k = (start + place - first) % len(texts)
        ids = services.traces.ids(row, texts[k])
        return Given(ids, logps=self._known(row, k, len(texts), len(ids)))

    def _known(self, row: dict[str, Any], k: int, traces: int, tokens: int) -> list[float] | None:
        value = None if self.logps is None else row.get(self.logps)
        if value is None:
            return None
        value = list(value[k] if traces > 1 or (value and isinstance(value[0], (list, tuple))) else value)
        if len(value) < tokens - 1:
            raise VariantError(
                f"column {self.logps!r} has {len(value)} log-probs for a trace of {tokens} tokens with its end token"
            )
        return [*value, math.nan][:tokens]


@hook("rollouts", "prefix_splice")
@dataclass(frozen=True)
class PrefixSplice:
    """Some completions of a group begin with a demonstration's first tokens, origin (N, T) 3. Prefix-RFT (2507.01679).

    l = min(max(floor(q n), l_min), n - 1) of the demonstration's n tokens, its end token not counted; the policy goes
    on from there within max_completion_length. q ~ U[low, high] (the paper's Beta(1, 1)), `low` falling from `high` to
    `end` by a cosine over the run. Prefix tokens stay in the loss. q = 0 or no demonstration: sampled whole.

    Args:
        column: demonstrations, as in `traces`. per_group: hybrid completions of each group.
        high, end: shares of the demonstration. min_tokens: l_min, in tokens.
    """

    column: str = "target"
    per_group: int = param(1, low=0)
    high: float = param(0.95, low=0.0, high=1.0, ours=True)
    end: float = param(0.0, low=0.0, high=1.0)
    min_tokens: int = param(1, low=0, ours=True)

    math = "{per_group} a group begins with q of column {column}, q ~ U[low, {high}], low: {high} -> {end} by a cosine"

    def low(self, progress: float) -> float:
        """The smallest share at this progress of the run."""
        return self.end + (self.high - self.end) * 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))

    def length(self, tokens: int, q: float) -> int:
        """l of a demonstration of so many tokens; 0 where nothing can be given."""
        if q <= 0.0 or tokens < 2:
            return 0
        return min(max(int(q * tokens + 1e-9), self.min_tokens), tokens - 1)

    def given(self, rows: list[dict[str, Any]], services: Any) -> list[Given | None]:
        low, size = self.low(services.progress), services.group_size
        out: list[Given | None] = []
        for i, row in enumerate(rows):
            texts = services.traces.texts(row, self.column)
            if services.place(i)[1] < size - min(int(self.per_group), size) or not texts:
                out.append(None)
                continue
            draw = services.draw(i, "prefix")
            ids = services.traces.body(row, texts[draw.randrange(len(texts))])
            room = services.max_new_tokens
            n = self.length(len(ids), draw.uniform(low, self.high))
            n = n if room is None else min(n, room - 1)  # at least one token is the policy's own
            out.append(Given(ids[:n], origin=3, complete=False) if n > 0 else None)
        return out
