"""Metrics of a window: parts are kept on the device, reduced over processes once per optimizer step, then logged.

One collective per step instead of several per micro-batch; per-process row counts may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..hooks.metrics import Max, Mean, Metric, Min


def _floats(part: Metric) -> list[Tensor]:
    return [part.total, part.count] if isinstance(part, Mean) else [part.at]


class MetricBook:
    """Collects the parts of each micro-batch and turns them into numbers at the end of the window.

    `per_micro_batch` reports the mean of per-micro-batch values, as TRL does; otherwise parts are merged over the
    window first, so the number does not depend on the split.
    """

    def __init__(self, per_micro_batch: bool):
        self.per_micro_batch = per_micro_batch
        self._pages: list[dict[str, Metric]] = []

    def add(self, parts: Mapping[str, Metric]) -> None:
        """Adds one micro-batch; every process must add the same names in the same order."""
        self._pages.append(dict(parts))

    def close(
        self, gather: Callable[[Tensor], Tensor], device: torch.device
    ) -> tuple[dict[str, list[float]], dict[str, float]]:
        """Ends the window. Returns (values to log per name, the window's merged value per name)."""
        pages, self._pages = self._pages, []
        flat = [
            f.to(device, torch.float32).reshape(()) for page in pages for part in page.values() for f in _floats(part)
        ]
        if not flat:
            return {}, {}
        local = torch.stack(flat)
        table = gather(local.unsqueeze(0)).tolist()  # (processes, all parts of all micro-batches)
        logged: dict[str, list[float]] = {}
        merged: dict[str, list] = {}
        at = 0
        for page in pages:
            for name, part in page.items():
                width = len(_floats(part))
                columns = [[row[at + i] for row in table] for i in range(width)]
                at += width
                value = _merge(type(part), columns)
                logged.setdefault(name, []).append(_number(type(part), value))
                seen = merged.setdefault(name, [type(part), [[] for _ in range(width)]])
                for i in range(width):
                    seen[1][i].extend(columns[i])
        window = {name: _number(kind, _merge(kind, columns)) for name, (kind, columns) in merged.items()}
        return (logged if self.per_micro_batch else {k: [v] for k, v in window.items()}), window


def _merge(kind: Any, columns: list[list[float]]) -> list[float]:
    if kind is Mean:
        return [sum(column) for column in columns]
    known = [v for v in columns[0] if v == v]
    pick = {Min: min, Max: max}[kind]
    return [pick(known) if known else float("nan")]


def _number(kind: type, value: list[float]) -> float:
    return value[0] / max(value[1], 1.0) if kind is Mean else value[0]
