"""Where a term towards a teacher acts: rows, tokens, whose tokens, and how it meets the clip. All detached.

A gate is a weight per token. Row gates read the verifier's word, so that the teacher is never asked about a row that
they shut; token gates read the teacher, the policy or its entropy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..records import Scored, TokenBatch
from .weight import exact_quantile

ROWS = ("all", "wrong", "right", "all_fail", "difficulty")
TOKENS = ("none", "sigmoid", "low_confidence", "high_entropy", "band")
CLIP = ("additive", "unclipped", "clipped_only")
WRITTEN_BY = ("policy", "other", "anyone")


def row_gate(kind: str, power: float, fact: Callable[[str], Tensor]) -> Tensor | float:
    """(B,) weight of each row: 1, [wrong], [right], [no row of the group is right], (1 - p)^power.

    p is the share of the group that is right; where nobody was scored there is none, and the gates on p are shut.

    Args:
        fact: gives `correct` or `solved`, (B,), by name; only what the gate reads is asked for.
    """
    if kind == "all":
        return 1.0
    if kind in ("wrong", "right"):
        return ((fact("correct") > 0) == (kind == "right")).float()
    if kind == "all_fail":
        return (fact("solved") == 0).float()
    return ((1 - fact("solved")) ** power).nan_to_num(nan=0.0)


def rows_asked(kind: str, power: float, written_by: str, scored: Scored) -> Tensor:
    """(N,) bool, rows on which the gates leave something to say."""
    asked = torch.ones_like(scored.keep)
    if kind != "all":
        asked = asked & (row_gate(kind, power, lambda name: getattr(scored, name)) != 0)
    if scored.origin is not None and written_by != "anyone":
        asked = asked & (_by_others(scored.origin) == (written_by == "other"))
    elif written_by == "other":
        asked = torch.zeros_like(asked)
    return asked


def written(by: str, batch: TokenBatch) -> Tensor:
    """(B, T) 1 on tokens of the policy, of someone else (a teacher's or a replayed trace), or on all."""
    if by == "anyone":
        return torch.ones_like(batch.mask)
    if batch.origin is None:
        return torch.full_like(batch.mask, float(by == "policy"))
    return (_by_others(batch.origin) == (by == "other")).to(batch.mask)


def _by_others(origin: Tensor) -> Tensor:
    return (origin == 1) | (origin == 2)


def token_gate(kind: str, gap: Tensor, batch: TokenBatch, sharpness: float, share: float, band: float) -> Tensor:
    """(B, T) weight of each token.

    "none" 1; "sigmoid" sigmoid(sharpness * gap); "low_confidence" and "high_entropy" 1 on the `share` of the window's
    tokens with the lowest pi or the highest entropy; "band" 1 where |gap| <= band. `gap` is lp_T - sg(lp) in nats.
    """
    if kind == "sigmoid":
        return torch.sigmoid(sharpness * gap)
    if kind == "band":
        return (gap.abs() <= band).to(batch.mask)
    if kind == "none":
        return torch.ones_like(batch.mask)
    score = batch.need("entropy").detach() if kind == "high_entropy" else -batch.logps.detach()
    score = score if score.dtype == torch.float64 else score.float()
    here = batch.mask > 0
    if not here.any():
        return torch.zeros_like(batch.mask)
    return ((score >= exact_quantile(score[here], 1 - share)) & here).to(batch.mask)


def clip_gate(interaction: str, batch: TokenBatch) -> Tensor | float:
    """(B, T) or (B, 1): 1, [the surrogate is not clipped there], [it is]."""
    if interaction == "additive":
        return 1.0
    clipped = batch.clipped if interaction == "clipped_only" else ~batch.clipped
    return clipped.to(batch.mask)
