"""From padded rows and a rectangle to the tensors of one forward, and from its results back to (rows, T)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .batching import Lengths, Rectangle


@dataclass(frozen=True)
class Rows:
    """B rows as TRL makes them: prompts padded on the left to P columns, completions on the right to T."""

    prompt_ids: Tensor  # (B, P)
    prompt_mask: Tensor  # (B, P)
    completion_ids: Tensor  # (B, T)
    completion_mask: Tensor  # (B, T), 0 on padding and on every token of a row that left the loss

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Rows:
        """The rows of a TRL batch."""
        return cls(batch["prompt_ids"], batch["prompt_mask"], batch["completion_ids"], batch["completion_mask"])

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)"""
        return self.completion_ids.shape[0], self.completion_ids.shape[1]

    @cached_property
    def regular(self) -> bool:
        """Whether every prompt has a token and padding stands only left of prompts and right of completions."""
        p, c = self.prompt_mask, self.completion_mask
        return bool((p[:, 1:] >= p[:, :-1]).all() and p[:, -1:].all() and (c[:, 1:] <= c[:, :-1]).all())

    @cached_property
    def lengths(self) -> Lengths:
        """Tokens of each row, without padding."""
        prompt, completion = self.prompt_mask.sum(1).tolist(), self.completion_mask.sum(1).tolist()
        ids = self.prompt_ids.cpu().numpy()
        keys = [ids[i, ids.shape[1] - n :].tobytes() for i, n in enumerate(prompt)]
        return Lengths(prompt, completion, keys)


@dataclass(frozen=True)
class Layout:
    """One forward: what the model is given, which of its hidden states are scored, and where the results belong."""

    input_ids: Tensor  # (R, L)
    position_ids: Tensor | None  # (R, L), each item from 0; None: one item a line
    attention_mask: Tensor | None  # (R, L), or (R, 1, L, L) bool where prompts are shared; None: causal
    source: Tensor  # (n,) places in the flattened (R, L) whose hidden state predicts a scored token
    labels: Tensor  # (n,) that token
    row: Tensor  # (n,) the row it belongs to
    column: Tensor  # (n,) its place in the completion
    useful: int  # places that hold a token

    def spread(self, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """(n, ...) values at their (row, column) of a (B, T, ...) of zeros, with gradient."""
        return values.new_zeros(*shape, *values.shape[1:]).index_put((self.row, self.column), values)


def compact(rows: Rows, rectangle: Rectangle, pad: int) -> Layout:
    """Items laid end to end on each line, padding only at its end; `rows` must be regular.

    Padding needs no mask: nothing in front of it attends to it. Several items on a line are told apart by positions
    that restart (the packed format of transformers); a shared prompt needs a mask of its own.
    """
    lengths, device = rows.lengths, rows.prompt_ids.device
    prompts, width = rows.prompt_ids.shape[1], rows.prompt_ids.shape[1] + rows.completion_ids.shape[1]
    size = max((sum(map(lengths.of, line)) for line in rectangle), default=0)
    index = np.full((len(rectangle), size), -1, dtype=np.int64)  # place in the flattened (B, P + T)
    position = np.zeros_like(index)
    segment = np.full_like(index, -1)  # item on its line
    branch = np.zeros_like(index)  # 0: prompt, k: the item's k-th completion
    scored: list[np.ndarray] = []  # rows of (source, label's place, row, column)
    for k, line in enumerate(rectangle):
        at = 0
        for number, item in enumerate(line):
            n = lengths.prompt[item[0]]
            index[k, at : at + n] = item[0] * width + prompts - n + np.arange(n)
            position[k, at : at + n] = np.arange(n)
            segment[k, at : at + lengths.of(item)] = number
            last, at = k * size + at + n - 1, at + n
            for b, i in enumerate(item, start=1):
                m = lengths.completion[i]
                here = np.arange(m)
                index[k, at : at + m] = i * width + prompts + here
                position[k, at : at + m] = n + here
                branch[k, at : at + m] = b
                source = np.concatenate([[last], k * size + at + here])[:m]
                scored.append(np.stack([source, i * width + prompts + here, np.full(m, i), here]))
                at += m
        position[k, at:] = np.arange(size - at)
    table = np.concatenate(scored, 1) if scored else np.zeros((4, 0), dtype=np.int64)
    source, label, row, column = torch.from_numpy(table).to(device)
    places = torch.from_numpy(index).to(device)
    ids = torch.cat([rows.prompt_ids, rows.completion_ids], 1).flatten()
    packed = any(len(line) > 1 for line in rectangle)
    branches = any(len(item) > 1 for line in rectangle for item in line)
    return Layout(
        input_ids=ids[places.clamp(min=0)].masked_fill(places < 0, pad),
        position_ids=torch.from_numpy(position).to(device) if packed or branches else None,
        attention_mask=_tree_mask(torch.from_numpy(segment), torch.from_numpy(branch)).to(device) if branches else None,
        source=source,
        labels=ids[label],
        row=row,
        column=column,
        useful=int((index >= 0).sum()),
    )


def _tree_mask(segment: Tensor, branch: Tensor) -> Tensor:
    """(R, 1, L, L) bool: a token attends to what stands before it in its item: the prompt and its own completion."""
    size = segment.shape[1]
    same = segment[:, :, None] == segment[:, None, :]
    seen = (branch[:, None, :] == 0) | (branch[:, :, None] == branch[:, None, :])
    return (same & seen & torch.ones(size, size, dtype=torch.bool).tril()).unsqueeze(1)


def padded(rows: Rows, trim: bool) -> Layout:
    """Rows as TRL pads them, with its attention mask; `trim` leaves out the columns in which no row has a token."""
    ids = torch.cat([rows.prompt_ids, rows.completion_ids], 1)
    mask = torch.cat([rows.prompt_mask, rows.completion_mask], 1)
    first, end = 0, ids.shape[1]
    if trim and bool(mask.any()):
        used = mask.any(0).nonzero().squeeze(1)
        first, end = int(used[0]), int(used[-1]) + 1
    row, column = rows.completion_mask.nonzero(as_tuple=True)
    place = row * (end - first) + rows.prompt_ids.shape[1] + column - first
    return Layout(
        input_ids=ids[:, first:end],
        position_ids=None,
        attention_mask=mask[:, first:end],
        source=place - 1,
        labels=rows.completion_ids[row, column],
        row=row,
        column=column,
        useful=int(mask.sum()),
    )
