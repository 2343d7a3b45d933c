"""Parts that answer to a sampler that is not the policy: correction of the engine mismatch, and off-policy masks."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped
from ..hooks.aggregate import TokenMean
from ..hooks.clip import PPOClip
from ..hooks.ratio import TokenRatio
from ..hooks.weight import OffPolicySequenceMask, SamplerCorrection
from . import entry

_SAME_ENGINE = (
    "where the trainer's own model samples there is no mismatch: every weight is 1 and the update is the host's"
)

TIS = entry(
    About(
        id="tis",
        title="Truncated importance sampling for the mismatch of sampling engine and trainer",
        family="sampler-correction",
        paper="",
        year=2025,
        kind="part",
        host="clip-higher",
        idea="Engine and trainer disagree on the same weights: multiply each token by the truncated ratio of the two.",
        deviations=(
            "no arXiv paper: the blog 'Your Efficient RL Framework Secretly Brings You Off-Policy RL Training'; truncated importance "
            "sampling itself is 1606.02647",
            "token level with C = 2, as verl; TRL's code default is sequence_mask with C = 3 although its docstring says token_truncate, "
            "SkyRL has 2 per token and 5 per sequence",
            "'sequence' is the product of the token ratios (TRL); ms-swift's is their geometric mean, here geometric_truncate",
            "KL and entropy terms are not multiplied; tokens the engine could not score count as ratio 1",
        ),
        inert=_SAME_ENGINE,
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(eps_low=0.2, eps_high=0.28),
    weight=(SamplerCorrection("token_truncate", max=2.0),),
    aggregate=TokenMean(),
)

MIS_ICEPOP = entry(
    About(
        id="mis-icepop",
        title="Masked importance sampling; IcePop (Every Step Evolves)",
        family="sampler-correction",
        paper="2510.18855",
        year=2025,
        kind="part",
        host="clip-higher",
        idea="Drop the tokens whose trainer / engine ratio leaves an interval, instead of truncating it.",
        deviations=(
            "IcePop's interval [0.5, 5] per token; other codes: TRL sequence_mask up to 3, SkyRL geometric [0.99, 1.01] "
            "(geometric_mask) or product [0.5, 2] (sequence_mask)",
            "masked tokens stay in the divisor, as in the public codes; metric weight/sampler_correction_zeros is their share",
            "a product over a long answer leaves almost nothing inside tight bounds: use geometric_mask there",
        ),
        aliases=("icepop", "mis"),
        inert=_SAME_ENGINE,
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(eps_low=0.2, eps_high=0.28),
    weight=(SamplerCorrection("token_mask", min=0.5, max=5.0),),
    aggregate=TokenMean(),
)

OPSM = entry(
    About(
        id="opsm",
        title="Off-policy sequence masking (DeepSeek-V3.2)",
        family="off-policy",
        paper="2512.02556",
        year=2025,
        kind="part",
        host="clip-higher",
        idea="A wrong answer that the policy has already made unlikely teaches little and destabilises: drop it.",
        deviations=(
            "the sampler's log-probs where the engine gives them, else the old policy's; TRL's off_policy_mask_threshold does the same",
            "denominators are unchanged: a dropped answer still counts",
        ),
        ours=("threshold 0.5 nats per token: the paper gives none",),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(eps_low=0.2, eps_high=0.28),
    weight=(OffPolicySequenceMask(threshold=0.5),),
    aggregate=TokenMean(),
)
