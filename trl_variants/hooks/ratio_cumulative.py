"""The ratio of a token together with everything before it. Signature as in `ratio.py`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..records import LOG_RATIO_BOUND, TokenBatch
from .base import hook
from .ratio import _Anchored


@hook("ratio", "cumulative")
@dataclass(frozen=True)
class CumulativeRatio(_Anchored):
    """R_t = prod_{s<=t} pi(y_s) / pi_old(y_s) in value, the own token's gradient, (B, T). CTPO (2605.07331).

    Tokens outside the mask add nothing: they keep the last value. Gradients through the sum would give an early token
    the sum of all later terms.
    """

    math = "R_t = sg[prod_(s<=t) r_s] exp(lp_t - sg[lp_t]), r_s = exp(lp_s - lp_{anchor},s)"

    def __call__(self, batch: TokenBatch) -> Tensor:
        step = self.token_log_ratio(batch).detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return (step * batch.mask).cumsum(-1) + batch.logps - batch.logps.detach()
