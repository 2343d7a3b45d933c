"""T_B, token by token: credit hooks that put a teacher's word into the advantage.

rt_t = lp_T - lp of the sampled token (nats), detached, positive where the teacher likes it better; 0 where the teacher
is silent. lp is the old policy's unless a hook says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import Scored, TokenBatch
from .base import hook, param
from .credit_future import discounted_future

_NEEDS = frozenset({"old_logps", "teacher_logps"})


@hook("credit", "teacher_advantage")
@dataclass(frozen=True)
class TeacherAdvantage:
    """A_t = keep A + coef sum_{k>=t} g^(k-t) clip(rt_k, low, high), (B, T). On-policy distillation as Thinking Machines
    Lab's post (2025) writes it; MOPD (2601.02780) for keep > 0; Kimi K3 (2607.24653) for the bounds.

    On-policy the expected gradient of a token is -grad KL(pi || pi_T) at its prefix (`coef` 1, `discount` g = 0).
    `low`, `high` in nats. `of` "current": rt against the policy of this very update.
    """

    coef: float = param(1.0)
    keep: float = param(1.0, low=0.0)
    discount: float = param(0.0, low=0.0, high=1.0)
    low: float | None = None
    high: float | None = None
    of: str = param("old", choices=("old", "current"))

    needs = _NEEDS
    adds = True

    def __post_init__(self):
        low, high = self.low, self.high
        if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low >= high:
            raise VariantError(f"teacher_advantage.low {low} must be below high {high}")

    @property
    def math(self) -> str:
        rt = "rt" if self.low is None and self.high is None else f"clip(rt, {self.low}, {self.high})"
        later = "" if self.discount == 0 else f"sum_k>=t {self.discount}^(k-t) "
        return f"A_t = {self.keep} A + {self.coef} {later}{rt}, rt = lp_T - lp_{self.of}"

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        gap = batch.teacher_gap(self.of)
        if self.low is not None or self.high is not None:
            gap = gap.clamp(self.low, self.high)
        if self.discount != 0:
            gap = discounted_future(gap, batch.mask, self.discount)
        return self.keep * advantage + self.coef * gap


@hook("credit", "teacher_interpolation")
@dataclass(frozen=True)
class TeacherInterpolation:
    """A_t = (1 - a) A + a rt, (B, T): direct interpolation, the survey's unused T_B; no paper, compare TRL's former
    MiniLLM trainer.

    a = 0 is the host, a = 1 on-policy distillation under the host's clip. Any schedule may move `a`.
    """

    a: float = param(0.25, low=0.0, high=1.0, ours=True)

    math = "A_t = (1 - {a}) A + {a} rt, rt = lp_T - lp_old"
    needs = _NEEDS
    adds = True

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        return (1 - self.a) * advantage + self.a * batch.teacher_gap()


@hook("credit", "teacher_until")
@dataclass(frozen=True)
class TeacherUntil:
    """A_t = rt in the first `steps` optimizer steps, A afterwards, (B, T). Sequential Beats Joint (2609.04108).

    The teacher is not asked about generations after that.
    """

    steps: int = param(60, low=0)

    math = "A_t = rt up to step {steps}, then A; rt = lp_T - lp_old"
    needs = _NEEDS
    adds = True

    def teacher_rows(self, scored: Scored) -> Tensor:
        """(N,) every row while the teacher leads, none afterwards."""
        return torch.full_like(scored.keep, scored.step < self.steps)

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        return batch.teacher_gap() if batch.step < self.steps else advantage


@hook("credit", "teacher_on_wrong")
@dataclass(frozen=True)
class TeacherOnWrong:
    """A_t = A on right rows, rt on wrong ones, (B, T): sample routing in advantage form. SRPO (2604.02288), in the form
    of 2609.04108.

    A wrong row's own advantage is dropped, also where no teacher speaks: then it learns nothing. Right rows are not
    shown to the teacher.
    """

    math = "A_t = A if right else rt, rt = lp_T - lp_old"
    needs = _NEEDS
    adds = True

    def teacher_rows(self, scored: Scored) -> Tensor:
        """(N,) the wrong rows."""
        return ~scored.correct.bool()

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        right = batch.need("correct").bool().unsqueeze(1)
        return torch.where(right, advantage, batch.teacher_gap())


@hook("credit", "teacher_extrapolation")
@dataclass(frozen=True)
class TeacherExtrapolation:
    """A_t = A + lam (lp_T - lp_ref) - (lp_old - lp_ref), (B, T). G-OPD / ExOPD (2602.12125).

    lam = 1 is plain distillation, above 1 goes beyond the teacher along log pi_T / pi_ref, 0 pulls back to the
    reference. Nothing is added where the teacher is silent.
    """

    lam: float = param(1.25, low=0.0)

    math = "A_t = A + {lam} (lp_T - lp_ref) - (lp_old - lp_ref)"
    needs = _NEEDS | {"ref_logps"}
    adds = True

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        # lam (lp_T - ref) - (old - ref) = rt + (lam - 1) (lp_T - ref)
        beyond = batch.need("teacher_logps") - batch.need("ref_logps")
        beyond = torch.where(batch.teacher_says, beyond, torch.zeros_like(beyond))
        return advantage + batch.teacher_gap() + (self.lam - 1) * beyond


@hook("credit", "teacher_magnitude")
@dataclass(frozen=True)
class TeacherMagnitude:
    """A_t = A ((1 - l) + l w_t), w_t = exp(clip(sign(A) rt_t, log(1 - eps), log(1 + eps))), (B, T): the verifier's
    sign, the teacher's size. RLSD (2604.03128).

    l(s) = lam max(0, 1 - s / decay_steps) at optimizer step s, counted from 0; `decay_steps` None: constant. `eps` is a
    width of the weight around 1, applied in log space. Once l is 0 the teacher is not asked.
    """

    lam: float = param(0.5, low=0.0, high=1.0)
    eps: float = param(0.2, above=0.0, high=0.99)
    decay_steps: int | None = param(50, low=1)

    math = "A_t = A (1 - l + l clip(exp(sign(A) rt), 1 -+ {eps})), l from {lam} to 0 in {decay_steps} steps"
    needs = _NEEDS

    def weight_at(self, step: int) -> float:
        """l(s), the teacher's share of the size."""
        return self.lam if self.decay_steps is None else self.lam * max(0.0, 1 - step / self.decay_steps)

    def teacher_rows(self, scored: Scored) -> Tensor:
        """(N,) every row while the teacher has a share."""
        return torch.full_like(scored.keep, self.weight_at(scored.step) > 0)

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        share = self.weight_at(batch.step)
        signed = advantage.sign() * batch.teacher_gap()
        weight = signed.clamp(math.log(1 - self.eps), math.log(1 + self.eps)).exp()
        return advantage * (1 - share + share * weight)


