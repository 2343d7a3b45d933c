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
