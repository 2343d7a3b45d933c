"""Advantages that leave some truncated answers without signal. Signature as in `advantage.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import Scored
from .advantage import grouped_normalise
from .base import hook, param


@hook("advantage", "truncation_dropout")
@dataclass(frozen=True)
class TruncationDropout:
    """GRPO's A, (N,), set to 0 with probability `rho` on answers that hit the length limit. MicroCoder-GRPO
    (2603.07777).

    Masked is a truncated answer that meets `criterion` ("non_incorrect": correct, "incorrect": not), does not end in a
    repetition and draws u < rho. Repetition: the last `m` tokens equal the `m` before them. Mean and std use all rows;
    a masked row still counts in every denominator. A record without token ids (`TokenBatch.from_tensors`) counts no
    answer as a repetition.
    """

    rho: float = param(0.3, low=0.0, high=1.0)
    m: int = param(128, low=1)
    criterion: str = param("non_incorrect", choices=("non_incorrect", "incorrect"))
    ddof: int = param(1, choices=(0, 1))
    eps: float = param(1e-4, low=0.0)

    math = "A = (R - mean_group) / (std_group + {eps}), 0 w.p. {rho} if truncated, {criterion} and not repeating"
    needs = frozenset({"truncated", "tokens"})
    random = True

    def __call__(self, scored: Scored, rng: torch.Generator) -> Tensor:
        advantage = grouped_normalise(
            scored.reward, scored.valid, scored, "group", "group", self.ddof, self.eps, "zero"
        )
        wanted = scored.correct.bool() if self.criterion == "non_incorrect" else ~scored.correct.bool()
        dropped = scored.fact("truncated").bool() & wanted & (_draws(scored, rng).to(advantage.device) < self.rho)
        if "ids" in scored.tokens:
            dropped = dropped & ~repeats(scored.tokens["ids"], self.m)
        return torch.where(dropped, 0.0, advantage)


def _draws(scored: Scored, rng: torch.Generator) -> Tensor:
    """(N,) uniform numbers, dealt in the order of (group, reward, length): not of rows, which a shuffle may change."""
    rows = len(scored.reward)
    lengths = [0] * rows if scored.length is None else scored.length.tolist()
    rewards = [-math.inf if r != r else r for r in scored.reward.tolist()]
    order = sorted(range(rows), key=list(zip(scored.group.tolist(), rewards, lengths, strict=True)).__getitem__)
    out = torch.empty(rows)
    out[order] = torch.rand(rows, generator=rng)
    return out


def repeats(ids: Tensor, m: int) -> Tensor:
    """(N,) bool: the last m tokens of a row equal the m before them. `ids` (N, T), -1 is padding."""
    position = torch.arange(ids.shape[1], device=ids.device)
    end = torch.where(ids >= 0, position + 1, 0).amax(1, keepdim=True)
    back = end - 1 - torch.arange(m, device=ids.device)
    last, before = ids.gather(1, back.clamp(min=0)), ids.gather(1, (back - m).clamp(min=0))
    return (last == before).all(1) & (end.squeeze(1) >= 2 * m)
