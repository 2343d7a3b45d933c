"""Methods in which a teacher's word becomes, or shapes, the reward or the advantage (T_B)."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped
from ..hooks.advantage_none import NoAdvantage
from ..hooks.advantage_teacher import SelfConditioned, TeacherBaselined
from ..hooks.aggregate import PromptMean, SequenceMean, TokenMean
from ..hooks.clip import PPOClip, Unclipped
from ..hooks.clip_squared import RatioClamp
from ..hooks.clip_teacher import Reinforce
from ..hooks.credit_teacher import (
    PrefixWeight,
    RelaxedTeacher,
    TeacherAdvantage,
    TeacherExtrapolation,
    TeacherInterpolation,
    TeacherMagnitude,
    TeacherOnWrong,
    TeacherUntil,
)
from ..hooks.ratio import OnPolicy, TokenRatio
from ..hooks.regularizers import KL
from ..hooks.regularizers_group import SquaredLogRatio
from ..hooks.rewards_teacher import StructureBonus, TeacherReward
from ..hooks.weight_teacher import TeacherPhases
from ..teachers.local import EMATeacher
from ..teachers.privileged import PrivilegedTeacher
from . import entry

_UNREWARDED = (
    "no reward enters the loss: the reward functions are logged only; num_generations is the number of rows per prompt "
    "(the method needs one, TRL two)"
)
_ROUTED = "which teacher scores a row is the teacher's own business: teacher: {routed: {column: ..., teachers: ...}}"
_END_TOKENS = (
    "where student and teacher end their turns with different tokens, the teacher has to be silent on the last one: "
    "otherwise it is fined for every answer's end"
)

OPD = entry(
    About(
        id="opd-sampled-token",
        title="On-policy distillation, sampled-token form (Thinking Machines Lab)",
        family="distillation",
        paper="",
        year=2025,
        side="reward",
        idea="Keep the machinery of RL and let the teacher's log-ratio of each sampled token be its advantage.",
        deviations=(
            "a blog post (2025) and public code (tinker-cookbook, verl, slime); no arXiv number",
            _UNREWARDED,
            "no baseline and no whitening: either would remove the mean, which is -KL(pi || pi_T)",
            "no clip on the advantage (others bound it at +-5: credit: {teacher_advantage: {low: -5, high: 5}}); beside a "
            "reward it is added with advantage: grouped",
            "rt is against the sampling policy's log-probs as the trainer computes them",
            "the post trains LoRA of rank 32 at 1e-4",
            _END_TOKENS,
        ),
        aliases=("opd", "on-policy-distillation"),
    ),
    advantage=NoAdvantage(),
    credit=TeacherAdvantage(coef=1.0),
    ratio=TokenRatio(),
    clip=Unclipped(),
    aggregate=TokenMean(),
)

TB_DIRECT = entry(
    About(
        id="tb-direct-interpolation",
        title="Direct advantage interpolation (T_B)",
        family="distillation",
        paper="",
        year=2026,
        side="reward",
        idea="Mix the verifier's advantage with the teacher's token signal instead of shaping the reward.",
        deviations=(
            "a slot that a survey names and nobody fills; no paper",
            "A has about unit variance, rt heavy negative tails and mean -KL(pi || pi_T): a = .25 may already be all teacher "
            "(gap2-tb-teacher-group-baseline matches their scales)",
            "the clip acts on signs that the mix has chosen: a right row's token can be pushed down",
            "a token without a teacher keeps (1 - a) A",
        ),
        ours=("a 0.25; any schedule may move it",),
    ),
    advantage=Grouped(),
    credit=TeacherInterpolation(a=0.25),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
)

RLSD = entry(
    About(
        id="rlsd",
        title="Self-Distilled RLVR",
        family="distillation",
        paper="2604.03128",
        year=2026,
        side="both",
        idea="The verifier decides the direction of the update, a teacher that knows the answer only its size per token.",
        deviations=(
            "the paper's last display puts w where the ratio stands; its algorithm, its clipped-credit equation and every port "
            "put it on the advantage, as here (on the ratio, w = 1.2 at r = 1 already touches the clip)",
            "the weight is clipped in log space, which is the same number and cannot overflow",
            "the teacher is a snapshot of the policy every 10 optimizer steps, shown column `answer`; after 50 steps it is not "
            "asked any more and this is GRPO without a KL",
            "groups without spread get no teacher signal (a port adds a signed fallback, which is not in the paper)",
            "GRPO's sequence mean; its batch of 256 rows and group of 8 are trainer settings",
        ),
        ours=("how the answer is shown: the privileged teacher's own template",),
        also_called=("self-distilled-rlvr",),
    ),
    teacher=PrivilegedTeacher(of=EMATeacher(rate=1.0, every=10), column="answer"),
    advantage=Grouped(),
    credit=TeacherMagnitude(lam=0.5, eps=0.2, decay_steps=50),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.28),
    aggregate=SequenceMean(),
)

REOPOLD = entry(
    About(
        id="reopold",
        title="REOPOLD: relaxed on-policy distillation",
        family="distillation",
        paper="2603.11137",
        year=2026,
        side="reward",
        idea="Distillation as policy optimisation: bound the teacher's reward from below, drop hostile tokens first and easy "
        "ones later.",
        deviations=(
            "the floor is log(lam) / (1 - lam) = -1.72; some notes print log(lam / (1 - lam)) = -0.85",
            _UNREWARDED,
            "the mean is over the kept tokens of the window; the paper's sum runs over a prompt's rows",
            "the entropy cut is taken over the optimizer window, of which the teacher speaks; ties stay",
            "t_switch is a third of the run (100 of 300, 20 of 60): weight: {teacher_phases: {switch: ...}}",
            "author code is announced, not released",
        ),
    ),
    advantage=NoAdvantage(),
    credit=RelaxedTeacher(lam=0.3),
    ratio=TokenRatio(),
    clip=Unclipped(),
    weight=TeacherPhases(lam=0.3, keep=0.2, switch=1 / 3),
    aggregate=TokenMean(),
)

SC_GRPO = entry(
    About(
        id="sc-grpo",
        title="SC-GRPO: self-conditioned credit assignment",
        family="distillation",
        paper="2606.18810",
        year=2026,
        side="reward",
        idea="Tokens matter where the policy's next-token distribution moves once it is shown one of its own right answers.",
        deviations=(
            "c is the 75th percentile over the routed tokens of the generation batch; the paper takes it per micro-batch, which "
            "makes the result depend on its size. All tokens count, those with D = 0 too",
            "D is computed once per generation, with the policy that sampled; with several passes the paper's moves along",
            "f >= 0 multiplies the advantage, which is f min(rho A, clip(rho) A)",
            "in a group without a right answer the teacher speaks only of as many first tokens as the answer it was shown has",
            "a group whose f do not differ gets 0 there, not 0 / eps",
        ),
        ours=("how the answer is shown: the privileged teacher's own template", "clip 0.2, GRPO's"),
    ),
    teacher=PrivilegedTeacher(of="live", column=None, siblings="any", pick="random", reach="sibling"),
    advantage=SelfConditioned(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
)

IW_OPD = entry(
    About(
        id="iw-opd",
        host="reinforce",
        title="IW-OPD: on the position bias of on-policy distillation",
        family="distillation",
        paper="2606.22600",
        year=2026,
        side="reward",
        idea="Late tokens sit on prefixes the teacher would not write: weight early ones more, by the disagreement gathered "
        "before them.",
        deviations=(
            "rt is against the old policy's log-probs as the trainer computes them, not the engine's own",
            _UNREWARDED,
            "TRL's experimental IWOPDTrainer has the same gradient with one update per generation; its loss value multiplies by "
            "lp (clip: reinforce does that)",
        ),
    ),
    advantage=NoAdvantage(),
    credit=(TeacherAdvantage(coef=1.0), PrefixWeight(g=0.5)),
    ratio=OnPolicy(),
    clip=Unclipped(),
    aggregate=TokenMean(),
)

MOPD = entry(
    About(
        id="mopd",
        title="MOPD: multi-teacher on-policy distillation (MiMo-V2-Flash)",
        family="distillation",
        paper="2601.02780",
        year=2026,
        side="both",
        idea="Merge experts: each prompt's own expert scores the student's rollout token by token, beside the outcome's "
        "advantage.",
        deviations=(
            _ROUTED + "; a row without one learns from its outcome alone",
            "a rejected token leaves the numerator, not the row's length",
            "mu is the engine's log-probs where it reports them, else the old policy, which sampled then",
            "GLM-5 puts the same advantage into a clipped objective; DeepSeek-V4 sums full-vocabulary reverse KLs of several "
            "experts instead (not built); ROLL's coefficients are teacher_advantage.coef",
            "experts as LoRA adapters of one base cost no second model",
        ),
        ours=("weight 1 on the outcome's advantage: the report prints none", "band 0.2 to 5, NeMo-RL's recipe"),
        aliases=("mimo-v2-flash-mopd",),
    ),
    advantage=Grouped(),
    credit=TeacherAdvantage(coef=1.0, keep=1.0, of="current"),
    ratio=TokenRatio(anchor="sampler"),
    clip=Reinforce(low=0.2, high=5.0),
    aggregate=SequenceMean(),
)

KIMI_K3_MOPD = entry(
    About(
        id="kimi-k3-mopd",
        title="Kimi K3 multi-teacher on-policy distillation",
        family="distillation",
        paper="2607.24653",
        year=2026,
        side="reward",
        host="kimi-k3",
        idea="Nine experts, three domains by three efforts: the one that matches the prompt gives each token its advantage, in "
        "Kimi K3's own objective.",
        deviations=(
            _ROUTED + ", one column holding domain and effort together; effort is part of the student's prompt alone",
            _UNREWARDED,
            "rt is against the old policy; whether the report means the current one was not seen (they agree at first)",
            "the domains' rewards are not mixed in, as in the report",
        ),
        ours=("R_max 1: none is published", "low 0.8, high 1.2, tau 0.1, as in kimi-k3"),
    ),
    advantage=NoAdvantage(),
    credit=TeacherAdvantage(coef=1.0, low=-1.0, high=1.0),
    ratio=TokenRatio(anchor="sampler"),
    clip=RatioClamp(0.8, 1.2),
    aggregate=PromptMean(),
    regularizers=(SquaredLogRatio(coef=0.1),),
)

EXOPD = entry(
    About(
        id="g-opd-exopd",
        title="G-OPD / ExOPD: generalized on-policy distillation with reward extrapolation",
        family="distillation",
        paper="2602.12125",
        year=2026,
        side="reward",
        idea="Distillation is KL-regularised RL with reward log(pi_T / pi_base): scaled above 1 it goes beyond the teacher.",
        deviations=(
            "pi_base is the run's reference model: the student's first weights (adapters off), not the teacher's checkpoint "
            "before RL",
            "PPO's surrogate; under vLLM add the author code's correction, weight: {sampler_correction: {mode: token_truncate, max: "
            "5.0}}, else TRL's own is added",
            _UNREWARDED,
            "the author code falls back to plain distillation for tags it does not know; several teachers: teacher: routed",
        ),
        ours=("clip 0.2",),
        aliases=("g-opd", "exopd"),
    ),
    advantage=NoAdvantage(),
    credit=TeacherExtrapolation(lam=1.25),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=TokenMean(),
)

OPD_THEN_RL = entry(
    About(
        id="opd-then-rl",
        title="OPD, then RL: sequential beats joint",
        family="distillation",
        paper="2609.04108",
        year=2026,
        side="both",
        idea="Distil first, switch to plain GRPO when that is exhausted: same rollouts, same optimizer, another advantage.",
        deviations=(
            "60 steps of 120 to 150; switch where your validation curve of the first phase flattens",
            "the repository was not available; read in parts",
            "the teacher stays in memory after the switch, unasked",
            _END_TOKENS,
            "its baselines in the same slot: KDRL A + b rt is teacher_advantage {coef: b}, SRPO is teacher_on_wrong, RLSD is "
            "teacher_magnitude, RLAD ratio teacher_mixture",
        ),
    ),
    advantage=Grouped(),
    credit=TeacherUntil(steps=60),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
)

SRPO = entry(
    About(
        id="srpo-sample-routing",
        also_called=("srpo",),
        title="SRPO: group-relative and self-distillation policy optimization by sample routing",
        family="distillation",
        paper="2604.02288",
        year=2026,
        side="both",
        idea="Right rows learn by GRPO, wrong ones by self-distillation, each where its signal says something.",
        deviations=(
            "low confidence: the abstract and the advantage form of another paper's table (2609.04108), which is built: rt stands "
            "for SDPO's divergence, clipped like an advantage",
            "the entropy-aware weight of distilled tokens was not seen and is not built",
            "the negative advantage of a wrong row is dropped, also where no sibling succeeded: a group that is all wrong "
            "learns nothing",
            "the teacher is SDPO's: a moving average of the policy, shown a sibling's success",
        ),
    ),
    teacher=PrivilegedTeacher(of=EMATeacher(rate=0.05), column=None, siblings="right", pick="first"),
    advantage=Grouped(),
    credit=TeacherOnWrong(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
)

GAP2 = entry(
    About(
        id="gap2-tb-teacher-group-baseline",
        title="Gap 2: the teacher's signal with a baseline of its own",
        family="distillation",
        paper="",
        year=2026,
        side="reward",
        idea="The teacher's log-ratio is a reward like any other: centre it, discount it and match its spread to A's before "
        "mixing.",
        deviations=(
            "an open problem of the survey, our design; no paper",
            "a group's token mean includes the token itself; leave-one-out would be exact",
            "position-wise means would be wrong: position t of two rows are two states",
            "the scales are matched over the generation's tokens: where no group has spread, the teacher's part is 0 too",
            "clip rt (bound) where single tokens set the spread; the exact baseline is then no longer exact",
        ),
        ours=(
            "a 0.25, baseline group, no discount, scales matched, no division by the std",
            "eps 1e-6 under both stds",
        ),
    ),
    advantage=TeacherBaselined(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
)

CODISTILL = entry(
    About(
        id="codistill-grpo",
        title="CoDistill-GRPO: the small model's side",
        family="distillation",
        paper="2605.08873",
        year=2026,
        side="reward",
        idea="A small model is rewarded for agreeing with a large one that learns from its rollouts.",
        deviations=(
            "low confidence: the abstract and a reproduction script; alpha and the rule that down-samples rollouts were not found "
            "(none is applied)",
            "only the small model trains here, against a frozen large one. The large one's side is GRPO on given rollouts: "
            "ratio: {token: {anchor: rollout}} with a rollout_func that returns the small model's answers and log-probs",
            "division by the group's std makes full-size advantages of tiny teacher differences where all rewards are equal "
            "(advantage: {grouped: {std: none}})",
            "accuracy and format rewards are the user's functions (1.0, 0.25 + 0.25 in the paper)",
        ),
        ours=("alpha 0.1", "clip 0.2"),
    ),
    rewards=TeacherReward(alpha=0.1, reduce="mean"),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
)

KDRL_SHAPING = entry(
    About(
        id="kdrl-reward-shaping",
        title="KDRL's reward shaping, the variant its authors reject",
        family="distillation",
        paper="2506.02208",
        year=2025,
        side="reward",
        idea="The teacher's log-ratio of the whole answer goes into its reward; a negative baseline that shows why the joint "
        "loss exists.",
        deviations=(
            "whether the paper sums or averages over tokens was not seen: the sum, the answer's own log-ratio, which punishes long "
            "answers (reduce: mean)",
            "every token of a row gets the same signal",
        ),
        ours=("alpha 0.05 per nat",),
    ),
    rewards=TeacherReward(alpha=0.05, reduce="sum"),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=TokenMean(),
)

EXPLANATORY = entry(
    About(
        id="exgrpo-explanatory",
        title="Explanatory GRPO: the structure bonus",
        family="distillation",
        paper="",
        year=2026,
        side="reward",
        kind="part",
        idea="A right answer earns more where the full chain of a teacher's probes helps more than a shortened one.",
        deviations=(
            "Probing to Refine (2026; no arXiv number seen), from third-party notes; not ExGRPO, the experience replay",
            "the reward alone: the teacher's probes, the dialogues and the SFT warm-up are the data set's business, the auxiliary "
            "NLL on the teacher's answers is not built",
            "full and shortened dialogues are data set rows with columns `question` and `probes`; both kinds must be in one "
            "generation (shuffle_dataset: false, rows of a question side by side)",
            "advantages are standardised over a question's full and shortened rows together: over the full ones alone the bonus is "
            "an affine map and vanishes. Which the authors do was not seen",
            "P_part = 0 pays the bonus for any success, as the formula says; one kind alone pays none",
            "the published sum over dialogues is a mean here; the KL is GRPO's",
        ),
        ours=("delta 0.5, nu 1: not seen", "KL coefficient 0.04, GRPO's"),
    ),
    rewards=StructureBonus(delta=0.5, nu=1.0),
    advantage=Grouped(mean="question", std="question", ddof=1, eps=1e-6),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
    regularizers=(KL(coef=0.04, estimator="k3"),),
)

PROVIDER = entry(
    About(
        id="teacher-provider",
        title="Where a teacher's log-probs come from",
        family="distillation",
        paper="",
        year=2026,
        side="baseline",
        kind="note",
        idea="One teacher seam for every method: sampled-token log-probs, and distributions where a divergence needs them.",
        deviations=(
            "no paper: the seam `teacher` holds one of: model (another causal LM, 4-bit if wanted), base (adapters off), adapter (a "
            "named one on the policy's base), live, ema (rate 1: a snapshot), privileged (any of these with a context the "
            "policy does not see), server (a remote vLLM), routed (one of several by a data set column)",
            "asked once per generation, only about rows that some hook reads; its distance from the policy is logged as "
            "teacher/kl whatever the method does with it",
            "log-probs are taken at the run's temperature; a server answers at 1 whatever it is told",
            "with LoRA the average is of A and B, not of their product",
            "tokenizers must agree: a teacher with another one can only share text",
        ),
        inert="a source for other methods' hooks: none of GRPO's hooks asks it",
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
    regularizers=(KL(coef=0.04, estimator="k3"),),
)
