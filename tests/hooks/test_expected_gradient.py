"""What each estimator descends: exact expectations over a vocabulary of five tokens, every one of them enumerated.

A row is one answer of one token, row a the token a; advantages are 0 unless a test says so. With g_a the slope of the
loss in the log-prob of row a, sum_a mu(a) rows g_a grad log pi(a) is the expected gradient under samples of mu. The
divergences and their gradients are written out here again, from their definitions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.batches import assert_close
from trl_variants import TokenBatch, Variant, VariantError, variant
from trl_variants.divergence import Divergence, divergence
from trl_variants.hooks.regularizers_teacher import ESTIMATORS, TeacherKL, reward_of

V = 5
Z = torch.tensor([0.9, -0.4, 0.3, -1.1, 0.2], dtype=torch.float64)  # the policy's logits
Z_T = torch.tensor([-0.3, 0.8, 0.5, -0.9, -0.2], dtype=torch.float64)  # the teacher's
Z_OLD = torch.tensor([0.7, -0.2, 0.6, -0.9, 0.0], dtype=torch.float64)  # an older policy's
Z_REF = torch.tensor([0.1, 0.3, -0.6, 0.2, -0.5], dtype=torch.float64)
STALE = ("ratio", "ratio_k3")  # right on samples of an older policy


def true_divergence(kind: str, z: Tensor, other: Tensor, beta: float = 0.5) -> Tensor:
    p, q = z.softmax(-1), other.softmax(-1)
    if kind == "rkl":
        return sum(p[a] * (p[a] / q[a]).log() for a in range(V))
    if kind == "fkl":
        return sum(q[a] * (q[a] / p[a]).log() for a in range(V))
    m = [beta * q[a] + (1 - beta) * p[a] for a in range(V)]
    return sum(beta * q[a] * (q[a] / m[a]).log() + (1 - beta) * p[a] * (p[a] / m[a]).log() for a in range(V))


def true_gradient(kind: str, z: Tensor = Z, other: Tensor = Z_T, beta: float = 0.5) -> Tensor:
    z = z.clone().requires_grad_()
    return torch.autograd.grad(true_divergence(kind, z, other, beta), z)[0]


def rows(z: Tensor, stale: bool = False, **more: Any) -> TokenBatch:
    """Five answers of one token each, one per token of the vocabulary; `z` may require grad."""
    lp = z.log_softmax(-1)
    compared = {
        d.key: divergence(lp.expand(V, V), other.expand(V, V), d).unsqueeze(1)
        for kind in ("rkl", "fkl", "jsd")
        for other, anchor in ((Z_T, "teacher"), (Z_REF, "ref"))
        for d in (Divergence(kind, anchor), *([Divergence(kind, anchor, beta=0.2)] if kind == "jsd" else []))
    }
    given = {
        "old_logps": (Z_OLD if stale else z.detach()).log_softmax(-1).unsqueeze(1),
        "teacher_logps": Z_T.log_softmax(-1).unsqueeze(1),
        "ref_logps": Z_REF.log_softmax(-1).unsqueeze(1),
        "entropy": torch.ones(V, 1, dtype=torch.float64),
        "advantage": torch.zeros(V),
        "correct": [False] * V,
    }
    return TokenBatch.from_tensors(lp.unsqueeze(1), divergences=compared, **{**given, **more})


def expected_gradient(v: Variant, stale: bool = False, **more: Any) -> Tensor:
    """Of the loss in the five logits, under samples of the policy (or of the older one)."""
    z = Z.clone().requires_grad_()
    batch = rows(z, stale, **more)
    loss = v.loss(batch).loss
    through = [batch.logps, *batch.divergences.values()]
    slopes = torch.autograd.grad(loss, through, allow_unused=True, retain_graph=True)
    mu = (Z_OLD if stale else Z).softmax(-1)
    weight = (V * mu).unsqueeze(1)
    total = sum((s * weight * x).sum() for s, x in zip(slopes, through, strict=True) if s is not None)
    return torch.autograd.grad(total, z)[0]


def only(h: Any) -> Variant:
    """A variant whose loss is this term and nothing else."""
    return variant("grpo", advantage="none", regularizers=[h])


PAIRS = [(d, e) for e, known in ESTIMATORS.items() for d in known if e != "k1"]


@pytest.mark.parametrize("anchor, other", [("teacher", Z_T), ("ref", Z_REF)])
@pytest.mark.parametrize("kind, estimator", PAIRS, ids=[f"{d}-{e}" for d, e in PAIRS])
def test_descends_the_divergence_it_names(kind, estimator, anchor, other):
    h = TeacherKL(coef=1.0, divergence=kind, estimator=estimator, anchor=anchor, x_max=None)
    assert_close(expected_gradient(only(h)), true_gradient(kind, other=other), "gradient", atol=1e-10)
    name = {"rkl": "reverse KL(pi || {})", "fkl": "forward KL({} || pi)", "jsd": "JSD(pi, {})"}[kind]
    assert h.descends == name.format("pi_T" if anchor == "teacher" else "ref")


@pytest.mark.parametrize("kind, estimator", PAIRS, ids=[f"{d}-{e}" for d, e in PAIRS])
def test_on_samples_of_an_older_policy(kind, estimator):
    h = TeacherKL(coef=1.0, divergence=kind, estimator=estimator, x_max=None)
    got, wanted = expected_gradient(only(h), stale=True), true_gradient(kind)
    if estimator in STALE or estimator == "exact":
        assert_close(got, wanted, "gradient", atol=1e-10)
        return
    assert float((got - wanted).norm() / wanted.norm()) > 0.05, "without a ratio it is biased here"
    # a detached ratio puts it right: these are expectations over the policy's own samples
    capped = TeacherKL(coef=1.0, divergence=kind, estimator=estimator, x_max=None, ratio_cap=100.0)
    assert_close(expected_gradient(only(capped), stale=True), wanted, "gradient", atol=1e-10)


@pytest.mark.parametrize("estimator", ["detached", "ratio", "exact"])
def test_jsd_of_another_mixture(estimator):
    h = TeacherKL(coef=1.0, divergence="jsd", estimator=estimator, beta=0.2)
    assert_close(expected_gradient(only(h)), true_gradient("jsd", beta=0.2), "gradient", atol=1e-10)
    assert "0.2" in h.descends


def test_the_bound_on_x_bends_the_forward_kl():
    # x is at most pi_T(1) / pi(1), about 3.5: a bound of 10 never acts, one of 1.5 does
    wide, narrow = (expected_gradient(only(TeacherKL(1.0, "fkl", "detached", x_max=x_max))) for x_max in (10.0, 1.5))
    assert_close(wide, true_gradient("fkl"), "gradient", atol=1e-10)
    assert float((narrow - wide).abs().max()) > 1e-2


@pytest.mark.parametrize(
    "v, kind, scale",
    [
        ("dgrpo", "rkl", 0.1),
        ("kdrl", "rkl", 0.002),
        ("gap3-tc-forward-kl-jsd", "fkl", 0.01),
        ("gap4-td-gated-scheduled", "rkl", 0.002),
        ("opsd", "jsd", 1.0),
        ("gkd", "jsd", 1.0),
        ("minillm", "rkl", 1.0),
    ],
)
def test_entries_descend_what_they_say(v, kind, scale):
    assert_close(expected_gradient(variant(v)) / scale, true_gradient(kind), v, atol=1e-10)


# ---------------------------------------------------------------- the teacher in the advantage (T_B)


@pytest.mark.parametrize(
    "credit", [{"teacher_advantage": {}}, {"teacher_interpolation": {"a": 1.0}}, "teacher_on_wrong"]
)
@pytest.mark.parametrize("stale", [False, True])
def test_the_teacher_as_advantage_descends_the_reverse_kl(credit, stale):
    v = variant("opd-sampled-token", credit=[credit])
    got, z = expected_gradient(v, stale), Z_OLD if stale else Z
    # rt is taken against the policy that sampled: with an older one, the reward log pi_T - log pi_old, exactly weighted
    mine = Z.clone().requires_grad_()
    reward = Z_T.log_softmax(-1) - z.log_softmax(-1)
    wanted = torch.autograd.grad(-(mine.softmax(-1) * reward).sum(), mine)[0]
    assert_close(got, wanted, "gradient", atol=1e-10)
    if not stale:
        assert_close(got, true_gradient("rkl"), "gradient", atol=1e-10)


def test_extrapolation_descends_the_kl_to_a_tilted_teacher():
    # A + lam (lp_T - ref) - (lp - ref): KL(pi || pi_T^lam ref^(1 - lam)), whose normaliser has no gradient
    lam = 1.25
    tilted = lam * Z_T.log_softmax(-1) + (1 - lam) * Z_REF.log_softmax(-1)
    v = variant("opd-sampled-token", credit=[{"teacher_extrapolation": {"lam": lam}}])
    assert_close(expected_gradient(v), true_gradient("rkl", other=tilted), "gradient", atol=1e-10)


# ---------------------------------------------------------------- forms that agree in value and not in gradient


def literal_gradient(scale: float = 1.0) -> Tensor:
    """Of - (log pi_T - log pi), differentiated as it stands."""
    z = Z.clone().requires_grad_()
    loss = -(Z.softmax(-1) * scale * (Z_T.log_softmax(-1) - z.log_softmax(-1))).sum()
    return torch.autograd.grad(loss, z)[0]


def test_the_literal_form_has_the_value_and_no_teacher_in_its_gradient():
    assert_close(literal_gradient(), torch.zeros(V), "E grad lp = 0", atol=1e-12)
    batch = rows(Z)
    literal = -(batch.teacher_logps - batch.logps)
    right = TeacherKL(1.0, "rkl", "ratio")(batch)
    assert_close(right.value, literal, "the same value")
    assert float(expected_gradient(only(TeacherKL(1.0, "rkl", "ratio"))).abs().max()) > 0.1


def test_the_three_directions_differ_and_k3_is_not_the_kl_whose_value_it_has():
    found = {(d, e): expected_gradient(only(TeacherKL(1.0, d, e, x_max=None))) for d, e in PAIRS}
    assert_close(found["fkl", "k3"], found["fkl", "exact"], "k3", atol=1e-10)
    assert float((found["fkl", "k3"] - found["rkl", "k2"]).abs().max()) > 0.05
    assert float((found["jsd", "exact"] - found["rkl", "exact"]).abs().max()) > 0.05
    value = lambda h: float((Z.softmax(-1) * h(rows(Z)).value.squeeze(1)).sum())  # noqa: E731
    assert value(TeacherKL(1.0, "fkl", "k3")) == pytest.approx(float(true_divergence("rkl", Z, Z_T)), abs=1e-12)
    assert value(TeacherKL(1.0, "rkl", "detached")) == pytest.approx(float(true_divergence("rkl", Z, Z_T)), abs=1e-12)


@pytest.mark.parametrize("kind", ["rkl", "fkl", "jsd"])
def test_the_exact_form_is_the_divergence_in_value_too(kind):
    value = TeacherKL(1.0, kind, "exact")(rows(Z)).value
    assert_close(value, true_divergence(kind, Z, Z_T).expand(V, 1), "value", atol=1e-12)


def test_the_exact_kl_to_the_reference():
    h = {"kl": {"coef": 1.0, "estimator": "exact"}}
    assert_close(expected_gradient(only(h)), true_gradient("rkl", other=Z_REF), "gradient", atol=1e-10)
    assert_close(expected_gradient(only(h), stale=True), true_gradient("rkl", other=Z_REF), "stale", atol=1e-10)
    with pytest.raises(VariantError, match="samples no token"):
        variant("grpo", regularizers=[{"kl": {"estimator": "exact", "weight": "live"}}])


# ---------------------------------------------------------------- k1, refused and gated


def test_k1_without_a_gate_is_refused_with_the_reason():
    for gate in (
        {},
        {"token_gate": "band"},
        {"token_gate": "low_confidence"},
        {"token_gate": "sigmoid", "sharpness": 0.0},
    ):
        with pytest.raises(VariantError, match="expected gradient zero"):
            TeacherKL(estimator="k1", **gate)
    with pytest.raises(VariantError, match="expected gradient zero"):
        variant("kdrl", regularizers=[{"teacher_kl": {"estimator": "k1", "row_gate": "wrong"}}])


def unchecked(**changes: Any) -> TeacherKL:
    """SDAR's term with parameters that the hook refuses."""
    h = TeacherKL(coef=1.0, estimator="k1", token_gate="sigmoid")
    for name, value in changes.items():
        object.__setattr__(h, name, value)
    return h


