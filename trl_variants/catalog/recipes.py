"""Recipes: rewards, data and phases around a plain objective. Their reward functions are in `trl_variants.rewards`."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped
from ..hooks.aggregate import SequenceMean
from ..hooks.clip import PPOClip
from ..hooks.ratio import TokenRatio
from ..hooks.regularizers import KL
from . import entry

PLAIN = dict(advantage=Grouped(), ratio=TokenRatio(), clip=PPOClip(0.2, 0.2), aggregate=SequenceMean())
GRPO = PLAIN | dict(regularizers=(KL(coef=0.04, estimator="k3"),))
REWARD_ONLY = "the method is the reward function: given the same rewards its update is GRPO's"

DEEPSEEK_R1 = entry(
    About(
        id="deepseek-r1",
        title="DeepSeek-R1 and R1-Zero",
        family="recipe",
        paper="2501.12948",
        year=2025,
        side="baseline",
        idea="GRPO on rules only, then with language consistency, then with reward models in the last steps.",
        kind="recipe",
        deviations=(
            "R1-Zero: reward_funcs accuracy_reward and think_answer_reward, equal weights, no reward model",
            "R1 stage 1: and LanguageConsistencyReward, added directly; stage 2: and DuringSteps(reward model, final=400) of 1700 steps",
            "the clip of 10 is on the ratio, stage 1's; its lower side never acts",
            "the reference is replaced every 400 steps: sync_ref_model, ref_model_sync_steps 400, ref_model_mixup_alpha 1.0 in the configuration",
            "the report writes the ratio per sequence in its formulas; per token here, as GRPO",
        ),
    ),
    regularizers=(KL(coef=0.001, estimator="k3"),),
    **PLAIN | dict(clip=PPOClip(eps_low=10.0, eps_high=10.0)),
)

REFLECTION_REWARD = entry(
    About(
        id="reflection-reward-grpo",
        title="GRPO with a reflection reward",
        family="recipe",
        paper="2603.14041",
        year=2025,
        side="reward",
        idea="A third reward, for visible reflection, is added to accuracy and format before the group is normalised.",
        kind="recipe",
        deviations=(
            "reward_funcs: accuracy_reward, think_answer_reward with weight 0.1, ReflectionReward()",
            "only the abstract was seen: how reflection is measured, the weights and the four stages are not the paper's",
            "supervised stages before RL are not in this entry",
        ),
        ours=("the detector, its gate on correctness, and weight 0.2",),
        inert=REWARD_ONLY,
    ),
    **GRPO,
)

SWE_RL = entry(
    About(
        id="swe-rl",
        title="SWE-RL: patch similarity",
        family="recipe",
        paper="2502.18449",
        year=2025,
        side="reward",
        idea="A code edit earns the textual similarity of its patch to the real one: a graded reward without running tests.",
        kind="recipe",
        deviations=(
            "reward_funcs: PatchSimilarityReward(), with columns code_context and oracle_new_content",
            "the score of an unrelated patch is well above 0, because context lines match",
        ),
        inert=REWARD_ONLY,
    ),
    **GRPO,
)

UI_R1 = entry(
    About(
        id="ui-r1",
        title="UI-R1: action prediction of GUI agents",
        family="recipe",
        paper="2503.21620",
        year=2025,
        side="reward",
        idea="One step on a screen earns format, action type and coordinate, a point each.",
        kind="recipe",
        deviations=(
            "reward_funcs: ActionReward(), with columns gt_action and gt_bbox",
            "the length bonus of its efficiency stage is entry ui-r1-length",
        ),
        inert=REWARD_ONLY,
    ),
    **GRPO,
)

UI_AGILE = entry(
    About(
        id="ui-agile",
        title="UI-AGILE: continuous grounding reward",
        family="recipe",
        paper="2507.22025",
        year=2025,
        side="both",
        idea="Reward the distance to the target's centre instead of a hit, and a moderate thinking length.",
        kind="recipe",
        deviations=(
            "reward_funcs: GroundingReward() and ThinkingLengthReward(), with column gt_bbox",
            "the thinking length is in characters; a Euclidean distance would pay corners less",
            "cropping the image and sampling again when a whole group misses needs new rollouts and is not in this entry",
        ),
        inert=REWARD_ONLY,
    ),
    **GRPO,
)

R1_V = entry(
    About(
        id="r1-v",
        title="R1-V: counting with a small vision-language model",
        family="recipe",
        paper="",
        year=2025,
        side="baseline",
        idea="Plain GRPO with two rewards: the answer matches, and the whole completion has the format.",
        kind="recipe",
        deviations=(
            "a repository (Deep-Agent/R1-V), no paper; reward_funcs: AnswerMatchReward() and think_answer_reward, equal weights",
            "its README reports that a 2B model did better without the thinking part",
        ),
        inert=REWARD_ONLY,
    ),
    **GRPO,
)

S2R = entry(
    About(
        id="s2r",
        title="S2R: self-verification and self-correction",
        family="recipe",
        paper="2502.12853",
        year=2025,
        side="trajectory",
        idea="One answer attempts, checks itself and tries again; attempts earn correctness, checks earn truthfulness.",
        kind="recipe",
        deviations=(
            "reward_funcs: SelfVerificationReward(), the last attempt's reward; level='mean' averages attempts and checks",
            "the process-level objective (a ratio, a clip and a running baseline per part) and its KL in the reward (0.05 per part, 0.01 "
            "per answer) are not in this entry: it is shown on GRPO",
            "markers are found in the text; the authors match token ids and let marker tokens form a part of their own",
            "the authors' leave-one-out baseline returns 2 R - mean of the others; nothing here uses it",
        ),
        ours=("a verdict is the last of correct, right, incorrect, wrong in the check",),
        inert=REWARD_ONLY,
    ),
    **GRPO,
)

QWQ = entry(
    About(
        id="qwq",
        title="QwQ-32B: verifiers first, then general skills",
        family="recipe",
        paper="",
        year=2025,
        side="reward",
        idea="Each domain has its own reward; math and code alone first, then a short phase that adds general skills.",
        kind="recipe",
        deviations=(
            "a blog report: objective, phase lengths, weights and reward model are not published; the objective here is GRPO",
            "reward_funcs: DomainReward({'math': ..., 'code': ..., 'general': ...}, phases=[(S1, ['math', 'code']), (S2, ['general', 'math', 'code'])])",
            "a domain outside its phase carries no signal; switch the data's mix with it, or those rollouts are wasted",
        ),
        inert=REWARD_ONLY,
    ),
    **GRPO,
)

GLM_4_5V = entry(
    About(
        id="glm-4-5v",
        title="GLM-4.5V: verifiers by domain",
        family="recipe",
        paper="2507.01006",
        year=2025,
        side="reward",
        idea="A verifier per domain, no KL, clip-higher, every answer counts the same.",
        kind="recipe",
        deviations=(
            "reward_funcs: DomainReward with EditSimilarityReward for reading text; image rewards are not in this package",
            "their 'per-sample loss' is the sequence mean, judged more stable than DAPO's token mean",
            "curriculum sampling, over-sampling by an EMA of 1 / (1 - share of dead groups) and forced answers at the budget need "
            "new rollouts and are not in this entry",
        ),
        ours=("eps_high 0.28: the report gives no number",),
    ),
    **PLAIN | dict(clip=PPOClip(eps_low=0.2, eps_high=0.28)),
)
