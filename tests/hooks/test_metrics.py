from __future__ import annotations

import math

import pytest
import torch

from tests.batches import build, inputs, split
from trl_variants import TokenBatch, variant
from trl_variants.hooks.metrics import Max, Mean, Min
from trl_variants.objective import evaluate, with_advantages


def test_means_over_tokens_and_rows():
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    per_token = torch.tensor([[1.0, 2.0], [6.0, 99.0], [99.0, 99.0]])
    assert Mean.over(per_token, mask).value() == pytest.approx(9 / 3)
    assert Mean.over(torch.tensor([[1.0], [2.0], [6.0]]), mask).value() == pytest.approx(3.0)
    # row means 1.5 and 6; the row without tokens is left out
    assert Min.over_rows(per_token, mask).value() == pytest.approx(1.5)
    assert Max.over_rows(per_token, mask).value() == pytest.approx(6.0)
    assert math.isnan(Min.over_rows(per_token, torch.zeros(3, 2)).value())
    assert Mean.over(per_token, torch.zeros(3, 2)).value() == 0.0


@pytest.mark.parametrize("name", ["dapo", "gspo", "gmpo"])
def test_merging_over_any_split_gives_the_window_s_metric(name):
    v = variant(name, regularizers=[{"kl": {"coef": 0.1}}])
    whole = with_advantages(v, build(inputs(3)))
    together = evaluate(v, whole).parts
    pieces = [
        evaluate(v, p).parts for p in split(whole, [[0, 1, 2], list(range(3, 9)), list(range(9, len(whole.mask)))])
    ]
    for key, metric in together.items():
        parts = [p[key] for p in pieces]
        if isinstance(metric, Mean):
            merged = sum(float(p.total) for p in parts) / sum(float(p.count) for p in parts)
        else:
            pick = min if isinstance(metric, Min) else max
            merged = pick(p.value() for p in parts if not math.isnan(p.value()))
        assert merged == pytest.approx(metric.value()), key
    assert {"kl", "ratio/mean", "ratio/second_moment", "clip_ratio/low_mean", "clip_ratio/high_max"} <= set(together)


def test_clip_metrics_by_hand():
    # row 0: r = 1.5, 1, 1 with A = 1 -> high 1/3; row 1: r = .5, 1 with A = -1 -> low 1/2
    r = torch.tensor([[1.5, 1.0, 1.0], [0.5, 1.0, 1.0]])
    batch = TokenBatch.from_tensors(torch.zeros(2, 3), -r.log(), mask=[[1.0, 1, 1], [1, 1, 0]], advantage=[1.0, -1.0])
    m = variant("dapo").loss(batch).metrics
    assert (
        m["clip_ratio/low_mean"],
        m["clip_ratio/high_mean"],
        m["clip_ratio/region_mean"],
    ) == pytest.approx((1 / 5, 1 / 5, 2 / 5))
    assert (m["clip_ratio/low_min"], m["clip_ratio/high_max"]) == pytest.approx((0.0, 1 / 3))
    assert m["ratio/mean"] == pytest.approx((1.5 + 1 + 1 + 0.5 + 1) / 5)
