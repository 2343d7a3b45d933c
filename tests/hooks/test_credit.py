from __future__ import annotations

import pytest
import torch

from tests import references
from tests.batches import assert_close, build, inputs
from trl_variants import TokenBatch, VariantError, variant
from trl_variants.hooks.credit import Discount


def test_numbers_and_tool_tokens():
    # policy tokens 0, 2, 3 of four: two, one and none to come; gamma .5 of A = 8
    batch = TokenBatch.from_tensors(torch.zeros(1, 4), mask=[[1.0, 0.0, 1.0, 1.0]])
    got = Discount(gamma=0.5)(torch.tensor([[8.0]]), batch) * batch.mask
    assert got.tolist() == [[2.0, 0.0, 4.0, 8.0]]


@pytest.mark.parametrize("per_token", [False, True])
def test_equals_the_loop_reference(per_token):
    batch = build(inputs(1))
    a = torch.randn(
        len(batch.mask), batch.mask.shape[1] if per_token else 1, generator=torch.Generator().manual_seed(0)
    ).double()
    slow = references.discounted(a.expand_as(batch.mask).tolist(), batch, 0.8)
    assert_close(Discount(0.8)(a, batch) * batch.mask, torch.tensor(slow, dtype=torch.float64) * batch.mask)
    assert torch.equal((Discount(1.0)(a, batch)).expand_as(batch.mask), a.expand_as(batch.mask)), (
        "gamma 1 changes nothing"
    )


def test_credit_reaches_ratio_and_clip_as_a_token_advantage():
    batch = TokenBatch.from_tensors(torch.zeros(1, 2, requires_grad=True), advantage=[1.0])
    loss = variant("dapo", credit=[Discount(0.5)]).loss(batch)
    assert loss.advantage.tolist() == [[0.5, 1.0]]
    assert torch.autograd.grad(loss.loss, batch.logps)[0].tolist() == [[-0.25, -0.5]]


def test_range():
    with pytest.raises(VariantError, match="discount.gamma must be > 0.0 and <= 1.0"):
        Discount(1.1)
