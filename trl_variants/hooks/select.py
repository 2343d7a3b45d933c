"""Select hooks: which rows go on, after rewards and before baselines.

Signature: `(scored) -> scored` with `keep` (enters the policy loss) and `in_baseline` (enters group statistics)
narrowed, or a bool (N,) that narrows both. A row that is not kept has an empty mask: its tokens leave every count.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import VariantError
from ..records import Scored
from .base import hook


@hook("select", "mask_truncated")
@dataclass(frozen=True)
class MaskTruncated:
    """Truncated rows, (N,), leave the loss but stay in their group's baseline. DAPO (2503.14476) 3.4, overlong
    filtering.

    TRL's mask_truncated_completions: the rows still count where rows are counted.
    """

    math = "truncated rows out of the loss"
    needs = frozenset({"truncated"})

    def __call__(self, scored: Scored) -> Scored:
        if scored.truncated is None:
            raise VariantError("mask_truncated needs `truncated` per row, and none was given")
        return scored.with_(keep=scored.keep & ~scored.truncated.bool())
