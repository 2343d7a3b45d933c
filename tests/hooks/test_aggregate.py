from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import references
from tests.batches import assert_close, build, inputs, random_parts, split
from trl_variants import TokenBatch, VariantError
from trl_variants.hooks.aggregate import ConstantLength, PromptMean, SequenceMean, SequenceSum, TokenMean

EXACT = [
    TokenMean(),
    SequenceMean(),
    SequenceMean("live"),
    SequenceSum(),
    ConstantLength(),
    ConstantLength(5),
    PromptMean(),
]


def values(batch: TokenBatch, per_row: bool) -> torch.Tensor:
    g = torch.Generator().manual_seed(8)
    return torch.randn(
        len(batch.mask),
        1 if per_row else batch.mask.shape[1],
        generator=g,
        dtype=torch.float64,
        requires_grad=True,
    )


@pytest.mark.parametrize("per_row", [False, True], ids=["(B, T)", "(B, 1)"])
@pytest.mark.parametrize("h", EXACT, ids=repr)
def test_equals_the_loop_reference(h, per_row):
    batch = build(inputs(6))
    x = values(batch, per_row)
    got = h(x, batch)
    slow = references.aggregate(
        h, [[x[i, 0 if per_row else t] for t in range(batch.mask.shape[1])] for i in range(len(x))], batch
    )
    assert_close(got, slow, "value")
    assert_close(torch.autograd.grad(got, x)[0], torch.autograd.grad(slow, x)[0], "gradient")


@pytest.mark.parametrize("h", EXACT, ids=repr)
def test_shares_of_any_split_add_up(h):
    batch = replace(build(inputs(6)), advantage=torch.zeros(13, 1))
    x = values(batch, False)
    for count in (2, 13):
        parts = random_parts(len(x), count, count)
        total = sum(h(x[torch.tensor(p)], piece) for p, piece in zip(parts, split(batch, parts), strict=True))
        assert_close(total, h(x, batch), f"{count} parts")


# two rows, |y| = 2 and 4, values 1 and 10, one prompt each
@pytest.mark.parametrize(
    "h, wanted",
    [
        (TokenMean(), (2 * 1 + 4 * 10) / 6),
        (SequenceMean(), (1 + 10) / 2),
        (SequenceSum(), (2 + 40) / 2),
        (ConstantLength(), 42 / (2 * 8)),  # the run's max_completion_length
        (ConstantLength(length=3), 42 / (2 * 3)),
        (PromptMean(), (1 + 10) / 2),
    ],
    ids=repr,
)
def test_numbers(h, wanted):
    mask = [[1.0, 1.0, 0.0, 0.0], [1.0] * 4]
    batch = TokenBatch.from_tensors(torch.zeros(2, 4), mask=mask, group=[0, 1], max_completion_length=8)
    assert float(h(torch.tensor([[1.0], [10.0]]), batch)) == pytest.approx(wanted)


def test_rows_without_tokens():
    # a third, empty row: "all" divides by 3, "live" by 2; tokens and prompts do not notice it
    mask = [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    batch = TokenBatch.from_tensors(torch.zeros(3, 2), mask=mask, group=[0, 1, 2])
    x = torch.tensor([[1.0], [10.0], [777.0]])
    wanted = {
        SequenceMean(): 11 / 3,
        SequenceMean("live"): 11 / 2,
        TokenMean(): 12 / 3,
        PromptMean(): 11 / 2,
        SequenceSum(): 12 / 3,
    }
    for h, value in wanted.items():
        assert float(h(x, batch)) == pytest.approx(value), h


def test_a_window_of_nothing_is_zero():
    batch = TokenBatch.from_tensors(torch.zeros(2, 2), mask=torch.zeros(2, 2))
    for h in [*EXACT, TokenMean("generation"), TokenMean("micro-batch")]:
        assert float(h(torch.ones(2, 2), batch)) == 0.0


def test_spans_of_the_token_mean():
    # four rows in two micro-batches, |y| = 1, 3 | 2, 2; the second pair comes from a generation with 16
    # tokens per window, the first pair from one with 8. Value 1 everywhere.
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 0]]).double()
    batch = TokenBatch.from_tensors(torch.zeros(4, 3, dtype=torch.float64), mask=mask, advantage=torch.zeros(4))
    batch.generation_tokens = torch.tensor([8.0, 8.0, 16.0, 16.0])
    pieces = split(batch, [[0, 1], [2, 3]])
    share = lambda span: [float(TokenMean(span)(torch.ones(2, 1).double(), p)) for p in pieces]  # noqa: E731
    assert share("window") == pytest.approx([4 / 8, 4 / 8])
    assert share("generation") == pytest.approx([4 / 8, 4 / 16])
    assert share("micro-batch") == pytest.approx([4 / 4 / 2, 4 / 4 / 2])


def test_micro_batch_span_depends_on_the_split_by_definition():
    # value 10 on the row of 1 token, 1 on the row of 4: together 14/5, apart (10 + 1) / 2
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]]).double()
    batch = TokenBatch.from_tensors(torch.zeros(2, 4, dtype=torch.float64), mask=mask, advantage=torch.zeros(2))
    x = torch.tensor([[10.0], [1.0]]).double()
    h = TokenMean("micro-batch")
    assert float(h(x, batch)) == pytest.approx(14 / 5)
    assert sum(float(h(x[i : i + 1], p)) for i, p in enumerate(split(batch, [[0], [1]]))) == pytest.approx(5.5)


def test_constant_without_a_length():
    with pytest.raises(VariantError, match="max_completion_length"):
        ConstantLength()(torch.ones(1, 1), TokenBatch(torch.zeros(1, 1), torch.ones(1, 1)))
    with pytest.raises(VariantError, match="constant.length must be > 0, got 0"):
        ConstantLength(length=0)
