"""Squared log-ratio instead of a clip: mirror descent, DRO, Kimi; and a pull on fallen tokens of good answers."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped
from ..hooks.advantage_window import LogPartition
from ..hooks.aggregate import PromptMean, SequenceMean, TokenMean
from ..hooks.clip import PPOClip
from ..hooks.clip_squared import LogLinear, RatioClamp
from ..hooks.ratio import ProductRatio, TokenRatio
from ..hooks.regularizers import KL
from ..hooks.regularizers_group import CorrectEntropy, FallenTokens, SquaredLogRatio
from . import entry

KIMI_K1_5 = entry(
    About(
        id="kimi-k1-5",
        title="Kimi k1.5: Scaling Reinforcement Learning with LLMs",
        family="mirror-descent",
        paper="2501.12599",
        year=2025,
        side="both",
        host="rloo",
        idea="Regress the answer's log-ratio to the sampling policy onto the group-centred reward: no ratio, no clip.",
        deviations=(
            "the objective part: length reward, curriculum, sampling by failure rate and partial rollouts are not in this entry",
            "the report resets the optimizer at every iteration; this does not",
            "the loss is the report's squared error over 2 tau without its constant: A l - tau/2 l^2, the same gradient",
            "l is a sum over tokens, not a mean: long answers need a small tau",
        ),
        ours=("coef = tau/2 = 0.05, tau = 0.1: the report's tau was not legible",),
    ),
    advantage=Grouped(std="none"),
    ratio=ProductRatio(),
    clip=LogLinear(),
    aggregate=SequenceMean(),
    regularizers=(SquaredLogRatio(coef=0.05),),
)

MIRROR_DESCENT = entry(
    About(
        id="mirror-descent",
        title="Online mirror descent (the view behind Kimi k1.5)",
        family="mirror-descent",
        paper="2501.12599",
        year=2025,
        side="both",
        kind="part",
        host="kimi-k1-5",
        idea="Each iteration solves max E[r] - tau KL(pi || pi_old), whose optimum has r - tau log Z = tau log(pi / pi_old).",
        deviations=(
            "Kimi k1.5 with the soft baseline tau log Z, estimated by the group, before it is replaced by the mean reward; with that "
            "replacement this is kimi-k1-5",
            "a finite group underestimates Z when good answers are rare",
        ),
        ours=("tau 0.1 in both places, as kimi-k1-5",),
    ),
    advantage=LogPartition(tau=0.1),
    ratio=ProductRatio(),
    clip=LogLinear(),
    aggregate=SequenceMean(),
    regularizers=(SquaredLogRatio(coef=0.05),),
)

DRO = entry(
    About(
        id="dro",
        title="DRO / KL-proximal REINFORCE (verl's policy loss 'dro')",
        family="mirror-descent",
        paper="",
        year=2025,
        host="clip-higher",
        idea="REINFORCE plus a quadratic penalty on the token log-ratio in place of the clip.",
        deviations=(
            "no paper of its own: verl's Direct Reward Optimization, the token form of Kimi k1.5's objective; the sequence form is kimi-k1-5 "
            "and differs by the cross terms between tokens of an answer",
            "verl writes lp A, this (lp - lp_old) A: the same gradient",
        ),
        ours=("coef = beta/2 = 0.05: verl leaves beta to the user", "advantage: grpo's, any will do"),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=LogLinear(),
    aggregate=TokenMean(),
    regularizers=(SquaredLogRatio(coef=0.05),),
)

KIMI_K3 = entry(
    About(
        id="kimi-k3",
        title="Kimi K3 objective (Kimi K2.5, 2602.02276, equation 1)",
        family="mirror-descent",
        paper="2607.24653",
        year=2026,
        side="trajectory",
        host="clip-higher",
        idea="Clip the ratio itself, without a minimum, and pull every token back by a quadratic penalty on its log-ratio.",
        deviations=(
            "the K3 report does not reprint the objective; this is K2.5's equation 1. Its text bounds the log-ratio, the equation the ratio: "
            "the equation is implemented",
            "N in the equation is the tokens of a prompt's K answers (token mean inside the prompt, mean over prompts); the report calls it "
            "the tokens of a batch",
            "the ratio is against the sampler's log-probs where the engine reports them, else against the old policy, which sampled then",
            "partial rollouts, effort budget and distillation are not in this entry",
        ),
        ours=("low 0.8, high 1.2, tau 0.1: none is published",),
        aliases=("kimi-k2-5",),
    ),
    advantage=Grouped(std="none"),
    ratio=TokenRatio(anchor="sampler"),
    clip=RatioClamp(0.8, 1.2),
    aggregate=PromptMean(),
    regularizers=(SquaredLogRatio(coef=0.1),),
)

SEARCH_AGENT_PO = entry(
    About(
        id="search-agent-po",
        also_called=("sapo",),
        title="Search Agent Policy Optimization (Improving Search Agent with One Line of Code)",
        family="proximal",
        paper="2603.10069",
        year=2026,
        side="trajectory",
        host="clip-higher",
        idea="PPO's clip cannot pull back good tokens that have sunk: add log r on them, the k1 of KL(old || pi).",
        deviations=(
            "seen through third-party notes quoting the loss; host GRPO's advantage with a token mean and no KL",
            "A >= 0 includes the groups without spread, as in the notes: they are regularised although they carry no reward; so is an "
            "answer that no reward function could score",
            "the authors call it SAPO too; sapo here is Soft Adaptive Policy Optimization",
            "with one update per generation every ratio is 1 and the term is 0",
        ),
        ours=(
            "coef 0.1 and threshold 0.8 (a bound on the ratio): neither was seen",
            "clip 0.2 / 0.28: that of dapo, the paper's was not seen",
        ),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(eps_low=0.2, eps_high=0.28),
    aggregate=TokenMean(),
    regularizers=(FallenTokens(),),
)

R1_ZERO_DIV = entry(
    About(
        id="r1-zero-div",
        title="R1-zero-Div: Diversity-Aware Policy Optimization for LLM Reasoning",
        family="diversity",
        paper="2505.23433",
        year=2025,
        side="trajectory",
        idea="An entropy bonus on right answers only, so that diversity is not bought with wrong reasoning.",
        deviations=(
            "the equations were rebuilt from a damaged copy and checked against their stated gradient",
            "divides by all answers of the window, not by the right ones, and only sees the sampled token, not the distribution",
            "correct is the first reward function above correct_above; shaping and partial credit do not enter",
        ),
        ours=("GRPO's KL as in this catalog's grpo, 0.04",),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
    regularizers=(KL(coef=0.04, estimator="k3"), CorrectEntropy(coef=0.01)),
)
