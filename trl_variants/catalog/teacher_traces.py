"""Methods whose groups hold trajectories from elsewhere: traces, demonstrations' prefixes, hinted answers."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped, LeaveOneOut
from ..hooks.advantage_traces import PrefixBaseline, StudentHistory
from ..hooks.aggregate import ConstantLength, SequenceMean, TokenMean
from ..hooks.clip import PPOClip
from ..hooks.clip_teacher import OriginShaped
from ..hooks.credit_prefix import PrefixEntropy
from ..hooks.ratio import TokenRatio
from ..hooks.regularizers import KL, EntropyBonus
from ..hooks.regularizers_teacher import TeacherKL
from ..hooks.rollouts_hinted import HintedRollouts
from ..hooks.rollouts_traces import PrefixSplice, TraceInjection
from ..teachers.privileged import PrivilegedTeacher
from . import entry

LUFFY = entry(
    About(
        id="luffy",
        title="LUFFY: learning to reason under off-policy guidance",
        family="traces",
        paper="2504.14945",
        year=2025,
        side="trajectory",
        idea="One verified trace of a stronger model joins each group and its baseline, its rare tokens with the most gradient.",
        deviations=(
            "num_generations 8 is their 7 own completions and 1 trace",
            "own tokens are not clipped, as the shipped script; the paper prints PPO's clip (clip: {origin_shaped: {inner: ppo}})",
            "sum over tokens / max_response_length, as the script, and over rows: there it is per micro-batch without a row count, "
            "so that their learning rate depends on the split",
            "the teacher's probability is taken as 1, so u = pi. The sibling code ExGRPO shapes pi / pi_old of replayed rows instead",
            "a wrong or truncated trace has reward 0 and a negative advantage: see traces/wrong and traces/truncated in the log",
            "the entropy bonus runs over the trace's tokens too, as theirs",
            "later work (2604.23747) corrects the SFT baselines of this line: SFT 52.2, SFT then RL 57.0, against LUFFY's 46.3",
        ),
        host="dr-grpo",
    ),
    rollouts=TraceInjection(column="target", per_group=1),
    advantage=Grouped(std="none"),
    ratio=TokenRatio(),
    clip=OriginShaped(inner="none", form="shaped", gamma=0.1),
    aggregate=ConstantLength(),
    regularizers=EntropyBonus(coef=0.001),
)

PREFIX_RFT = entry(
    About(
        id="prefix-rft",
        title="Prefix-RFT: blending supervised and reinforcement fine-tuning with prefix sampling",
        family="traces",
        paper="2507.01679",
        year=2025,
        side="both",
        idea="One completion of each group begins with a demonstration's first tokens, fewer and fewer over the run.",
        deviations=(
            "the old policy's log-probs of prefix tokens are those at rollout time, so that their ratio begins at 1",
            "the entropy ranking is over the optimizer window; the authors' is over a micro-batch",
            "with several hybrid rows on one prefix the authors' code centres prefix tokens twice; here every hybrid row draws its own "
            "length, the layout with one row is the one meant",
            "their second estimator gives the tokens after a prefix 0 whatever they earned: not built",
            "the prefix is cut from token ids without going back to text, which theirs does",
        ),
        ours=("high 0.95, end 0, l_min 1 and the share 0.2 of prefix tokens: no public run configuration has them",),
    ),
    rollouts=PrefixSplice(column="target", per_group=1),
    advantage=PrefixBaseline(),
    credit=PrefixEntropy(keep=0.2),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2, floor=3.0),
    aggregate=TokenMean(),
    regularizers=EntropyBonus(coef=0.001),
)

HDPO = entry(
    About(
        id="hdpo",
        title="HDPO: hybrid distillation policy optimization via privileged self-distillation",
        family="traces",
        paper="2603.23871",
        year=2026,
        side="both",
        idea="Where every completion failed, the policy that is shown the solution answers, and the plain one learns its distribution.",
        deviations=(
            "coef 0.01 keeps pass@1; 0.1 trades it for pass@8",
            "right hinted answers stand in for failed rows, which had advantage 0: the policy term is as without them, rows and all",
            "teacher: the current weights of each generation; a frozen copy is teacher: {privileged: {of: base}} with an adapter, or "
            "{ema: {rate: 0}}",
            "the teacher's top 64 renormalised, the student's mass outside them exactly: P_rest ln2 / 2; the paper prints P_rest ln2",
            "a hint that shows ('as given in the solution') must be caught by the reward functions",
        ),
        ours=("as many hinted answers as rows in the group, and the words that show the solution",),
        host="grpo",
    ),
    teacher=PrivilegedTeacher(of="live", column="solution"),
    rollouts=HintedRollouts(column="solution"),
    advantage=LeaveOneOut(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=SequenceMean(),
    regularizers=TeacherKL(
        coef=0.01,
        divergence="jsd",
        estimator="exact",
        top_k=64,
        support="teacher",
        rest="student",
        written_by="other",
        normaliser="gated",
        own_token_mean=True,
    ),
)

GAP1 = entry(
    About(
        id="gap1-ta-substitution-endpoint",
        title="Gap 1: the teacher is the only behaviour policy",
        family="traces",
        paper="",
        year=2026,
        side="trajectory",
        idea="A dial from the student's rows to the teacher's: what is left of the method when no row is the student's.",
        deviations=(
            "an open problem of the survey of GRPO-OPD hybrids (8.5), no paper: the design is ours",
            "share 1.0 is the endpoint; share 0 is GRPO",
            "rows come from a column of traces with their log-probs under the teacher (`target`, `target_logps`), not from a teacher "
            "that samples during the run; without log-probs pi_T is taken as 1",
            "p(x) moves only where the student has rows of its own: at share 1.0 it stays at `start`, and the method is weighted SFT",
            "other factors: clip.origin_shaped.form shaped, sequence, product; other baselines: advantage grouped (mixed group)",
        ),
        ours=("all of it",),
    ),
    rollouts=TraceInjection(column="target", share=1.0, logps="target_logps"),
    advantage=StudentHistory(),
    ratio=TokenRatio(),
    clip=OriginShaped(inner={"ppo": {}}, form="truncated", cap=2.0, behaviour="known"),
    aggregate=SequenceMean(),
    regularizers=KL(coef=0.04, estimator="k3"),
)
