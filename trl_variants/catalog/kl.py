"""Entropy and KL terms, shown on a named host."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped
from ..hooks.aggregate import SequenceMean, TokenMean
from ..hooks.clip import PPOClip
from ..hooks.ratio import TokenRatio
from ..hooks.regularizers import KL, EntropyBonus
from ..hooks.regularizers_kl import EntropyController, StraightThroughKL
from . import entry

ENTROPY_BONUS = entry(
    About(
        id="entropy-bonus",
        title="Entropy bonus",
        family="regularizer",
        paper="1602.01783",
        year=2016,
        side="baseline",
        kind="part",
        idea="A little of the mean token entropy is added to the objective to keep exploration.",
        deviations=(
            "the mean is over the window's tokens; TRL takes the mean of micro-batch means (span: micro-batch)",
            "shown on DAPO's objective",
        ),
        ours=("coef 0.001: TRL's default is 0, A3C's 0.01 is for small action spaces",),
        host="clip-higher",
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.28),
    aggregate=TokenMean(),
    regularizers=(EntropyBonus(coef=0.001),),
)

ADAPTIVE_ENTROPY = entry(
    About(
        id="adaptive-entropy",
        title="Adaptive entropy coefficient (Skywork-OR1)",
        family="regularizer",
        paper="2505.22312",
        year=2025,
        side="reward",
        kind="part",
        idea="Raise the entropy coefficient a little whenever entropy is below a target, lower it otherwise, and apply it only below the target.",
        deviations=(
            "the authors' script values (init 0, step 1e-4, max 0.005); their yaml says max 0.5, step 0.001",
            "entropy is that of the optimizer window at hand; the authors measure once per rollout batch",
            "TRL compares with <=, takes steps of 0.005 and applies the coefficient one step later (regularizer: adaptive_entropy)",
            "shown on DAPO's objective",
        ),
        host="clip-higher",
        inert="while the mean token entropy is at or above 0.2 nats the coefficient is 0; it acts below that",
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.28),
    aggregate=TokenMean(),
    regularizers=(EntropyController(),),
)

UNBIASED_KL = entry(
    About(
        id="unbiased-kl",
        title="Unbiased KL term (DeepSeek-V3.2)",
        family="regularizer",
        paper="2512.02556",
        year=2025,
        side="reward",
        kind="part",
        idea="The k3 estimate times the live ratio: value and gradient are those of KL(pi || ref) under samples of the old policy.",
        deviations=(
            "exact for a token ratio; with a sequence ratio (ratio: sequence) the identity holds only approximately",
            "the coefficient cannot be compared with that of the uncorrected term",
        ),
        ours=("coef 0.04, the host's: the report names none",),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
    regularizers=(KL(coef=0.04, estimator="k3", weight="live"),),
)

KL_ESTIMATORS = entry(
    About(
        id="kl-estimators",
        title="KL estimators: value and gradient chosen apart",
        family="regularizer",
        paper="",
        year=2020,
        side="baseline",
        kind="part",
        idea="k1, k2, k3 estimate the same number but have different gradients as losses; here the value is k3's and the gradient k2's, which descends KL(pi || ref).",
        deviations=(
            "Schulman's note has no arXiv number; the pair shown is verl's 'k3+' on GRPO",
            "in the loss: hook `kl` (k2, k3, exact; k1 with a live ratio), `kl_straight_through` (any value with the gradient of k2 or k3); "
            "in the reward: rewards hook `kl_in_reward` (k1, k2, k3), whose k1 descends the reverse KL",
            "no value is clamped at 10 as verl and OpenRLHF do: that would take the gradient away where drift is worst",
            "the exact form, sum_v pi log(pi/ref) (hook `kl`, estimator exact), is computed in chunks of the vocabulary's logits "
            "and recomputed in the backward",
        ),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
    regularizers=(StraightThroughKL(coef=0.04, value="k3", gradient="k2"),),
)

FP32_LM_HEAD = entry(
    About(
        id="fp32-lm-head",
        title="FP32 LM head (MiniMax-M1, ScaleRL)",
        family="precision",
        paper="2506.13585",
        year=2025,
        side="trajectory",
        kind="note",
        idea="Compute the output projection in fp32 in sampler and trainer, which removes most of their mismatch.",
        deviations=(
            "nothing in the loss: set TRL's cast_lm_head_to_fp32 (it wants untied embeddings and a full-precision copy of the head); "
            "the sampler has to do the same for full effect",
            "what mismatch remains is corrected by weight: sampler_correction",
        ),
        inert="a model option, not a hook: the objective is GRPO's",
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
    regularizers=(KL(coef=0.04, estimator="k3"),),
)
