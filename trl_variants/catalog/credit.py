"""Methods that say which tokens of an answer earned its advantage."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped
from ..hooks.advantage_credit import EntropyGated, EntropyShare, Process
from ..hooks.aggregate import SequenceMean, TokenMean
from ..hooks.clip import PPOClip, Unclipped
from ..hooks.credit_entropy import EntropyBand, EntropyFlow
from ..hooks.credit_future import FutureKL, LambdaTrace
from ..hooks.credit_phase import PhaseWeights
from ..hooks.credit_probability import LowProbabilityFirst, PolarityBoost, ProbabilityWeight
from ..hooks.ratio import OnPolicy, TokenRatio
from ..hooks.regularizers import KL
from ..hooks.regularizers_probability import KLOfPass
from ..hooks.weight import EntropyQuantile
from . import entry

_LOPTI_DEVIATIONS = (
    "the two updates are two passes over the generation: num_iterations must be even (checked). With "
    "steps_per_generation = gradient_accumulation_steps each mini-batch gets them back to back, as the authors' code; with "
    "more mini-batches all low-probability updates come before all high-probability ones",
    "the KL is masked with the tokens of the pass and still divided by every token, so that both passes together pay one KL",
)

HIGHENT = entry(
    About(
        id="highent",
        title="Beyond the 80/20 Rule: high-entropy minority tokens",
        family="credit",
        paper="2506.01939",
        year=2025,
        host="clip-higher",
        idea="Only a few tokens are real decisions: train on the fifth of highest entropy and on nothing else.",
        deviations=(
            "the mean is over the selected tokens, as the authors; TRL's top_entropy_quantile divides by all tokens, a gradient "
            "about five times smaller (weight: entropy_quantile.denominator: all)",
            "the cut is taken over the whole optimizer window; the authors take it per rank and micro-batch, TRL per micro-batch "
            "of all ranks (span: micro-batch, with aggregate: token_mean.span: micro-batch). Ties at the cut all stay",
            "entropy is the current policy's, as in both codes; dynamic sampling and the overlong penalty are not in this entry",
            "the dual clip at 10 is the authors' script, not the paper; the reported gains are mainly for 14B and 32B",
        ),
        aliases=("80/20", "forking-tokens"),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(eps_low=0.2, eps_high=0.28, floor=10.0),
    weight=EntropyQuantile(keep=0.2, denominator="selected"),
    aggregate=TokenMean(),
)

LOPTI_AR = entry(
    About(
        id="lopti-ar",
        title="Advantage reweighting and Lopti together (AR-Lopti)",
        family="credit",
        paper="2505.12929",
        year=2025,
        idea="Low-probability tokens have the largest gradients: weight advantages by probability, and update the unlikely "
        "tokens before the likely ones.",
        deviations=(
            *_LOPTI_DEVIATIONS,
            "alpha 0.3 and eta 0.5 are the pair of the combined script. Advantage reweighting alone is one pass with "
            "alpha 0.2: credit: {probability_weight: {alpha: 0.2}}, regularizers: {kl: {coef: 0.001}}",
        ),
        aliases=("ar-lopti",),
    ),
    advantage=Grouped(),
    credit=(ProbabilityWeight(alpha=0.3), LowProbabilityFirst(eta=0.5)),
    ratio=TokenRatio(),
    clip=PPOClip(eps_low=0.2, eps_high=0.24, floor=10.0),
    aggregate=TokenMean(),
    regularizers=(KLOfPass(coef=0.001, estimator="k3", eta=0.5),),
)

LOPTI = entry(
    About(
        id="lopti",
        title="Low-probability Token Isolation",
        family="credit",
        paper="2505.12929",
        year=2025,
        idea="Two updates on one batch: the unlikely tokens first, then the likely ones under the policy that has moved.",
        deviations=_LOPTI_DEVIATIONS,
    ),
    advantage=Grouped(),
    credit=LowProbabilityFirst(eta=0.4),
    ratio=TokenRatio(),
    clip=PPOClip(eps_low=0.2, eps_high=0.24, floor=10.0),
    aggregate=TokenMean(),
    regularizers=(KLOfPass(coef=0.001, estimator="k3", eta=0.4),),
)

GTPO = entry(
    About(
        id="gtpo",
        title="GTPO: token rewards shaped by policy entropy",
        family="credit",
        paper="2508.04349",
        year=2025,
        side="both",
        host="clip-higher",
        idea="Among right answers the uncertain tokens get more of the reward, among wrong ones the confident tokens more of the "
        "blame.",
        deviations=(
            "read from third-party code (textpolicy), which follows an early version of the paper; the latest was not seen. "
            "GRPO-S, its sequence-level sister, is not here: its formula was not seen",
            "right and wrong tokens are standardised apart, so each side is centred on 0: a confident token of a right answer "
            "gets a NEGATIVE advantage, the contrast between right and wrong goes, and a2 = 0 is no signal, not GRPO. "
            "norm joint or none (ours) keep the contrast",
            "right means the first reward function's word; reward shaping beside it is ignored. Groups that are all right or all "
            "wrong still carry signal, as the formula says",
            "the t-th token counts policy tokens: tool output has no place",
            "another GTPO (2508.03772) is a different method",
        ),
        ours=("clip 0.2 / 0.28, DAPO's: the shaping's source gives none", "entropy floor 1e-6 nats under 1 / H"),
    ),
    advantage=EntropyShare(),
    ratio=TokenRatio(),
    clip=PPOClip(eps_low=0.2, eps_high=0.28),
    aggregate=TokenMean(),
)

GRPO_LAMBDA = entry(
    About(
        id="grpo-lambda",
        title="GRPO-lambda (Parthasarathi): eligibility traces without a critic",
        family="credit",
        paper="2510.00194",
        year=2025,
        idea="GAE is a trace-weighted sum of log-probs: put the group advantage where the TD errors stand.",
        deviations=(
            "low confidence: only the abstract, reviews and third-party code were seen. reading 'terminal' (third-party code) "
            "puts the error on the last token, 'every' on each token; they weight opposite ends of the answer. The paper's "
            "'recent' and 'both' traces, epsilon forms and TD-error approximation were not seen and are not built",
            "lambda 0.99 is the reported best: 0.99^1000 = 4e-5, so long answers keep little early signal in reading 'terminal'",
            "reviews mention that negative advantages are clamped at -0.1 (credit: lambda_trace.floor); off here, it is no part of "
            "a trace",
            "two other methods share the letters: a dynamic length penalty, and lambda-GRPO (2510.06870)",
        ),
        ours=("KL coefficient 0.04, GRPO's: the paper is reported to use a larger one without a number",),
    ),
    advantage=Grouped(),
    credit=LambdaTrace(lam=0.99, gamma=1.0),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
    regularizers=(KL(coef=0.04, estimator="k3"),),
)

A3PO = entry(
    About(
        id="a3po",
        title="A3PO: adaptive, asymmetric token-level advantage shaping by sample polarity",
        family="credit",
        paper="2512.21625",
        year=2025,
        host="clip-higher",
        idea="Early on, unlikely tokens of right answers and overconfident tokens of wrong ones count double; the factor fades.",
        deviations=(
            "the authors' public code has the static multiplier only; start 2 and decay 0.005 are from the paper's summary",
            "the decay counts optimizer steps ('training step' in the summary), whatever num_iterations is",
            "the public code ranks over nonzero entries to skip padding; here the mask does",
            "right is the verifier's word (correct), not the sign of the advantage",
        ),
    ),
    advantage=Grouped(),
    credit=PolarityBoost(),
    ratio=TokenRatio(),
    clip=PPOClip(eps_low=0.2, eps_high=0.28),
    aggregate=TokenMean(),
)

FIPO = entry(
    About(
        id="fipo",
        title="FIPO: Future-KL Influenced Policy Optimization",
        family="credit",
        paper="2603.19835",
        year=2026,
        host="clip-higher",
        idea="A token counts by how far the policy, since sampling, has moved the rest of its answer.",
        deviations=(
            "constants are from a third-party port (ms-swift) and notes; the official repository could not be fetched",
            "factor range [1, 1.2], that of the 32B runs; the others use [0.8, 1.2] (credit: future_kl.low: 0.8)",
            "with one update per rollout every factor is 1 and this is DAPO with a dual clip: use several",
            "discounting counts policy tokens: tool output in between costs nothing",
        ),
    ),
    advantage=Grouped(),
    credit=FutureKL(low=1.0, high=1.2),
    ratio=TokenRatio(),
    clip=PPOClip(eps_low=0.2, eps_high=0.28, floor=10.0),
    aggregate=TokenMean(),
)

ERPO = entry(
    About(
        id="erpo",
        title="ERPO: token-level entropy-regulated policy optimization",
        family="credit",
        paper="2603.28204",
        year=2026,
        idea="Tokens at uncertain points, where the policy has left its reference, get more say in the group's advantage.",
        deviations=(
            "low confidence: abstract and a summary only, no code. The form of the gate, the scale, eta and the number of buckets "
            "were not seen and are our choices",
            "the log-ratio and the entropy are the sampling policy's, computed once per generation",
            "the summary's clipped branch has the un-normalised advantage; both branches here use A_t (a misprint, we think)",
            "eta 0 standardises the advantage over tokens, which weights by length: not GRPO",
        ),
        ours=(
            "eta 0.5, target_std 0.5, 10 buckets, a sigmoid gate on the entropy's z-score, eps_token 1e-4",
            "KL coefficient 0.001 and clip 0.2",
        ),
        aliases=("erpo-entropy",),
    ),
    advantage=EntropyGated(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=TokenMean(),
    regularizers=(KL(coef=0.001, estimator="k3"),),
)

OPEFO = entry(
    About(
        id="opefo",
        title="On-Policy Entropy Flow Optimization",
        family="credit",
        paper="2605.11491",
        year=2026,
        host="reinforce",
        idea="Scale the tokens that raise entropy against those that lower it until both flows are equal.",
        deviations=(
            "the published estimate of a token's effect on entropy is a sampled-token approximation whose sign can be wrong "
            "(p = .05, .07, .38, .5, third sampled: -0.0318 against +0.0571); the exact change needs the whole "
            "distribution and is not built",
            "read from the abstract and a summary, no code",
            "for strictly on-policy data: set num_iterations 1 and steps_per_generation = gradient_accumulation_steps",
            "with no token on one side the formula switches the other off; here nothing is scaled then (ours)",
        ),
    ),
    advantage=Grouped(),
    credit=EntropyFlow(),
    ratio=OnPolicy(),
    clip=Unclipped(),
    aggregate=TokenMean(),
)

EG_GRPO = entry(
    About(
        id="eg-grpo",
        title="Entropy-Guided GRPO",
        family="credit",
        paper="",
        year=2026,
        side="trajectory",
        host="reinforce",
        idea="Confident tokens get no reward term, only the KL; the most uncertain half gets a small positive bonus.",
        deviations=(
            "paper: 'From Broad Exploration to Stable Synthesis' (2026, no arXiv id), written for image tokens; one modality here, "
            "so one ranking per answer",
            "the authors' code (minebetter/EG-GRPO), constant cap 0.3 and token mean; the paper's budget-matched bonus is "
            "credit: entropy_band.form: paper with aggregate: sequence_mean, and can flip a small negative advantage",
            "the code counts tokens with entropy above 0 as valid, here the mask does; a row with advantage 0 gets no bonus",
            "entropy is divided by the log of the model's vocabulary; the bonus is detached, no entropy regulariser",
            "one update per batch: set num_iterations 1",
        ),
    ),
    advantage=Grouped(eps=1e-4),
    credit=EntropyBand(),
    ratio=OnPolicy(),
    clip=Unclipped(),
    aggregate=TokenMean(),
    regularizers=(KL(coef=0.01, estimator="k3"),),
)

HT_GRPO = entry(
    About(
        id="ht-grpo",
        title="Phase weights, the part of HT-GRPO (Sketch Then Paint) that any policy can use",
        family="credit",
        paper="2605.16842",
        year=2026,
        kind="part",
        idea="Weight the advantage by the phase of the answer a token belongs to.",
        deviations=(
            "NOT an implementation of the paper, whose formulas were not seen: its three phases and its ratio from a fully masked "
            "state need a masked-diffusion model. Only 'advantage weight by phase' carries over; shown on GRPO",
            "phases are equal parts of the completion here; by: turn, segment or any attached (B, T) tensor of ids",
        ),
        ours=("weights 2 and 1 for two halves, rescaled to a mean of 1 per answer",),
    ),
    advantage=Grouped(),
    credit=PhaseWeights(weights=(2.0, 1.0)),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
    regularizers=(KL(coef=0.04, estimator="k3"),),
)

UNIFIED_INTERLEAVED_GRPO = entry(
    About(
        id="unified-interleaved-grpo",
        title="Unified GRPO for interleaved generation, its text part: process rewards per segment",
        family="credit",
        paper="2603.09538",
        year=2025,
        kind="part",
        idea="Every segment has its own reward; a token gets the normalised rewards of the segments still to end.",
        deviations=(
            "text only: image tokens, decoder and vision rewards are not here, and its 'unified' ratio is the ordinary token ratio. "
            "From third-party notes; the authors' repository could not be had",
            "reward function j scores segment j and says None where an answer has none; segments end at the token ids in "
            "advantage: process.delimiters. The outcome version is GRPO with the sum of the rewards",
            "more segments are more terms, so their number can be hacked: per_segment: true divides by it (ours)",
        ),
        ours=("KL coefficient 0.04 and clip 0.2, GRPO's",),
        inert="with one reward function and no delimiters there is one segment per answer, which is GRPO",
    ),
    advantage=Process(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
    regularizers=(KL(coef=0.04, estimator="k3"),),
)
