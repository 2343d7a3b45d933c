"""T_A on the policy's own tokens: ratios measured from a policy that a teacher has a part in. Signature as in
`ratio.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import TokenBatch
from .base import hook, param


@hook("ratio", "teacher_mixture")
@dataclass(frozen=True)
class TeacherMixture:
    """log r_t = alpha (lp - lp_old) + (1 - alpha) (lp - lp_T), (B, T): the trust region's centre is a geometric mixture
    of the old policy and the teacher. RLAD (2602.22495).

    alpha = 1 is the plain token ratio, 0 measures from the teacher alone. `clamp` c bounds lp - lp_T to +-c (nats)
    before mixing; where it binds, only the alpha part moves. The ratio is not 1 on-policy: r = exp(-(1 - alpha) d),
    d = lp_T - lp. A token without a teacher keeps the plain ratio.
    """

    alpha: float = param(0.5, low=0.0, high=1.0)
    clamp: float | None = param(None, above=0.0)

    needs = frozenset({"old_logps", "teacher_logps"})
    per_token = True  # a clip of token ratios takes it

    @property
    def math(self) -> str:
        gap = "lp - lp_T" if self.clamp is None else f"clip(lp - lp_T, -{self.clamp}, {self.clamp})"
        return f"r_t = exp({self.alpha} (lp - lp_old) + {1 - self.alpha:g} ({gap}))"

    def __call__(self, batch: TokenBatch) -> Tensor:
        own = batch.logps - batch.anchor
        says = batch.teacher_says
        gap = batch.logps - torch.where(says, batch.need("teacher_logps"), batch.logps.detach())
        gap = gap if self.clamp is None else gap.clamp(-self.clamp, self.clamp)
        return torch.where(says, self.alpha * own + (1 - self.alpha) * gap, own)
