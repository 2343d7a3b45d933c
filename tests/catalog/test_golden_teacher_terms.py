# ruff: noqa: E501  (a table: one row, one line of arithmetic)
"""Golden numbers of the terms towards a teacher, values and gradients, and the wrong readings they rule out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.batches import assert_close, build, gradient, inputs, leaves_of, split
from tests.catalog.test_golden import E, Golden, L
from tests.catalog.test_golden import test_golden as check_golden
from trl_variants import Schedule, Scored, TokenBatch, VariantError, variant
from trl_variants.divergence import Divergence, divergence
from trl_variants.hooks.regularizers_teacher import DualTeacherKL, TeacherKL
from trl_variants.objective import evaluate, with_advantages

D = torch.float64
# the atlas' fixture F: two answers of 3 and 2 tokens, A = +1, -1. Ratios e^.1, 1, e^-.8 and 1, e^-.5 = .607 (clipped at .8)
F = {
    "logps": [[-0.5, -1.0, -2.0], [-0.7, -1.5, 0.0]],
    "old_logps": [[-0.6, -1.0, -1.2], [-0.7, -1.0, 0.0]],
    "teacher_logps": [[-0.2, -2.0, -0.8], [-0.4, -3.0, 0.0]],
    "mask": [[1, 1, 1], [1, 1, 0]],
    "advantage": [1.0, -1.0],
}
# J = ((e^.1 + 1 + e^-.8) / 3 - (1 + .8) / 2) / 2 = (2.554500 / 3 - .9) / 2 = -.024250
GRPO = [[-0.184195, -1 / 6, -0.074888], [0.25, 0, 0]]
KL_OFF = {"regularizers": []}


def teacher_kl(**fields: Any) -> dict[str, Any]:
    return {"regularizers": [{"teacher_kl": fields}]}


def rows(*d: float, **more: Any) -> dict[str, Any]:
    """Answers of one token with lp_T - lp = d, on-policy, without advantage."""
    return {"logps": [[-1.0]] * len(d), "teacher_logps": [[-1.0 + x] for x in d], "advantage": [0.0] * len(d), **more}


KD = [(2 * kd) ** 0.5 for kd in (0.4, 0.2, 0.3, 0.5)]  # k2 = .4, .2, .3, .5
MASKED = rows(*KD, correct=[True, False, True, False])

GOLDEN = [
    # ------------------------------------------------------------ four-operator hybrid
    Golden("hybrid, nothing in its places", "four-operator-hybrid", F, {"loss": 0.024250, "grad": GRPO}, KL_OFF),
    # ((2.554500) - 1.8) / 5
    Golden("hybrid, token mean", "four-operator-hybrid", F, {"loss": -0.150900}, {"aggregate": "token_mean", **KL_OFF}),
    # k3 against d = .1, .2, -.5 / 0, -.3: .004837, .018731, .148721 / 0, .049859; rows .057430, .024929; .04 * .041180 = .001647
    Golden("hybrid, T_D to the reference", "four-operator-hybrid", F | {"ref_logps": [[-0.6, -1.2, -1.5], [-0.7, -1.2, 0]]},
           {"loss": 0.025897, "grad": [[-0.183561, -0.165458, -0.079213], [0.25, -0.003499, 0]]}),
    *[Golden(f"hybrid, T_C of weight 0, {e}", "four-operator-hybrid", F, {"loss": 0.024250, "grad": GRPO},
             teacher_kl(coef=0.0, divergence=d, estimator=e))
      for d, e in (("rkl", "detached"), ("rkl", "k2"), ("fkl", "k3"), ("jsd", "ratio"))],
    # ------------------------------------------------------------ dGRPO
    # rt = .3, -1, 1.2 / .3, -1.5; + .1 rt rho / 3 / 2: .1 * .3 * 1.105171 / 6 = .005526, -.016667, .1 * 1.2 * .449329 / 6 = .008987 /
    # .1 * .3 / 4 = .0075, -.1 * 1.5 * .606531 / 4 = -.022745: the token that the clip has stopped moves
    Golden("dgrpo, fixture F", "dgrpo", F, {"loss": 0.041649, "grad": [[-0.189721, -0.15, -0.083875], [0.2425, 0.022745, 0]]}),
    # with exp(lp - sg lp) in the place of rho: .1 * 1.2 / 6 = .02 on token 3, -.1 * 1.5 / 4 = -.0375
    Golden("dgrpo, detached", "dgrpo", F, {"loss": 0.045917, "grad": [[-0.189195, -0.15, -0.094888], [0.2425, 0.0375, 0]]},
           teacher_kl(coef=0.1, estimator="detached")),
    Golden("dgrpo, beta 0", "dgrpo", F, {"loss": 0.024250, "grad": GRPO}, teacher_kl(coef=0.0, estimator="ratio")),
    Golden("gap3 is dgrpo with its settings", "gap3-tc-forward-kl-jsd", F, {"loss": 0.041649}, teacher_kl(coef=0.1, estimator="ratio")),
    # only where the clip is silent: token (2, 2) keeps nothing; only where it acts: the others keep GRPO's
    Golden("dgrpo, where the surrogate keeps its gradient", "dgrpo", F, {"grad": [[-0.189721, -0.15, -0.083875], [0.2425, 0, 0]]},
           teacher_kl(coef=0.1, estimator="ratio", clip_interaction="unclipped")),
    Golden("dgrpo, on dead tokens alone", "dgrpo", F, {"grad": [*GRPO[:1], [0.25, 0.022745, 0]]},
           teacher_kl(coef=0.1, estimator="ratio", clip_interaction="clipped_only")),
    # ------------------------------------------------------------ KDRL
    # k2 = .045, .5, .72 / .045, 1.125: 2.435 / 5 = .487; .150900 - .002 * .487. Slopes (r A - .002 d) / 5:
    # (1.105171 + .0006) / 5 = .221154, (1 - .002) / 5, (.449329 + .0024) / 5, (-1 + .0006) / 5, -.003 / 5
    Golden("kdrl, fixture F", "kdrl", F, {"loss": -0.149926, "grad": [[-0.221154, -0.1996, -0.090346], [0.19988, 0.0006, 0]], "terms.teacher_kl": 0.000974}),
    # the group mask with every answer wrong is the plain term; with one right, none
    Golden("kdrl, group mask of a failed group", "kdrl", F | {"correct": [False, False]}, {"loss": -0.149926},
           teacher_kl(row_gate="all_fail")),
    Golden("kdrl, group mask of a group with a right answer", "kdrl", F | {"correct": [True, False]}, {"loss": -0.150900},
           teacher_kl(row_gate="all_fail")),
    # rows 2 and 4: .7 over all 4 rows; over those kept .35
    Golden("kdrl, response mask", "kdrl", MASKED, {"loss": 0.175, "grad": [[0], [-KD[1] / 4], [0], [-KD[3] / 4]]},
           teacher_kl(coef=1.0, row_gate="wrong")),
    Golden("kdrl, response mask over kept tokens", "kdrl", MASKED, {"loss": 0.35, "grad": [[0], [-KD[1] / 2], [0], [-KD[3] / 2]]},
           teacher_kl(coef=1.0, row_gate="wrong", normaliser="gated")),
    Golden("kdrl, group mask", "kdrl", MASKED, {"loss": 0.0, "grad": [[0]] * 4}, teacher_kl(coef=1.0, row_gate="all_fail")),
    # far tokens: k2 slopes -R, k3 slopes 1 - e^R (e^5 - 1 = 147.4), each over 4 tokens
    Golden("kdrl, far tokens", "kdrl", rows(-5, -1, 1, 5), {"grad": [[5 / 4], [1 / 4], [-1 / 4], [-5 / 4]]}, teacher_kl(coef=1.0)),
    Golden("kdrl's far tokens by k3", "kdrl", rows(-5, -1, 1, 5),
           {"grad": [[0.993262 / 4], [0.632121 / 4], [-1.718282 / 4], [-147.413159 / 4]]}, teacher_kl(coef=1.0, divergence="fkl", estimator="k3")),
    # 5e-3 - 5e-5 step, not below 1e-3, on k2 = .5
    *[Golden(f"kdrl, annealed at step {step}", "kdrl", rows(1.0, step=step), {"terms.teacher_kl": beta / 2, "grad": [[-beta]]},
             teacher_kl(coef=5e-3, decay=5e-5, floor=1e-3), atol=1e-12)
      for step, beta in ((0, 5e-3), (40, 3e-3), (80, 1e-3), (200, 1e-3))],
    # ------------------------------------------------------------ SDAR
    # g = sigmoid(0) = .5, sigmoid(5) = .993307: loss .01 g D, slope -.01 g, over two tokens
    Golden("sdar, gates", "sdar", rows(0.0, 1.0), {"loss": 0.01 * 0.993307 / 2, "grad": [[-0.0025], [-0.01 * 0.993307 / 2]]},
           teacher_kl(coef=0.01, estimator="k1", token_gate="sigmoid"), atol=1e-7),
    # a reference that moved by .5 is paid beside it: .01 k3(.5) = .01 * .106531
    Golden("sdar, with its KL", "sdar", rows(0.0, ref_logps=[[-1.5]]), {"loss": 0.001065, "grad": [[0.003935 - 0.005]]}),
    # ------------------------------------------------------------ SDPO, its sampled-token version
    # lp = -1, lp_q = -.4: slope lp - lp_q = -.6 (their value, -.6 * lp = .6, is no KL either)
    Golden("sdpo, sampled token", "sdpo", rows(0.6), {"grad": [[-0.6]]}, teacher_kl(coef=1.0, estimator="detached", ratio_cap=2.0)),
    # importance weights e^.5 = 1.648721 and e^1, capped at 2, without gradient: slopes w * -.6 / 2
    Golden("sdpo, importance weight", "sdpo", {"logps": [[-1.0], [-1.0]], "old_logps": [[-1.5], [-2.0]], "teacher_logps": [[-0.4], [-0.4]], "advantage": [0, 0]},
           {"grad": [[-0.6 * 1.648721 / 2], [-0.6]]}, teacher_kl(coef=1.0, estimator="detached", ratio_cap=2.0)),
    # ------------------------------------------------------------ gap 3
    # FKL rewards x - 1 = e^.5 - 1 and, x held at 10, 9; slopes -.01 (x - 1) / 2
    Golden("gap3, bounded forward KL", "gap3-tc-forward-kl-jsd", rows(0.5, 5.0), {"grad": [[-0.01 * (E(0.5) - 1) / 2], [-0.045]]}),
    # JSD: .5 log((1 + x) / 2) = .31006 at x = e^.5... and -log(2) / 2 for x -> 0
    Golden("gap3, JSD is bounded below", "gap3-tc-forward-kl-jsd", rows(0.5, -19.0),
           {"grad": [[-0.5 * L((1 + E(0.5)) / 2) / 2], [0.346574 / 2]]}, teacher_kl(coef=1.0, divergence="jsd", estimator="detached")),
    # ------------------------------------------------------------ gap 4
    # (1 - p)^2 * .02 on k2 = 1/2, groups with 0 / 4, 1 / 4, 2 / 4, 4 / 4 right; every group a quarter of the tokens
    *[Golden(f"gap4, difficulty gate at {right} of 4", "gap4-td-gated-scheduled",
             rows(1, 1, 1, 1, correct=[True] * right + [False] * (4 - right)), {"loss": weight / 2},
             teacher_kl(coef=0.02, row_gate="difficulty", power=2.0))
      for right, weight in ((0, 0.02), (1, 0.01125), (2, 0.005), (4, 0.0))],
    Golden("gap4 with kdrl's settings", "gap4-td-gated-scheduled", F, {"loss": -0.149926}, {**teacher_kl(coef=0.002), "aggregate": "token_mean"}),
    # anchor ref, ratio_k3: TRL's default KL. rho (k3): e^.1 * .106531 with slope rho d = e^.1 * .5
    Golden("gap4 towards the reference is TRL's KL", "gap4-td-gated-scheduled",
           {"logps": [[-1.0]], "old_logps": [[-1.1]], "ref_logps": [[-1.5]], "teacher_logps": [[-9.0]], "advantage": [0.0]},
           {"loss": 0.04 * E(0.1) * 0.106531, "grad": [[0.04 * E(0.1) * 0.5]]}, teacher_kl(coef=0.04, anchor="ref", estimator="ratio_k3")),
    # sampled gates: band 1 drops |rt| = 2; sigmoid .5, sigmoid(1) = .731059 of k2 1/2
    Golden("gap4, a band", "gap4-td-gated-scheduled", rows(1.0, 2.0), {"loss": 0.25}, teacher_kl(coef=1.0, token_gate="band", band=1.0)),
    Golden("gap4, SDAR's gate on k2", "gap4-td-gated-scheduled", rows(0.0, 1.0), {"loss": 0.731059 / 4, "grad": [[0], [-0.731059 / 2]]},
           teacher_kl(coef=1.0, token_gate="sigmoid", sharpness=1.0)),
    # a silent teacher: nothing read from the token, and it stays in the mean (or leaves it)
    Golden("gap4, a silent teacher", "gap4-td-gated-scheduled", rows(1.0, 9.0, teacher_mask=[[1], [0]]), {"loss": 0.25, "grad": [[-0.5], [0]]}, teacher_kl(coef=1.0)),
    Golden("gap4, a silent teacher out of the mean", "gap4-td-gated-scheduled", rows(1.0, 9.0, teacher_mask=[[1], [0]]), {"loss": 0.25, "grad": [[-0.5], [0]]},
           teacher_kl(coef=1.0, normaliser="gated")),
    Golden("gap4, a silent teacher out of the mean over tokens", "gap4-td-gated-scheduled", rows(1.0, 9.0, teacher_mask=[[1], [0]]), {"loss": 0.5, "grad": [[-1.0], [0]]},
           {**teacher_kl(coef=1.0, normaliser="gated"), "aggregate": "token_mean"}),
]  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN, ids=[g.name for g in GOLDEN])
def test_golden(case):
    check_golden(case)


# ---------------------------------------------------------------- three tokens, every one enumerated


PI, PI_T = (0.5, 0.3, 0.2), (0.1, 0.2, 0.7)


def expected(name: str, **fields: Any) -> Tensor:
    """Gradient in the logits of the term's expectation over the policy's own samples, coefficient 1."""
    z = torch.tensor([L(p) for p in PI], dtype=D, requires_grad=True)
    lp = z.log_softmax(0)
    batch = TokenBatch.from_tensors(lp.unsqueeze(1), teacher_logps=[[L(q)] for q in PI_T], advantage=[0.0] * 3)
    [h] = [h for h in variant(name).regularizers if h.hook_name == "teacher_kl"]
    value = replace(h, **fields)(batch).value.squeeze(1)
    return torch.autograd.grad((lp.detach().exp() * value).sum(), z)[0]


@pytest.mark.parametrize(
    "name, fields, wanted",
    [
        ("sdar", {}, [0.117185, 0.035498, -0.152682]),
        ("dgrpo", {}, [0.466816, -0.081102, -0.385714]),
        ("kdrl", {}, [0.466816, -0.081102, -0.385714]),
        ("gap3-tc-forward-kl-jsd", {}, [0.4, 0.1, -0.5]),
        ("gap3-tc-forward-kl-jsd", {"divergence": "jsd"}, [0.090726, 0.005160, -0.095885]),
        ("gap3-tc-forward-kl-jsd", {"estimator": "k3"}, [0.4, 0.1, -0.5]),
    ],
)
def test_expected_gradients_of_the_atlas(name, fields, wanted):
    assert_close(expected(name, **fields), wanted, name, atol=6e-7)


def test_the_literal_form_of_dgrpo_is_told_apart_by_its_gradient_alone():
    # J = GRPO + .1 rt with gradient through lp: the value of the detached form, [[.167528, .15, .058221], [-.275, -.025, 0]]
    lp = torch.tensor(F["logps"], dtype=D, requires_grad=True)
    batch = TokenBatch.from_tensors(lp, **{k: v for k, v in F.items() if k != "logps"})
    host = variant("dgrpo", regularizers=[]).loss(batch).loss
    rt = (batch.teacher_logps - batch.logps) * batch.mask
    literal = host - 0.1 * (rt.sum(1) / batch.mask.sum(1)).mean()
    right = variant("dgrpo", **teacher_kl(coef=0.1, estimator="detached")).loss(batch).loss
    assert_close(literal, right, "the same value", atol=1e-12)
    wrong = torch.autograd.grad(literal, lp, retain_graph=True)[0]
    assert_close(wrong, [[-0.167528, -0.15, -0.058221], [0.275, 0.025, 0]], "the literal form", atol=6e-7)
    assert float((wrong - torch.autograd.grad(right, lp)[0]).abs().max()) > 0.03


def test_operators_at_their_defaults_are_grpo_bit_for_bit():
    base, given = variant("grpo"), inputs(5)
    host = base.loss(build(given))
    neutral = [
        {"regularizers": [*base.regularizers, {"teacher_kl": {"coef": 0.0, "divergence": d, "estimator": e}}]}
        for d, e in (("rkl", "k2"), ("rkl", "ratio"), ("fkl", "detached"), ("jsd", "exact"))
    ]
    neutral += [{"credit": [{"teacher_interpolation": {"a": 0.0}}]}, {}]
    for edits in neutral:
        batch = build(given)
        loss = variant("four-operator-hybrid", **edits).loss(batch)
        assert torch.equal(loss.loss, host.loss), edits
        assert torch.equal(
            *(torch.autograd.grad(x.loss, b.logps, retain_graph=True)[0] for x, b in _pairs(loss, batch, given))
        )


def _pairs(loss: Any, batch: TokenBatch, given: dict[str, Any]):
    other = build(given)
    return (loss, batch), (variant("grpo").loss(other), other)


# ---------------------------------------------------------------- the exact forms


T3, S3 = (0.7, 0.2, 0.1), (0.3, 0.3, 0.4)
HD_T, HD_S = (0.6, 0.3, 0.06, 0.04), (0.2, 0.3, 0.1, 0.4)


def compare(student, teacher, **spec) -> Tensor:
    logs = [torch.tensor([[L(p) for p in row]], dtype=D) for row in (student, teacher)]
    return divergence(*logs, Divergence(**spec))


@pytest.mark.parametrize(
    "what, student, teacher, spec, wanted",
    [
        ("gkd, forward", S3, T3, {"kind": "fkl"}, 0.373386),
        ("gkd and minillm, reverse", S3, T3, {"kind": "rkl"}, 0.421968),
        ("gkd", S3, T3, {"kind": "jsd", "beta": 0.1}, 0.033460),
        ("gkd, half", S3, T3, {"kind": "jsd"}, 0.094362),
        ("gkd, the other end", S3, T3, {"kind": "jsd", "beta": 0.9}, 0.036678),
        ("sdpo's alpha is the teacher's share", S3, T3, {"kind": "jsd", "beta": 0.25}, 0.069685),
        ("sdpo, tail", (0.6, 0.3, 0.1), (0.06, 0.03, 0.91), {"kind": "rkl", "top_k": 2, "support": "student"}, 1.851499),
        ("sdpo, JSD and tail", (0.6, 0.3, 0.1), (0.06, 0.03, 0.91), {"kind": "jsd", "top_k": 2, "support": "student"}, 0.379287),
        ("sdft hides it", (0.6, 0.3, 0.1), (0.06, 0.03, 0.91), {"kind": "rkl", "top_k": 2, "support": "student", "rest": "renormalize"}, 0.0),
        ("opsd", (0.1, 0.5, 0.4), (0.7, 0.2, 0.1), {"kind": "jsd"}, 0.207944),
        ("opsd, bound per entry", (0.1, 0.5, 0.4), (0.7, 0.2, 0.1), {"kind": "jsd", "entry_cap": 0.05}, 0.131393),
        ("hdpo", HD_S, HD_T, {"kind": "jsd", "top_k": 2, "rest": "student"}, 0.240001),
        ("hdpo, untruncated", HD_S, HD_T, {"kind": "jsd"}, 0.140324),
        ("hdpo, no tail", HD_S, HD_T, {"kind": "jsd", "top_k": 2, "rest": "renormalize"}, 0.036160),
        ("hdpo, a tail on both sides", HD_S, HD_T, {"kind": "jsd", "top_k": 2, "rest": "tail"}, 0.125101),
        ("hdpo, disjoint", (1e-12, 1 - 1e-12), (1 - 1e-12, 1e-12), {"kind": "jsd"}, L(2)),
    ],
)  # fmt: skip
def test_divergences_of_the_entries(what, student, teacher, spec, wanted):
    assert float(compare(student, teacher, **spec)) == pytest.approx(wanted, abs=6e-7)


@pytest.mark.parametrize(
    "name, spec",
    [
        ("gkd", Divergence("jsd")),
        ("opsd", Divergence("jsd")),
        ("minillm", Divergence("rkl")),
        ("sdpo", Divergence("jsd", top_k=100, support="student")),
        ("sdft", Divergence("jsd", top_k=100, support="student", rest="renormalize")),
    ],
)
def test_the_exact_entries_average_their_divergence(name, spec):
    # rows of 2 and 1 tokens, D = .3, .5 / .1: over tokens .9 / 3, over rows (.4 + .1) / 2; the reward is not in the loss
    v = variant(name)
    [h] = v.regularizers
    assert h.divergences == (spec,) and {"teacher_logps", "distribution"} <= v.needs
    values = torch.tensor([[0.3, 0.5], [0.1, 7.0]], dtype=D, requires_grad=True)
    given = {
        "logps": torch.tensor([[-1.0, -2.0], [-3.0, 0.0]], dtype=D),
        "teacher_logps": [[-1.0, -1.0], [-1.0, 0.0]],
        "mask": [[1, 1], [1, 0]],
    }
    batch = TokenBatch.from_tensors(**given, rewards=[1.0, 0.0], divergences={spec.key: values})
    loss = v.loss(batch)
    by_rows = name == "sdft"
    assert_close(loss.loss, 0.25 if by_rows else 0.3, "loss")
    wanted = [[0.25, 0.25], [0.5, 0.0]] if by_rows else [[1 / 3, 1 / 3], [1 / 3, 0.0]]
    assert_close(torch.autograd.grad(loss.loss, values)[0], wanted, "gradient")
    assert not loss.advantage.any()
    if name == "gkd":  # a wrong support is an error that names the statistic
        with pytest.raises(VariantError, match="rkl/teacher"):
            variant("gkd", **teacher_kl(estimator="exact")).loss(batch)


def test_sdpo_counts_the_rows_that_have_a_context():
    # row 2 has none: over one token, not two; weight min(e^.5, 2) on it
    key = variant("sdpo").regularizers[0].divergences[0].key
    values = torch.tensor([[0.4], [9.0]], dtype=D, requires_grad=True)
    batch = TokenBatch.from_tensors(
        -torch.ones(2, 1, dtype=D), [[-1.5], [-1.0]], teacher_logps=[[-1.0], [0.0]], teacher_mask=[[1.0], [0.0]],
        rewards=[1.0, 0.0], divergences={key: values},
    )  # fmt: skip
    v = variant("sdpo")
    assert v.scope == "window"
    loss = v.loss(batch).loss
    assert_close(loss, 0.4 * E(0.5), "loss")
    assert_close(torch.autograd.grad(loss, values)[0], [[E(0.5)], [0.0]], "gradient")
    stays = v.with_(regularizers=[replace(v.regularizers[0], normaliser="all")])
    assert_close(stays.loss(batch).loss, 0.2 * E(0.5), "in the denominator")


def test_hdpo_s_term_reads_what_was_written_with_the_hint():
    # .01 JSD over the tokens of the hinted rows: (.2 + .4) / 2, whatever the others disagree on; none: 0
    h = TeacherKL(
        coef=0.01, divergence="jsd", estimator="exact", top_k=64, rest="student", written_by="other", normaliser="gated", own_token_mean=True
    )  # fmt: skip
    v = variant("grpo", regularizers=[h])
    given = {"logps": -torch.ones(2, 2, dtype=D), "teacher_logps": [[-1.0] * 2] * 2, "advantage": [0.0, 0.0]}
    values = torch.tensor([[5.0, 6.0], [0.2, 0.4]], dtype=D)
    origin = torch.tensor([[0, 0], [1, 1]])
    batch = lambda o: TokenBatch.from_tensors(**given, origin=o, divergences={h.divergences[0].key: values})  # noqa: E731
    assert_close(v.loss(batch(origin)).loss, 0.003, "loss")
    assert float(v.loss(batch(torch.zeros_like(origin))).loss) == 0.0
    assert float(v.loss(batch(None)).loss) == 0.0


# ---------------------------------------------------------------- rows, gates, the controller


def scored(**more: Any) -> Scored:
    correct = torch.tensor([False, False, False, True, True, True, False])
    group = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    rewards = correct.double().unsqueeze(1)
    rewards[6] = math.nan  # nobody scored group 3
    return Scored(rewards=rewards, weights=torch.ones(1, dtype=D), group=group, correct=correct, **more)


@pytest.mark.parametrize(
    "fields, asked",
    [
        ({}, [1, 1, 1, 1, 1, 1, 1]),
        ({"row_gate": "wrong"}, [1, 1, 1, 0, 0, 0, 1]),
        ({"row_gate": "right"}, [0, 0, 0, 1, 1, 1, 0]),
        ({"row_gate": "all_fail"}, [1, 1, 0, 0, 0, 0, 0]),
        ({"row_gate": "difficulty"}, [1, 1, 1, 1, 0, 0, 0]),
        ({"anchor": "ref"}, [0] * 7),
        ({"estimator": "exact", "written_by": "other"}, [0, 0, 0, 0, 0, 1, 1]),
        ({"row_gate": "wrong", "estimator": "exact", "written_by": "other"}, [0, 0, 0, 0, 0, 0, 1]),
        ({"row_gate": "wrong"}, [1, 1, 1, 0, 0, 0, 0]),
    ],
)
def test_a_row_that_the_gates_shut_is_not_asked_about(fields, asked):
    with_origin = fields.get("written_by") == "other" or asked == [1, 1, 1, 0, 0, 0, 0]
    record = scored(origin=torch.tensor([0, 3, 0, 0, 0, 1, 2]) if with_origin else None)
    assert TeacherKL(**fields).teacher_rows(record).long().tolist() == asked


def test_hdpo_s_gate_on_groups():
    # R = [[0,0,0,0],[0,1,0,0],[1,1,1,1]]: only the first is a cliff
    correct = torch.tensor([0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 1, 1]).bool()
    record = Scored(correct.double().unsqueeze(1), torch.ones(1, dtype=D), torch.arange(12) // 4, correct=correct)
    assert TeacherKL(row_gate="all_fail").teacher_rows(record).long().tolist() == [1] * 4 + [0] * 8


def test_a_gate_knows_its_group_when_the_window_does_not_hold_it():
    given = inputs(4)
    v = variant("kdrl", **teacher_kl(coef=1.0, row_gate="all_fail"))
    whole = build(given)
    assert v.scope == "local" and not v.whole_groups
    parts = split(with_advantages(v, whole), [[i] for i in range(len(whole.mask))])
    total = torch.stack([evaluate(v, p).terms["teacher_kl"] for p in parts]).sum()
    assert_close(total, v.loss(build(given)).terms["teacher_kl"], "term")
    assert float(total.detach()) > 0


@pytest.mark.parametrize("gate", ["low_confidence", "high_entropy"])
def test_token_quantiles_are_of_the_window(gate):
    # the half with the lowest lp (-3, -4) or the highest entropy (4, 3): tokens 3, 4 or 1, 2; k2 = 1/2 each, over 4 tokens
    lp = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], dtype=D, requires_grad=True)
    batch = TokenBatch.from_tensors(
        lp, teacher_logps=lp.detach() + 1, entropy=[[4.0, 3.0], [2.0, 1.0]], advantage=[0.0, 0.0]
    )
    v = variant("kdrl", **teacher_kl(coef=1.0, token_gate=gate, share=0.5))
    assert v.scope == "window"
    loss = v.loss(batch)
    assert_close(loss.loss, 0.25, "loss")
    first = gate == "high_entropy"
    wanted = [[-0.25 * first] * 2, [-0.25 * (not first)] * 2]
    assert_close(torch.autograd.grad(loss.loss, lp)[0], wanted, "gradient")
    assert loss.metrics["teacher_kl/open"] == 0.5 and loss.metrics["teacher_kl/coef"] == 1.0


def test_the_dual_controller():
    # .01 e^(.5 * .4) = .012214, again .014918, times e^(.5 * -.05) = .014550; nothing measured: as it was; bounds hold
    h = DualTeacherKL(coef=0.01, eta=0.5, target=0.1)
    state, trail = h.init(), []
    for kl in (0.5, 0.5, 0.05):
        state = h.update(state, {"open_kl": kl, "open": 0.5})
        trail.append(state["coef"])
    assert trail == pytest.approx([0.012214, 0.014918, 0.014550], abs=6e-7)
    assert h.update(state, {"open_kl": 0.0, "open": 0.0}) == state
    assert h.update(state, {"open_kl": 1e9, "open": 1.0}) == {"coef": 0.1}
    assert h.update(state, {"open_kl": -1e9, "open": 1.0}) == {"coef": 1e-4}
    assert json.loads(json.dumps(state)) == state and h.report(state) == {"teacher_kl_dual/next_coef": state["coef"]}


def test_the_controller_measures_the_tokens_let_through():
    # lp - lp_T = -1 on the wrong row's two tokens, -3 on the right one's: K = -1 over 2 of 3 tokens
    v = variant("gap4-td-gated-scheduled", regularizers=[{"teacher_kl_dual": {"row_gate": "wrong", "coef": 0.02}}])
    batch = TokenBatch.from_tensors(
        -torch.ones(2, 2, dtype=D), teacher_logps=[[0.0, 0.0], [2.0, 0.0]], mask=[[1, 1], [1, 0]], advantage=[0.0, 0.0], correct=[False, True]
    )  # fmt: skip
    loss = v.loss(batch, {"regularizers.0": {"coef": 0.04}})
    seen = loss.stats["regularizers.0"]
    assert seen["open_kl"].value() == pytest.approx(-1.0) and seen["open"].value() == pytest.approx(2 / 3)
    # .04 * (1/2 + 0) / 2: the wrong row's mean of k2 = 1/2, over two rows
    assert_close(loss.loss, 0.01, "loss")
    with pytest.raises(VariantError, match="moves its coefficient by itself"):
        DualTeacherKL(decay=1e-4)


def test_a_schedule_and_a_switch_between_divergences():
    terms = [
        {"teacher_kl": {"coef": Schedule(1.0, 0.0, 0.5, 0.5, "step"), "divergence": "fkl", "estimator": "k3"}},
        {"teacher_kl": {"coef": Schedule(0.0, 1.0, 0.5, 0.5, "step"), "divergence": "rkl", "estimator": "k2"}},
    ]
    v = variant("gap3-tc-forward-kl-jsd", regularizers=terms)
    for progress, slope in ((0.25, 1 - E(1)), (0.75, -1.0)):
        lp = torch.tensor([[-1.0]], dtype=D, requires_grad=True)
        batch = TokenBatch.from_tensors(lp, teacher_logps=[[0.0]], advantage=[0.0], progress=progress)
        assert_close(torch.autograd.grad(v.loss(batch).loss, lp)[0], [[slope]], "gradient")


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"estimator": "ratio", "ratio_cap": 2.0}, "multiplies by the ratio already"),
        ({"top_k": 5}, "belong to estimator: exact"),
        ({"entry_cap": 0.1}, "belong to estimator: exact"),
        ({"divergence": "jsd", "estimator": "exact", "beta": 1.0}, "beta in"),
        ({"estimator": "exact", "top_k": 5, "rest": "student"}, "rkl is infinite"),
        ({"written_by": "anyone"}, "policy's own tokens"),
        ({"estimator": "k4"}, "must be one of"),
    ],
)
def test_what_does_not_go_together_is_refused(fields, words):
    with pytest.raises(VariantError, match=words):
        TeacherKL(**fields)


def test_nothing_is_read_where_the_teacher_is_silent_or_the_token_is_masked():
    for fields in ({}, {"divergence": "fkl", "estimator": "detached"}, {"estimator": "k1", "token_gate": "sigmoid"}):
        given = inputs(3)
        v = variant("kdrl", **teacher_kl(coef=1.0, **fields))
        silent = (given["teacher_mask"] == 0) | (given["mask"] == 0)
        one, two = (
            build(given | {"teacher_logps": given["teacher_logps"].masked_fill(silent, x)}) for x in (-1e3, 4.0)
        )
        losses = [v.loss(b) for b in (one, two)]
        assert torch.equal(losses[0].loss, losses[1].loss)
        grads = [gradient(x.loss, leaves_of(b))["logps"] for x, b in zip(losses, (one, two), strict=True)]
        assert torch.equal(*grads)
