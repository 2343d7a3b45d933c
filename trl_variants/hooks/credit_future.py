"""Credit hooks that look at what follows a token in its answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import TokenBatch, bounded_exp
from .base import hook, param


def discounted_future(x: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """(B, T) F_t = sum over the row's tokens k >= t of gamma^(k-t) x_k, counting tokens under `mask` only.

    Doubling instead of a loop over T: after s rounds every token has seen the 2^s columns from itself on.
    """
    total = torch.where(mask > 0, x, 0.0)
    factor = torch.where(mask > 0, torch.as_tensor(gamma, dtype=x.dtype, device=x.device), 1.0)
    shift = 1
    while shift < x.shape[1]:
        total = torch.cat([total[:, :-shift] + factor[:, :-shift] * total[:, shift:], total[:, -shift:]], 1)
        factor = torch.cat([factor[:, :-shift] * factor[:, shift:], factor[:, -shift:]], 1)
        shift *= 2
    return total * (mask > 0)


@hook("credit", "lambda_trace")
@dataclass(frozen=True)
class LambdaTrace:
    """A_t = A w(d), d the tokens still to come, (B, T): GAE's trace without a critic. GRPO-lambda (2510.00194).

    From sum_t A_t^GAE grad lp_t = sum_t delta_t sum_{l<=t} (gamma lam)^(t-l) grad lp_l. `reading` says where delta = A:
    "terminal", at the last token alone, w = (gamma lam)^d; "every", at every token, w = (1 - (gamma lam)^(d+1)) /
    (1 - gamma lam), d + 1 in the limit 1. `floor` bounds A from below first, in units of advantage; None: not.
    """

    lam: float = param(0.99, above=0.0, high=1.0)
    gamma: float = param(1.0, above=0.0, high=1.0)
    reading: str = param("terminal", choices=("terminal", "every"))
    floor: float | None = param(None, high=0.0)

    math = "A_t = A w(tokens to come), {reading} trace of {gamma} * {lam}"
    silent_at_zero = True

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        advantage = advantage if self.floor is None else advantage.clamp(min=self.floor)
        to_come = batch.mask.flip(1).cumsum(1).flip(1) - batch.mask
        log_decay = math.log(self.gamma * self.lam)
        if self.reading == "terminal":
            return advantage * torch.exp(to_come * log_decay)
        if log_decay == 0.0:
            return advantage * (to_come + 1)
        return advantage * torch.expm1((to_come + 1) * log_decay) / math.expm1(log_decay)


@hook("credit", "future_kl")
@dataclass(frozen=True)
class FutureKL:
    """A_t = f_t A, f_t = clip(exp(F_t), low, high), F_t = sum_{k>=t} gamma^(k-t) [d_k <= log ratio_filter] d_k, (B, T).
    FIPO (2603.19835).

    d = sg[lp] - lp_old, gamma = 2^(-1/half_life), `half_life` in tokens; k = t is included. `low`, `high` are bounds on
    the factor itself; where A < 0 and r_t > `safe_ratio` the factor is then held in [safe_low, safe_high]. A token over
    `ratio_filter` (a ratio) adds nothing to F; its own loss stays. f = 1 when the batch is on-policy.
    """

    half_life: float = param(32.0, above=0.0)
    low: float = param(1.0, above=0.0)
    high: float = param(1.2, above=0.0)
    ratio_filter: float = param(10.0, above=0.0)
    safe_ratio: float = param(4.0, above=0.0)
    safe_low: float = param(0.8, above=0.0)
    safe_high: float = param(1.0, above=0.0)

    math = "A_t = clip(exp(sum_k>=t 2^(-(k-t)/{half_life}) d_k), {low}, {high}) A, d = sg[lp] - lp_old"
    needs = frozenset({"old_logps"})
    silent_at_zero = True

    def __post_init__(self):
        for low, high in (("low", "high"), ("safe_low", "safe_high")):
            a, b = getattr(self, low), getattr(self, high)
            if isinstance(a, (int, float)) and isinstance(b, (int, float)) and a > b:
                raise VariantError(f"future_kl.{low} {a} is above {high} {b}")

    @property
    def gamma(self) -> float:
        """Decay per token."""
        return 2.0 ** (-1.0 / self.half_life)

    @torch.no_grad()
    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        d = batch.logps - batch.anchor
        counted = torch.where(d <= math.log(self.ratio_filter), d, 0.0)
        factor = bounded_exp(discounted_future(counted, batch.mask, self.gamma)).clamp(self.low, self.high)
        unsafe = (advantage < 0) & (d > math.log(self.safe_ratio))
        return torch.where(unsafe, factor.clamp(self.safe_low, self.safe_high), factor) * advantage
