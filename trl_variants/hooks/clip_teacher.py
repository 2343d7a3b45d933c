"""T_A on tokens that a teacher wrote: a clip of its own for them, beside any clip for the policy's own tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import TokenBatch, bounded_exp, masked_mean
from ..schedule import at
from .base import hook, instantiate, is_stateful, param
from .clip import Clipped
from .metrics import Mean, Metric

TEACHER = 1  # the origin of a token that a teacher wrote


@hook("clip", "origin_shaped")
@dataclass(frozen=True)
class OriginShaped:
    """`inner` on the policy's own tokens; on a teacher's (origin 1) the factor below times A, unclipped, (B, T). LUFFY
    (2504.14945) eq. 7.

    With u = pi / pi_T the factor is, by `form`: "shaped" f(u) = u / (u + gamma), gradient through f; "truncated"
    sg[min(u, cap)] lp, CISPO's; "sequence" exp(mean_t log u); "product" exp(sum_t log u), whose variance grows
    exponentially with length: a diagnostic. Means and sums run over the row's teacher tokens. `behaviour` says what
    pi_T is: "one" takes it as 1 (LUFFY), "known" the log-prob the trace came with, and 1 where it came with none.
    `gamma` is a probability, `cap` a bound on u. `clipped` counts the policy's own tokens alone.
    """

    inner: Any = "none"
    form: str = param("shaped", choices=("shaped", "truncated", "sequence", "product"))
    gamma: float = param(0.1, above=0.0)
    cap: float = param(2.0, above=0.0, ours=True)
    behaviour: str = param("one", choices=("one", "known"))

    def __post_init__(self):
        object.__setattr__(self, "inner", instantiate("clip", self.inner))
        if isinstance(self.inner, OriginShaped) or is_stateful(self.inner) or self.inner.random:
            raise VariantError(f"origin_shaped.inner is a clip without memory, not {self.inner.hook_name}")

    @property
    def math(self) -> str:
        from ..describe import math_of  # describe reads the catalog, which reads hooks

        factor = {
            "shaped": f"u / (u + {self.gamma})",
            "truncated": f"sg[min(u, {self.cap})] lp",
            "sequence": "exp(mean log u)",
            "product": "exp(sum log u)",
        }[self.form]
        below = "1" if self.behaviour == "one" else "pi_T"
        return f"{math_of(self.inner) or self.inner.hook_name}; {factor} A on a teacher's tokens, u = pi / {below}"

    @property
    def needs(self) -> frozenset[str]:
        return self.inner.needs | frozenset({"rollout_logps"} if self.behaviour == "known" else ())

    @property
    def scope(self) -> str:
        return self.inner.scope

    @property
    def whole_groups(self) -> bool:
        return self.inner.whole_groups

    @property
    def divergences(self) -> tuple:
        return self.inner.divergences

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        own = at(self.inner, batch.progress)(log_ratio, advantage, batch)
        own = own if isinstance(own, Clipped) else Clipped(own)
        if batch.origin is None:
            return own
        theirs = batch.origin == TEACHER
        log_u = batch.logps - self._behaviour(batch)
        factor = self._factor(log_u, theirs.to(batch.mask) * batch.mask, batch.logps)
        if own.over_tokens:  # the others were chosen inside the hook already
            factor = factor * batch.active
        objective = torch.where(theirs, factor * advantage, own.objective)
        outside = lambda flag: None if flag is None else flag & ~theirs  # noqa: E731
        return Clipped(
            objective,
            outside(own.low),
            outside(own.high),
            {**own.metrics, **self._metrics(log_u.detach(), theirs.to(batch.mask) * batch.mask)},
            own.over_tokens,
        )

    def _behaviour(self, batch: TokenBatch) -> Tensor:
        """(B, T) log pi_T, 0 where it is taken as 1."""
        if self.behaviour == "one" or batch.rollout_logps is None:
            return torch.zeros_like(batch.logps)
        return batch.rollout_logps.nan_to_num(nan=0.0).to(batch.logps.dtype)

    def _factor(self, log_u: Tensor, here: Tensor, logps: Tensor) -> Tensor:
        if self.form == "shaped":
            u = bounded_exp(log_u)
            return u / (u + self.gamma)
        if self.form == "truncated":
            return bounded_exp(log_u.detach()).clamp(max=self.cap) * logps
        whole = masked_mean(log_u, here) if self.form == "sequence" else (log_u * here).sum(-1, keepdim=True)
        return bounded_exp(whole).expand_as(log_u)

    def _metrics(self, log_u: Tensor, here: Tensor) -> Mapping[str, Metric]:
        u = bounded_exp(log_u) * here
        count = here.sum(-1, keepdim=True)
        ess = u.sum(-1, keepdim=True) ** 2 / (count * (u**2).sum(-1, keepdim=True)).clamp(min=1e-30)
        rows = (count > 0).to(ess)
        return {
            "origin/teacher_ess": Mean((ess * rows).sum(), rows.sum()),
            "origin/teacher_truncated": Mean.over((u > self.cap).to(u), here),
        }


@hook("clip", "reinforce")
@dataclass(frozen=True)
class Reinforce:
    """sg[w] A lp, w = r where low <= r <= high and 0 elsewhere, (B, T): REINFORCE with a gate on the ratio. MOPD
    (2601.02780) section 4.4; IcePop.

    A rejected token leaves the numerator alone. `low` and `high` are bounds on the ratio itself; None: unbounded. With
    ratio `on_policy` w is 1.
    """

    low: float | None = param(None, low=0.0)
    high: float | None = param(None, above=0.0)

    def __post_init__(self):
        if isinstance(self.low, (int, float)) and isinstance(self.high, (int, float)) and self.low >= self.high:
            raise VariantError(f"reinforce.low {self.low} must be below high {self.high}")

    @property
    def math(self) -> str:
        if self.low is None and self.high is None:
            return "sg[r] A lp"
        below, above = (0 if self.low is None else self.low), ("inf" if self.high is None else self.high)
        return f"sg[r [{below} <= r <= {above}]] A lp"

    def __call__(self, log_ratio: Tensor, advantage: Tensor, batch: TokenBatch) -> Clipped:
        ratio = bounded_exp(log_ratio.detach())
        none = torch.zeros_like(ratio, dtype=torch.bool)
        low = none if self.low is None else ratio < self.low
        high = none if self.high is None else ratio > self.high
        return Clipped(ratio.masked_fill(low | high, 0.0) * advantage * batch.logps, low, high)
