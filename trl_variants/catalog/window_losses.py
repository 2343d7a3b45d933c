"""Losses and filters of whole groups or windows: contrasts of right and wrong answers, dropped groups and rows."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped
from ..hooks.advantage_baselines import BatchScaled
from ..hooks.advantage_window import BalancedLabels
from ..hooks.aggregate import PromptMean, SequenceMean
from ..hooks.clip import CISPO, PPOClip
from ..hooks.clip_contrast import GroupContrast, InfoNCE
from ..hooks.ratio import TokenRatio
from ..hooks.regularizers import KL
from ..hooks.regularizers_group import KLHinge
from ..hooks.select_variance import TopAdvantage, ZeroVariance
from ..schedule import Schedule
from . import entry

ZERO_VARIANCE = entry(
    About(
        id="zero-variance-filter",
        title="Zero-variance group filter (The Art of Scaling RL Compute for LLMs, component)",
        family="filters",
        paper="2510.13786",
        year=2025,
        side="trajectory",
        kind="part",
        idea="Groups whose rewards are all equal leave the loss and every divisor, without replacements.",
        deviations=(
            "shown on grpo, whose KL such groups would still pay, with the row mean over what is kept",
            "statistics of the whole batch (a batch std) still see the dropped groups",
            "with no group left the step's loss is 0",
        ),
    ),
    select=(ZeroVariance(tol=0.0),),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(rows="live"),
    regularizers=(KL(coef=0.04, estimator="k3"),),
)

CPPO = entry(
    About(
        id="cppo-pruning",
        title="CPPO: completion pruning",
        family="filters",
        paper="2503.22342",
        year=2025,
        idea="Answers with a small |advantage| cost a backward pass and add little: train on the largest ones only.",
        deviations=(
            "per question, as the paper; the authors' TRL code prunes over the process's batch, their verl code over the global one "
            "(within: batch)",
            "ties go to the earlier row; the paper breaks them arbitrarily",
            "pruned rows leave the loss and its count but are still forwarded, so no time is saved; filling the freed memory with more "
            "prompts is a matter of the batch size",
        ),
        aliases=("cppo",),
        ours=("rate 0.5: the paper sweeps it, 0.875 and 0.9375 (of 16 answers) were seen",),
    ),
    select=(TopAdvantage(rate=0.5),),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(rows="live"),
    regularizers=(KL(coef=0.04, estimator="k3"),),
)

DISCO = entry(
    About(
        id="disco",
        title="DisCO: Discriminative Constrained Optimization",
        family="contrastive",
        paper="2505.12366",
        year=2025,
        side="both",
        host="grpo",
        idea="Push the scores of right answers above a soft maximum of the wrong ones, and hold the step by a hinge on its KL.",
        deviations=(
            "the log-likelihood score with tau = 10; the ratio score (score: likelihood_ratio, tau: 1) cannot run in the released code",
            "the value is the formula's; the authors' code logs a soft maximum divided by itself, with the same gradient",
            "a prompt without both kinds is 0 and still counts; an answer without tokens belongs to neither kind",
            "groups are compared inside one optimizer window, which the trainer never lets cut a group; K is the whole window's",
        ),
    ),
    advantage=BalancedLabels(),
    ratio=TokenRatio(),
    clip=GroupContrast(score="log_likelihood", tau=10.0),
    aggregate=PromptMean(),
    regularizers=(KLHinge(coef=1000.0, delta=1e-4),),
)

CONSPO = entry(
    About(
        id="conspo",
        title="ConSPO (RLVR from a contrastive perspective)",
        family="contrastive",
        paper="2605.12969",
        year=2026,
        side="both",
        host="grpo",
        idea="A saturating contrast of each right answer with all wrong ones, so that separated pairs stop contributing.",
        deviations=(
            "only the abstract was seen: the paper may have further terms",
            "prompts without both kinds are left out of the mean (select zero_variance by correctness)",
            "no ratio and no trust region at all (the ratio is only logged): stay near on-policy, or add a regularizer such as kl_hinge",
        ),
        ours=("margin 0 to 0.5 nats, linear over the run: it starts at 0 and grows, how far was not seen",),
    ),
    select=(ZeroVariance(by="correct"),),
    advantage=BalancedLabels(),
    ratio=TokenRatio(),
    clip=InfoNCE(tau=10.0, margin=Schedule(0.0, 0.5)),  # type: ignore[arg-type]
    aggregate=PromptMean(),
)

SCALERL = entry(
    About(
        id="scalerl",
        title="ScaleRL recipe, objective part (The Art of Scaling RL Compute for LLMs)",
        family="recipes",
        paper="2510.13786",
        year=2025,
        side="both",
        kind="recipe",
        host="cispo",
        idea="The choices that raised the asymptote of reward against compute: CISPO, prompt mean, batch std, no dead groups.",
        deviations=(
            "parts: cispo with eps_max 5, prompt-mean-aggregation, batch-std-advantage, zero-variance-filter; not in this entry: "
            "no-positive-resampling, forced interruption, the fp32 head and the asynchronous pipeline",
            "the ratio is against the sampler's log-probs where the engine reports them, so no further correction is added; with one "
            "update per generation of the trainer's own samples it is 1 and the cap never binds",
            "the batch std is that of the centred rewards over all groups, the dropped ones included",
            "TRL 1.16 can only approximate it: loss_type=cispo, epsilon_high=5, scale_rewards=batch (std of the raw rewards)",
            "rewards are +1 and -1, 48 prompts of 16 answers a step: settings of the run",
        ),
    ),
    select=(ZeroVariance(tol=0.0),),
    advantage=BatchScaled(),
    ratio=TokenRatio(anchor="sampler"),
    clip=CISPO(cap=5.0),
    aggregate=PromptMean(),
)
