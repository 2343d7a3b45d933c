"""Methods in which a teacher moves the trust region (T_A)."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped
from ..hooks.aggregate import SequenceMean
from ..hooks.clip import PPOClip
from ..hooks.ratio_teacher import TeacherMixture
from . import entry

RLAD = entry(
    About(
        id="rlad",
        title="RLAD / TRRD: reinforcement-aware knowledge distillation",
        family="distillation",
        paper="2602.22495",
        year=2026,
        side="trajectory",
        idea="Measure the clip from a mixture of the old policy and a teacher: imitation happens only where the advantage "
        "agrees.",
        deviations=(
            "alpha is the old policy's exponent, as in the formula; the body's text names the ends the other way round",
            "the ratio is not 1 on-policy: clip fraction, mean ratio and ESS are not centred at 1. A survey calls its weight on "
            "teacher-preferred tokens larger; it is smaller, only the room before the clip is larger",
            "no clamp: a distant teacher clips most tokens of one side at first (appendix B: ratio: {teacher_mixture: {clamp: "
            "1.0}}, the value of a third-party port)",
            "the reference KL is optional in the paper and off here",
            "a token without a teacher keeps the plain ratio; another public RLAD (alpha clip(rho) teacher term) is not this",
        ),
        aliases=("trrd",),
    ),
    advantage=Grouped(ddof=0),
    ratio=TeacherMixture(alpha=0.5),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
)
