from __future__ import annotations

import math

import pytest
import torch

from tests import references
from tests.batches import assert_close, build, gradient, inputs, leaves_of
from trl_variants import TokenBatch, VariantError
from trl_variants.hooks.base import hook_class
from trl_variants.hooks.ratio import OnPolicy, ProductRatio, SequenceRatio, SequenceTokenRatio, TokenRatio

ANCHORED = [TokenRatio, SequenceRatio, SequenceTokenRatio, ProductRatio]


def weighted(batch, table) -> torch.Tensor:
    """A scalar that sees every entry under the mask with a different weight."""
    rows, width = batch.mask.shape
    table = (
        torch.stack([torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in row]) for row in table])
        if isinstance(table, list)
        else table.expand(rows, width)
    )
    w = torch.arange(1.0, rows * width + 1, dtype=torch.float64).reshape(rows, width).sin()
    return (table * w * batch.mask).sum()


@pytest.mark.parametrize("anchor", ["old", "rollout", "sampler"])
@pytest.mark.parametrize("cls", ANCHORED)
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_the_loop_reference(cls, anchor, seed):
    batch, h = build(inputs(seed)), cls(anchor=anchor)
    got, slow = h(batch), references.log_ratios(h, batch)
    assert got.shape == ((len(batch.mask), 1) if cls in (SequenceRatio, ProductRatio) else batch.mask.shape)
    assert_close(
        got.expand_as(batch.mask) * batch.mask,
        torch.tensor([[float(torch.as_tensor(x).detach()) for x in r] for r in slow]) * batch.mask,
        "value",
        1e-7,
    )
    fast, by_loop = (gradient(weighted(batch, x), leaves_of(batch))["logps"] for x in (got, slow))
    assert_close(fast, by_loop, "gradient")
    assert fast.abs().max() > 0.1


def test_on_policy_has_value_zero_and_the_gradient_of_log_pi():
    batch = build(inputs(0))
    got = OnPolicy()(batch)
    assert not got.any()
    assert_close(torch.autograd.grad(got.sum(), batch.logps)[0], torch.ones_like(batch.logps))
    assert OnPolicy.needs == frozenset()


def test_numbers():
    # old = -1, new = -.7, -1.1, -.9: log-ratios .3, -.1, .1; mean .1, sum .3
    batch = TokenBatch.from_tensors(torch.tensor([[-0.7, -1.1, -0.9]], dtype=torch.float64), [[-1.0] * 3])
    assert TokenRatio()(batch).tolist() == [pytest.approx([0.3, -0.1, 0.1])]
    assert SequenceRatio()(batch).tolist() == [pytest.approx([0.1])]
    assert SequenceTokenRatio()(batch).tolist() == [pytest.approx([0.1] * 3)]
    assert ProductRatio()(batch).tolist() == [pytest.approx([0.3])]


def test_tool_tokens_inside_an_answer_do_not_count():
    # the middle token is the tool's: mean of .3 and .1, not of three
    batch = TokenBatch.from_tensors([[-0.7, 5.0, -0.9]], [[-1.0, -9.0, -1.0]], mask=[[1.0, 0.0, 1.0]])
    assert float(SequenceRatio()(batch)) == pytest.approx(0.2)
    assert float(ProductRatio()(batch)) == pytest.approx(0.4)


@pytest.mark.parametrize("cls", ANCHORED)
def test_without_old_logps_the_update_is_on_policy(cls):
    batch = TokenBatch.from_tensors(torch.tensor([[-0.7, -1.1]], requires_grad=True))
    log_ratio = cls()(batch)
    assert not log_ratio.any()
    assert torch.autograd.grad(log_ratio.sum(), batch.logps)[0].abs().min() > 0


def test_a_token_the_engine_could_not_score_has_ratio_one_and_keeps_its_gradient():
    logps = torch.tensor([[-0.7, -1.1]], requires_grad=True)
    batch = TokenBatch.from_tensors(logps, rollout_logps=[[-1.0, math.nan]])
    log_ratio = TokenRatio(anchor="rollout")(batch)
    assert log_ratio.tolist() == [pytest.approx([0.3, 0.0])]
    assert torch.autograd.grad(log_ratio.sum(), logps)[0].tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("cls", ANCHORED)
def test_the_anchor_names_what_is_needed(cls):
    assert cls().needs == {"old_logps"} and cls(anchor="rollout").needs == {"rollout_logps"}
    with pytest.raises(VariantError, match="`rollout_logps`"):
        cls(anchor="rollout")(TokenBatch.from_tensors([[-1.0]]))
    both = {"old_logps", "rollout_logps"}
    assert cls(anchor="sampler").needs == both and cls(anchor="sampler")(TokenBatch.from_tensors([[-1.0]])).eq(0).all()
    with pytest.raises(VariantError, match="anchor must be one of 'old', 'rollout', 'sampler', got 'older'.*mean old"):
        cls(anchor="older")
    assert hook_class("ratio", cls.hook_name) is cls
