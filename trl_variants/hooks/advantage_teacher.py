"""T_B where the teacher's word needs a group or the whole generation beside it: advantages per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..divergence import Divergence
from ..records import Scored, masked_mean
from .advantage import Grouped, labels_of, mean_by, reward_to_go, std_by, sums_by
from .advantage_credit import moments_by, standardised_by
from .base import hook, param
from .weight import exact_quantile

_SHIFT = Divergence("fkl", "teacher")  # KL(shown the sibling || plain)
_EXACT = Divergence("rkl", "teacher")


@hook("advantage", "self_conditioned")
@dataclass(frozen=True)
class SelfConditioned(Grouped):
    """A_t = f_t A, f = D / (D + c), D_t = KL(pi_T || pi) over the vocabulary, pi_T the policy shown one of its own
    answers, (N, T). SC-GRPO (2606.18810).

    c = max(`percentile`-th percentile of D over the generation's routed tokens, `floor`), in nats. Routing by the
    number of right rows of the group: at least two and not all: f A; none: A = `diversity` (s - mean s) / (std s +
    eps_s), s the row's mean f, f itself not applied; one or all: A, and the teacher is not asked. A routed token where
    the teacher is silent keeps A.
    """

    percentile: float = param(75.0, low=0.0, high=100.0)
    floor: float = param(1e-4, above=0.0)
    diversity: float = param(0.1, low=0.0)
    eps_s: float = param(1e-6, low=0.0)

    needs = frozenset({"tokens", "distribution"})
    divergences = (_SHIFT,)
    reads_token_rewards = False

    @property
    def math(self) -> str:
        return super().math + "; A_t = A D_t / (D_t + c), D = KL(pi_T || pi), c its {percentile:g}th percentile"

    def _routes(self, scored: Scored) -> tuple[Tensor, Tensor]:
        """(N,) bool each: rows weighted by f, rows of groups without a right answer."""
        right = scored.correct.bool() & scored.valid
        total, count = sums_by(labels_of(scored, "group"), right.to(scored.reward), scored.valid)
        total, count = (x[labels_of(scored, "group")] for x in (total, count))
        return scored.valid & (total >= 2) & (total < count), scored.valid & (total == 0)

    def teacher_rows(self, scored: Scored) -> Tensor:
        """(N,) rows of the groups in which f is read."""
        weighted, failed = self._routes(scored)
        return weighted | failed

    def __call__(self, scored: Scored) -> Tensor:
        advantage = super().__call__(scored).unsqueeze(1)
        weighted, failed = self._routes(scored)
        asked = scored.teacher_says & (weighted | failed).unsqueeze(1)
        shift = torch.where(asked, scored.need(f"divergence/{_SHIFT.key}"), 0.0).to(advantage.dtype)
        f = shift / (shift + self._scale(shift[asked]))
        spread = masked_mean(f, asked.to(f)).squeeze(1)
        labels, counted = labels_of(scored, "group"), failed & asked.any(1)
        centred = spread - mean_by(labels, spread, counted)
        diverse = self.diversity * centred / (std_by(labels, spread, counted, 1) + self.eps_s)
        diverse = torch.where(counted, diverse, 0.0).nan_to_num(nan=0.0).unsqueeze(1)
        advantage = torch.where(failed.unsqueeze(1), diverse, advantage)
        return torch.where(asked & weighted.unsqueeze(1), f * advantage, advantage) * scored.need("mask")

    def _scale(self, shifts: Tensor) -> float:
        return max(float(exact_quantile(shifts, self.percentile / 100)), self.floor) if len(shifts) else self.floor


@hook("advantage", "teacher_baselined")
@dataclass(frozen=True)
class TeacherBaselined(Grouped):
    """A_t = (1 - a) A + a s sum_{k>=t} g^(k-t) (rt_k - b_k), (N, T): the teacher's signal with a baseline of its own.
    The survey's open problem on T_B; no paper, compare GRPO's (2402.03300) for rewards.

    rt = lp_T - lp_old, bounded to +-`bound` nats (None: not). b, by `baseline`: "exact" E_pi[rt] = -KL(pi || pi_T) at
    each prefix, which leaves the expected gradient as it is (with `bound` None); "group" the mean over the group's
    tokens; "row": the row's mean rt takes the place of rt and competes in the group; "none". `divide` by the group's
    population std ("group" alone). s = std A / std of the teacher's part over the generation's tokens (`match_scale`),
    1 otherwise. Tokens without a teacher keep (1 - a) A; a = 0 is the host.

    State: the last generation's correlation between A and the teacher's part over tokens, which is logged.
    """

    a: float = param(0.25, low=0.0, high=1.0, ours=True)
    baseline: str = param("group", choices=("exact", "group", "row", "none"), ours=True)
    discount: float = param(0.0, low=0.0, high=1.0, ours=True)
    match_scale: bool = param(True, ours=True)
    divide: bool = param(False, ours=True)
    bound: float | None = param(None, above=0.0)
    eps_teacher: float = param(1e-6, low=0.0, ours=True)

    update_every = "generation"
    reads_token_rewards = False

    @property
    def needs(self) -> frozenset[str]:
        exact = {"distribution"} if self.baseline == "exact" else set()
        return frozenset({"tokens", "old_logps", "teacher_logps", *exact})

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        return (_EXACT,) if self.baseline == "exact" else ()

    @property
    def math(self) -> str:
        scale = "std A / std rt " if self.match_scale else ""
        return super().math + f"; A_t = {1 - self.a:g} A + {self.a} {scale}(rt - b), b {self.baseline}"

    def init(self) -> dict[str, float]:
        return {"correlation": 0.0}

    def report(self, state: Mapping[str, float]) -> dict[str, float]:
        return {"teacher/advantage_correlation": state["correlation"]}

    def update(self, state: Mapping[str, float], seen: Scored) -> dict[str, float]:
        inside, signal = self._teacher_part(seen)
        advantage = super().__call__(seen).unsqueeze(1).expand_as(signal)
        x, y = advantage[inside].double(), signal[inside].double()
        if len(x) < 2:
            return {"correlation": 0.0}
        x, y = x - x.mean(), y - y.mean()
        return {"correlation": float((x * y).sum() / (x.norm() * y.norm()).clamp(min=1e-30))}

    def __call__(self, scored: Scored, state: Mapping[str, float]) -> Tensor:  # type: ignore[override]
        inside, signal = self._teacher_part(scored)
        advantage = super().__call__(scored).unsqueeze(1).expand_as(signal)
        if self.match_scale and bool(inside.any()):
            spread = signal[inside].std(correction=0)
            signal = signal * (advantage[inside].std(correction=0) / (spread + self.eps_teacher))
        return ((1 - self.a) * advantage + self.a * signal) * (scored.need("mask") > 0)

    def _teacher_part(self, scored: Scored) -> tuple[Tensor, Tensor]:
        """Where the teacher counts, (N, T) bool, and its centred, discounted signal there, 0 elsewhere."""
        inside = scored.teacher_says & scored.valid.unsqueeze(1)
        gap = torch.where(inside, scored.teacher_gap(), 0.0).to(scored.reward.dtype)
        gap = gap if self.bound is None else gap.clamp(-self.bound, self.bound)
        labels = labels_of(scored, "group")
        tokens = labels.unsqueeze(1).expand_as(inside)
        if self.baseline == "exact":
            gap = gap + scored.need(f"divergence/{_EXACT.key}").to(gap)
        elif self.baseline == "row":
            rows = masked_mean(gap, inside.to(gap)).squeeze(1)
            gap = (rows - mean_by(labels, rows, inside.any(1))).unsqueeze(1).expand_as(gap)
        elif self.baseline == "group" and self.divide:
            gap = standardised_by(tokens, gap, inside, self.eps_teacher)
        elif self.baseline == "group":
            gap = gap - moments_by(tokens, gap, inside)[0]
        gap = torch.where(inside, gap, 0.0)
        if self.discount:
            gap = reward_to_go(gap, scored.need("mask"), self.discount)
        return inside, gap