@hook("credit", "prefix_weight")
@dataclass(frozen=True)
class PrefixWeight:
    """A_t = A_t w_t, w_t = 1 + g (1 - sum_{s<t} |rt_s| / sum_s |rt_s|), (B, T). IW-OPD (2606.22600).

    A token counts less the more the row has strayed from its teacher before it: w falls from 1 + g at the first token
    towards 1.
    """

    g: float = param(0.5, low=0.0)
    eps: float = param(1e-8, above=0.0)

    math = "A_t = A_t (1 + {g} (1 - sum_s<t |rt_s| / sum_s |rt_s|)), rt = lp_T - lp_old"
    needs = _NEEDS

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        apart = batch.teacher_gap().abs()
        before = apart.cumsum(1) - apart
        return advantage * (1 + self.g * (1 - before / (apart.sum(1, keepdim=True) + self.eps)))


def relaxed_floor(lam: float) -> float:
    """The lowest teacher reward, log(lam) / (1 - lam): log((1 - lam) x + lam) / (1 - lam) at x = pi_T / pi = 0."""
    return math.log(lam) / (1 - lam)


@hook("credit", "relaxed_teacher")
@dataclass(frozen=True)
class RelaxedTeacher:
    """A_t = A + max(lp_T - lp, log(lam) / (1 - lam)), lp the current policy's, (B, T). REOPOLD (2603.11137).

    One hostile token cannot dominate the batch. `lam` is the mixture weight the floor comes from.
    """

    lam: float = param(0.3, above=0.0, high=0.99)

    math = "A_t = A + max(lp_T - sg[lp], log({lam}) / (1 - {lam}))"
    needs = _NEEDS
    adds = True

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        return advantage + batch.teacher_gap("current").clamp(min=relaxed_floor(self.lam))
