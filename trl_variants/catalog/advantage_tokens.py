"""Methods whose baseline or scale reads tokens: their number, their task, the policy's confidence in them."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage_tokens import LengthWeightedLeaveOneOut, RewardConfidence, TaskWhitened
from ..hooks.aggregate import SequenceMean, TokenMean
from ..hooks.clip import CISPO, PPOClip
from ..hooks.ratio import TokenRatio
from . import entry

AGENTRL_TASK_NORM = entry(
    About(
        id="agentrl-task-norm",
        title="AgentRL: advantage normalization per task",
        family="advantage-shaping",
        paper="2510.04206",
        year=2025,
        idea="Token advantages are standardised inside each task's share of the batch, so no task dominates by its reward scale or length.",
        deviations=(
            "written from the description, the code was not seen: ddof and eps are not the paper's",
            "statistics are over tokens, so the advantages of a group no longer sum to 0 over its rows, and a dead group's is not 0",
            "needs the data set's column `task` (advantage.task names another)",
        ),
        ours=("population std with eps 1e-6", "the objective around it is GRPO's without KL, over tokens"),
    ),
    advantage=TaskWhitened(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=TokenMean(),
)

LAGUNA = entry(
    About(
        id="laguna",
        title="Laguna: length-weighted leave-one-out with a loose CISPO",
        family="advantage-shaping",
        paper="2605.27605",
        year=2026,
        side="both",
        idea="The other answers count in the baseline by their tokens; weights are clipped only far from 1.",
        deviations=(
            "the blog says the weights give long successes a smaller advantage; in the formula a long success lowers the others'",
            "not seen: whether observation tokens count (here only the policy's), CISPO's lower bound, the token normalisation, and "
            "whether the ratio is to the sampler or to the old policy (here the old one)",
            "the penalties of the agentic run (-0.1 malformed tool call, -0.05 tool error) and its curriculum belong to rewards and data",
        ),
        ours=("tokens are averaged over the window, no lower bound",),
    ),
    advantage=LengthWeightedLeaveOneOut(),
    ratio=TokenRatio(),
    clip=CISPO(cap=5.0),
    aggregate=TokenMean(),
)

RCC = entry(
    About(
        id="rcc",
        title="Reward-confidence correction of the group baseline",
        family="advantage-shaping",
        paper="2603.13134",
        year=2026,
        side="trajectory",
        idea="Shift the baseline by twice the covariance of reward and confidence: the first-order variance-minimising baseline.",
        deviations=(
            "the RCC half of BICC + RCC; the public code has no RCC, so this follows third-party notes of the formula",
            "confidence is of the policy that sampled, once per generation, not of every update's policy",
            "the advantages of a group no longer sum to 0; a constant confidence gives the z-score with population std",
        ),
        ours=(
            "confidence is the mean over tokens (a sum explodes on long answers), held within +-20",
            "eps 1e-6; no KL beside the reference that the confidence needs",
        ),
    ),
    advantage=RewardConfidence(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
)
