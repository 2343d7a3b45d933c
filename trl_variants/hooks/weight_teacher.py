"""Weight hooks that read a teacher. Signature as in `weight.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import TokenBatch
from .base import hook, param
from .credit_teacher import relaxed_floor
from .weight import exact_quantile

TIE = 1e-5  # nats


@hook("weight", "teacher_phases")
@dataclass(frozen=True)
class TeacherPhases:
    """0/1, (B, T): exploration keeps tokens with rt >= log(lam) / (1 - lam), refinement the `keep` share of highest
    entropy. REOPOLD (2603.11137).

    rt = lp_T - lp, entropy (nats) the current policy's; the second phase begins at the share `switch` of training. The
    quantile is over the window's tokens that the teacher speaks of; others are left out. The mean is over kept tokens.
    """

    lam: float = param(0.3, above=0.0, high=0.99)
    keep: float = param(0.2, above=0.0, high=1.0)
    switch: float = param(1 / 3, low=0.0, high=1.0)

    math = "* [rt >= log({lam}) / (1 - {lam})], after {switch:.2f} of training [H in top {keep}]; mean over kept"
    needs = frozenset({"teacher_logps", "entropy"})
    scope = "window"
    selects = True
    in_denominator = True

    @torch.no_grad()
    def __call__(self, batch: TokenBatch) -> Tensor:
        says = batch.teacher_says
        entropy = batch.need("entropy").detach()
        if batch.progress < self.switch:
            return (says & (batch.teacher_gap("current") >= relaxed_floor(self.lam))).to(batch.mask)
        entropy = entropy if entropy.dtype == torch.float64 else entropy.float()
        everyone = batch.gather(entropy[says])
        if everyone.numel() == 0:
            return torch.zeros_like(batch.mask)
        # rows of a group begin in the same state: rounding must not part tokens of one entropy
        threshold = exact_quantile(everyone, 1 - self.keep) - TIE
        return (says & (entropy >= threshold)).to(batch.mask)
