"""The experiments of `teachers.py` as data: arms (a catalog entry and its edits), their budget, and claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.claims import Claim


@dataclass(frozen=True)
class Arm:
    """A variant of the catalog with edits, and what its budget has of its own."""

    label: str
    entry: str
    edits: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    title: str
    arms: tuple[Arm, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()

    def arm(self, label: str) -> Arm:
        return next(a for a in self.arms if a.label == label)


def _kl(coef: float, **more: Any) -> dict[str, Any]:
    return {"regularizers": {"teacher_kl": {"coef": coef, **more}}}


PLAIN = Arm("grpo without KL", "grpo", {"regularizers": []})

UNSOLVED = Experiment(
    "problems the student never solves",
    (
        PLAIN,
        Arm("luffy", "luffy", {"rollouts": {"traces": {"column": "solution"}}}),
        # 30 steps of 64 see as many traces as LUFFY's 240 of 8
        Arm("SFT, then grpo without KL", "grpo", {"regularizers": []}, {"warm_up": 30}),
        Arm("kdrl, coef 0.1", "kdrl", _kl(0.1, divergence="rkl", estimator="k2")),
    ),
    # two updates a generation, as LUFFY's authors: with eight, own tokens without a clip undo what the traces teach
    dict(split="unsolved", steps=240, passes=1, every=16, learning_rate=5e-4, target=0.5),
    (
        Claim("luffy", "grpo without KL", "accuracy", ">", "traces teach what GRPO never sees rewarded"),
        Claim(
            "luffy",
            "SFT, then grpo without KL",
            "accuracy",
            ">",
            "better than SFT, then RL, on as many traces",
        ),
    ),
)

SPEED = Experiment(
    "steps to a given accuracy with a teacher's term beside the reward",
    (
        PLAIN,
        Arm("grpo", "grpo"),
        Arm("dgrpo", "dgrpo"),
        Arm("kdrl", "kdrl"),
        Arm("kdrl, coef 0.1", "kdrl", _kl(0.1, divergence="rkl", estimator="k2")),
        Arm("opd-sampled-token", "opd-sampled-token"),
    ),
    dict(target=0.6),
    (
        Claim("dgrpo", "grpo without KL", "steps_to", "<", "reaches the target in fewer steps than GRPO"),
        Claim("kdrl", "grpo without KL", "steps_to", "<", "reaches the target in fewer steps than GRPO"),
        Claim("kdrl, coef 0.1", "grpo without KL", "steps_to", "<", "reaches the target in fewer steps than GRPO"),
    ),
)

STABILITY = Experiment(
    "the teacher in the reward against the teacher in the loss",
    (
        Arm("kdrl", "kdrl"),
        Arm("kdrl, coef 0.1", "kdrl", _kl(0.1, divergence="rkl", estimator="k2")),
        Arm("shaping, sum", "kdrl-reward-shaping"),
        Arm("shaping, mean", "kdrl-reward-shaping", {"rewards": {"teacher_reward": {"alpha": 0.05, "reduce": "mean"}}}),
        Arm(
            "shaping, sum, alpha 0.5",
            "kdrl-reward-shaping",
            {"rewards": {"teacher_reward": {"alpha": 0.5, "reduce": "sum"}}},
        ),
    ),
    dict(steps=96, every=4),
    (
        Claim("shaping, sum", "kdrl", "drop", ">", "falls further from its peak than the joint loss"),
        Claim("shaping, sum, alpha 0.5", "kdrl", "drop", ">", "falls further from its peak than the joint loss"),
        Claim("shaping, sum", "kdrl", "accuracy", "<", "ends below the joint loss"),
        Claim("shaping, sum, alpha 0.5", "kdrl, coef 0.1", "accuracy", "<", "ends below the joint loss"),
    ),
)

_FORMS = {"inner": {"ppo": {}}, "behaviour": "known"}
_TEACHERS_OWN = {"column": "target", "logps": "target_logps"}

GAP1 = Experiment(
    "gap 1, the teacher as behaviour policy: a dial from the student's rows to the teacher's",
    (
        Arm("dial 0", "gap1-ta-substitution-endpoint", {"rollouts": {"traces": {**_TEACHERS_OWN, "share": 0.0}}}),
        Arm("dial 0.25", "gap1-ta-substitution-endpoint", {"rollouts": {"traces": {**_TEACHERS_OWN, "share": 0.25}}}),
        Arm("dial 1", "gap1-ta-substitution-endpoint"),
        Arm(
            "dial 1, full product",
            "gap1-ta-substitution-endpoint",
            {"clip": {"origin_shaped": {**_FORMS, "form": "product"}}},
        ),
        Arm("dial 1, group mean", "gap1-ta-substitution-endpoint", {"advantage": "grouped"}),
    ),
    dict(traces=4),
    (
        Claim(
            "dial 1", "dial 1, full product", "accuracy", ">", "the truncated weight learns more than the full product"
        ),
        Claim("dial 1", "dial 1, group mean", "accuracy", ">", "a history baseline teaches where groups are all right"),
        Claim("dial 1", "dial 0", "entropy", "<", "is weighted SFT, so that entropy falls"),
    ),
)

GAP2 = Experiment(
    "gap 2, a baseline of its own for the teacher's signal",
    (
        PLAIN,
        Arm("plain interpolation", "tb-direct-interpolation"),
        Arm("group mean", "gap2-tb-teacher-group-baseline"),
        Arm("exact", "gap2-tb-teacher-group-baseline", {"advantage": {"teacher_baselined": {"baseline": "exact"}}}),
        Arm("row mean", "gap2-tb-teacher-group-baseline", {"advantage": {"teacher_baselined": {"baseline": "row"}}}),
        Arm("none", "gap2-tb-teacher-group-baseline", {"advantage": {"teacher_baselined": {"baseline": "none"}}}),
    ),
    {},
    (
        Claim("group mean", "plain interpolation", "accuracy", ">", "learns more than the uncentred signal"),
        Claim("exact", "plain interpolation", "accuracy", ">", "learns more than the uncentred signal"),
        Claim("group mean", "grpo without KL", "accuracy", ">", "learns more than no teacher"),
    ),
)


def _gap3(divergence: str, coef: float = 0.1, **more: Any) -> dict[str, Any]:
    return _kl(coef, divergence=divergence, estimator="detached", **more)


GAP3 = Experiment(
    "gap 3, other divergences beside the clipped objective",
    (
        PLAIN,
        Arm("forward KL, 0.01", "gap3-tc-forward-kl-jsd"),
        Arm("forward KL", "gap3-tc-forward-kl-jsd", _gap3("fkl")),
        Arm("reverse KL", "gap3-tc-forward-kl-jsd", _gap3("rkl")),
        Arm("JSD, coef 0.5", "gap3-tc-forward-kl-jsd", _gap3("jsd", 0.5)),
        Arm("reverse KL, exact", "gap3-tc-forward-kl-jsd", _kl(0.1, divergence="rkl", estimator="exact")),
        Arm("forward KL, exact", "gap3-tc-forward-kl-jsd", _kl(0.1, divergence="fkl", estimator="exact")),
        Arm("reverse KL where clipped", "gap3-tc-forward-kl-jsd", _gap3("rkl", clip_interaction="clipped_only")),
    ),
    {},
    (
        Claim("forward KL", "reverse KL", "entropy", ">", "keeps more entropy than the reverse KL"),
        Claim("forward KL", "grpo without KL", "accuracy", ">", "learns more than no teacher"),
        Claim("reverse KL, exact", "reverse KL", "accuracy", ">", "the whole vocabulary teaches more than one sample"),
    ),
)


def _gap4(coef: float = 0.1, **more: Any) -> dict[str, Any]:
    return _kl(coef, divergence="rkl", estimator="k2", **more)


GAP4 = Experiment(
    "gap 4, gates and schedules of a term outside the expectation",
    (
        PLAIN,
        Arm("dual, all-fail", "gap4-td-gated-scheduled"),
        Arm("all rows", "gap4-td-gated-scheduled", _gap4()),
        Arm("all-fail groups", "gap4-td-gated-scheduled", _gap4(row_gate="all_fail")),
        Arm("wrong rows", "gap4-td-gated-scheduled", _gap4(row_gate="wrong")),
        Arm("by difficulty", "gap4-td-gated-scheduled", _gap4(row_gate="difficulty", power=2.0)),
        Arm("falling", "gap4-td-gated-scheduled", _gap4(decay=0.002)),
    ),
    {},
    (
        Claim("all-fail groups", "grpo without KL", "accuracy", ">", "learns more than no teacher"),
        Claim("wrong rows", "all rows", "accuracy", ">", "a gate on wrong rows is better than none"),
    ),
)

EXPERIMENTS: dict[str, Experiment] = {
    "unsolved": UNSOLVED,
    "speed": SPEED,
    "stability": STABILITY,
    "gap1": GAP1,
    "gap2": GAP2,
    "gap3": GAP3,
    "gap4": GAP4,
}
