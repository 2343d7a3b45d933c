"""Policy gradients with other baselines, scales and aggregations."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped
from ..hooks.advantage_baselines import BatchScaled, LengthWeighted, LiveRescaled, Returns
from ..hooks.advantage_otb import OptimalTokenBaseline
from ..hooks.aggregate import PromptMean, SequenceMean, SequenceSum, TokenMean
from ..hooks.clip import PPOClip, Unclipped
from ..hooks.ratio import OnPolicy, TokenRatio
from . import entry

REINFORCE = entry(
    About(
        id="reinforce",
        title="REINFORCE",
        family="reinforce",
        paper="",
        year=1992,
        side="baseline",
        idea="The plain score-function gradient: raise the log-probability of what was sampled in proportion to its return.",
        deviations=(
            "Williams, Machine Learning 8 (1992): no arXiv number",
            "the surrogate is written in ratio form, r = exp(lp - sg[lp]): its value is A, not A lp; the gradient is the same",
            "a policy gradient only for the first update on a rollout: with more, use a ratio (ratio: token)",
            "no baseline; advantage.returns.baseline is a constant one, advantage running_mean the mean of earlier rewards",
        ),
        host="reinforce",
    ),
    advantage=Returns(),
    ratio=OnPolicy(),
    clip=Unclipped(),
    aggregate=SequenceSum(),
)

GPG = entry(
    About(
        id="gpg",
        title="Group Policy Gradient",
        family="reinforce",
        paper="2504.02546",
        year=2025,
        side="baseline",
        idea="Plain policy gradient: no ratio, no clip, no KL; only a group mean baseline and a factor that makes up for groups without signal.",
        deviations=(
            "alpha = B/(B - M) counts samples of all-equal groups, as defined; verl divides by the number of nonzero rewards instead, "
            "the authors' code divides by 1/alpha + 1e-5",
            "F_norm = 1; the group's std is advantage.live_rescaled.std=group",
            "the optional resampling until 60 % of the groups are valid is not in this entry",
        ),
        host="reinforce",
    ),
    advantage=LiveRescaled(),
    ratio=OnPolicy(),
    clip=Unclipped(),
    aggregate=SequenceMean(),
)

OPO = entry(
    About(
        id="opo",
        title="On-Policy RL with Optimal Reward Baseline",
        family="reinforce",
        paper="2505.23585",
        year=2025,
        side="baseline",
        idea="The length-weighted mean of the group is the baseline, about variance-optimal where gradient norms grow with length; strictly on-policy.",
        deviations=(
            "one update per rollout is its premise: with more, use a ratio (ratio: token)",
            "the leave-one-out form of Laguna is advantage: length_weighted_leave_one_out",
            "the paper's text was not seen, its formula through verl's code",
        ),
        ours=("tokens averaged over the window: sources leave the aggregation open",),
        host="reinforce",
    ),
    advantage=LengthWeighted(),
    ratio=OnPolicy(),
    clip=Unclipped(),
    aggregate=TokenMean(),
)

OTB = entry(
    About(
        id="otb",
        title="The Optimal Token Baseline",
        family="reinforce",
        paper="2602.07078",
        year=2026,
        side="baseline",
        idea="One baseline per time step, weighted by the accumulated squared norm of the score, which minimises the variance of the token gradient.",
        deviations=(
            "as verl computes it: the paper's text was not seen",
            "a time step is the t-th token of the policy, so tool tokens do not shift it (verl's multi-turn form)",
            "weights are not multiplied by a squared sampler correction",
            "a row alone in its group gets 0, not its return",
            "where only the longest answer is left its baseline is 0, so an all-equal group still has signal there",
        ),
        host="clip-higher",
    ),
    advantage=OptimalTokenBaseline(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.28),
    aggregate=TokenMean(),
)

BATCH_STD = entry(
    About(
        id="batch-std-advantage",
        title="Group centring with the batch's std (ScaleRL, Lite PPO)",
        family="group-relative",
        paper="2510.13786",
        year=2025,
        side="reward",
        kind="part",
        idea="Centre inside each group but divide by one std of the whole batch, so that small group deviations are not blown up.",
        deviations=(
            "sigma is the std of the centred rewards of the generation; TRL's scale_rewards='batch' takes that of the raw rewards "
            "(advantage: grouped, std batch), its ScaleRL code a moving average (advantage: ema_scaled)",
            "all rows count in sigma: groups without spread lower it",
        ),
        ours=("sigma divides by n: the paper's text was not seen; advantage.batch_scaled.ddof=1 divides by n - 1",),
        host="clip-higher",
    ),
    advantage=BatchScaled(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.28),
    aggregate=TokenMean(),
)

PROMPT_MEAN = entry(
    About(
        id="prompt-mean-aggregation",
        title="Prompt-level loss mean (ScaleRL)",
        family="group-relative",
        paper="2510.13786",
        year=2025,
        side="reward",
        kind="part",
        idea="All tokens of a prompt's answers are averaged together, then prompts count the same.",
        deviations=(
            "prompts are counted over the whole optimizer window; one whose rows are all masked leaves the count, one whose rewards are all "
            "equal stays in it",
            "shown on DAPO's objective",
        ),
        host="clip-higher",
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.28),
    aggregate=PromptMean(),
)
