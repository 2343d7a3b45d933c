from __future__ import annotations

import json
import math

import pytest
import torch
import yaml

from tests import references
from tests.batches import assert_close, build, by_coefficients, gradient, inputs, leaves_of, split
from trl_variants import TokenBatch, VariantError, variant
from trl_variants.hooks.regularizers import KL, AdaptiveEntropy, EntropyBonus, PositiveNLL, kl_estimate
from trl_variants.objective import evaluate, with_advantages

TERMS = [
    KL(0.5),
    KL(0.5, "k2"),
    KL(0.5, "k3", "live"),
    KL(0.5, "k2", "detached"),
    KL(0.5, "k1", "live"),
    KL(0.5, "k2", own_token_mean=True),
    EntropyBonus(0.5),
    AdaptiveEntropy(0.5, target=1.0),
    PositiveNLL(0.5),
]


@pytest.mark.parametrize("host", ["grpo", "dapo", "gspo", "dr-grpo"])
@pytest.mark.parametrize("h", TERMS, ids=repr)
def test_equals_the_loop_reference(h, host):
    v = variant(host, regularizers=[h])
    batch = build(inputs(7))
    states = {"regularizers.0": {"coef": 0.3, "last_entropy": 0.9}} if v.stateful else None
    loss = v.loss(batch, states)
    active = [[m > 0 for m in row] for row in batch.mask.tolist()]
    slow = references.regularizer(
        h, v, batch, references.log_ratios(v.ratio, batch), active, (states or {}).get("regularizers.0")
    )
    [term] = [x for name, x in loss.terms.items() if name != "policy"]
    assert_close(term, slow, "term")
    leaves = leaves_of(batch)
    grads = gradient(term, leaves)
    assert_close(grads, gradient(slow, leaves), "gradient")
    assert max(float(g.abs().max()) for g in grads.values()) > 1e-3
    assert_close(loss.loss, loss.terms["policy"] + term, "the loss is the sum of its terms")


def test_several_terms_are_told_apart():
    batch = build(inputs(7))
    terms = variant("dapo", regularizers=[KL(0.1), EntropyBonus(0.1), KL(0.2, "k2")]).loss(batch).terms
    assert list(terms) == ["policy", "kl", "entropy_bonus", "regularizers.2"]


def test_estimators():
    # d = .5: .5, .125, e^-.5 - .5 = .106531; d = -.5: -.5, .125, .148721
    d = torch.tensor([0.5, -0.5], dtype=torch.float64)
    for estimator, wanted in (("k1", [0.5, -0.5]), ("k2", [0.125, 0.125]), ("k3", [0.106531, 0.148721])):
        assert kl_estimate(d, estimator).tolist() == pytest.approx(wanted, abs=6e-7)
    assert torch.isfinite(kl_estimate(torch.tensor([-1e6, 1e6]), "k3")).all(), "a drifted reference cannot overflow k3"


@pytest.mark.parametrize("weight", ["none", "detached"])
def test_k1_as_a_loss_is_refused(weight):
    with pytest.raises(VariantError, match="expected gradient zero"):
        KL(0.1, "k1", weight)
    assert KL(0.1, "k1", "live").descends == "reverse KL(pi || ref)"


def test_what_each_estimator_descends():
    assert (KL(estimator="k2").descends, KL(estimator="k3").descends) == (
        "reverse KL(pi || ref)",
        "forward KL(ref || pi)",
    )
    assert KL(estimator="k3", weight="live").descends == "reverse KL(pi || ref)"


def test_kl_is_reported_per_token():
    batch = TokenBatch.from_tensors([[-1.0, -1.0]], ref_logps=[[-1.5, -1.0]], advantage=[0.0])
    assert variant("grpo").loss(batch).metrics["kl"] == pytest.approx(0.106531 / 2, abs=6e-7)


# ---------------------------------------------------------------- entropy


