"""Methods that shape the reward of a whole group: length, budgets, diversity, history."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped
from ..hooks.aggregate import SequenceMean, TokenMean
from ..hooks.clip import PPOClip
from ..hooks.ratio import TokenRatio
from ..hooks.regularizers import KL, EntropyBonus
from ..hooks.rewards_diversity import AnswerFrequency
from ..hooks.rewards_length import AdaptiveBudget, OutcomeReward, SoftOverlong, StagedLimit
from ..hooks.rewards_rank import HistoryRank
from ..hooks.rewards_target import DifficultyTargetBonus, TargetLengthBonus
from ..hooks.rollouts_dynamic import DynamicSampling
from ..schedule import Schedule
from . import entry

PLAIN = dict(advantage=Grouped(), ratio=TokenRatio(), clip=PPOClip(0.2, 0.2), aggregate=SequenceMean())
GRPO = PLAIN | dict(regularizers=(KL(coef=0.04, estimator="k3"),))
HIGHER = PLAIN | dict(clip=PPOClip(eps_low=0.2, eps_high=0.28), aggregate=TokenMean())

DAPO_OVERLONG = entry(
    About(
        id="dapo-overlong",
        title="DAPO with the soft overlong punishment",
        family="length",
        paper="2503.14476",
        year=2025,
        side="both",
        idea="DAPO's reward: +1 or -1, and a penalty that grows over the last fifth of the length limit.",
        kind="part",
        host="dapo",
        deviations=(
            "entry dapo with the paper's reward (2.4 and eq. 13)",
            "the penalty starts at L_max - L_cache (16384 of 20480); L_cache is a share of the run's limit here",
            "verl leaves the penalty below -1 for answers above L_max (-1.127 at 21000 tokens); capped here, as printed",
            "a dead group's penalty still gives advantages: filter on correctness, not on the reward's spread",
        ),
    ),
    rollouts=DynamicSampling(),
    rewards=(OutcomeReward(right=1.0, wrong=-1.0), SoftOverlong(cache_share=0.2)),
    **HIGHER,
)

KIMI_K1_5_LENGTH = entry(
    About(
        id="kimi-k1-5-length",
        title="Kimi k1.5: the length reward",
        family="length",
        paper="2501.12599",
        year=2025,
        side="reward",
        idea="Answers shorter than the middle of their group's lengths gain, longer ones lose; a wrong answer never gains.",
        kind="part",
        deviations=(
            "the reward alone, on GRPO; the paper's squared log-ratio objective is entry kimi-k1-5",
            "the paper's weight is 0 in a warm-up of unstated length, then constant",
        ),
        ours=("weight 0.4: one public imitation's; the paper states none", "a warm-up over the first 5 % of the run"),
    ),
    rewards=({"relative_length": {"weight": Schedule(0.0, 0.4, until=0.05, shape="step")}},),
    **GRPO,
)

KIMI_K3_EFFORT_BUDGET = entry(
    About(
        id="kimi-k3-effort-budget",
        title="Kimi K3: effort budgets",
        family="length",
        paper="2607.24653",
        year=2026,
        side="reward",
        idea="An answer longer than its prompt's budget counts as a failure, and the budget tightens over training.",
        kind="part",
        deviations=(
            "a failure is -1, worse than a wrong short answer; the 0 of blog posts is K2.5's rule (failure: 0)",
            "every token of the policy counts; the paper counts only thinking tokens for general tasks",
            "b0 is measured at a prompt's first visit (column: names a data set column measured on the cold-start model)",
            "K2.5's alternation of phases and the verbosity rule for judged tasks are not in this entry",
        ),
        ours=(
            "tau from 2 to 1.5: the paper gives no numbers, and below the lengths of right answers the -1 teaches guessing",
            "b0 as the mean length of the first answers",
        ),
    ),
    rewards=({"effort_budget": {"tau": Schedule(2.0, 1.5)}},),
    **GRPO,
)

LASER = entry(
    About(
        id="laser",
        title="LASER: length-based reward shaping with a target length",
        family="length",
        paper="2505.15612",
        year=2025,
        side="reward",
        idea="A step bonus for right answers no longer than a target length; everything else keeps its reward.",
        deviations=(
            "bad format is whatever a reward function scores below -0.5 (the paper: -1); it keeps that score",
            "right answers longer than the target are not penalised: the bonus is binary, without a slope",
        ),
        ours=("target: half of the run's limit (8192 of 16384)", "tokens averaged over the window"),
    ),
    rewards=(OutcomeReward(right=1.0, wrong=-0.5), TargetLengthBonus(bonus=0.5)),
    regularizers=(KL(coef=0.001, estimator="k3"), EntropyBonus(coef=0.001)),
    **HIGHER,
)

LASER_D = entry(
    About(
        id="laser-d",
        title="LASER-D: dynamic and difficulty-aware target lengths",
        family="length",
        paper="2505.15612",
        year=2025,
        side="reward",
        idea="LASER with one target per difficulty, moved every 20 steps to what the model can do.",
        deviations=(
            "the paper watches 500 held-out prompts; here the answers to the last 500 training prompts are watched, which costs no rollouts",
            "the share within the target counts all answers of the bucket, right or wrong, as the authors' code does; the text "
            "speaks of right ones",
            "one set of bucket edges (>= 2/3, >= 1/3); the authors' monitor uses <= at the same values",
            "LASER-DE is rewards.difficulty_target_bonus.explore: true",
        ),
        ours=("ngram 20 for LASER-DE's repetition test", "tokens averaged over the window"),
    ),
    rewards=(OutcomeReward(right=1.0, wrong=-0.5), DifficultyTargetBonus(bonus=0.5)),
    regularizers=(KL(coef=0.001, estimator="k3"), EntropyBonus(coef=0.001)),
    **HIGHER,
)

DAST = entry(
    About(
        id="dast",
        title="DAST: Difficulty-Adaptive Slow-Thinking",
        family="length",
        paper="2503.04472",
        year=2025,
        side="both",
        idea="A prompt's token budget follows its success rate: short for easy prompts, the limit for hard ones.",
        deviations=(
            "online use in GRPO is ours and one public port's; the paper ranks offline answers by this reward and trains SimPO on the pairs",
            "the public port adds the reward to others and takes the group's longest answer as L_max; here it replaces the reward and "
            "L_max is the run's limit, as printed",
        ),
        ours=("the GRPO objective around it",),
    ),
    rewards=(AdaptiveBudget(),),
    **GRPO,
)

GAPO = entry(
    About(
        id="gapo",
        title="Group-Aware Policy Optimization",
        family="diversity",
        paper="2511.12596",
        year=2025,
        side="trajectory",
        idea="For prompts with many valid answers, an answer is paid less the more often its group gave it.",
        deviations=(
            "the difference f - 1/L is signed, as in one public port; another takes its absolute value, which pays rare answers less",
            "without rewards.answer_frequency.column L is the number of distinct valid answers in the group",
            "not the Group Adaptive Policy Optimization of the same abbreviation",
        ),
        ours=("answers compared without case, spaces and closing punctuation",),
    ),
    rewards=(AnswerFrequency(),),
    **GRPO,
)

DIVER = entry(
    About(
        id="diver",
        title="DIVER: Diversity-Incentivized Exploration for Versatile Reasoning",
        family="diversity",
        paper="2509.26209",
        year=2025,
        side="trajectory",
        idea="Right answers that differ from the rest of their group earn a small bonus, shaped as a potential.",
        deviations=(
            "the bonus is cut to right answers after the potential argument, so that policy invariance is not exact",
            "the mix of formulas and texts with its cap 0.42; formulas alone are measure: equation with sigma: 0.68",
            "weight 0.001 is the code's default, its shipped script sets 1.0; the std of an all-right group makes either size order 1",
            "the authors' code also multiplies the equation form by group accuracy and pays the textual form only in all-right groups",
            "measure: semantic compares sentence embeddings in place of BLEU: entry dsdr's distance, not this paper's",
        ),
        ours=(
            "the mix is the mean of both",
            "formulas are what stands between $, $$, \\( \\) or \\[ \\]",
            "tokens averaged over the window",
        ),
    ),
    # full for 100 steps, cosine over the next 50
    rewards=(
        {
            "diversity_bonus": {
                "weight": Schedule(0.001, 0.0, begin=2 / 3, until=1.0, shape="cosine"),
                "sigma": 0.42,
                "measure": "mix",
            }
        },
    ),
    **HIGHER,
)

DR_SEG = entry(
    About(
        id="dr-seg",
        title="Dr. Seg: distribution-ranked reward",
        family="reward-scale",
        paper="2603.00152",
        year=2026,
        side="reward",
        idea="Each raw score is replaced by its rank in a long moving history, so that metrics share a scale.",
        deviations=(
            "every reward function is ranked; name the metrics in history_rank.functions and leave format functions out",
            "boxes, points and counts with Hungarian matching, and the look-to-confirm prompt, are not in this entry",
            "128 initial zeros make early ranks near 1 for anything positive, as in the authors' code",
        ),
    ),
    rewards=(HistoryRank(),),
    regularizers=(KL(coef=0.005, estimator="k3"),),
    **PLAIN,
)

THINKPRUNE = entry(
    About(
        id="thinkprune",
        title="ThinkPrune",
        family="length",
        paper="2504.01296",
        year=2025,
        side="trajectory",
        idea="An answer that is not finished within the budget scores 0, and the budget tightens in rounds.",
        deviations=(
            "the paper runs 4000, 3000 and 2000 tokens as three trainings, each cut at its limit; here one run is cut at the first limit "
            "and later stages score longer answers 0 without cutting them",
            "for the paper's form: three runs with max_completion_length 4000, 3000, 2000 and stages: [1.0]",
            "the prompt that tells the model its budget is the data set's",
            "truncated rows stay in the loss: their zero is the method",
        ),
        ours=("stages of equal parts of the run",),
    ),
    rewards=(StagedLimit(),),
    regularizers=(KL(coef=0.001, estimator="k3"),),
    **PLAIN,
)

UI_R1_LENGTH = entry(
    About(
        id="ui-r1-length",
        title="UI-R1, efficiency stage",
        family="length",
        paper="2503.21620",
        year=2025,
        side="reward",
        idea="UI-R1's action reward plus a length bonus measured against the group's own budget.",
        kind="part",
        deviations=(
            "added to the reward of entry ui-r1, whose full score 3 counts as success",
            "the group's longest answer is the L_max of DAST's budget",
        ),
    ),
    rewards=(AdaptiveBudget(limit="group", add=True, success=3.0),),
    **GRPO,
)
