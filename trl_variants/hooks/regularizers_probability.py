"""Regularizers that follow a split of the tokens by probability."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..records import TokenBatch
from .base import hook, param
from .credit_probability import tokens_of_pass
from .regularizers import KL, Term


@hook("regularizers", "kl_of_pass")
@dataclass(frozen=True)
class KLOfPass(KL):
    """`kl` on the tokens that credit `low_probability_first` trains on in this pass, (B, T). AR-Lopti (2505.12929).

    The other tokens count as 0 and stay in the denominator, so that the passes together pay one whole KL. `eta` is the
    probability of the credit hook.
    """

    eta: float = param(0.5, low=0.0, high=1.0)

    math = "+ {coef} {estimator}(pi || pi_ref) [tokens of the pass, eta {eta}]"

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"old_logps"}

    def __call__(self, batch: TokenBatch) -> Term:
        term = super().__call__(batch)
        return replace(term, value=term.value * tokens_of_pass(batch, self.eta))
