"""Regularizer hooks: what else is minimised.

Signature: `(batch) -> Term`, or `(batch, state) -> Term` with memory. The loss adds coefficient * aggregate(value).
A KL term is placement x value estimator x gradient x importance weight; each states which divergence its gradient
descends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..divergence import Divergence
from ..errors import VariantError
from ..records import TokenBatch, bounded_exp
from .aggregate import TokenMean
from .base import hook, param
from .metrics import Mean, Metric


@dataclass(frozen=True)
class Term:
    """`coefficient * aggregate(value)`; without an aggregate of its own, the policy's. `mask` restricts it to
    tokens."""

    value: Tensor  # (B, T) or (B, 1)
    coefficient: float
    aggregate: Callable[[Tensor, TokenBatch], Tensor] | None = None
    mask: Tensor | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    stats: Mapping[str, Mean] = field(default_factory=dict)  # window means handed to update()


def kl_estimate(log_ratio: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(pi || ref) on samples of pi, from log_ratio = lp - lp_ref. Schulman, approximating
    KL (2020).

    k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d, with d = lp - lp_ref.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    return bounded_exp(-log_ratio) + log_ratio - 1


@hook("regularizers", "kl")
@dataclass(frozen=True)
class KL:
    """coef * KL(pi || pi_ref) per token, (B, T), differentiated through its estimator. GRPO (2402.03300) eq. 4 for k3.

    On on-policy samples the gradient of k2 descends the reverse KL; that of k3 descends the forward KL(pi_ref || pi)
    unless `weight="live"` multiplies by the ratio, which makes value and gradient those of the reverse KL
    (DeepSeek-V3.2).
    k1 alone has expected gradient zero on-policy and is refused; k1 with a live ratio is valid.
    `weight="detached"` multiplies by the ratio without its gradient. "exact" is sum_v pi log(pi / ref) over the whole
    vocabulary: value and gradient of the reverse KL at each prefix, whoever sampled the token. `own_token_mean`
    averages over the window's tokens whatever the policy term does (REINFORCE++-baseline).
    """

    coef: float = param(0.001, low=0.0)
    estimator: str = param("k3", choices=("k1", "k2", "k3", "exact"))
    weight: str = param("none", choices=("none", "live", "detached"))
    own_token_mean: bool = False

    math = "+ {coef} {estimator}(pi || pi_ref)"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"ref_logps", "distribution"}) if self.estimator == "exact" else frozenset({"ref_logps"})

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        return (Divergence("rkl", anchor="ref"),) if self.estimator == "exact" else ()

    def __post_init__(self):
        if self.estimator == "exact" and self.weight != "none":
            raise VariantError("kl.estimator='exact' samples no token, so there is none to weight: weight='none'")
        if self.estimator == "k1" and self.weight != "live":
            raise VariantError(
                "kl.estimator='k1' back-propagated on on-policy samples has expected gradient zero: "
                "use k2, or weight='live', or the rewards hook kl_in_reward"
            )

    @property
    def descends(self) -> str:
        if self.weight == "live":
            return "reverse KL(pi || ref)"
        return "forward KL(ref || pi)" if self.estimator == "k3" else "reverse KL(pi || ref)"

    def __call__(self, batch: TokenBatch) -> Term:
        # log-space clamp happens inside the estimator, so a drifted reference cannot overflow k3
        reference = batch.need("ref_logps")
        if self.estimator == "exact":
            value = batch.divergence(self.divergences[0])
        else:
            value = kl_estimate(batch.logps - reference, self.estimator)
        if self.weight != "none":
            ratio = bounded_exp(batch.log_ratio)
            value = value * (ratio if self.weight == "live" else ratio.detach())
        own = TokenMean() if self.own_token_mean else None
        return Term(value, self.coef, own, metrics={"kl": Mean.over(value, batch.mask)})


@hook("regularizers", "entropy_bonus")
@dataclass(frozen=True)
class EntropyBonus:
    """- coef * mean entropy of the active tokens, (B, T). Maximum-entropy exploration; A3C (1602.01783) section 4.

    `span="window"`: mean over the window's tokens. "micro-batch" is TRL's rule, the mean of local means.
    """

    coef: float = param(0.001)
    span: str = param("window", choices=("window", "micro-batch"))

    math = "- {coef} H[{span}]"
    needs = frozenset({"entropy"})

    def __call__(self, batch: TokenBatch) -> Term:
        return _entropy_term(batch, self.coef, self.span)

    def report(self) -> dict[str, float]:
        return {"entropy_coef": self.coef}


@hook("regularizers", "adaptive_entropy")
@dataclass(frozen=True)
class AdaptiveEntropy:
    """Entropy bonus, (B, T), whose coefficient moves by `step` to keep entropy at `target`. Skywork-OR1
    (2505.22312) 4.2.

    The coefficient applies only while the last window's entropy was at or below the target; the first window applies
    none. Defaults are TRL's.
    """

    coef: float = param(0.0)
    target: float = param(0.2)
    step: float = param(0.005, low=0.0)
    min: float = 0.0
    max: float = 1.0
    span: str = param("window", choices=("window", "micro-batch"))

    math = "- c H[{span}], c +- {step} towards H = {target}"
    needs = frozenset({"entropy"})
    update_every = "step"

    def init(self) -> dict[str, Any]:
        return {"coef": self.coef, "last_entropy": float("inf")}

    def __call__(self, batch: TokenBatch, state: dict[str, Any]) -> Term:
        term = _entropy_term(batch, state["coef"] if state["last_entropy"] <= self.target else 0.0, self.span)
        entropy = Mean((batch.need("entropy").detach() * batch.active).sum(), batch.active.sum())
        return Term(term.value, term.coefficient, term.aggregate, term.mask, stats={"entropy": entropy})

    def update(self, state: dict[str, Any], seen: Mapping[str, float]) -> dict[str, Any]:
        entropy = seen["entropy"]
        moved = state["coef"] + (self.step if entropy <= self.target else -self.step)
        return {
            "coef": min(moved, self.max) if entropy <= self.target else max(moved, self.min),
            "last_entropy": entropy,
        }

    def report(self, state: dict[str, Any]) -> dict[str, float]:
        return {"entropy_coef": state["coef"]}


def _entropy_term(batch: TokenBatch, coef: float, span: str) -> Term:
    return Term(-batch.need("entropy"), coef, TokenMean(span), mask=batch.active)


@hook("regularizers", "nll")
@dataclass(frozen=True)
class PositiveNLL:
    """coef * negative log-likelihood, (B, T), averaged over the tokens of correct rows. VAPO (2504.05118) section 4.3.

    The count of correct tokens is a window total, so this hook takes the window path.
    """

    coef: float = param(0.1, low=0.0)

    math = "+ {coef} NLL[correct rows]"
    scope = "window"

    def __call__(self, batch: TokenBatch) -> Term:
        right = batch.mask * batch.need("correct").to(batch.mask).unsqueeze(1)
        return Term(-batch.logps, self.coef, TokenMean(), mask=right)


@torch.no_grad()
def k1_in_reward(old_logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """(N, T) log pi_old - log pi_ref on the policy's tokens, 0 elsewhere: the penalty of KL-in-reward methods."""
    return (old_logps - ref_logps) * mask