def test_selected_tokens_are_the_ones_the_bonus_acts_on():
    # entropies 1, 2, 3, 4, keep .5: the bonus is the mean of 3 and 4; the KL still acts on all four
    batch = TokenBatch.from_tensors(
        torch.zeros(1, 4), ref_logps=torch.full((1, 4), -0.5), entropy=[[1.0, 2.0, 3.0, 4.0]], advantage=[1.0]
    )
    v = variant("dapo", weight=[{"entropy_quantile": {"keep": 0.5}}], regularizers=[EntropyBonus(1.0), KL(1.0, "k2")])
    terms = v.loss(batch).terms
    assert float(terms["entropy_bonus"]) == pytest.approx(-3.5)
    assert float(terms["kl"]) == pytest.approx(0.125)
    assert float(terms["policy"]) == pytest.approx(-0.5)


def test_the_bonus_of_selected_tokens_in_a_micro_batch():
    # TRL: mean over the selected tokens of the micro-batch, over the number of micro-batches: (2 + 4) / 2
    batch = TokenBatch.from_tensors(torch.zeros(2, 2), entropy=[[1.0, 2.0], [3.0, 4.0]], advantage=[1.0, 1.0])
    h = {"entropy_bonus": {"coef": 1.0, "span": "micro-batch"}}
    v = variant("dapo", weight=[{"entropy_quantile": {"keep": 0.5, "span": "micro-batch"}}], regularizers=[h])
    shares = [evaluate(v, p).terms["entropy_bonus"] for p in split(batch, [[0], [1]])]
    assert [float(s) for s in shares] == pytest.approx([-1.0, -2.0])


def trl_controller(entropies, coef, target, step, low, high):
    """TRL 1.16, `_compute_loss`: the coefficient applied in each window and the state after it."""
    last, out = math.inf, []
    for h in entropies:
        applied = coef if last <= target else 0.0
        if h <= target:
            coef = min(coef + step, high)
        else:
            coef = max(coef - step, low)
        last = h
        out.append((applied, coef, last))
    return out


def follow(h: AdaptiveEntropy, entropies, windows=2):
    """Runs the hook as a trainer does: the same state in every micro-batch, one update per window."""
    v, state, out = variant("dapo", regularizers=[h]), None, []
    for mean_entropy in entropies:
        state = h.init() if state is None else state
        before = json.dumps(state)
        # four rows of different lengths; token entropies differ, their window mean is `mean_entropy`
        mask = torch.tensor([[1.0, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]], dtype=torch.float64)
        spread = torch.tensor([[1.0, -1, 0], [2, 9, 9], [-1, -1, 9], [0, 1, -1]], dtype=torch.float64) * 0.01
        batch = TokenBatch.from_tensors(
            torch.zeros_like(mask), mask=mask, advantage=torch.zeros(4), entropy=spread + mean_entropy
        )
        total = torch.zeros(2, dtype=torch.float64)
        applied = set()
        for piece in split(batch, [[0, 1], [2, 3]] if windows == 2 else [[0, 1, 2, 3]]):
            result = evaluate(v, piece, {"regularizers.0": state})
            seen = result.stats["regularizers.0"]["entropy"]
            total += torch.tensor([float(seen.total), float(seen.count)])
            share = float(result.terms["adaptive_entropy"]) / float((piece.entropy * piece.mask).sum() / 9)
            applied.add(round(-share, 9))
        assert json.dumps(state) == before, "calling a hook never changes its state"
        [one] = applied
        state = h.update(state, {"entropy": float(total[0] / total[1])})
        out.append((one, state["coef"], state["last_entropy"]))
    return out


@pytest.mark.parametrize(
    "entropies, params",
    [
        ([0.15, 0.15, 0.25, 0.1, 0.1], {"step": 1e-4}),
        ([0.5, 0.1, 0.1, 0.1, 0.5, 0.5, 0.5], {"coef": 0.01, "step": 0.005, "max": 0.018, "min": 0.004}),
        ([0.2001, 0.1999, 0.1999], {"coef": 0.1}),
    ],
)
@pytest.mark.parametrize("windows", [1, 2])
def test_adaptive_entropy_follows_trl_s_rule(entropies, params, windows):
    h = AdaptiveEntropy(**params)
    wanted = trl_controller(entropies, h.coef, h.target, h.step, h.min, h.max)
    for got, expected in zip(follow(h, entropies, windows), wanted, strict=True):
        assert got == pytest.approx(expected, abs=1e-6)


