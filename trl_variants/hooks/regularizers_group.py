"""Terms around the old policy (squared log-ratio, hinge on its KL, fallen tokens) and an entropy term on right
answers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..records import TokenBatch, bounded_exp
from .aggregate import SequenceMean, TokenMean
from .base import hook, param
from .metrics import Mean
from .regularizers import Term


@hook("regularizers", "squared_log_ratio")
@dataclass(frozen=True)
class SquaredLogRatio:
    """coef (log r)^2, (B, T) or (B, 1), on the variant's own ratio and aggregate: pulls r back to 1 everywhere.

    Kimi K2.5 (2602.02276) eq. 1 has coef = tau; Kimi k1.5 (2501.12599) and verl's dro have coef = tau / 2 and beta / 2.
    With the product ratio it is the square of the sum over tokens, cross terms included.
    """

    coef: float = param(0.1, low=0.0, ours=True)

    math = "+ {coef} (log r)^2"

    def __call__(self, batch: TokenBatch) -> Term:
        value = batch.log_ratio**2
        return Term(value, self.coef, metrics={"squared_log_ratio": Mean.over(value, batch.mask)})


@hook("regularizers", "kl_hinge")
@dataclass(frozen=True)
class KLHinge:
    """coef/2 max(K - delta, 0)^2 of one scalar K, on every row (B, 1). DisCO (2505.12366), with coef = beta.

    K = mean over the window's tokens of lp_old - lp, the sampled KL(old || current) in nats; `delta` in nats. The
    authors' sg[max(beta (K - delta), 0)] K has the same gradient.
    """

    coef: float = param(1000.0, low=0.0)
    delta: float = param(1e-4, low=0.0)

    math = "+ {coef}/2 max(KL(old || pi) - {delta}, 0)^2"
    needs = frozenset({"old_logps"})
    scope = "window"

    def __call__(self, batch: TokenBatch) -> Term:
        moved = batch.anchor - batch.logps
        kl = (moved * batch.mask).sum() / max(batch.window.tokens, 1.0)
        value = 0.5 * (kl - self.delta).clamp(min=0.0) ** 2
        metrics = {"kl_old": Mean.over(moved, batch.mask)}
        return Term(value.expand(len(batch.mask), 1), self.coef, TokenMean(), metrics=metrics)


@hook("regularizers", "fallen_tokens")
@dataclass(frozen=True)
class FallenTokens:
    """- coef * mean over tokens with A >= 0 of [r <= threshold] log r, (B, T): lifts good tokens that sank.

    Search Agent Policy Optimization (2603.10069). r is the token ratio to the old policy, `threshold` a bound on the
    ratio itself; the indicator has no gradient. The mean is over all tokens with A >= 0, not the fallen ones, a
    count of
    the window, so this hook takes the window path. Without a move from the old policy it is 0.
    """

    coef: float = param(0.1, low=0.0, ours=True)
    threshold: float = param(0.8, above=0.0, ours=True)

    math = "- {coef} mean_(A >= 0) [r <= {threshold}] log r"
    needs = frozenset({"old_logps"})
    scope = "window"

    def __call__(self, batch: TokenBatch) -> Term:
        log_ratio = batch.logps - batch.anchor
        fallen = (log_ratio.detach() <= math.log(self.threshold)).to(log_ratio)
        good = batch.mask * (batch.advantage >= 0)
        metrics = {"fallen_tokens": Mean.over(fallen, good)}
        return Term(-log_ratio * fallen, self.coef, TokenMean(), mask=good, metrics=metrics)


@hook("regularizers", "correct_entropy")
@dataclass(frozen=True)
class CorrectEntropy:
    """- coef * mean over all rows of [correct] 1/|y| sum_t (- r lp), (B, T). R1-zero-Div (2505.23433).

    The importance-sampled entropy of the sampled tokens of right answers; r and lp both carry gradient, so a token
    below
    probability 1/e is lifted and one above is lowered (r detached would only lower). r is not clipped.
    """

    coef: float = param(0.01, low=0.0)

    math = "- {coef} mean_rows [correct] mean_t (-r lp)"
    needs = frozenset({"old_logps"})

    def __call__(self, batch: TokenBatch) -> Term:
        right = batch.need("correct").to(batch.mask).unsqueeze(1)
        surprise = -bounded_exp(batch.logps - batch.anchor) * batch.logps * right
        metrics = {"correct_entropy": Mean.over(surprise, batch.mask * right)}
        return Term(-surprise, self.coef, SequenceMean(), metrics=metrics)
