"""Methods that change what happens beyond the trust region."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped
from ..hooks.aggregate import SequenceMean, TokenMean
from ..hooks.clip import CISPO as CISPOClip
from ..hooks.clip import PPOClip, SoftGate
from ..hooks.ratio import TokenRatio
from ..hooks.regularizers import KL
from . import entry

CISPO = entry(
    About(
        id="cispo",
        title="Clipped Importance Sampling Policy Optimization (MiniMax-M1)",
        family="clipping",
        paper="2506.13585",
        year=2025,
        idea="Clip and detach the importance weight, so every token keeps a gradient with a bounded multiplier.",
        deviations=(
            "cap is a bound on the ratio itself; TRL's epsilon_high is too, and its fall-back to epsilon=0.2 caps every weight at 0.2",
        ),
        ours=("cap 5.0: the value TRL's documentation recommends, the paper gives none",),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=CISPOClip(cap=5.0),
    aggregate=TokenMean(),
)

SAPO = entry(
    About(
        id="sapo",
        also_called=("sapo",),
        title="Soft Adaptive Policy Optimization",
        family="clipping",
        paper="2511.20347",
        year=2025,
        side="trajectory",
        idea="A smooth gate instead of a hard clip: the weight falls off as the ratio leaves 1, faster for negative advantages.",
        deviations=("the value at ratio 1 is 2/tau, so losses cannot be compared with PPO's; gradients can",),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=SoftGate(tau_pos=1.0, tau_neg=1.05),
    aggregate=SequenceMean(),
)

TWO_SIDED = entry(
    About(
        id="two-sided-clip",
        title="Two-sided GRPO clipping (INTELLECT-2)",
        family="clipping",
        paper="2505.07291",
        year=2025,
        idea="Bound the ratio of negative advantages too: PPO's min has no floor there.",
        kind="part",
        deviations=("shown on GRPO with the paper's KL coefficient 0.001",),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2, delta=4.0),
    aggregate=TokenMean(),
    regularizers=(KL(coef=0.001, estimator="k3"),),
)

DUAL_CLIP = entry(
    About(
        id="dual-clip",
        title="Dual-clip PPO",
        family="clipping",
        paper="1912.09729",
        year=2019,
        idea="A floor c A on the objective of negative advantages.",
        kind="part",
        deviations=("shown on GRPO's advantage with a token mean; equal to two-sided-clip with delta = c",),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2, floor=3.0),
    aggregate=TokenMean(),
)
