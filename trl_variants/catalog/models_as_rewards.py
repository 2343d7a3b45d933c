"""Models beside the policy used as rewards: reward models, judges, encoders (`trl_variants.rewards`)."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped
from ..hooks.advantage_steps import StepRewards
from ..hooks.aggregate import SequenceMean
from ..hooks.clip import PPOClip
from ..hooks.ratio import TokenRatio
from ..hooks.regularizers import KL
from . import entry
from .recipes import REWARD_ONLY

PLAIN = dict(ratio=TokenRatio(), clip=PPOClip(0.2, 0.2), aggregate=SequenceMean())
GRPO = PLAIN | dict(advantage=Grouped(), regularizers=(KL(coef=0.04, estimator="k3"),))

REWARD_SOURCES = entry(
    About(
        id="reward-sources-rm-prm-judge",
        title="Reward models, process reward models and judges; GRPO with process supervision",
        family="rewards",
        paper="2402.03300",
        year=2024,
        side="reward",
        idea="A model scores the answer, its steps, or pairs of answers; step scores are normalised in one pool and summed to the right.",
        kind="part",
        aliases=("grpo-ps",),
        deviations=(
            "outcome model: its name or a sequence-classification model in reward_funcs, as in TRL",
            "process model: ProcessRewardModel in reward_funcs, one value at each step's end; the advantage pools the group's steps",
            "judges: JudgeScoreReward (one answer) or JudgePreferenceReward (pairs in both orders) over ServerJudge or LocalJudge",
            "pairs become the mean over opponents of the share of asks won; the papers train a reward model on such labels",
            "the suffix sum pays a longer chain more, as printed: advantage.step_rewards.per_step: true divides by the number of steps",
            "keep the KL term with a learned reward: proxies drift, even where rule-based recipes use no KL",
        ),
        ours=("std: the paper does not say which; unbiased, with 1e-4 against 0",),
        inert="one reward an answer is one step, which is GRPO: the steps are the reward function's",
    ),
    advantage=StepRewards(),
    regularizers=(KL(coef=0.04, estimator="k3"),),
    **PLAIN,
)

OP_GRPO = entry(
    About(
        id="op-grpo",
        title="OP-GRPO: Overton pluralistic GRPO",
        family="recipe",
        paper="",
        year=2026,
        side="reward",
        idea="One answer should list many viewpoints: it is paid for the reference perspectives it covers, each once, and for no repeats.",
        kind="recipe",
        deviations=(
            "reward_funcs: PerspectiveCoverage(), PerspectiveUniqueness(), tag_layout_reward, equal weights; the references in column perspectives",
            "matching is one to one: the largest cosine left, again and again; many-to-one would reward repetition",
            "an answer in the wrong layout is scored as a whole, so coverage is still paid beside the -0.2",
            "only author code was seen, not the paper; their encoder is tuned on perspectives",
            "not the off-policy GRPO for flow models of the same abbreviation",
        ),
        ours=("the three rewards are summed", "encoder all-MiniLM-L6-v2 for their tuned one", "the list of stop words"),
        inert=REWARD_ONLY,
    ),
    **GRPO,
)

WS_GRPO = entry(
    About(
        id="ws-grpo",
        title="WS-GRPO: weakly supervised GRPO",
        family="recipe",
        paper="2602.17025",
        year=2026,
        side="reward",
        idea="A preference model fitted on right and wrong answers is asked, step by step, whether the longer prefix is the better one.",
        kind="recipe",
        deviations=(
            "phase 1: fit_preference(questions, answers, correct) on answers of a first rollout pass; what it returns is frozen",
            "phase 2: reward_funcs [outcome, PrefixPreferenceReward(preference)] with reward_weights [5, 1], lam2 and lam1",
            "fitted on whole answers and asked about prefixes, as in the paper: expect a shift between the two",
            "the later version's use of the model to stop or go on is not in this entry",
        ),
        ours=(
            "which of 1 and 5 multiplies the outcome",
            "steps are lines; the first is compared with no answer",
            "encoder all-MiniLM-L6-v2, AdamW 1e-3, 200 passes; hidden 512 is the paper's",
        ),
        inert=REWARD_ONLY,
    ),
    **GRPO,
)
