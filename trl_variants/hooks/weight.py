"""Weight hooks: what multiplies the objective after the clip, detached; several, in order.

Signature: `(batch) -> weight`, (B, T) or (B, 1). `batch.advantage` is final (after credit), `batch.log_ratio` is set
for hooks that do not select. A hook with `selects` returns 0/1 and narrows `batch.active` for everything after it; with
`in_denominator` its zeros also leave the aggregation's count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import TokenBatch, bounded_exp, masked_mean
from .base import hook, param


@hook("weight", "sampler_correction")
@dataclass(frozen=True)
class SamplerCorrection:
    """pi_old / pi_rollout, for an engine whose log-probs differ from the trainer's: token (B, T) or sequence (B, 1).

    "truncate" clamps to [min, max] (TIS), "mask" zeroes what lies outside (MIS). Modes and defaults are those of TRL
    1.16's vLLM correction, where "sequence" is the product over tokens; "geometric" is their geometric mean (ms-swift,
    SkyRL). Tokens the engine could not score count as ratio 1.
    """

    mode: str = param(
        "sequence_mask",
        choices=(
            "token_truncate",
            "token_mask",
            "sequence_truncate",
            "sequence_mask",
            "geometric_truncate",
            "geometric_mask",
        ),
    )
    min: float | None = None
    max: float | None = 3.0

    math = "* {mode}(pi_old/pi_rollout, {min}, {max})"
    needs = frozenset({"old_logps", "rollout_logps"})
    corrects_sampler = True
    drift = True

    def __post_init__(self):
        if self.min is not None and self.max is not None and self.min >= self.max:
            raise VariantError(f"sampler_correction.min {self.min} must be below max {self.max}")

    @torch.no_grad()
    def __call__(self, batch: TokenBatch) -> Tensor:
        if batch.rollout_logps is None:  # the sampler is the trainer's own model: nothing to correct
            return torch.ones_like(batch.mask[:, :1])
        difference = ((batch.anchor - batch.rollout_logps) * batch.mask).nan_to_num(nan=0.0)
        if self.mode.startswith("sequence"):
            difference = difference.sum(-1, keepdim=True)
        elif self.mode.startswith("geometric"):
            difference = masked_mean(difference, batch.mask)
        ratio = bounded_exp(difference)
        low, high = -math.inf if self.min is None else self.min, math.inf if self.max is None else self.max
        if self.mode.endswith("truncate"):
            return ratio.clamp(low, high)
        return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


@hook("weight", "off_policy_mask")
@dataclass(frozen=True)
class OffPolicySequenceMask:
    """Drops a negative-advantage row whose mean log(pi_sampler / pi) exceeds `threshold`, (B, 1). DeepSeek-V3.2
    eq. 7-8.

    The sampler's own log-probs are used where the engine gave them, else the old policy's.
    """

    threshold: float = param(0.5, ours=True)

    math = "* [A >= 0 or mean_t(lp_sampler - lp) <= {threshold}]"
    needs = frozenset({"old_logps"})
    drift = True

    @torch.no_grad()
    def __call__(self, batch: TokenBatch) -> Tensor:
        sampler = batch.anchor if batch.rollout_logps is None else batch.rollout_logps
        drift = masked_mean((sampler - batch.logps).nan_to_num(nan=0.0), batch.mask)
        return ((batch.advantage >= 0) | (drift <= self.threshold)).to(batch.mask)


@hook("weight", "entropy_quantile")
@dataclass(frozen=True)
class EntropyQuantile:
    """Keeps the `keep` share of tokens with the highest entropy, (B, T). Beyond the 80/20 rule (2506.01939) eq. 5.

    `span="window"` takes the quantile over the whole optimizer window; "micro-batch" is TRL's rule, over the rows that
    happen to be forwarded together on all processes. `denominator`: "all" averages over every token (TRL), "selected"
    over those kept (the authors), which makes the gradient 1 / keep times larger.
    """

    keep: float = param(0.2, above=0.0, high=1.0)
    span: str = param("window", choices=("window", "micro-batch"))
    denominator: str = param("all", choices=("all", "selected"))

    math = "* [H_t in top {keep} of the {span}; mean over {denominator}]"
    needs = frozenset({"entropy"})
    selects = True

    @property
    def in_denominator(self) -> bool:
        return self.denominator == "selected"

    @property
    def scope(self) -> str:
        return "window" if self.span == "window" else "local"

    @torch.no_grad()
    def __call__(self, batch: TokenBatch) -> Tensor:
        entropy = batch.need("entropy").detach()
        entropy = entropy if entropy.dtype == torch.float64 else entropy.float()  # torch.quantile takes no half types
        everyone = batch.gather(entropy[batch.mask.bool()])
        if everyone.numel() == 0:
            return torch.zeros_like(batch.mask)
        threshold = exact_quantile(everyone, 1 - self.keep)
        return ((entropy * batch.mask >= threshold) & batch.mask.bool()).to(batch.mask)


def exact_quantile(x: Tensor, q: float) -> Tensor:
    """torch.quantile without its limit of 16 million values: linear interpolation between order statistics."""
    if x.numel() < 1 << 24:
        return torch.quantile(x, q)
    ordered = x.sort().values
    position = q * (x.numel() - 1)
    below = int(math.floor(position))
    return torch.lerp(ordered[below], ordered[min(below + 1, x.numel() - 1)], position - below)
