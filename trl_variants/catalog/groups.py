"""Methods that change what a group of answers is worth: its failures, its best answers, its history."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped, LeaveOneOut, NormalizeEach
from ..hooks.advantage_history import SmoothStandardized
from ..hooks.advantage_virtual import PassAtK, VirtualBest, WinnerLead
from ..hooks.aggregate import SequenceMean, TokenMean
from ..hooks.aggregate_groups import PromptSum
from ..hooks.clip import PPOClip
from ..hooks.clip_probability import ProbabilityBounds
from ..hooks.ratio import ProductRatio, TokenRatio
from ..hooks.regularizers import KL
from ..hooks.rewards import KLInReward
from ..hooks.select_groups import DropSolved
from ..hooks.select_variance import ZeroVariance
from . import entry

NGRPO = entry(
    About(
        id="ngrpo",
        title="Negative-enhanced Group Relative Policy Optimization",
        family="group-relative",
        paper="2509.18851",
        year=2025,
        side="reward",
        idea="A virtual best answer joins every group's statistics, so an all-wrong group pushes down instead of teaching nothing.",
        deviations=(
            "as the authors' code: the paper's text was not seen",
            "all-right groups leave the loss; they are not replaced by fresh prompts",
            "r_max = 1 is the best reward of a 0/1 verifier: with bonuses set advantage.virtual_best.r_max and select.drop_solved.r_max",
            "a row alone in its group gets 0",
        ),
        host="clip-higher",
    ),
    select=(DropSolved(),),
    advantage=VirtualBest(),
    ratio=TokenRatio(),
    clip=PPOClip(eps_low=0.16, eps_high=0.24),
    aggregate=TokenMean(),
)

AGPO = entry(
    About(
        id="agpo",
        title="Adaptive Group Policy Optimization: loss mask (Towards Stable Training and Token-Efficient Reasoning)",
        family="group-relative",
        paper="2503.15952",
        year=2025,
        side="reward",
        idea="Groups without spread leave the loss and its denominator, so they no longer dilute the mean.",
        deviations=(
            "the plain reading of the abstracts of versions 2 and 3: the exact formulas were not seen (low confidence)",
            "the loss clip, L <- max(0, L), is a switch that is off: aggregate floored_sequence_mean with rows=live; it takes the loss of "
            "the whole window, every term included",
            "version 1 (advantage +-1 for homogeneous groups, a length reward) is not built: its formula was not seen",
            "another AGPO (Dual Statistical Feedback, 2605.20722) is a different method",
        ),
    ),
    select=(ZeroVariance(),),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(rows="live"),
    regularizers=(KL(coef=0.04, estimator="k3"),),
)

GDPO = entry(
    About(
        id="gdpo",
        title="Group reward-Decoupled Normalization Policy Optimization",
        family="group-relative",
        paper="2601.05242",
        year=2026,
        side="reward",
        idea="Every reward is normalised in its group on its own before they are added, so different mixes keep different advantages.",
        deviations=(
            "the last normalisation is over answers, as TRL; verl whitens over tokens, which weights long answers more",
            "a missing reward is left out of its statistics, as TRL; the authors' code counts it as 0",
            "with a single reward function the batch normalisation still acts; the authors then fall back to GRPO",
            "weights apply after the normalisation, so they no longer make up for the scale of a reward",
        ),
    ),
    advantage=NormalizeEach(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
    regularizers=(KL(coef=0.04, estimator="k3"),),
)

DCPO = entry(
    About(
        id="dcpo",
        title="Dynamic Clipping Policy Optimization",
        family="clipping",
        paper="2509.02333",
        year=2025,
        side="both",
        idea="Each token's clip range depends on its own probability, and a prompt's advantage blends the group with all its earlier answers.",
        deviations=(
            "the paper's widths 0.16 and 0.2, in units of probability; the authors' scripts run 0.2 and 0.28",
            "the paper's loss: per prompt the sum of its answers' token means, without 1/G; the code averages over the tokens of a "
            "micro-batch instead. aggregate: sequence_mean is the 1/G form",
            "a homogeneous group that is seen for the first time gives nothing",
            "the history moves once per rollout and remembers 100000 prompts",
        ),
        host="clip-higher",
    ),
    advantage=SmoothStandardized(),
    ratio=TokenRatio(),
    clip=ProbabilityBounds(),
    aggregate=PromptSum(),
)

PASSK_GRPO = entry(
    About(
        id="passk-grpo",
        title="GRPO pass@k advantage: the winner's lead",
        family="group-relative",
        paper="2503.19595",
        year=2025,
        side="reward",
        idea="Optimise the best of k: only the best answer of a group has a signal, its lead over the second best.",
        deviations=(
            "as verl's grpo_passk: the paper's text was not seen",
            "k is the group size; with 0/1 rewards only groups with exactly one right answer train",
        ),
    ),
    advantage=WinnerLead(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
    regularizers=(KL(coef=0.04, estimator="k3"),),
)

PASSK_ANALYTIC = entry(
    About(
        id="passk-analytic",
        title="Pass@k training, analytic advantage",
        family="group-relative",
        paper="2508.10751",
        year=2025,
        side="reward",
        idea="Each answer's average advantage under the pass@k reward of all k-subsets of its group, in closed form.",
        deviations=(
            "the formula was rederived and checked against all subsets: the paper's text was not seen",
            "reads correctness, not the reward, and needs it to be binary",
            "a group smaller than k, or with fewer than k wrong answers, gives nothing",
        ),
        ours=("k = 2: k is the user's choice, below num_generations",),
    ),
    advantage=PassAtK(k=2),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
    regularizers=(KL(coef=0.04, estimator="k3"),),
)

GRPO_USTAT = entry(
    About(
        id="grpo-ustat",
        title="Group policy gradients as U-statistics: the group-size law",
        family="reinforce",
        paper="2603.01162",
        year=2026,
        side="baseline",
        kind="note",
        idea="With the leave-one-out mean the group gradient is a second-order U-statistic; one group size G* = sqrt(c3/c1) is best for any budget.",
        deviations=(
            "an analysis, not a method: the estimator it is about is RLOO's advantage without std, Dr. GRPO's times G/(G-1)",
            "the rule: keep the number of samples per step and set num_generations near G*; the paper found 32 (GSM8K, 1.5B) and 64 (MATH, 7B). "
            "trl_variants.report.group_size.best_group_size gives G* from c1 (spread of per-prompt gradients) and c3",
        ),
        ours=("how to estimate c1 and c3 is left open by the paper, and by us",),
        host="rloo",
        inert="the analysed estimator is the host's own",
    ),
    rewards=(KLInReward(coef=0.05, level="sequence"),),
    advantage=LeaveOneOut(),
    ratio=ProductRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
)
