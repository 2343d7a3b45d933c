"""KL terms whose value and gradient are chosen apart, and an entropy bonus with the authors' controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..records import TokenBatch, bounded_exp
from .aggregate import TokenMean
from .base import hook, param
from .metrics import Mean
from .regularizers import Term, kl_estimate


@hook("regularizers", "kl_straight_through")
@dataclass(frozen=True)
class StraightThroughKL:
    """coef * w (g - sg[g] + sg[v]) per token, (B, T): the value of one estimator, the gradient of another. "k1+" and
    "k3+" of verl; Schulman's note (2020) for the estimators; DeepSeek-V3.2 has the live form (hook `kl`).

    d = lp - lp_ref; v and g are k1 = d, k2 = d^2/2 or k3 = exp(-d) - 1 + d, with slopes 1, d and 1 - exp(-d). On
    samples of the current policy g = "k2" descends the reverse KL(pi || ref), "k3" the forward KL(ref || pi).
    `weight="detached"` multiplies by w = sg[min(ratio, cap)] for samples of an older policy: `cap` bounds the ratio
    itself (OpenRLHF uses 10).
    """

    coef: float = param(0.001, low=0.0)
    value: str = param("k3", choices=("k1", "k2", "k3"))
    gradient: str = param("k2", choices=("k2", "k3"))
    weight: str = param("none", choices=("none", "detached"))
    cap: float | None = param(None, above=0.0)

    math = "+ {coef} {value}(pi || pi_ref) with the gradient of {gradient}"
    needs = frozenset({"ref_logps"})

    @property
    def descends(self) -> str:
        return {"k2": "reverse KL(pi || ref)", "k3": "forward KL(ref || pi)"}[self.gradient]

    def __call__(self, batch: TokenBatch) -> Term:
        # outside the mask the two log-probs may be anything: there their difference must not reach the estimators
        d = (batch.logps - batch.need("ref_logps")) * batch.mask
        slope = kl_estimate(d, self.gradient)
        value = slope - slope.detach() + kl_estimate(d.detach(), self.value)
        if self.weight == "detached":
            ratio = bounded_exp(batch.log_ratio.detach())
            value = value * (ratio if self.cap is None else ratio.clamp(max=self.cap))
        return Term(value, self.coef, metrics={"kl": Mean.over(value, batch.mask)})


@hook("regularizers", "entropy_controller")
@dataclass(frozen=True)
class EntropyController:
    """- c mean_t H_t, (B, T), c moved by `step` before it is applied, and only while H < target. Skywork-OR1
    (2505.22312) and its code.

    H is the mean token entropy of the window at hand (nats): c = min(c + step, max) if H < target, else
    max(c - step, min); the bonus has coefficient c if H < target, else 0. The hook `adaptive_entropy` is TRL's rule,
    which applies the coefficient one step later.
    """

    coef: float = param(0.0, low=0.0)
    target: float = param(0.2, low=0.0)
    step: float = param(1e-4, low=0.0)
    min: float = param(0.0, low=0.0)
    max: float = param(0.005, low=0.0)

    math = "- c [H < {target}] H, c +- {step} in [{min}, {max}]"
    needs = frozenset({"entropy"})
    scope = "window"
    update_every = "step"

    def init(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def _moved(self, coef: float, entropy: float) -> float:
        return min(coef + self.step, self.max) if entropy < self.target else max(coef - self.step, self.min)

    def __call__(self, batch: TokenBatch, state: Mapping[str, Any]) -> Term:
        entropy = batch.need("entropy")
        seen = Mean((entropy.detach() * batch.active).sum(), batch.active.sum())
        now = seen.value()
        coef = self._moved(state["coef"], now) if now < self.target else 0.0
        return Term(-entropy, coef, TokenMean(), mask=batch.active, stats={"entropy": seen})

    def update(self, state: Mapping[str, Any], seen: Mapping[str, float]) -> dict[str, Any]:
        return {"coef": self._moved(state["coef"], seen["entropy"])}

    def report(self, state: Mapping[str, Any]) -> dict[str, float]:
        return {"entropy_coef": state["coef"]}
