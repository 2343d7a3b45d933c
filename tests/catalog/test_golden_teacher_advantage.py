# ruff: noqa: E501  (a table: one row, one line of arithmetic)
"""Golden numbers of teachers in the reward and the advantage, values and gradients, and the readings they rule out.

F is the atlas' fixture: rows of 3 and 2 tokens, A = +1, -1; against lp_old the teacher's word is rt = (.4, -1, .4), (.3, -2).
Ratios: e^.1 = 1.105171, 1, e^-.8 = 0.449329; 1, e^-.5 = 0.606531. Rows are means, the loss is minus the mean of rows.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.batches import assert_close
from tests.catalog.test_golden import E, Golden, L, each
from tests.catalog.test_golden import test_golden as check_golden
from trl_variants import Schedule, Scored, TokenBatch, VariantError, variant
from trl_variants.hooks.advantage_none import NoAdvantage
from trl_variants.hooks.advantage_teacher import SelfConditioned, TeacherBaselined
from trl_variants.hooks.clip_teacher import Reinforce
from trl_variants.hooks.credit_teacher import (
    PrefixWeight,
    TeacherAdvantage,
    TeacherMagnitude,
    TeacherUntil,
    relaxed_floor,
)
from trl_variants.hooks.rewards_teacher import StructureBonus
from trl_variants.teachers import Question
from trl_variants.teachers.privileged import PrivilegedTeacher

D = torch.float64
LP, OLD, TEACHER = (
    [[-0.5, -1, -2], [-0.7, -1.5, 0]],
    [[-0.6, -1, -1.2], [-0.7, -1, 0]],
    [[-0.2, -2, -0.8], [-0.4, -3, 0]],
)
MASK = [[1.0, 1, 1], [1, 1, 0]]
F = {"logps": LP, "old_logps": OLD, "teacher_logps": TEACHER, "mask": MASK, "advantage": [1.0, -1.0]}
R1, R3, R5 = E(0.1), E(-0.8), E(-0.5)  # the ratios of F that are not 1


def aside(**changes) -> dict:
    return {**F, **changes}


def told(rt, **more) -> dict:
    """On-policy tokens with that teacher log-ratio."""
    rows = [[-1.0] * len(r) for r in rt]
    return {"logps": rows, "teacher_logps": [[-1.0 + x for x in r] for r in rt], **more}


GOLDEN = [
    # ------------------------------------------------------------ on-policy distillation
    # A_t = rt whatever A was; gradient -rho rt / 5 tokens
    Golden(
        "opd on F",
        "opd-sampled-token",
        aside(advantage=[0.0, 0.0]),
        {
            "advantage": [[0.4, -1, 0.4], [0.3, -2, 0]],
            "grad": [[-R1 * 0.4 / 5, 1 / 5, -R3 * 0.4 / 5], [-0.3 / 5, R5 * 2 / 5, 0]],
        },
    ),
    # rt = .3, -1, 1.2: alone, and with discount .5: 1.2; -1 + .6 = -.4; .3 - .2 = .1
    Golden(
        "opd, no discount",
        "opd-sampled-token",
        told([[0.3, -1.0, 1.2]], advantage=[0.0]),
        {"advantage": [[0.3, -1.0, 1.2]]},
    ),
    Golden(
        "opd, discount .5",
        "opd-sampled-token",
        told([[0.3, -1.0, 1.2]], advantage=[0.0]),
        {"advantage": [[0.1, -0.4, 1.2]]},
        {"credit": [{"teacher_advantage": {"discount": 0.5}}]},
    ),
    # added to an advantage of 1 with coef 2, the signal bounded to +-.5 first
    Golden(
        "opd added to an advantage",
        "opd-sampled-token",
        told([[0.3, -1.0, 1.2]], advantage=[1.0]),
        {"advantage": [[1.6, 0.0, 2.0]]},
        {"credit": [{"teacher_advantage": {"coef": 2.0, "low": -0.5, "high": 0.5}}]},
    ),
    # a teacher equal to the policy: rt = 0, nothing moves
    Golden(
        "opd, teacher equal to the policy",
        "opd-sampled-token",
        told([[0.0, 0.0]], advantage=[0.0]),
        {"loss": 0.0, "grad": [[0, 0]]},
    ),
    # the last token's teacher word is left out (another end token): A = 0 there, still a token of the mean
    Golden(
        "opd, a silent token",
        "opd-sampled-token",
        told([[0.3, -9.0]], advantage=[0.0], teacher_mask=[[1.0, 0.0]]),
        {"advantage": [[0.3, 0.0]], "grad": [[-0.15, 0.0]]},
    ),
    # ------------------------------------------------------------ direct interpolation
    # .75 A + .25 rt = .85, .5, .85; -.675, -1.25. Objective: (1.105171 .85 + .5 + .449329 .85) / 3; the second row's
    # second token is held at .8: (-.675 - .8 1.25) / 2. J = mean = -.115196
    Golden(
        "tb-direct on F",
        "tb-direct-interpolation",
        F,
        {
            "advantage": [[0.85, 0.5, 0.85], [-0.675, -1.25, -0.75]],
            "loss": 0.115196,
            "grad": [[-0.156566, -0.083333, -0.063655], [0.168750, 0, 0]],
        },
    ),
    Golden(
        "tb-direct, a = 0 is GRPO",
        "tb-direct-interpolation",
        F,
        {"loss": 0.024250},
        {"credit": [{"teacher_interpolation": {"a": 0.0}}]},
    ),
    # a moving from 0 to .5: at progress .5 it is .25
    Golden(
        "tb-direct, a from a schedule",
        "tb-direct-interpolation",
        aside(progress=0.5),
        {"loss": 0.115196},
        {"credit": [{"teacher_interpolation": {"a": Schedule(0.0, 0.5)}}]},
    ),
    # a / (1 - a) = b: A + .2 rt = 1.08, .8, 1.08; -.94, -1.4
    Golden(
        "A + b rt",
        "tb-direct-interpolation",
        F,
        {"advantage": [[1.08, 0.8, 1.08], [-0.94, -1.4, -1]]},
        {"credit": [{"teacher_advantage": {"coef": 0.2}}]},
    ),
    # ------------------------------------------------------------ RLSD
    # raw w = e^.4 = 1.491825, e^-1 = .367879, ...; on the second row e^-.3 = .740818, e^2 = 7.389: held in [.8, 1.2]
    # lam .5: A (.5 + .5 w) = 1.1, .9, 1.1; -.9, -1.1. J = ((1.105171 1.1 + .9 + .449329 1.1) / 3 + (-.9 - .8 1.1) / 2) / 2
    Golden(
        "rlsd on F",
        "rlsd",
        F,
        {
            "advantage": [[1.1, 0.9, 1.1], [-0.9, -1.1, -1]],
            "loss": 0.010008,
            "grad": [[-0.202615, -0.150000, -0.082377], [0.225000, 0, 0]],
        },
    ),
    Golden(
        "rlsd, lam 1",
        "rlsd",
        F,
        {"advantage": [[1.2, 0.8, 1.2], [-0.8, -1.2, -1]]},
        {"credit": [{"teacher_magnitude": {"lam": 1.0}}]},
    ),
    Golden("rlsd, lam 0 is GRPO", "rlsd", F, {"loss": 0.024250}, {"credit": [{"teacher_magnitude": {"lam": 0.0}}]}),
    # lam(s) = .5 (1 - s / 50): at step 25 .25, so A (1 + .25 (w - 1)) = 1.05, .95, ...; from step 50 on it is GRPO
    Golden("rlsd, half way", "rlsd", aside(step=25), {"advantage": [[1.05, 0.95, 1.05], [-0.95, -1.05, -1]]}),
    Golden("rlsd, step 49", "rlsd", aside(step=49), {"advantage": [[1.002, 0.998, 1.002], [-0.998, -1.002, -1]]}),
    Golden("rlsd, step 50", "rlsd", aside(step=50), {"advantage": [[1.0] * 3, [-1.0] * 3], "loss": 0.024250}),
    Golden(
        "rlsd, no advantage",
        "rlsd",
        aside(advantage=[0.0, 0.0]),
        {"advantage": [[0.0] * 3] * 2, "grad": [[0.0] * 3] * 2},
    ),
    # ------------------------------------------------------------ REOPOLD
    # against the current lp R = .3, -1, 1.2; .3, -1.5: nothing under -1.719961, all five tokens kept.
    # J = (1.105171 .3 - 1 + .449329 1.2 + .3 - .606531 1.5) / 5 = -.147810
    Golden(
        "reopold, exploration",
        "reopold",
        aside(advantage=[0.0, 0.0], entropy=[[2, 0.1, 1], [0.5, 1.5, 9]]),
        {"loss": 0.147810, "grad": [[-0.066310, 0.2, -0.107839], [-0.06, 0.181959, 0]]},
    ),
    # on-policy at F's lp_old: R = .4, -1, .4; .3, -2, the last under the floor and out of the mean: gradient -R / 4
    Golden(
        "reopold, a masked token leaves the mean",
        "reopold",
        aside(logps=OLD, advantage=[0.0, 0.0], entropy=[[2, 0.1, 1], [0.5, 1.5, 9]]),
        {"grad": [[-0.1, 0.25, -0.1], [-0.075, 0, 0]]},
    ),
    # refinement: entropies 2, 1, 1.5 of 2, .1, 1, .5, 1.5 are the top 3/5 (cut at the 40th percentile, .8); the floored
    # token is kept with -1.719961: gradient -R / 3
    Golden(
        "reopold, refinement",
        "reopold",
        aside(logps=OLD, advantage=[0.0, 0.0], entropy=[[2, 0.1, 1], [0.5, 1.5, 9]], progress=0.5),
        {"grad": [[-0.4 / 3, 0, -0.4 / 3], [0, 1.719961 / 3, 0]]},
        {"weight": [{"teacher_phases": {"keep": 0.6}}]},
    ),
    # ------------------------------------------------------------ IW-OPD
    # |a| = .5, 1, .25, .25, sum 2: before 0, .5, 1.5, 1.75; w = 1.5, 1.375, 1.125, 1.0625. -mean(w a lp) at
    # lp = -1 is mean(w a) = -.078125 / 4; at ratio 1 the same gradient comes with -mean(w a)
    *[
        Golden(
            f"iw-opd, {clip}",
            "iw-opd",
            told([[0.5, -1.0, 0.25, 0.25]], advantage=[0.0]),
            {
                "advantage": [[0.75, -1.375, 0.28125, 0.265625]],
                "loss": loss,
                "grad": [[-0.75 / 4, 1.375 / 4, -0.28125 / 4, -0.265625 / 4]],
            },
            {"clip": clip},
        )
        for clip, loss in (("reinforce", -0.019531), ("none", 0.019531))
    ],
    Golden(
        "iw-opd, g = 0 is opd",
        "iw-opd",
        told([[0.5, -1.0, 0.25, 0.25]], advantage=[0.0]),
        {"advantage": [[0.5, -1.0, 0.25, 0.25]]},
        {"credit": ["teacher_advantage", {"prefix_weight": {"g": 0.0}}]},
    ),
    # ------------------------------------------------------------ MOPD
    # A = .3, -.5; r = 1, e = 2.718: the band [.5, 2] drops the second from the numerator alone: loss = .3 .5 / 2 = .075
    Golden(
        "mopd, math teacher",
        "mopd",
        {"logps": [[-0.5, -0.5]], "rollout_logps": [[-0.5, -1.5]], "teacher_logps": [[-0.2, -1.0]], "advantage": [0.0]},
        {"advantage": [[0.3, -0.5]], "ratio": [[1.0, E(1)]], "loss": 0.075, "grad": [[-0.15, 0]], "clipped": [[0, 1]]},
        {"clip": {"reinforce": {"low": 0.5, "high": 2.0}}},
    ),
    Golden(
        "mopd, code teacher",
        "mopd",
        {"logps": [[-0.5, -0.5]], "rollout_logps": [[-0.5, -1.5]], "teacher_logps": [[-1.0, -0.3]], "advantage": [0.0]},
        {"advantage": [[-0.5, 0.2]]},
    ),
    # an unrouted row has its outcome alone: A = 2, loss = 2 .5; REINFORCE -A / 2 per token
    Golden(
        "mopd, an unrouted row",
        "mopd",
        {"logps": [[-0.5, -0.5]], "teacher_logps": [[9.0, 9.0]], "teacher_mask": [[0.0, 0.0]], "advantage": [2.0]},
        {"advantage": [[2.0, 2.0]], "loss": 1.0, "grad": [[-1.0, -1.0]]},
    ),
    # ------------------------------------------------------------ Kimi K3
    # R_max 1: -1.2 against -.7 is .5; -6 against -.5 is held at 1; -.1 against -3 at -1
    Golden(
        "kimi-k3-mopd, bounds",
        "kimi-k3-mopd",
        {"logps": [[-1.2, -6, -0.1]], "teacher_logps": [[-0.7, -0.5, -3]], "advantage": [0.0]},
        {"advantage": [[0.5, 1.0, -1.0]], "grad": [[-0.5 / 3, -1 / 3, 1 / 3]]},
    ),
    Golden(
        "kimi-k3-mopd, student = teacher",
        "kimi-k3-mopd",
        told([[0.0, 0.0]], advantage=[0.0]),
        {"advantage": [[0, 0]], "grad": [[0, 0]]},
    ),
    # ------------------------------------------------------------ ExOPD
    # lp_old = -1, base -1.2, teacher -.4: .8 lam - .2
    *[
        Golden(
            f"exopd, lam {lam}",
            "g-opd-exopd",
            {"logps": [[-1.0]], "ref_logps": [[-1.2]], "teacher_logps": [[-0.4]], "advantage": [0.0]},
            {"advantage": [[0.8 * lam - 0.2]], "grad": [[-(0.8 * lam - 0.2)]]},
            {"credit": [{"teacher_extrapolation": {"lam": lam}}]},
        )
        for lam in (0.0, 1.0, 1.25)
    ],
    # ------------------------------------------------------------ OPD, then RL; SRPO
    # S = 60: the 60th step (59 done) still has rt, the 61st has A; S = 0 is GRPO
    *[
        Golden(f"opd-then-rl, step {step + 1}", "opd-then-rl", aside(step=step), {"advantage": a})
        for step, a in ((58, [[0.4, -1, 0.4], [0.3, -2, 0]]), (59, [[0.4, -1, 0.4], [0.3, -2, 0]]), (60, each(1, -1)))
    ],
    Golden(
        "opd-then-rl, S = 0 is GRPO",
        "opd-then-rl",
        F,
        {"loss": 0.024250},
        {"credit": [{"teacher_until": {"steps": 0}}]},
    ),
    Golden("srpo on F", "srpo-sample-routing", aside(correct=[True, False]), {"advantage": [[1, 1, 1], [0.3, -2, 0]]}),
    # a wrong row without a teacher learns nothing, also not from its own advantage
    Golden(
        "srpo, all wrong and no context",
        "srpo-sample-routing",
        aside(correct=[False, False], teacher_mask=[[0.0] * 3] * 2),
        {"advantage": [[0.0] * 3] * 2, "grad": [[0.0] * 3] * 2},
    ),
    # ------------------------------------------------------------ gap 2
    # A = +-1 (population std), rt = -.5, -.1, -.3; -.1, -.1 with mean -.22: .75 A + .25 (rt + .22), no scale matched
    Golden(
        "gap 2, the group's token mean",
        "gap2-tb-teacher-group-baseline",
        told([[-0.5, -0.1, -0.3], [-0.1, -0.1, 9.0]], mask=MASK, rewards=[1, 0]),
        {
            "advantage": [[0.68, 0.78, 0.73], [-0.72, -0.72, 0]],
            "grad": [[-0.68 / 6, -0.78 / 6, -0.73 / 6], [0.72 / 4, 0.72 / 4, 0]],
        },
        {"advantage": {"teacher_baselined": {"match_scale": False, "ddof": 0, "eps": 0.0}}},
    ),
    # ------------------------------------------------------------ reward shaping
    # R = 1, 0, 1, 0 plus .1 times means -.2, -.1, -.6, -.3: .98, -.01, .94, -.03; mean .47, sample std .566098
    Golden(
        "codistill, mixed group",
        "codistill-grpo",
        told([[-0.2], [-0.1], [-0.6], [-0.3]], rewards=[1, 0, 1, 0]),
        {"advantage": each(0.900903, -0.847909, 0.830244, -0.883238)},
        {"advantage": {"grouped": {"eps": 1e-6}}},
    ),
    Golden(
        "codistill, population std",
        "codistill-grpo",
        told([[-0.2], [-0.1], [-0.6], [-0.3]], rewards=[1, 0, 1, 0]),
        {"advantage": each(1.040273, -0.979080, 0.958683, -1.019875)},
        {"advantage": {"grouped": {"eps": 1e-6, "ddof": 0}}},
    ),
    # all right: alpha cancels, the teacher alone speaks
    *[
        Golden(
            f"codistill, all right, alpha {alpha}",
            "codistill-grpo",
            told([[-0.2], [-0.1], [-0.6], [-0.3]], rewards=[1, 1, 1, 1]),
            {"advantage": each(*a)},
            {"advantage": {"grouped": {"eps": 1e-6, "ddof": 0}}, "rewards": [{"teacher_reward": {"alpha": alpha}}]},
            atol=2e-6,
        )
        for alpha, a in ((0.1, (0.534494, 1.068988, -1.603482, 0)), (0.001, (0.531681, 1.063361, -1.595042, 0)))
    ],
    # a long right answer with sum -40 and a short wrong one with -5, alpha .05: 1 - 2 = -1 and -.25: the right one is punished
    Golden(
        "kdrl shaping by sums",
        "kdrl-reward-shaping",
        told([[-20.0, -20.0], [-5.0, 0.0]], mask=[[1, 1], [1, 0]], rewards=[1, 0]),
        {"advantage": each(-1, 1)},
        {"advantage": {"grouped": {"ddof": 0, "eps": 0.0}}},
    ),
    # means over 200 and 20 tokens: 1 - .01 = .99 and -.0125
    Golden(
        "kdrl shaping by means",
        "kdrl-reward-shaping",
        told([[-0.2] * 200, [-0.25] * 20 + [0.0] * 180], mask=[[1] * 200, [1] * 20 + [0] * 180], rewards=[1, 0]),
        {"advantage": each(0.99, -0.0125)},
        {"rewards": [{"teacher_reward": {"alpha": 0.05}}], "advantage": {"grouped": {"mean": "none", "std": "none"}}},
    ),
    Golden(
        "kdrl shaping, alpha 0 is GRPO",
        "kdrl-reward-shaping",
        told([[-20.0], [-5.0]], rewards=[1, 0]),
        {"advantage": each(1, -1)},
        {
            "rewards": [{"teacher_reward": {"alpha": 0.0, "reduce": "sum"}}],
            "advantage": {"grouped": {"ddof": 0, "eps": 0.0}},
        },
    ),
]


@pytest.mark.parametrize("row", GOLDEN, ids=[g.name for g in GOLDEN])
def test_golden(row):
    check_golden(row)


def scored_of(batch: TokenBatch) -> Scored:
    assert batch.scored is not None
    return batch.scored


def told_group(rt, rewards, divergences=None, **more) -> Scored:
    return scored_of(TokenBatch.from_tensors(**told(rt), rewards=rewards, divergences=divergences, **more))


# ---------------------------------------------------------------- on-policy distillation


PI, PI_T = (0.5, 0.3, 0.2), (0.1, 0.2, 0.7)
RKL_GRADIENT = [0.466816, -0.081102, -0.385714]


def expected_gradient(v, **more) -> list[float]:
    """Of the loss in the logits, every token of the vocabulary weighted by its probability."""
    logits = torch.tensor([L(p) for p in PI], dtype=D, requires_grad=True)
    logps = logits.log_softmax(0)
    total = 0.0
    for a in range(3):
        one = TokenBatch.from_tensors(logps[a : a + 1], teacher_logps=[L(PI_T[a])], advantage=[0.0], **more)
        total = total + PI[a] * v.loss(one).loss
    return torch.autograd.grad(total, logits)[0].tolist()


def test_the_sampled_token_form_descends_the_reverse_kl():
    assert expected_gradient(variant("opd-sampled-token")) == pytest.approx(RKL_GRADIENT, abs=6e-7)
    # within the band, w = r = 1: MOPD with a = 0 is the same
    assert expected_gradient(variant("mopd")) == pytest.approx(RKL_GRADIENT, abs=6e-7)
    # IW-OPD weights a first token 1 + g
    assert expected_gradient(variant("iw-opd")) == pytest.approx([1.5 * g for g in RKL_GRADIENT], abs=1e-6)


def test_whitening_would_remove_what_is_distilled():
    # a row's own mean is its baseline: one token is left with 0. The exact baseline -RKL leaves the gradient as it is
    rkl = sum(p * L(p / q) for p, q in zip(PI, PI_T, strict=True))
    assert rkl == pytest.approx(0.675806, abs=6e-7)
    logits = torch.tensor([L(p) for p in PI], dtype=D, requires_grad=True)
    logps = logits.log_softmax(0)
    v = variant(
        "opd-sampled-token",
        credit=[],
        advantage={"teacher_baselined": {"a": 1.0, "baseline": "exact", "match_scale": False}},
    )
    total = 0.0
    for a in range(3):
        one = TokenBatch.from_tensors(
            logps[a : a + 1], teacher_logps=[L(PI_T[a])], rewards=[0.0], divergences={"rkl/teacher": [[rkl]]}
        )
        total = total + PI[a] * v.loss(one).loss
    assert torch.autograd.grad(total, logits)[0].tolist() == pytest.approx(RKL_GRADIENT, abs=6e-7)
    whitened = variant(v, advantage={"teacher_baselined": {"a": 1.0, "baseline": "group", "match_scale": False}})
    one = TokenBatch.from_tensors(logits.log_softmax(0)[:1], teacher_logps=[L(PI_T[0])], rewards=[0.0])
    assert not torch.autograd.grad(whitened.loss(one).loss, logits)[0].any()


def test_moments_of_the_exact_baseline():
    # rt = log .1/.5, log .2/.3, log .7/.2; b = -0.675806; second moment 1.658349 -> 1.201635
    rt = [L(q / p) for p, q in zip(PI, PI_T, strict=True)]
    assert rt == pytest.approx([-1.609438, -0.405465, 1.252763], abs=6e-7)
    hook = TeacherBaselined(a=1.0, baseline="exact", match_scale=False)
    scored = told_group([rt], [1.0], {"rkl/teacher": [[0.675806] * 3]})
    centred = hook(scored, hook.init())[0]
    assert centred.tolist() == pytest.approx([-0.933632, 0.270341, 1.928569], abs=2e-6)
    p = torch.tensor(PI, dtype=D)
    assert float((p * centred).sum()) == pytest.approx(0, abs=1e-6)
    assert float((p * torch.tensor(rt, dtype=D) ** 2).sum()) == pytest.approx(1.658349, abs=1e-6)
    assert float((p * centred**2).sum()) == pytest.approx(1.201635, abs=2e-6)


# ---------------------------------------------------------------- gap 2


ROWS = [[-0.5, -0.1, -0.3], [-0.1, -0.1, 9.0]]  # the last place is padding


def baselined(**changes) -> list[list[float]]:
    hook = TeacherBaselined(**{"a": 1.0, "match_scale": False, **changes})
    return hook(told_group(ROWS, [1.0, 0.0], mask=MASK), hook.init()).tolist()


def test_baselines_of_the_teacher_s_signal():
    # mean of five -1.1 / 5 = -.22, deviations -.28, .12, -.08, .12, .12: squares .128 / 5, std .16
    assert baselined()[0] == pytest.approx([-0.28, 0.12, -0.08]) and baselined()[1] == pytest.approx([0.12, 0.12, 0])
    divided = baselined(divide=True)
    assert divided[0] == pytest.approx([-1.749989, 0.749995, -0.499997], abs=6e-7)
    assert divided[1] == pytest.approx([0.749995, 0.749995, 0], abs=6e-7)
    # row means -.3, -.1: -.1 and +.1, on all of their tokens
    rows = baselined(baseline="row")
    assert rows[0] == pytest.approx([-0.1] * 3) and rows[1] == pytest.approx([0.1, 0.1, 0])
    # one token of -20 is bounded before the mean
    assert baselined(bound=0.2)[0] == pytest.approx([-0.2 + 0.7 / 5, -0.1 + 0.7 / 5, -0.2 + 0.7 / 5])
    # a discount looks at later tokens: -.08; .12 - .04 = .08; -.28 + .04 = -.24
    assert baselined(discount=0.5)[0] == pytest.approx([-0.24, 0.08, -0.08])


def test_the_teacher_s_spread_is_matched():
    # A = +-1 (population std, eps 0) over tokens 1, 1, 1, -1, -1: std sqrt(1 - .04) = .979796; rt std .16
    hook = TeacherBaselined(a=0.25, ddof=0, eps=0.0, eps_teacher=0.0)
    got = hook(told_group(ROWS, [1.0, 0.0], mask=MASK), hook.init())
    scale = math.sqrt(0.96) / 0.16
    assert got[0].tolist() == pytest.approx([0.75 + 0.25 * scale * x for x in (-0.28, 0.12, -0.08)])
    assert got[1].tolist() == pytest.approx([-0.75 + 0.25 * scale * 0.12] * 2 + [0.0])


def test_a_0_is_the_host_and_the_correlation_is_kept():
    hook = TeacherBaselined(a=0.0)
    scored = told_group(ROWS, [1.0, 0.0], mask=MASK)
    host = variant("grpo").advantage(scored).unsqueeze(1) * scored.tokens["mask"]
    assert_close(hook(scored, hook.init()), host)
    # x = 1, 1, 1, -1, -1 less .2; y = -.28, .12, -.08, .12, .12: sum xy = -.48, over sqrt(4.8 .128)
    state = hook.update(hook.init(), scored)
    assert state["correlation"] == pytest.approx(-0.48 / math.sqrt(4.8 * 0.128))
    assert hook.report(state) == {"teacher/advantage_correlation": state["correlation"]}


# ---------------------------------------------------------------- SC-GRPO


def conditioned(shift, rewards, percentile=75.0, **more) -> torch.Tensor:
    shift = torch.tensor(shift, dtype=D)
    batch = TokenBatch.from_tensors(
        torch.full_like(shift, -1.0),
        teacher_logps=torch.zeros_like(shift),
        rewards=rewards,
        divergences={"fkl/teacher": shift},
        **more,
    )
    return SelfConditioned(eps=0.0, percentile=percentile)(scored_of(batch))


def test_sc_grpo_weights_by_the_shift_over_its_75th_percentile():
    # four rows, three right: A = .5, .5, .5, -1.5 (sample std .5, mean .75). D = 0, .001, .02, .3, 2 in the first row
    # and nothing told elsewhere: P75 of the five = .3, f = D / (D + .3)
    told_mask = torch.zeros(4, 5, dtype=D)
    told_mask[0] = 1
    shift = [[0, 0.001, 0.02, 0.3, 2.0]] + [[5.0] * 5] * 3
    got = conditioned(shift, [1.0, 1, 1, 0], teacher_mask=told_mask)
    f = torch.tensor([0, 0.003322, 0.0625, 0.5, 0.869565], dtype=D)
    assert got[0].tolist() == pytest.approx((0.5 * f).tolist(), abs=6e-7)
    assert got[1].tolist() == pytest.approx([0.5] * 5) and got[3].tolist() == pytest.approx([-1.5] * 5)
    # over the non-zero four the percentile would be .3 + .25 1.7 = .725
    assert float(got[0, 3]) != pytest.approx(0.5 * 0.3 / (0.3 + 0.725), abs=1e-3)
    # both signs of A are weighted
    told_mask[3] = 1
    assert conditioned(shift, [1.0, 1, 1, 0], teacher_mask=told_mask)[3].abs().max() < 1.5


def test_sc_grpo_s_floor():
    # D = 0, 5e-5, 1e-4: P75 = 7.5e-5 is under the floor 1e-4: f = 0, 1/3, 1/2
    told_mask = torch.zeros(4, 3, dtype=D)
    told_mask[0] = 1
    got = conditioned([[0, 5e-5, 1e-4]] + [[0.0] * 3] * 3, [1.0, 1, 1, 0], teacher_mask=told_mask)
    assert got[0].tolist() == pytest.approx([0, 0.5 / 3, 0.25], abs=1e-9)


def test_sc_grpo_rewards_diversity_where_nobody_is_right():
    # one token a row with f = .2, .5, .3, .4, i.e. D = f / (1 - f) at c = 1: the 75th percentile is put at 1 by a mixed group
    f = [0.2, 0.5, 0.3, 0.4]
    shift = [[x / (1 - x)] for x in f]
    got = conditioned(shift + [[1.0]] * 4, [0.0] * 4 + [1, 1, 1, 0], 100.0, group=[0] * 4 + [1] * 4)
    # s - .35 over the sample std .129099: -.116189, .116189, -.038730, .038730; times f they would differ
    assert got[:4, 0].tolist() == pytest.approx([-0.116189, 0.116189, -0.038730, 0.038730], abs=6e-7)
    # equal shifts: 0, not 0 / eps
    assert not conditioned([[0.3]] * 4, [0.0] * 4).any()


def test_sc_grpo_s_routes():
    hook = variant("sc-grpo").advantage
    scored = told_group(
        [[0.1]] * 12,
        [1.0, 1, 0, 0] + [1, 0, 0, 0] + [1, 1, 1, 1],
        {"fkl/teacher": [[0.4]] * 12},
        group=[0] * 4 + [1] * 4 + [2] * 4,
    )
    assert hook.teacher_rows(scored).tolist() == [True] * 4 + [False] * 8
    plain = variant("grpo").advantage(scored)
    got = hook(scored).squeeze(1)
    assert_close(got[4:], plain[4:])  # one right row, or all: plain GRPO
    assert_close(got[:4], plain[:4] / 2)  # D = c everywhere
    nobody = told_group([[0.1]] * 2, [0.0, 0.0], {"fkl/teacher": [[0.4]] * 2})
    assert hook.teacher_rows(nobody).all()


def test_sc_grpo_s_teacher_reaches_as_far_as_the_wrong_answer_it_saw():
    # group 0 has no right answer: row 0 (3 tokens, one of them masked out between) is shown row 1's 1 token, and row 1
    # row 0's 2. Row 2 is shown row 3, which is right: all of its tokens
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0]])
    scored = Scored(
        torch.tensor([[0.0], [0.0], [1.0], [1.0], [0.0]], dtype=D),
        torch.ones(1, dtype=D),
        torch.tensor([0, 0, 1, 1, 1]),
        length=torch.tensor([2, 1, 4, 1, 1]),
        texts={"completions": list("abcde")},
    )
    teacher = variant("sc-grpo").teacher
    asked = Question(batch={"completion_mask": mask}, rows=[{}] * 5, index=torch.arange(5), scored=scored)
    within = (teacher.within(asked, seed=0) & (mask > 0)).int().tolist()
    assert within == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0]]
    assert [teacher.sibling(i, scored, 0) for i in range(4)] == [1, 0, 3, 2]
    assert teacher.sibling(4, scored, 0) in (2, 3) and teacher.contexts(asked, 0)[:4] == ["b", "a", "d", "c"]
    everything = PrivilegedTeacher(siblings="any", column=None)
    assert everything.within(asked, seed=0).all()


# ---------------------------------------------------------------- what is asked, and limits


def test_rows_the_teacher_is_not_asked_about():
    scored = told_group([[0.1], [0.1]], [1.0, 0.0])
    assert variant("srpo-sample-routing").credit[0].teacher_rows(scored).tolist() == [False, True]
    for name, last in (("opd-then-rl", 60), ("rlsd", 50)):
        [hook] = variant(name).credit
        before, after = (Scored(scored.rewards, scored.weights, scored.group, step=s) for s in (last - 1, last))
        assert hook.teacher_rows(before).all() and not hook.teacher_rows(after).any()


def test_a_leak_cannot_flip_the_sign():
    # float32 and a gap of 100: exp first would be inf, and inf * 0 on padding NaN
    batch = TokenBatch.from_tensors(
        torch.full((2, 2), -1.0),
        teacher_logps=torch.tensor([[99.0, -101.0], [99.0, 0.0]]),
        mask=torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        advantage=torch.tensor([1.0, -1.0]),
    )
    got = TeacherMagnitude(lam=1.0)(batch.advantage, batch)
    assert got[0].tolist() == pytest.approx([1.2, 0.8]) and got[1].tolist() == pytest.approx([-0.8, -1.0])


def test_the_floor_is_not_the_misprint():
    assert relaxed_floor(0.3) == pytest.approx(-1.719961, abs=6e-7) and relaxed_floor(0.2) == pytest.approx(
        -2.011797, abs=6e-7
    )
    assert relaxed_floor(0.3) != pytest.approx(L(0.3 / 0.7), abs=0.1)  # -0.847298
    # it is the limit of log((1 - lam) x + lam) / (1 - lam) at x = 0
    assert L(0.7 * 1e-12 + 0.3) / 0.7 == pytest.approx(relaxed_floor(0.3))


def test_student_equal_to_teacher():
    same = {
        "logps": LP,
        "old_logps": LP,
        "teacher_logps": LP,
        "mask": MASK,
        "advantage": [1.0, -1.0],
        "correct": [True, True],
    }
    grpo = variant("grpo", regularizers=[]).loss(TokenBatch.from_tensors(**same))
    for name in ("rlsd", "tb-direct-interpolation", "srpo-sample-routing"):
        got = variant(name).loss(TokenBatch.from_tensors(**same))
        assert_close(got.loss, grpo.loss * (0.75 if name.startswith("tb") else 1.0), name)
    # REINFORCE with a group baseline: the outcome's advantage alone
    assert variant("mopd").loss(TokenBatch.from_tensors(**same)).advantage.tolist() == [[1.0] * 3, [-1.0] * 3]


# ---------------------------------------------------------------- the structure bonus


A_OUTCOMES, B_OUTCOMES = [1.0, 0, 1, 0], [1.0, 0, 0, 0]


def dialogues(a, b) -> Scored:
    n = len(a) + len(b)
    batch = TokenBatch.from_tensors(
        torch.full((n, 1), -1.0, dtype=D),
        rewards=[*a, *b],
        group=[0] * len(a) + [1] * len(b),
        columns={"question": ["q"] * n, "probes": [3] * len(a) + [1] * len(b)},
    )
    return scored_of(batch)


def test_the_structure_bonus_acts_across_both_kinds_of_dialogue():
    v = variant("exgrpo-explanatory")
    scored = dialogues(A_OUTCOMES, B_OUTCOMES)
    bonus = v.rewards[0](scored)
    assert bonus.tolist() == [1.5, 0, 1.5, 0, 1, 0, 0, 0]  # .5 > .25
    z = v.advantage(scored.with_(reward=bonus)).tolist()
    assert z == pytest.approx([1.4142, -0.7071, 1.4142, -0.7071, 0.7071, -0.7071, -0.7071, -0.7071], abs=6e-5)
    plain = v.advantage(scored).tolist()
    assert plain == pytest.approx([1.2076, -0.7246, 1.2076, -0.7246, 1.2076, -0.7246, -0.7246, -0.7246], abs=6e-5)
    # grouped by prompt alone, the bonus is an affine map and vanishes
    alone = variant("grpo", advantage={"grouped": {"eps": 0.0}}).advantage
    assert alone(scored.with_(reward=bonus))[:4].tolist() == pytest.approx([0.8660, -0.8660, 0.8660, -0.8660], abs=6e-5)
    assert_close(alone(scored.with_(reward=bonus))[:4], alone(scored)[:4])


def test_a_tie_and_a_lone_kind_earn_no_structure_bonus():
    hook = StructureBonus()
    assert_close(hook(dialogues([1.0, 0], [1.0, 0])), torch.tensor([1.0, 0, 1, 0], dtype=D))
    assert_close(hook(dialogues([1.0, 0], [])), torch.tensor([1.0, 0], dtype=D))
    assert_close(
        StructureBonus(delta=0.0)(dialogues(A_OUTCOMES, B_OUTCOMES)), torch.tensor([*A_OUTCOMES, *B_OUTCOMES], dtype=D)
    )
    assert_close(
        StructureBonus(nu=2.0)(dialogues(A_OUTCOMES, B_OUTCOMES)), torch.tensor([*A_OUTCOMES, *B_OUTCOMES], dtype=D)
    )
    missing = TokenBatch.from_tensors(torch.full((2, 1), -1.0), rewards=[1.0, 0.0])
    with pytest.raises(VariantError, match="question"):
        hook(scored_of(missing))


def test_impossible_numbers_are_refused():
    with pytest.raises(VariantError, match="below high"):
        TeacherAdvantage(low=1.0, high=-1.0)
    with pytest.raises(VariantError, match="below high"):
        Reinforce(low=2.0, high=1.0)
    with pytest.raises(VariantError, match="eps"):
        TeacherMagnitude(eps=1.0)
    assert TeacherUntil(steps=0).steps == 0 and PrefixWeight(g=0.0).g == 0.0
    assert not NoAdvantage()(told_group([[0.1]], [1.0])).any()
