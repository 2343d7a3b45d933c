"""Methods that compare a group's answers by sentence embeddings (`trl_variants.rewards.embeddings`)."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped
from ..hooks.aggregate import SequenceMean
from ..hooks.clip import PPOClip
from ..hooks.ratio import TokenRatio
from ..hooks.regularizers import KL
from ..hooks.rewards_diversity import DiversityBonus
from ..hooks.rewards_semantic import DistinctEntropy, SemanticDensity
from . import entry

PLAIN = dict(advantage=Grouped(), ratio=TokenRatio(), clip=PPOClip(0.2, 0.2), aggregate=SequenceMean())

DRA_GRPO = entry(
    About(
        id="dra-grpo",
        title="DRA-GRPO: diversity-aware reward adjustment",
        family="diversity",
        paper="2505.09655",
        year=2025,
        side="trajectory",
        idea="Each reward is divided by the answer's semantic crowding in its group, so near-copies share one credit.",
        deviations=(
            "the cosines are over the whole group, as in the paper; the authors' code takes the rows of one process, which is "
            "the group only where a process holds exactly one",
            "with negative rewards the distinct answer is punished most: a warning, not a change; give rewards >= 0",
            "DRA-Dr.GRPO is variant('dr-grpo', rewards=['semantic_density'])",
            "the paper's rewards are format with weight 1 and cosine-length accuracy with weight 2, G = 6",
        ),
        ours=(
            "encoder all-MiniLM-L6-v2: the paper's jina and nomic models run code from the Hub; name one in encoder where that is allowed",
            "the sum of cosines is at least 1, which acts only where cosines are negative",
            "clip 0.2 and KL 0.04, as entry grpo",
        ),
    ),
    rewards=(SemanticDensity(),),
    regularizers=(KL(coef=0.04, estimator="k3"),),
    **PLAIN,
)

DSDR = entry(
    About(
        id="dsdr",
        title="DSDR: dual-scale diversity regularization",
        family="diversity",
        paper="2602.19895",
        year=2026,
        side="trajectory",
        idea="Right answers that differ from their group earn a little more, and the most distinct of them are kept open token by token.",
        deviations=(
            "the bonus is tiny, but the std of an all-right group scales it to order 1, as in entry diver",
            "the local term's sum over right answers is not divided by the group size and is averaged over prompts; a prompt "
            "without a right answer adds 0",
            "the local term's importance ratio is not clipped and carries gradient, as printed: a token below probability 1/e is "
            "lifted, one above is lowered",
            "formulas are what stands between $, $$, \\( \\) or \\[ \\]",
        ),
        ours=("sigma 1, which caps nothing: the paper names sigma_d and gives no number",),
    ),
    rewards=(DiversityBonus(weight=0.001, sigma=1.0, measure="semantic_mix"),),
    regularizers=(DistinctEntropy(),),
    **PLAIN | dict(clip=PPOClip(eps_low=0.2, eps_high=0.28)),
)