def test_adaptive_entropy_at_the_target_counts_as_below():
    h = AdaptiveEntropy(coef=0.1, target=0.2, step=0.01)
    assert h.update(h.init(), {"entropy": 0.2})["coef"] == pytest.approx(0.11)
    batch = TokenBatch.from_tensors(torch.zeros(1, 1), entropy=[[2.0]])
    assert h(batch, {"coef": 0.1, "last_entropy": 0.2}).coefficient == 0.1
    assert h(batch, {"coef": 0.1, "last_entropy": 0.2001}).coefficient == 0.0


def test_adaptive_entropy_numbers():
    # atlas, D = 1e-4, target .2: 1e-4, 2e-4, 1e-4, 2e-4; applied one window late: 0, 1e-4, 2e-4, 0
    got = follow(AdaptiveEntropy(step=1e-4), [0.15, 0.15, 0.25, 0.1])
    assert [c for _, c, _ in got] == pytest.approx([1e-4, 2e-4, 1e-4, 2e-4])
    assert [a for a, _, _ in got] == pytest.approx([0.0, 1e-4, 2e-4, 0.0], abs=1e-8)


def test_adaptive_entropy_reaches_its_bound_and_stays():
    h = AdaptiveEntropy(step=0.25, max=0.6)
    state = h.init()
    trail = []
    for _ in range(5):
        state = h.update(state, {"entropy": 0.0})
        trail.append(state["coef"])
    assert trail == pytest.approx([0.25, 0.5, 0.6, 0.6, 0.6])


def test_adaptive_entropy_measures_the_selected_tokens_of_the_window():
    v = variant(
        "dapo",
        weight=[{"entropy_quantile": {"keep": 0.5, "span": "micro-batch"}}],
        regularizers=[{"adaptive_entropy": {"span": "micro-batch"}}],
    )
    batch = TokenBatch.from_tensors(torch.zeros(1, 4), entropy=[[1.0, 2.0, 3.0, 4.0]], advantage=[1.0])
    assert v.loss(batch).stats["regularizers.0"]["entropy"].value() == pytest.approx(3.5)


def test_state_survives_yaml_of_the_variant_and_json():
    v = variant("grpo", regularizers=[{"adaptive_entropy": {"coef": 0.01}}])
    assert list(v.stateful) == ["regularizers.0"]
    assert variant(yaml.safe_load(yaml.safe_dump(v.to_mapping()))) == v
    state = v.stateful["regularizers.0"].init()
    assert json.loads(json.dumps(state)) == state == {"coef": 0.01, "last_entropy": math.inf}


# ---------------------------------------------------------------- nll


def test_nll_counts_the_correct_tokens_of_the_whole_window():
    v = variant("dapo", regularizers=[PositiveNLL(1.0)])
    assert v.scope == "window"
    given = inputs(7)
    loss, c = by_coefficients(v, given)
    batch = build(given)
    right = batch.mask * batch.scored.correct.double()[:, None]
    # d/dlp of the term: -1 / (correct tokens) on each of them
    plain = by_coefficients(variant("dapo"), given)[1]["logps"]
    assert_close(c["logps"] - plain, -right / right.sum(), "gradient of the term")
    # in a part of the window the count is unknown: the term is NaN rather than wrong
    piece = split(with_advantages(v, batch), [[i for i in range(len(right)) if i % 2 == k] for k in range(2)])[0]
    assert torch.isnan(evaluate(v, piece).terms["nll"])


def test_nll_without_a_correct_row_is_zero_and_without_correctness_an_error():
    v = variant("dapo", regularizers=[PositiveNLL(1.0)])
    none = TokenBatch.from_tensors(torch.zeros(2, 2), advantage=[0.0, 0.0], correct=[False, False])
    assert float(v.loss(none).loss) == 0.0
    with pytest.raises(VariantError, match="`correct`"):
        v.loss(TokenBatch.from_tensors(torch.zeros(2, 2), advantage=[0.0, 0.0]))
