"""Methods whose advantage remembers earlier generations: reward histories, tracked quantiles, multipliers."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage_memory import Constrained, HistoryNorm
from ..hooks.advantage_risk import MixedRisk
from ..hooks.aggregate import SequenceMean, TokenMean
from ..hooks.clip import PPOClip
from ..hooks.ratio import TokenRatio
from ..hooks.regularizers import KL
from . import entry

P_GRPO_PERSONALIZED = entry(
    About(
        id="p-grpo-personalized",
        title="Personalized GRPO",
        family="advantage-memory",
        paper="2603.10009",
        year=2026,
        side="trajectory",
        idea="Rewards are normalised by the history of the user's preference group, so that tastes with other levels and spreads keep them.",
        deviations=(
            "the order was not seen: rewards are used first, then enter the history; so is the warm-up (the group's z-score)",
            "the history is cumulative; with an improving policy most advantages turn positive: set decay below 1",
            "the advantages of a prompt need not sum to 0: a group that is all good is pushed up",
        ),
        ours=(
            "the label is the data set's column `task`, a user's preference group there (advantage.key names another)",
            "warm-up of two groups, eps 1e-4, 10000 labels remembered",
            "clip, KL and denominators are GRPO's",
        ),
        aliases=("p-grpo",),
    ),
    advantage=HistoryNorm(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
    regularizers=(KL(coef=0.04, estimator="k3"),),
)

RISKPO = entry(
    About(
        id="riskpo",
        title="RiskPO: mixed value-at-risk over bundles of questions",
        family="advantage-memory",
        paper="2510.00911",
        year=2025,
        idea="Five questions are scored together and valued by the middle and the lower tail of the score's distribution over training.",
        deviations=(
            "the dapo-math script: levels 0.2 and 0.8, share sum_mean; the math script has 0.9, share std and natural_baseline, "
            "with which no advantage is positive",
            "the released trainer attaches the tracked quantiles after the advantage was computed, so it always uses each bundle's own; "
            "this entry is the method as intended",
            "quantiles move once per generation; a bundle is of consecutive groups, the last may be smaller",
        ),
        ours=(
            "a question without a k-th scored answer adds its mean to the bundle",
            "tokens are averaged over the window",
        ),
    ),
    advantage=MixedRisk(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=TokenMean(),
)

CONSTRAINED_GRPO = entry(
    About(
        id="constrained-grpo",
        title="Constrained GRPO",
        family="advantage-memory",
        paper="2602.05863",
        year=2026,
        side="both",
        idea="Standardise the reward and each cost on its own, then subtract: one multiplier no longer changes the weight of everything else.",
        deviations=(
            "third-party notes state it backwards; summing before the group's norm shrinks the reward as a multiplier grows",
            "a cost that is the same in the whole group gives no gradient, although its multiplier grows",
            "the update rule was not seen: plain dual ascent, once per generation; whether the reward's weight is 1 - sum of multipliers neither",
        ),
        ours=(
            "the cost is that an answer hit the length limit, at most one in ten; the paper's are of driving. costs: functions takes the last "
            "reward functions, one per limit",
            "multiplier 0.5 at the start, rate 0.1, eps 1e-6; clip, KL and denominators are GRPO's",
        ),
    ),
    advantage=Constrained(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
    regularizers=(KL(coef=0.04, estimator="k3"),),
)