@pytest.mark.parametrize("changes", [{"token_gate": "none"}, {"sharpness": 0.0}])
def test_what_is_refused_has_no_teacher_in_its_expected_gradient(changes):
    assert_close(expected_gradient(only(unchecked(**changes))), torch.zeros(V), "gradient", atol=1e-12)


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 5.0])
def test_sdar_descends_an_f_divergence(sharpness):
    # g(x) = x^b / (1 + x^b). With f(x) = x int_1^x (g(s) - 1/2) / s^2 ds, f - x f' = 1/2 - g: the gradient of
    # sum_v pi f(pi_T / pi) is E[(f - x f') grad lp] = E[-g grad lp]. The integral is done by Gauss-Legendre
    nodes, weights = _legendre(60)

    def f(x: Tensor) -> Tensor:
        s = 1 + (x.unsqueeze(-1) - 1) * (nodes + 1) / 2
        inside = (torch.sigmoid(sharpness * s.log()) - 0.5) / s**2
        return x * (inside * weights).sum(-1) * (x - 1) / 2

    z = Z.clone().requires_grad_()
    p, q = z.softmax(-1), Z_T.softmax(-1)
    wanted = torch.autograd.grad((p * f(q / p)).sum(), z)[0]
    h = TeacherKL(coef=1.0, estimator="k1", token_gate="sigmoid", sharpness=sharpness)
    assert_close(expected_gradient(only(h)), wanted, "gradient", atol=1e-10)
    assert "f-divergence" in h.descends and f"{sharpness:g}" in h.descends
    assert float(expected_gradient(only(h), teacher_logps=Z.log_softmax(-1).unsqueeze(1)).abs().max()) < 1e-12


