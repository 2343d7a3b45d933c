"""Methods that add a term towards a teacher to the loss, or are nothing but that term; and their neighbours elsewhere."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped
from ..hooks.advantage_none import NoAdvantage
from ..hooks.aggregate import SequenceMean, TokenMean
from ..hooks.clip import PPOClip
from ..hooks.ratio import TokenRatio
from ..hooks.regularizers import KL
from ..hooks.regularizers_teacher import DualTeacherKL, TeacherKL
from ..teachers.local import EMATeacher
from ..teachers.privileged import PrivilegedTeacher
from . import entry

_GRPO = dict(advantage=Grouped(), ratio=TokenRatio(), clip=PPOClip(0.2, 0.2), aggregate=SequenceMean())
# ratio and clip are idle without an advantage, and ready for one
_NO_REWARD = dict(advantage=NoAdvantage(), ratio=TokenRatio(), clip=PPOClip(0.2, 0.2))
_REWARDS_UNUSED = (
    "no reward enters the loss: the reward functions are logged only, and num_generations sets rows per prompt"
)

DGRPO = entry(
    About(
        id="dgrpo",
        title="dGRPO: on-policy optimization and distillation for long-context reasoning",
        family="distillation",
        paper="2605.12227",
        year=2026,
        side="both",
        idea="GRPO's sparse reward and a stronger teacher's word on every one of the student's tokens, in one objective.",
        deviations=(
            "read from abstracts of two versions and a survey's equation; the full text was not seen",
            "as printed, beta (log pi_T - log pi) with gradient, the term has expected gradient -beta grad lp = 0 whoever the "
            "teacher is; here beta sg[log pi_T - log pi] rho, the policy gradient of the reverse KL. estimator: detached drops "
            "rho, exact takes the whole vocabulary",
            "the survey puts the term beside GRPO (T_C), a later abstract in the place of the reference KL (T_D): the same "
            "gradient, for the same tokens and denominator; no KL to a reference here",
            "never clipped: a token the clip has stopped still follows the teacher (clip_interaction: unclipped changes that)",
            "its warm-up, SFT on long contexts, is a run of its own before this one",
        ),
        ours=("coef 0.1: no source gives beta_d",),
        aliases=("d-grpo",),
    ),
    **_GRPO,
    regularizers=TeacherKL(coef=0.1, divergence="rkl", estimator="ratio"),
)

KDRL = entry(
    About(
        id="kdrl",
        title="KDRL: unified knowledge distillation and reinforcement learning",
        family="distillation",
        paper="2506.02208",
        year=2025,
        side="both",
        idea="The pull to the reference becomes a pull to a teacher, as k2 on the student's own samples.",
        deviations=(
            "constant beta 2e-3. Annealed, max(5e-3 - 5e-5 step, 1e-3) by optimizer step: "
            "teacher_kl: {coef: 0.005, decay: 0.00005, floor: 0.001}",
            "reward-guided masks: teacher_kl.row_gate wrong (response level) or all_fail (group level). Masked tokens stay in "
            "the denominator, which the paper does not say (normaliser: gated divides by those kept)",
            "wrong means not right by the first reward function; a row nobody could score counts as wrong",
            "a summary prints rho A without the clip: the same while strictly on-policy",
            "beta is sensitive: a re-implementation as A + beta log(pi_T / pi) used 0.002 on math, 0.2 on logic, 0.02 on Countdown",
        ),
    ),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=TokenMean(),
    regularizers=TeacherKL(coef=0.002, divergence="rkl", estimator="k2"),
)

SDAR = entry(
    About(
        id="sdar",
        title="SDAR: self-distilled agentic reinforcement learning",
        family="distillation",
        paper="2605.15155",
        year=2026,
        side="both",
        idea="The policy shown a skill teaches itself, and a sigmoid lets in the tokens that it then likes more.",
        deviations=(
            "the term's value, g (log pi_T - log pi), is no KL. Its gradient is -g grad lp: in expectation that of an "
            "f-divergence to the teacher with f'' = g'(x) / x, x = pi_T / pi, not of the reverse KL",
            "the authors' baseline 'GRPO+OPSD' is this with sharpness 0, whose expected gradient is 0: refused here",
            "coef 0.01 and reference KL 0.01 are the script's (0.1 in the code's defaults, 0.001 for search)",
            "the skill is one text per data set row here (column `skill`); the authors retrieve it per turn. A row without one "
            "has no teacher. Rows of several turns: tool tokens are masked as in GRPO",
            "entropy gate and soft OR of the paper are not built (token_gate: high_entropy is a hard one)",
        ),
        ours=("the sentence that shows the skill",),
    ),
    teacher=PrivilegedTeacher(of="live", column="skill", template="{prompt}\n\nA skill that may help:\n\n{context}"),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=TokenMean(),
    regularizers=(
        KL(coef=0.01, estimator="k3"),
        TeacherKL(coef=0.01, estimator="k1", token_gate="sigmoid", sharpness=5.0),
    ),
)

OPSD = entry(
    About(
        id="opsd",
        title="OPSD: on-policy self-distillation",
        family="distillation",
        paper="2601.18734",
        year=2026,
        side="both",
        idea="The initial model, shown the reference solution, teaches the one that is not shown it, on the latter's samples.",
        deviations=(
            _REWARDS_UNUSED,
            "the released trainer has no bound per vocabulary entry, a description of the method and reproductions have "
            "(teacher_kl.entry_cap: 0.05)",
            "one script compares the teacher's top 50, renormalised (top_k: 50, rest: renormalize). Teacher weights may be an "
            "average instead (teacher: {privileged: {of: {ema: {rate: 0.001}}}})",
            "authors' run: LoRA r 64, lr 2e-4, temperature 1.1, top_p 0.95, top_k 20, 1024 tokens: settings of the run. The loss "
            "compares both models at that temperature",
            "the prompt with the solution is `teacher.privileged.template`, not the authors' wording",
            "a row with an empty solution has no teacher; it stays in the mean",
        ),
    ),
    teacher=PrivilegedTeacher(of="base", column="solution"),
    **_NO_REWARD,
    aggregate=TokenMean(),
    regularizers=TeacherKL(coef=1.0, divergence="jsd", estimator="exact"),
)

SDPO = entry(
    About(
        id="sdpo",
        title="SDPO: reinforcement learning via self-distillation",
        family="distillation",
        paper="2601.20802",
        year=2026,
        side="both",
        idea="The policy's moving average, shown a right answer of the same group, re-scores the policy's own answer.",
        deviations=(
            "no advantage enters the loss: rewards only say which sibling is shown (right by correct_above 0.5)",
            "the authors' code: JSD(1/2) over the student's top 100 and a tail bucket, EMA 0.05, importance weight up to 2, token "
            "mean over rows that have a context. TRL's SDPOTrainer differs on seven of these (sampled token, alpha 1, no tail, "
            "sequence mean)",
            "the demonstration is the group's first right answer other than the row itself; the authors also strip its thinking",
            "feedback where there is no solution: teacher.privileged.column names its column (none here: siblings alone)",
            "the trust-region teacher (logits between reference and student) is not built",
            "the sampled-token version: estimator: detached. A mix with GRPO: advantage: grouped and teacher_kl.coef",
            "under PEFT the average is of the LoRA factors; see teacher ema",
        ),
        ours=("the sentence that shows the demonstration",),
    ),
    teacher=PrivilegedTeacher(of=EMATeacher(rate=0.05), column=None, siblings="right", pick="first"),
    **_NO_REWARD,
    aggregate=TokenMean(),
    regularizers=TeacherKL(
        coef=1.0,
        divergence="jsd",
        estimator="exact",
        top_k=100,
        support="student",
        rest="tail",
        ratio_cap=2.0,
        normaliser="gated",
    ),
)

GAP3 = entry(
    About(
        id="gap3-tc-forward-kl-jsd",
        title="Gap 3: other divergences in the term beside the clipped objective",
        family="distillation",
        paper="",
        year=2026,
        side="both",
        idea="Divergence, estimator, schedule and relation to the clip of dGRPO's term as independent choices, forward KL first.",
        deviations=(
            "our design for an open problem of the survey of GRPO-OPD hybrids; no paper. Neighbours: TrOPD (2606.01249), CADENCE "
            "(2607.16955), SDPG (2606.04036)",
            "x = pi_T / pi is bounded at 10: e^5 - 1 = 147 otherwise; where it acts the gradient is not quite the forward KL's",
            "coefficients do not compare between divergences: a JSD gradient is about five times smaller",
            "forward KL on the student's prefixes is not SFT on the teacher's samples",
            "a switch from one to the other is two terms whose coef are step schedules",
        ),
        ours=("coef 0.01, x_max 10, forward KL",),
    ),
    **_GRPO,
    regularizers=TeacherKL(coef=0.01, divergence="fkl", estimator="detached", x_max=10.0),
)

GAP4 = entry(
    About(
        id="gap4-td-gated-scheduled",
        title="Gap 4: a gated and controlled term towards the teacher",
        family="distillation",
        paper="",
        year=2026,
        side="both",
        idea="The teacher speaks only where the whole group failed, and its weight holds the measured KL at a target.",
        deviations=(
            "our design for an open problem of the survey of GRPO-OPD hybrids; no paper",
            "row_gate all and a linear coef is KDRL; anchor ref with ratio_k3 is GRPO with TRL's default KL",
            "the gate 'the teacher itself solves it' needs rollouts of the teacher and is not built",
            "masked tokens stay in the denominator (normaliser: gated makes the pull per token independent of how rare the gate is)",
            "the controller reads lp - lp_T on the tokens let through; log teacher_kl_dual/open with it, the gate sees changing prompts",
        ),
        ours=("coef 0.002, k2, all-fail groups, eta 0.5, target 0.1 nats, range 1e-4 to 0.1",),
    ),
    **_GRPO,
    regularizers=DualTeacherKL(coef=0.002, divergence="rkl", estimator="k2", row_gate="all_fail", eta=0.5),
)

FOUR_OPERATOR_HYBRID = entry(
    About(
        id="four-operator-hybrid",
        title="Four-operator GRPO-OPD hybrid",
        family="distillation",
        paper="",
        year=2026,
        side="both",
        kind="part",
        idea="One objective with four places for a teacher; with nothing in them it is GRPO.",
        deviations=(
            "a survey's formulation (its eq. 39), no arXiv number: J = mean min(T_A T_B, clip(T_A) T_B) + T_C - T_D",
            "T_A is the ratio (default rho), T_B the advantage or a credit hook (default A), T_C and T_D regularizers (defaults "
            "nothing, and 0.04 KL to the reference): fill them with rlad, tb_interpolation, teacher_kl, ...",
            "a term with coef 0 changes no bit of the gradient, and still asks the teacher",
            "the survey calls T_D independent of the rollout; KDRL's is computed on the student's own tokens. Inside or outside is "
            "clip, gates and denominator",
            "T_C literally, beta (log pi_T - log pi) with gradient, has the value of dGRPO's term and no teacher in its gradient",
        ),
        inert="the defaults of the four operators are GRPO",
        aliases=("hybrid",),
    ),
    **_GRPO,
    regularizers=KL(coef=0.04, estimator="k3"),
)

GKD = entry(
    About(
        id="gkd",
        title="GKD, its on-policy part: JSD to a teacher on the student's samples",
        family="distillation",
        paper="2306.13649",
        year=2023,
        side="both",
        kind="part",
        idea="Distil with any divergence on the prefixes that the student really visits.",
        deviations=(
            _REWARDS_UNUSED,
            "on-policy only (lambda 1). The half on fixed sequences has no group, no rollout and no reward, which leaves this "
            "frame: TRL's GKDTrainer (experimental, lmbda and seq_kd) does it, DistillationTrainer the on-policy half without groups",
            "beta 0.5 is the teacher's share of the mixture; the ends are kinds of their own, divergence: fkl and rkl",
            "TRL's GKDTrainer applies the temperature to sampling alone and compares at 1; here both models are compared at it",
            "with a reward it is a mix: advantage: grouped, and teacher_kl.coef",
        ),
    ),
    **_NO_REWARD,
    aggregate=TokenMean(),
    regularizers=TeacherKL(coef=1.0, divergence="jsd", estimator="exact"),
)

MINILLM = entry(
    About(
        id="minillm",
        title="MiniLLM, its single-step term: exact reverse KL on the student's samples",
        family="distillation",
        paper="2306.08543",
        year=2023,
        side="both",
        kind="part",
        idea="Reverse KL keeps a small student from spreading mass over what it cannot represent.",
        deviations=(
            _REWARDS_UNUSED,
            "only the single-step part, the exact reverse KL at each prefix. The long-range part is a policy gradient on the later "
            "tokens' log pi_T / pi (opd-sampled-token with a discount); dividing by what remains, whitening, the teacher-mixed "
            "sampler and the language-model loss on a plain corpus are not built",
            "the mixed sampler and the corpus leave this frame. TRL has no MiniLLM trainer any more; its DistillationTrainer with "
            "beta 1 is this term",
        ),
    ),
    **_NO_REWARD,
    aggregate=TokenMean(),
    regularizers=TeacherKL(coef=1.0, divergence="rkl", estimator="exact"),
)

SDFT = entry(
    About(
        id="sdft",
        title="SDFT: self-distillation enables continual learning",
        family="distillation",
        paper="2601.19897",
        year=2026,
        side="both",
        idea="The model shown a demonstration teaches the model that is not, on the latter's samples, without forgetting.",
        deviations=(
            _REWARDS_UNUSED,
            "read from TRL's experimental SDFTTrainer, which is complete and the right tool where no reward, gate or group is wanted",
            "JSD(1/2) over the student's top 100 renormalised on both sides: mass outside is invisible (rest: tail shows it)",
            "generate_from_teacher and num_loss_tokens_to_skip are not built; both are off in TRL's defaults",
        ),
    ),
    teacher=PrivilegedTeacher(of="base", column="privileged_context"),
    **_NO_REWARD,
    aggregate=SequenceMean(),
    regularizers=TeacherKL(
        coef=1.0, divergence="jsd", estimator="exact", top_k=100, support="student", rest="renormalize", ratio_cap=2.0
    ),
)

GOLD_ULD = entry(
    About(
        id="gold-uld",
        title="GOLD and ULD: distillation across tokenizers",
        family="distillation",
        paper="2402.12030",
        year=2024,
        side="both",
        kind="note",
        idea="Align text spans of two tokenizers and compare sorted probabilities where no token matches.",
        deviations=(
            "not built: every operator here reads the teacher's log-prob of the student's own token, so tokenizers must agree "
            "(checked at start-up). TRL's GOLDTrainer (experimental) does it, without rewards",
            "sorted L1 ignores which token is which: (.2, .2, .6) against (.5, .3, .2) gives 0.2, a permuted teacher 0",
            "GRPO's objective stands here unchanged",
        ),
        inert="nothing is built: the objective is GRPO's",
        aliases=("gold", "uld"),
    ),
    **_GRPO,
    regularizers=KL(coef=0.04, estimator="k3"),
)

DPO = entry(
    About(
        id="dpo",
        title="DPO: direct preference optimization",
        family="distillation",
        paper="2305.18290",
        year=2023,
        side="both",
        kind="note",
        idea="Fit preference pairs directly: no rollouts, no reward model, no advantage.",
        deviations=(
            "not built: chosen and rejected answers come from a data set, so there is no group, no rollout and nothing for these "
            "seams. TRL's DPOTrainer is complete",
            "beta (log pi_DPO - log pi_ref) of a model it trained is a dense reward: g-opd-exopd has that algebra",
            "GRPO's objective stands here unchanged",
        ),
        inert="nothing is built: the objective is GRPO's",
    ),
    **_GRPO,
    regularizers=KL(coef=0.04, estimator="k3"),
)
