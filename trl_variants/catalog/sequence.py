"""Methods that treat the answer, not the token, as the unit of the ratio."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped
from ..hooks.aggregate import SequenceMean, SequenceSum, TokenMean
from ..hooks.clip import GammaWeight, GeometricMean, PPOClip
from ..hooks.ratio import SequenceRatio, SequenceTokenRatio, TokenRatio
from . import entry

GSPO = entry(
    About(
        id="gspo",
        title="Group Sequence Policy Optimization",
        family="sequence-ratio",
        paper="2507.18071",
        year=2025,
        side="trajectory",
        idea="The reward belongs to the whole answer, so one length-normalised ratio per answer, clipped in a narrow window.",
        deviations=(
            "with one update per rollout the ratio is 1 and this is sequence-mean GRPO: use four mini-batches, as the paper",
        ),
    ),
    advantage=Grouped(),
    ratio=SequenceRatio(),
    clip=PPOClip(eps_low=3e-4, eps_high=4e-4),
    aggregate=SequenceMean(),
)

GSPO_TOKEN = entry(
    About(
        id="gspo-token",
        title="GSPO, token variant",
        family="sequence-ratio",
        paper="2507.18071",
        year=2025,
        side="trajectory",
        idea="GSPO's ratio in value, each token's own path in gradient, so token advantages can be used.",
        deviations=("verl clamps the log-ratio at 10 from above; here every log-ratio is clamped at +-20",),
    ),
    advantage=Grouped(),
    ratio=SequenceTokenRatio(),
    clip=PPOClip(eps_low=3e-4, eps_high=4e-4),
    aggregate=SequenceMean(),
)

LUSPO = entry(
    About(
        id="luspo",
        title="Length-Unbiased Sequence Policy Optimization",
        family="sequence-ratio",
        paper="2602.05261",
        year=2026,
        idea="GSPO underweights the tokens of long answers: multiply each answer's term by its length.",
        deviations=("the loss grows with length: lower the learning rate against GSPO's",),
    ),
    advantage=Grouped(),
    ratio=SequenceRatio(),
    clip=PPOClip(eps_low=2e-3, eps_high=2.5e-3),
    aggregate=SequenceSum(),
)

GMPO = entry(
    About(
        id="gmpo",
        title="Geometric-Mean Policy Optimization",
        family="sequence-ratio",
        paper="2507.20673",
        year=2025,
        idea="Clip every token's log-ratio one-sidedly, then weight the answer by the geometric mean, so one outlier cannot drive it.",
        deviations=("the widths are log-space half-widths; A = 0 counts as negative, which has no effect",),
    ),
    advantage=Grouped(eps=1e-8),
    ratio=TokenRatio(),
    clip=GeometricMean(0.4, 0.4),
    aggregate=SequenceMean(),
)

VESPO = entry(
    About(
        id="vespo",
        title="Variational Sequence-Level Soft Policy Optimization",
        family="sequence-ratio",
        paper="2602.10693",
        year=2026,
        idea="A smooth Gamma-shaped weight of the product ratio instead of length normalisation or clipping.",
        deviations=(
            "constants (2, 3, 3, 2) as in the authors' code; its docstring quotes (1.5, 4 / 2.5)",
            "a sampler correction is folded into the weight, never multiplied again",
        ),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=GammaWeight(),
    aggregate=TokenMean(),
)
