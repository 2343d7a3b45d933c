"""GRPO and the methods that differ from it in baseline, scale or denominator."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped, LeaveOneOut, TokenWhitened
from ..hooks.aggregate import ConstantLength, SequenceMean, TokenMean
from ..hooks.clip import PPOClip
from ..hooks.ratio import ProductRatio, TokenRatio
from ..hooks.regularizers import KL
from ..hooks.rewards import KLInReward
from ..hooks.rollouts_dynamic import DynamicSampling
from . import entry

GRPO = entry(
    About(
        id="grpo",
        title="Group Relative Policy Optimization",
        family="group-relative",
        paper="2402.03300",
        year=2024,
        side="baseline",
        idea="No critic: the other answers to the same prompt are the baseline and their spread the scale.",
        deviations=(
            "the paper writes the population std; this uses the unbiased one with eps 1e-4, as TRL and verl run it",
            "the k3 KL has no importance weight, as printed; its gradient then descends the forward KL(ref || pi)",
            "a group whose rewards are all equal has advantage 0 but still pays the KL",
        ),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
    regularizers=(KL(coef=0.04, estimator="k3"),),
)

DR_GRPO = entry(
    About(
        id="dr-grpo",
        title="Dr. GRPO: GRPO done right",
        family="group-relative",
        paper="2503.20783",
        year=2025,
        side="reward",
        idea="Removes two biases: the division by the group's std and the division by each answer's own length.",
        deviations=("the divisor L is the run's max_completion_length (3000 in the paper)",),
        aliases=("dr.grpo", "drgrpo"),
    ),
    advantage=Grouped(std="none"),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=ConstantLength(),
)

DAPO = entry(
    About(
        id="dapo",
        title="Decoupled Clip and Dynamic Sampling Policy Optimization",
        family="group-relative",
        paper="2503.14476",
        year=2025,
        side="both",
        idea="A looser upper clip keeps entropy, every token counts the same, there is no KL, and every group has something to teach.",
        deviations=(
            "the overlong penalty is entry dapo-overlong; without dynamic sampling (rollouts: []) it is entry clip-higher",
            "correct is the first reward function above correct_above; after max_rounds generations the batch is trained on as it is "
            "(rollouts: {dynamic_sampling: {when_short: error}} stops, as the authors' code)",
            "a round draws as many prompts as are missing, theirs a whole generation batch of three times the size; surplus groups "
            "are dropped in both",
            "tokens are averaged over the whole window, as the authors' code does; the formula as printed divides per prompt "
            "(aggregate: prompt_mean)",
        ),
    ),
    rollouts=DynamicSampling(),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(eps_low=0.2, eps_high=0.28),
    aggregate=TokenMean(),
)

CLIP_HIGHER = entry(
    About(
        id="clip-higher",
        title="DAPO's objective alone",
        family="group-relative",
        paper="2503.14476",
        year=2025,
        side="trajectory",
        idea="A looser upper clip keeps entropy, every token counts the same, and there is no KL; groups as they are sampled.",
        kind="part",
        deviations=(
            "what TRL's loss_type dapo with epsilon_high 0.28 computes when a window is one generation; entry dapo adds the sampling",
            "tokens are averaged over the whole window; the formula as printed divides per prompt (aggregate: prompt_mean)",
        ),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(eps_low=0.2, eps_high=0.28),
    aggregate=TokenMean(),
)

BNPO = entry(
    About(
        id="bnpo",
        title="TRL's loss_type bnpo",
        family="group-relative",
        paper="",
        side="baseline",
        idea="Token mean inside each micro-batch, then the mean over micro-batches.",
        deviations=(
            "a rule of TRL, which takes its name from 2506.02864; it depends on the split into micro-batches by definition, so it is "
            "the one entry that is not partition-invariant",
        ),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=TokenMean(span="micro-batch"),
)

RLOO = entry(
    About(
        id="rloo",
        title="REINFORCE Leave-One-Out",
        family="reinforce",
        paper="2402.14740",
        year=2024,
        side="baseline",
        idea="REINFORCE on whole answers, each compared with the mean of the other answers to its prompt.",
        deviations=(
            "on-policy the gradient is the paper's; for several updates per batch the product ratio and its clip are TRL's RLOOTrainer's",
        ),
    ),
    rewards=(KLInReward(coef=0.05, level="sequence"),),
    advantage=LeaveOneOut(),
    ratio=ProductRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
)

REINFORCE_PP = entry(
    About(
        id="reinforce-pp",
        title="REINFORCE++",
        family="reinforce",
        paper="2501.03262",
        year=2025,
        side="baseline",
        idea="PPO without critic or groups: KL inside token rewards, reward-to-go, one whitening over all tokens of the batch.",
        deviations=(
            "population std with the variance floored at 1e-8, as OpenRLHF (the authors' code); verl uses the unbiased std",
        ),
        aliases=("reinforce++",),
    ),
    rewards=(KLInReward(coef=0.01, level="token"),),
    advantage=TokenWhitened(center="none"),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=TokenMean(),
)

REINFORCE_PP_BASELINE = entry(
    About(
        id="reinforce-pp-baseline",
        title="REINFORCE++-baseline",
        family="reinforce",
        paper="2501.03262",
        year=2025,
        side="baseline",
        idea="Centre on the prompt's mean but take the scale from the whole batch; the KL is a separate k2 loss.",
        deviations=(
            "with unequal lengths the token mean is not 0, so an all-equal group gets a nonzero advantage; kept for fidelity, "
            "advantage.shift_mean=false removes it",
        ),
        aliases=("reinforce++-baseline",),
    ),
    advantage=TokenWhitened(center="group"),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=TokenMean(),
    regularizers=(KL(coef=0.01, estimator="k2", own_token_mean=True),),
)
