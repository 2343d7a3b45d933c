"""Methods that scale the group-relative advantage by how hard the prompt is, or by more than its own spread."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped
from ..hooks.advantage_difficulty import Asymmetric, DifficultySharedStd, Focal, LocalGlobal
from ..hooks.advantage_tokens import Clamped
from ..hooks.aggregate import ConstantLength, SequenceMean, TokenMean
from ..hooks.clip import PPOClip
from ..hooks.ratio import TokenRatio
from ..hooks.regularizers import KL
from . import entry

DURIAN = entry(
    About(
        id="durian",
        title="Durian: difficulty-aware group normalization",
        family="advantage-shaping",
        paper="2602.21743",
        year=2026,
        side="trajectory",
        idea="Keep the prompt's own mean, but take half of the scale from all prompts that are about as likely under the policy.",
        deviations=(
            "the reasoning half: the perceptual half bins by the entropy of vision features, its weight went to the reasoning term",
            "eq. 14 as printed sums probabilities; log-probs here, as the text says. The sum makes long answers count as hard: length=mean",
            "12 bins (best range 12-16) are meant for hundreds of prompts; a small generation has fewer (min_prompts)",
        ),
        ours=(
            "weights 0.6 and 0.4: the paper's table has seven mixes close to each other, the main run's was not seen",
            "at least two prompts a bin: with one the method is GRPO",
            "eps 1e-4",
        ),
    ),
    advantage=DifficultySharedStd(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
    regularizers=(KL(coef=0.04, estimator="k3"),),
)

F_GRPO = entry(
    About(
        id="f-grpo",
        title="F-GRPO: focal difficulty scaling",
        family="advantage-shaping",
        paper="2602.06717",
        year=2026,
        side="trajectory",
        idea="Prompts that are mostly solved push less, so that a group without the rare right answers does not unlearn them.",
        deviations=(
            "gamma is 0.5 or 1.0 in the paper, which also scales DAPO's and CISPO's advantages: advantage: focal on them",
            "the success rate is that of `correct`, never of shaped rewards; the mean gradient falls with it: retune the learning rate",
        ),
    ),
    advantage=Focal(gamma=0.5),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
    regularizers=(KL(coef=0.04, estimator="k3"),),
)

A_GRAE = entry(
    About(
        id="a-grae",
        title="A-GRAE: asymmetric group-relative advantage estimation",
        family="advantage-shaping",
        paper="2602.05548",
        year=2026,
        side="trajectory",
        idea="Weak policies learn less from successes, which keeps exploration; the weight moves from easy to hard prompts as the batch improves.",
        deviations=(
            "the paper's factor for easy prompts, 1/sqrt(1-p); the public code divides by 1 - sqrt(p), 15.5 instead of 2.8 at p = 7/8",
            "the released scripts never reach the method (a weight that is annealed from the first step is compared with 2.0 exactly)",
            "p and om are shares of `correct`, for rewards outside [0, 1] break the square roots; om is over rows, not over group means",
            "alpha is 1.0 (the public multimodal code has 0.5); the paper has no KL",
        ),
    ),
    advantage=Asymmetric(eps=1e-6, alpha=1.0),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
)

DIVA_GRPO = entry(
    About(
        id="diva-grpo",
        title="DIVA-GRPO: difficulty-adaptive variant advantage",
        family="advantage-shaping",
        paper="",
        side="both",
        idea="Two z-scores, within a variant of the problem and over all its variants, the latter weighted by relative difficulty.",
        deviations=(
            "a 2026 paper without an arXiv id in our sources; written from the authors' code",
            "the advantage part: making variants (hints, paraphrases, image changes) and tracking difficulty belong to data and prompts",
            "rows of a problem share the column `id`, `difficulty` is a number (1..9 there); without variants this is twice the z-score",
            "the batch z-score is over rows; the released code takes it over the padded tokens, padding included",
        ),
    ),
    advantage=LocalGlobal(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=TokenMean(),
)

NORD = entry(
    About(
        id="nord",
        title="NoRD: no reasoning for driving",
        family="advantage-shaping",
        paper="2602.21172",
        year=2026,
        idea="From a weak start, division by the std mutes exactly the prompts whose rewards are spread out; centred, unscaled advantages do not.",
        kind="note",
        host="dr-grpo",
        inert="its objective is Dr. GRPO's; what is new is the finding, kept as a test of two groups with unequal spread",
        deviations=(
            "the reward scale sets the step size; the driving simulator, its score and its fine-tuning recipe are out of scope",
        ),
    ),
    advantage=Grouped(std="none"),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=ConstantLength(),
)

RESONATE = entry(
    About(
        id="resonate",
        title="Resonate: group mean, batch std and a clamp (Flow-GRPO's advantage)",
        family="advantage-shaping",
        paper="2603.11661",
        year=2026,
        idea="One std for the whole batch: a prompt whose rewards hardly differ is not blown up; the clamp bounds the rest.",
        kind="part",
        deviations=(
            "the advantage on GRPO's objective; flow matching, its clip range of 1e-4 on averaged latents and its KL do not fit token policies",
            "rows with advantage 0 are dropped there; here they have no gradient and stay in the count of rows",
            "the judge's yes/no reward is trl_variants.rewards.YesNoReward",
        ),
    ),
    advantage=Clamped(std="batch", ddof=0, eps=1e-4, limit=5.0),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
    regularizers=(KL(coef=0.04, estimator="k3"),),
)
