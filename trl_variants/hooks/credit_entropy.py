"""Credit hooks that look at the entropy of the next-token distribution, detached."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import TokenBatch, bounded_exp
from .base import hook, param

SAME = 1e-5  # nats: contexts that repeat have one entropy, and rounding must not rank them


@hook("credit", "entropy_flow")
@dataclass(frozen=True)
class EntropyFlow:
    """A_t = (1 + l) A where dH_t > 0, (1 - l) A where dH_t < 0, (B, T): both sides move entropy alike. OPEFO
    (2605.11491).

    dH_t = -A (1 - p_t)^2 (lp_t + H_t) is the paper's estimate of a token's effect on entropy, up to the step size; it
    is not the exact first-order change and may have its sign wrong. P, N: sums of the positive and of the negative
    |dH| over the window, l = (N - P) / (N + P). With nothing on one side nothing can be balanced and l = 0.
    """

    math = "A_t = (1 + l sign(dH_t)) A, dH = -A (1-p)^2 (lp + H), l = (N - P) / (N + P)"
    needs = frozenset({"entropy"})
    scope = "window"

    @torch.no_grad()
    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        flow = -advantage * (1 - bounded_exp(batch.logps)) ** 2 * (batch.logps + batch.need("entropy"))
        flow = torch.where(batch.mask > 0, flow, 0.0)
        up, down = flow.clamp(min=0.0).sum(), -flow.clamp(max=0.0).sum()
        both = (up > 0) & (down > 0)
        balance = torch.where(both, (down - up) / torch.where(both, up + down, 1.0), 0.0)
        return advantage * (1 + balance * flow.sign())


@hook("credit", "entropy_band")
@dataclass(frozen=True)
class EntropyBand:
    """No reward term on the tokens of lowest entropy, a bonus on those of highest, (B, T). EG-GRPO (2026, no arXiv id),
    on GRPO (2402.03300); the authors' code (minebetter/EG-GRPO) or the paper's form.

    Cuts per row, over its n tokens sorted by entropy upwards: low is H < sorted[floor(low n)], high is H >
    sorted[floor(high_from n)]. M = 1 outside low, U = 1 in high, h = H / log(vocabulary) in [0, 1].
    form "code": A_t = (A + U min(cap |A|, coef h)) M. form "paper": A_t = M A + U l h, one l per window,
    l = kappa sum_i |A_i| n_low / n / sum_i 1/n sum_high h, so that kappa = 1 gives back the |A| taken from low.
    A row with A = 0 (dead group, no score) gets no bonus. `vocabulary` defaults to the model's; 0 leaves H in nats.
    """

    low: float = param(0.2, low=0.0, high=1.0)
    high_from: float = param(0.5, low=0.0, high=1.0)
    form: str = param("code", choices=("code", "paper"))
    coef: float = param(0.3, low=0.0)
    cap: float = param(0.3, low=0.0)
    kappa: float = param(1.0, low=0.0)
    vocabulary: int | None = param(None, low=0)

    math = "A_t = [not in lowest {low} by H] A + [H above {high_from}] bonus ({form}: {coef}, {cap}, {kappa})"
    needs = frozenset({"entropy"})
    silent_at_zero = True

    @property
    def scope(self) -> str:
        return "window" if self.form == "paper" else "local"

    @torch.no_grad()
    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        entropy, inside = batch.need("entropy"), batch.mask > 0
        size = batch.run.vocabulary if self.vocabulary is None else self.vocabulary
        level = torch.where(inside, entropy / math.log(size) if size > 1 else entropy, 0.0)
        count = batch.mask.sum(1, keepdim=True)
        ordered = torch.where(inside, entropy, torch.inf).sort(1).values
        below = inside & (entropy < _order_statistic(ordered, count, self.low) - SAME)
        above = inside & (entropy > _order_statistic(ordered, count, self.high_from) + SAME) & (advantage != 0)
        kept = (~below).to(batch.mask)
        if self.form == "code":
            bonus = torch.minimum(self.cap * advantage.abs(), self.coef * level)
            return (advantage + bonus * above) * kept
        share = 1 / count.clamp(min=1.0)
        taken = (advantage.abs() * below * share).sum()
        room = (level * above * share).sum()
        scale = self.kappa * torch.where(room > 0, taken / torch.where(room > 0, room, 1.0), 0.0)
        return advantage * kept + scale * level * above


def _order_statistic(ordered: Tensor, count: Tensor, share: float) -> Tensor:
    """(B, 1) the value at place floor(share * count) of each row, the last one at most."""
    place = torch.minimum((count.double() * share).floor(), count.double() - 1).clamp(min=0.0)
    return ordered.gather(1, place.long())
