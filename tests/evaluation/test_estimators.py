"""Estimators beside enumerations and numbers by hand; the `evaluate` modules give the same."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from trl_variants import VariantError
from trl_variants.evaluation import bootstrap, pass_at_k, wilson
from trl_variants.evaluation.estimators import powers_up_to
from trl_variants.evaluation.measure import load_metrics


@pytest.mark.parametrize("n, right, k", [(1, 0, 1), (1, 1, 1), (4, 1, 2), (5, 2, 3), (6, 5, 2), (7, 0, 7), (7, 1, 7)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, right, k):
    samples = [True] * right + [False] * (n - right)
    subsets = list(itertools.combinations(samples, k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_k_is_unbiased():
    # over all outcomes of 5 samples that are right with probability p, its mean is 1 - (1 - p)^k
    p, n, k = 0.3, 5, 3
    mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-15)


def test_wilson_by_hand():
    # 3 of 10: centre (0.3 + 3.841459/20) / 1.3841459 = 0.3555077, half 0.2477195
    found = wilson(3, 10)
    assert (found.value, found.n) == (0.3, 10)
    assert (found.low, found.high) == pytest.approx((0.1077913, 0.6032219), abs=1e-6)
    assert wilson(0, 10).low == 0.0 and wilson(0, 10).high > 0.2
    assert wilson(10, 10).high == 1.0 and wilson(10, 10).low < 0.8


def test_wilson_holds_the_truth_as_often_as_it_says():
    p, n = 0.85, 40
    held = sum(
        math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1) if wilson(c, n).low <= p <= wilson(c, n).high
    )
    assert 0.93 < held < 0.97


def test_bootstrap_is_seeded_and_close_to_the_standard_error():
    values = np.random.default_rng(0).random(200)
    a, b, c = bootstrap(values, 4, seed=1), bootstrap(values, 4, seed=1), bootstrap(values, 4, seed=2)
    assert a == b and a.low != c.low and a.value == pytest.approx(values.mean())
    half = 1.96 * values.std() / math.sqrt(200)
    assert (a.high - a.low) / 2 == pytest.approx(half, rel=0.05)


def test_bootstrap_of_equal_values_says_that_its_width_means_nothing():
    found = bootstrap([1.0, 1.0, 1.0], 8)
    assert found.low == found.high == 1.0 and found.interval.endswith("too narrow, all problems are alike")


def test_k_of_a_report():
    assert [powers_up_to(k) for k in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize(
    "call", [lambda: wilson(3, 2), lambda: wilson(0, 0), lambda: pass_at_k(2, 1, 3), lambda: bootstrap([], 1)]
)
def test_impossible_counts(call):
    with pytest.raises(VariantError):
        call()


def test_the_modules_of_evaluate_give_the_same():
    rows = [[True, False, True, True], [False] * 4, [False, False, False, True]]
    metrics = load_metrics()
    accuracy = metrics["greedy_accuracy"].compute(predictions=[True, False, True])
    assert accuracy == {"greedy accuracy": wilson(2, 3).to_mapping()}
    average = metrics["avg_at_k"].compute(predictions=rows, seed=3)
    assert average == {"avg@4": bootstrap([0.75, 0.0, 0.25], 4, 3).to_mapping()}
    passed = metrics["pass_at_k"].compute(predictions=rows)
    # 3 of 4 right: pass@2 = 1; 1 of 4: 1 - C(3,2)/C(4,2) = 0.5
    assert list(passed) == ["pass@2", "pass@4"]
    assert passed["pass@2"]["value"] == pytest.approx(1.5 / 3) and passed["pass@4"]["value"] == pytest.approx(2 / 3)
