"""Methods with another trust region than PPO's interval on the token ratio."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped
from ..hooks.advantage_truncated import TruncationDropout
from ..hooks.aggregate import SequenceMean, TokenMean
from ..hooks.aggregate_constants import PromptConstant, SequenceConstant
from ..hooks.clip import PPOClip, Unclipped
from ..hooks.clip_answers import SelfNormalised, Tapered
from ..hooks.clip_balanced import BalancedClip
from ..hooks.clip_cov import ClipCov, KLCov
from ..hooks.clip_trust import DivergenceMask, HybridClip, UpperCap, WideningClip
from ..hooks.ratio import ProductRatio, TokenRatio
from ..hooks.ratio_cumulative import CumulativeRatio
from ..hooks.select_winners import Winners
from ..hooks.weight import SamplerCorrection
from . import entry

DHPO = entry(
    About(
        id="dhpo",
        title="Dynamic Hybrid Policy Optimization",
        family="trust-region",
        paper="2601.05607",
        year=2026,
        side="trajectory",
        idea="Mix the token's ratio and the answer's, each clipped in its own branch before mixing.",
        deviations=(
            "the averaged form (w = 1/2); clip.mix: entropy is the entropy-guided one, whose map from entropy to w was not seen "
            "(here H / max H of the window)",
            "the sequence branch has the own-token gradient of GSPO-token; through the mean over tokens the sum is the same, its spread is not",
            "seen: abstract and summary, no code; a summary prints the sequence ratio with power 2, its words and GSPO say 1/|y|",
        ),
        ours=(
            "clip ranges 0.2 / 0.28 (token, DAPO's) and 3e-4 / 4e-4 (sequence, GSPO's): asymmetric, values not seen",
        ),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=HybridClip(mix="averaged", w=0.5),
    aggregate=SequenceMean(),
)

CTPO = entry(
    About(
        id="ctpo",
        title="Cumulative Token Policy Optimization",
        family="trust-region",
        paper="2605.07331",
        year=2026,
        side="trajectory",
        host="clip-higher",
        idea="A token's importance weight is the product of ratios up to it; the trust region widens with the position like sqrt t.",
        deviations=(
            "bounds exp(-0.025 sqrt t), exp(0.05 sqrt t) as in the authors' code; a formula printed as 1 -/+ exp(-eps sqrt t) is wrong",
            "with the code's dual clip at the upper width, A < 0 above the upper bound has no gradient; clip.widening.dual: null leaves it out",
            "token mean as the authors' code defaults to; a summary says mean over sequences of token means",
            "the code's further filter of rollouts with a sequence ratio above 5 is a weight hook (sampler_correction) and not in this entry",
            "log-ratios are clamped at +-20 before exp (the code: at 10 from above); beyond either the clip has taken the gradient",
        ),
    ),
    advantage=Grouped(),
    ratio=CumulativeRatio(),
    clip=WideningClip(eps_low=0.025, eps_high=0.05, power=0.5, dual=0.05),
    aggregate=TokenMean(),
)

TIC_GRPO = entry(
    About(
        id="tic-grpo",
        title="Trajectory-level Importance-Corrected GRPO",
        family="trust-region",
        paper="2508.02833",
        year=2025,
        side="trajectory",
        host="dr-grpo",
        idea="One product ratio per answer, capped from above for both signs of A, over a constant length.",
        deviations=(
            "seen: abstract and public reviews, no code; low confidence",
            "the divisor T is the run's max_completion_length",
            "later versions also correct the group statistic for length in a form that was not seen; here plain group normalisation",
        ),
        ours=("eps_high 0.28: the value was not seen",),
    ),
    advantage=Grouped(),
    ratio=ProductRatio(),
    clip=UpperCap(eps_high=0.28),
    aggregate=SequenceConstant(),
)

DECOUPLED_PPO = entry(
    About(
        id="decoupled-ppo",
        title="Decoupled (three-policy) PPO",
        family="trust-region",
        paper="2110.00641",
        year=2021,
        side="trajectory",
        host="bnpo",
        inert="where the trainer's own model samples u = 1 and this is PPO's clip with a token mean (its host in one micro-batch a step); "
        "it differs once the sampler reports its own log-probs",
        idea="The behaviour policy is corrected for by a weight, the trust region is drawn around the trainer's own anchor.",
        deviations=(
            "the paper's proximal policy is a moving average (PPO-EWMA); here it is the policy at the start of the update phase, as asynchronous "
            "LLM trainers have it",
            "u is not truncated (weight.sampler_correction.max caps it), only bounded at exp(+-20)",
        ),
        ours=("group advantage and token mean: the method takes any advantage",),
        aliases=("three-policy-ppo",),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    weight=(SamplerCorrection(mode="token_truncate", max=None),),
    aggregate=TokenMean(),
)

DPPO = entry(
    About(
        id="dppo",
        title="Divergence PPO: a trust region in probability",
        family="trust-region",
        paper="2602.04879",
        year=2026,
        side="trajectory",
        host="clip-higher",
        idea="Mask a token when its probability, not its ratio, has moved too far in the direction the advantage pushes.",
        deviations=(
            "the binary total-variation form; clip: {divergence_mask: {divergence: kl, delta: 0.05}} is the KL form; the top-k form needs "
            "distributions recorded at rollout and is not built",
            "anchored to the sampler: its own log-probs where the engine reports them, else the old policy's; no further correction is multiplied",
            "truncation 20 as the paper, the authors' code defaults to 10",
            "another DPPO is Dynamic Pruning (2603.04135), not this one",
        ),
        aliases=("divergence-ppo",),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(anchor="sampler"),
    clip=DivergenceMask(divergence="tv", delta=0.15, cap=20.0),
    aggregate=TokenMean(),
)

TOPR = entry(
    About(
        id="topr",
        title="Tapered Off-Policy REINFORCE",
        family="trust-region",
        paper="2503.14286",
        year=2025,
        side="trajectory",
        host="rloo",
        idea="Positive answers need no importance weight; negative ones are tapered by a ratio truncated at 1.",
        deviations=(
            "the weight follows the sign of the advantage (reward minus the group's mean), not of the raw reward: a baseline moves the split",
            "anchored to the sampler: its own log-probs where the engine reports them, else the old policy's",
            "seen: summaries of the paper, no code",
        ),
        ours=("the group's mean as the baseline",),
    ),
    advantage=Grouped(std="none"),
    ratio=ProductRatio(anchor="sampler"),
    clip=Tapered(cap=1.0),
    aggregate=SequenceMean(),
)

BAPO = entry(
    About(
        id="bapo",
        title="Balanced Policy Optimization with adaptive clipping",
        family="trust-region",
        paper="2510.18927",
        year=2025,
        side="trajectory",
        host="clip-higher",
        idea="Re-choose both ratio bounds in every step so that positive tokens supply a set share of the loss's magnitude.",
        deviations=(
            "the share is measured on the tokens PPO leaves unclipped (measure: active). Under the authors' code (surrogate) and the paper's equation "
            "(paper) raising c_low only lowers the share, so that half of the search always runs to its maximum",
            "measure paper divides by P + N; the printed |P - N| is unbounded near P = N",
            "upper bound first, as the paper's algorithm; the authors' code moves the lower one first",
            "rho0 0.4, c in 0.6-0.9 and 1.2-3.0, steps 0.02 and 0.05 as the paper's text; readme and scripts use 1/2 or 1/3, 0.6-0.8, 1.2-2.0",
            "dual clip 3 is the verl host's, not in the paper",
        ),
        ours=("measure active",),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=BalancedClip(),
    aggregate=TokenMean(),
)

CLIP_COV = entry(
    About(
        id="clip-cov",
        title="Clip-Cov: the entropy mechanism of RL",
        family="trust-region",
        paper="2505.22617",
        year=2025,
        side="trajectory",
        host="clip-higher",
        idea="A few random tokens whose log-prob and advantage co-vary strongly lose their gradient, because they collapse the entropy.",
        deviations=(
            "means run over the window's tokens; the authors' run over a mini-batch, which is the same",
            "PPO's interval is [0, 2], as the authors' scripts have it",
        ),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=ClipCov(),
    aggregate=TokenMean(),
)

KL_COV = entry(
    About(
        id="kl-cov",
        title="KL-Cov: the entropy mechanism of RL",
        family="trust-region",
        paper="2505.22617",
        year=2025,
        side="trajectory",
        host="clip-higher",
        idea="Tokens whose log-prob and advantage co-vary most pay for moving away from the old policy; there is no clip.",
        deviations=(
            "share 0.002 is the authors' 7B setting, written 0.2 percent in their scripts (32B: 0.0002); verl takes a fraction of 0.0002, SkyRL 0.2",
            "the first update of a batch is unaffected: |0| has no gradient",
        ),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=Unclipped(),
    aggregate=TokenMean(),
    regularizers=(KLCov(coef=1.0, share=0.002),),
)

STABLEDRL = entry(
    About(
        id="stabledrl",
        title="StableDRL: unconditional clipping and self-normalisation",
        family="trust-region",
        paper="2603.06743",
        year=2026,
        side="trajectory",
        host="rloo",
        idea="Clip the answer's ratio whatever the sign of A and divide by the group's sum: a convex combination of score terms.",
        deviations=(
            "a method for diffusion language models; here log pi(y) is the policy's own, not a bound of it",
            "eps 0.2 comes from a third-party text; the authors' code caps at ratio 5 only: clip: {self_normalised: {eps_low: 1, eps_high: 4}}",
            "normalised inside the prompt's group; the authors' code does it over the local batch, which holds one prompt",
            "groups weigh by their number of live rows: with equal groups the paper's mean over groups",
            "no length normalisation in this branch: the gradient norm grows with length (the authors clip it at 0.2)",
        ),
    ),
    advantage=Grouped(std="none"),
    ratio=ProductRatio(),
    clip=SelfNormalised(0.2, 0.2),
    aggregate=SequenceMean(rows="live"),
)

MICROCODER_GRPO = entry(
    About(
        id="microcoder-grpo",
        title="MicroCoder-GRPO",
        family="trust-region",
        paper="2603.07777",
        year=2026,
        side="both",
        host="clip-higher",
        idea="Mask some of the truncated answers, not all and not none, raise the upper clip, drop the KL, sample hotter.",
        deviations=(
            "whether correct or incorrect truncated answers are masked differs within the authors' material (equation figure and insights: "
            "non-incorrect; symbol list and a review: incorrect); advantage.truncation_dropout.criterion takes both",
            "the sampling temperature (1.2, staged from low to high) is the run's own setting and not in this entry",
            "ratio granularity and divisor were not seen: DAPO's token ratio and token mean",
            "no training code seen",
        ),
        ours=(
            "eps_high 0.28: DAPO's, the value was not seen",
            "rho 0.3: a value the authors studied, not a stated default",
        ),
    ),
    advantage=TruncationDropout(rho=0.3, m=128, criterion="non_incorrect"),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.28),
    aggregate=TokenMean(),
)

WAPO = entry(
    About(
        id="wapo",
        title="Winner Advantage Policy Optimization",
        family="trust-region",
        paper="2606.16154",
        year=2026,
        side="both",
        host="dr-grpo",
        idea="Train only on answers above their group's mean and cap the ratio, far out, instead of clipping it.",
        deviations=(
            "eps 9 is an offset from 1: the cap is at ratio 10",
            "the divisor counts groups that have a winner, times the group size, times L = the run's max_completion_length (8192 in the paper); "
            "aggregate: token_mean is the code's option to divide by kept tokens",
            "anchored to the sampler: its own log-probs where the engine reports them, else the old policy's",
            "the code's bins of tokens above and below sum p^2, a diagnostic, are not built",
        ),
    ),
    select=(Winners(),),
    advantage=Grouped(std="none"),
    ratio=TokenRatio(anchor="sampler"),
    clip=UpperCap(eps_high=9.0),
    aggregate=PromptConstant(),
)
