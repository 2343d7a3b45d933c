from __future__ import annotations

import pytest
import torch

from trl_variants import Scored, TokenBatch, VariantError, hook, variant
from trl_variants.objective import score


def four() -> Scored:
    return Scored(
        torch.tensor([[1.0], [0.0], [1.0], [0.0]]),
        torch.ones(1),
        torch.tensor([0, 0, 0, 0]),
        truncated=torch.tensor([False, True, False, False]),
    )


def test_truncated_rows_stay_in_the_baseline():
    got = score(variant("dapo", select=["mask_truncated"]), four())
    assert got.keep.tolist() == [True, False, True, True]
    assert got.in_baseline.all()


def test_evaluation_does_not_select():
    assert score(variant("dapo", select=["mask_truncated"]), four(), selecting=False).keep.all()


def test_truncation_unknown_is_an_error_not_a_silent_no():
    s = four()
    s.truncated = None
    with pytest.raises(VariantError, match="`truncated`"):
        score(variant("dapo", select=["mask_truncated"]), s)


def test_a_bool_narrows_both():
    @hook("select", "test_first_three")
    def first_three(scored):
        return torch.arange(len(scored.reward)) < 3

    @hook("select", "test_last_three")
    def last_three(scored):
        return torch.arange(len(scored.reward)) > 0

    v = variant("dr-grpo", select=["test_first_three", "test_last_three"], aggregate="token_mean")
    got = score(v, four())
    assert got.keep.tolist() == got.in_baseline.tolist() == [False, True, True, False]
    # rows 1 and 2 alone: rewards 0 and 1, mean .5
    batch = TokenBatch.from_tensors(torch.zeros(4, 1, requires_grad=True), rewards=[1.0, 0.0, 1.0, 0.0])
    loss = v.loss(batch)
    assert loss.advantage.squeeze(1).tolist() == [0.0, -0.5, 0.5, 0.0]
    assert torch.autograd.grad(loss.loss, batch.logps)[0].squeeze(1).tolist() == [0.0, 0.25, -0.25, 0.0]


@pytest.mark.parametrize(
    "aggregate, denominator",
    [
        ("token_mean", 3),  # tokens that are left
        ({"token_mean": {"span": "generation"}}, 3),  # TRL counts its generation after masking
        ("sequence_sum", 2),  # rows, the dropped one included
        ({"constant": {"length": 10}}, 20),
    ],
)
def test_what_a_dropped_row_still_counts_for(aggregate, denominator):
    # |y| = 3 kept with A = 1, |y| = 2 truncated
    batch = TokenBatch.from_tensors(
        torch.zeros(2, 3, requires_grad=True),
        mask=[[1.0, 1, 1], [1.0, 1, 0]],
        rewards=[1.0, -1.0],
        truncated=[False, True],
    )
    v = variant("dr-grpo", select=["mask_truncated"], aggregate=aggregate)
    grad = torch.autograd.grad(v.loss(batch).loss, batch.logps)[0]
    assert grad[0].tolist() == pytest.approx([-1 / denominator] * 3) and not grad[1].any()
