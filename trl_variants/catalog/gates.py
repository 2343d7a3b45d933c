"""Methods that replace the hard clip by a smooth function of the ratio."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped
from ..hooks.aggregate import SequenceMean, TokenMean
from ..hooks.clip_gates import GaussianWeight, Hazard, SmoothGate, SoftSequence
from ..hooks.ratio import TokenRatio
from . import entry

SAPO_GATES = entry(
    About(
        id="sapo-gates",
        title="Gate families for SAPO",
        family="soft-gates",
        paper="2602.19345",
        year=2026,
        side="trajectory",
        kind="part",
        host="sapo",
        idea="SAPO's sigmoid gate is one of a family: any f with f' = 1 at r = 1 that falls to 0 on both sides will do.",
        deviations=(
            "the families (sigmoid, erf, arctan, softsign) are the paper's; their scale is fixed by f'(1) = 1, derived here because "
            "the formulas were seen only in summaries",
            "at equal tau the gates are not equally wide (f' at r = 1.5: .940, .779, .800, .444): tune tau with the gate",
            "v1 of the paper expands SAPO as Soft Advantage Policy Optimization",
        ),
        ours=("gate erf, the tightest: the paper names no winner", "tau 1.0 and 1.05: SAPO's"),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=SmoothGate(gate="erf"),
    aggregate=SequenceMean(),
)

GIPO = entry(
    About(
        id="gipo",
        title="Gaussian Importance Sampling Policy Optimization",
        family="soft-gates",
        paper="2603.03955",
        year=2026,
        side="trajectory",
        kind="part",
        host="clip-higher",
        idea="A detached Gaussian weight in the log-ratio instead of a clip, so stale samples fade smoothly and symmetrically.",
        deviations=(
            "the paper's host is an actor-critic for robots (GAE); shown here on group advantages with a token mean",
            "sigma 0.5 as the authors' script; another port uses 1.0 with r clamped to (0.0067, 148), here r is clamped at exp(+-20)",
            "no dependence on the sign of A: a harmful token with a large ratio is damped too",
        ),
        ours=("group advantage and token mean: the host is ours",),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=GaussianWeight(sigma=0.5),
    aggregate=TokenMean(),
)

SSPO = entry(
    About(
        id="sspo",
        title="Soft Sequence Policy Optimization",
        family="soft-gates",
        paper="2602.19327",
        year=2026,
        side="trajectory",
        host="gmpo",
        idea="GMPO's geometric mean, but every token's log-ratio passes a smooth bounded gate (arctan) instead of a one-sided clip.",
        deviations=(
            "seen: abstract and a third party's notes, no code; the gate is the paper's best of five, its sharpness 1 is not confirmed",
            "another SSPO is a subsentence method (2511.04256), not this one",
        ),
        ours=("sharpness 1 of the arctan",),
        aliases=("soft-sequence",),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=SoftSequence(),
    aggregate=SequenceMean(),
)

MHPO = entry(
    About(
        id="mhpo",
        title="Modulated Hazard-aware Policy Optimization",
        family="soft-gates",
        paper="2603.16929",
        year=2026,
        side="trajectory",
        idea="Squash the log-ratio with a scaled tanh and multiply by a survival weight with its own shape for up and down moves.",
        deviations=(
            "no authors' code found: two third-party readings and a verl port agree on formula and defaults; a third-party ablation "
            "prefers k >= 2.5 and lambda 0.8",
            "the verl port averages over tokens, the paper's sum is a sequence mean",
            "on-policy the gradient is 0.2651 of GRPO's at the same learning rate (the hazard is not 0 at r = 1)",
        ),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=Hazard(),
    aggregate=SequenceMean(),
)
