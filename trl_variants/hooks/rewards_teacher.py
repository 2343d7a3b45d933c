"""T_B before any baseline: a teacher's word in the reward of a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import Scored
from .base import hook, param


@hook("rewards", "teacher_reward")
@dataclass(frozen=True)
class TeacherReward:
    """R + alpha S, S the "mean" or "sum" of lp_T - lp_old over the row's tokens, (N,). CoDistill-GRPO (2605.08873) with
    the mean; the reward shaping that KDRL (2506.02208) rejects.

    `alpha` in reward per nat. A row without a teacher keeps R. Under division by the group's std alpha cancels where
    all R are equal: the teacher alone drives the update.
    """

    alpha: float = param(0.1, ours=True)
    reduce: str = param("mean", choices=("mean", "sum"))

    math = "R + {alpha} {reduce}_t (lp_T - lp_old)"
    needs = frozenset({"tokens", "old_logps", "teacher_logps"})
    combined = True

    @torch.no_grad()
    def __call__(self, scored: Scored) -> Tensor:
        total = scored.teacher_gap().sum(1)
        if self.reduce == "mean":
            total = total / scored.teacher_says.sum(1).clamp(min=1)
        return scored.reward + self.alpha * total.to(scored.reward)


@hook("rewards", "structure_bonus")
@dataclass(frozen=True)
class StructureBonus:
    """R + delta [P_full > nu P_part] [row is full and right], (N,). ExGRPO, Explanatory Inversion (2026; not the ExGRPO
    of 2510.02245).

    A question (column `question`) is answered after the full chain of probes or after a shortened one: rows with the
    largest number in column `probes` are full, those with fewer are not. P is the share of right rows (raw
    correctness) among each; a question with one kind alone gets no bonus. `delta` in units of reward, `nu` a factor.
    The two kinds are data set rows of their own and meet in the question, so the advantage must group by it too.
    """

    delta: float = param(0.5, low=0.0, ours=True)
    nu: float = param(1.0, low=1.0, ours=True)
    question: str = param("question", ours=True)
    probes: str = param("probes", ours=True)

    math = "R + {delta} [P_full > {nu} P_part] [full and right]"
    combined = True

    @property
    def keys(self) -> frozenset[str]:
        """Data set columns this hook groups by."""
        return frozenset({self.question, self.probes})

    def __call__(self, scored: Scored) -> Tensor:
        for name in (self.question, self.probes):
            if name not in scored.keys:
                raise VariantError(f"structure_bonus reads column {name!r}, and there is none")
        question, probes = scored.keys[self.question], scored.keys[self.probes]
        right = scored.correct.bool() & scored.valid
        bonus = torch.zeros_like(scored.reward)
        for label in torch.unique(question).tolist():
            rows = (question == label) & scored.valid
            if not bool(rows.any()):
                continue
            full = rows & (probes == probes[rows].max())
            part = rows & ~full
            share = lambda kind: int(right[kind].sum()) / int(kind.sum())  # noqa: E731
            if bool(part.any()) and share(full) > self.nu * share(part):
                bonus[full & right] = self.delta
        return scored.reward + bonus