def _legendre(n: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [-1, 1], from the eigenvalues of the Jacobi matrix (Golub and Welsch)."""
    k = torch.arange(1, n, dtype=torch.float64)
    off = k / (4 * k**2 - 1).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return values, 2 * vectors[0] ** 2


def test_a_pair_that_descends_something_else_is_refused_and_says_what():
    for kind, estimator, other in (("rkl", "k3", "fkl"), ("fkl", "k2", "rkl"), ("jsd", "ratio_k3", "rkl")):
        with pytest.raises(VariantError, match=f"gradient of {estimator} is that of {other}, not of {kind}"):
            TeacherKL(divergence=kind, estimator=estimator)


@pytest.mark.parametrize("estimator", [e for e in ESTIMATORS if e not in ("exact", "k1")])
def test_sampled_estimators_are_refused_on_what_others_wrote(estimator):
    with pytest.raises(VariantError, match="policy's own tokens"):
        TeacherKL(divergence=ESTIMATORS[estimator][0], estimator=estimator, written_by="anyone")
    h = TeacherKL(1.0, ESTIMATORS[estimator][0], estimator)
    theirs = torch.tensor([[0], [1], [2], [3], [0]])
    value = h(rows(Z, origin=theirs)).value
    assert ((value == 0).squeeze(1).tolist()) == [False, True, True, False, False]


def test_reward_of_is_finite_for_any_gap():
    gap = torch.tensor([-1e4, -30.0, 0.0, 30.0, 1e4], dtype=torch.float64)
    for kind in ("rkl", "fkl", "jsd"):
        assert torch.isfinite(reward_of(kind, gap)).all() and float(reward_of(kind, gap)[2]) == 0
    # JSD(1/2) is bounded below by -log(2) / 2
    assert float(reward_of("jsd", gap)[0]) == pytest.approx(-0.34657359)
