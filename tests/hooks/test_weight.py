from __future__ import annotations

import math

import pytest
import torch

from tests import references
from tests.batches import assert_close, build, inputs
from trl_variants import TokenBatch, VariantError, hook, variant
from trl_variants.hooks.weight import EntropyQuantile, OffPolicySequenceMask, SamplerCorrection, exact_quantile

MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
BOUNDS = [(None, 3.0), (None, 1.1), (0.9, 1.2), (0.9, None), (None, None)]


def reference(h, batch, advantage):
    return torch.tensor(references.weight(h, batch, advantage.expand_as(batch.mask).tolist()), dtype=torch.float64)


@pytest.mark.parametrize("low, high", BOUNDS)
@pytest.mark.parametrize("mode", MODES)
def test_sampler_correction_equals_the_loop_reference(mode, low, high):
    batch, h = build(inputs(4)), SamplerCorrection(mode, low, high)
    got = h(batch)
    assert got.shape == ((len(batch.mask), 1) if mode.startswith("sequence") else batch.mask.shape)
    assert not got.requires_grad and torch.isfinite(got).all()
    slow = reference(h, batch, torch.zeros(len(batch.mask), 1))
    assert_close(got * batch.mask, slow * batch.mask)
    if high == 1.1 or low:  # a product above 3 is rare
        assert not torch.equal(got, SamplerCorrection(mode, None, None)(batch)), "the bounds act on this batch"


def test_sampler_correction_without_a_sampler_or_a_score():
    assert SamplerCorrection()(TokenBatch.from_tensors([[-1.0, -2.0]])).tolist() == [[1.0]]
    batch = TokenBatch.from_tensors([[-1.0, -2.0]], rollout_logps=[[math.nan, -2.5]])
    assert SamplerCorrection("token_truncate")(batch).tolist() == [pytest.approx([1.0, math.exp(0.5)])]
    assert float(SamplerCorrection("sequence_mask")(batch)) == pytest.approx(math.exp(0.5))


def test_a_stray_engine_log_prob_cannot_overflow_an_unbounded_correction():
    batch = TokenBatch.from_tensors([[-1.0] * 4], rollout_logps=[[-900.0] * 4])
    for mode in MODES:
        assert torch.isfinite(SamplerCorrection(mode, None, None)(batch)).all()
    assert float(SamplerCorrection("sequence_mask", None, 3.0)(batch)) == 0.0
    assert float(SamplerCorrection("sequence_truncate", None, 3.0)(batch)) == 3.0


def test_a_dropped_answer_still_counts_in_the_denominator():
    # W = e^1 > 2 drops row 0; the token mean still divides by 4
    batch = TokenBatch.from_tensors(
        torch.full((2, 2), -1.0), rollout_logps=[[-1.5, -1.5], [-1.0, -1.0]], advantage=[1.0, 1.0]
    )
    loss = variant("dapo", weight=[{"sampler_correction": {"max": 2.0}}]).loss(batch)
    assert float(loss.loss) == pytest.approx(-2 / 4)
    assert loss.metrics["weight/sampler_correction_mean"] == pytest.approx(0.5)


@pytest.mark.parametrize("seed", [0, 4])
@pytest.mark.parametrize("sampler", [True, False])
@pytest.mark.parametrize("threshold", [0.0, 0.05])
def test_off_policy_mask_equals_the_loop_reference(threshold, sampler, seed):
    batch = build(inputs(seed), **({} if sampler else {"rollout_logps": None}))
    batch.advantage = torch.randn(len(batch.mask), 1, generator=torch.Generator().manual_seed(1)).double()
    h = OffPolicySequenceMask(threshold)
    got = h(batch)
    assert got.shape == (len(batch.mask), 1) and not got.requires_grad
    assert_close(got * batch.mask, reference(h, batch, batch.advantage) * batch.mask)
    assert 0 < float(got.sum()) < len(batch.mask), "some go, some stay"
    assert got[batch.advantage >= 0].all(), "a positive answer is never dropped"


def test_off_policy_mask_numbers():
    # atlas: drifts .6333 and .0667 against a threshold of .5
    logps = torch.tensor([[-1.2, -1.9, -2.8], [-1.0, -1.1, -2.1]]).double()
    for advantage, wanted in (([-1.0, -1.0], [0, 1]), ([1.0, 1.0], [1, 1]), ([0.0, 0.0], [1, 1])):
        batch = TokenBatch.from_tensors(logps, [[-1.0, -1.0, -2.0]] * 2, advantage=advantage)
        assert OffPolicySequenceMask(0.5)(batch).squeeze(1).tolist() == wanted
    exactly = TokenBatch.from_tensors([[-1.5]], [[-1.0]], advantage=[-1.0])
    assert float(OffPolicySequenceMask(0.5)(exactly)) == 1.0, "at the threshold a row stays"


@pytest.mark.parametrize("keep", [0.1, 0.2, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("seed", [0, 4])
def test_entropy_quantile_equals_the_loop_reference(keep, seed):
    batch, h = build(inputs(seed)), EntropyQuantile(keep)
    got = h(batch)
    assert_close(got, reference(h, batch, torch.zeros(len(batch.mask), 1)))
    share = float(got.sum() / batch.mask.sum())
    assert abs(share - keep) <= 1 / float(batch.mask.sum()), "within one token"


def test_entropy_quantile_numbers_and_ties():
    # atlas: ten tokens, keep .2: position .8 * 9 = 7.2 of the sorted values: .7 + .2 * (1.5 - .7) = .86
    h = [0.1, 2, 0.3, 1.5, 0.2, 0.05, 0.6, 0.4, 0.01, 0.7]
    batch = TokenBatch.from_tensors(torch.zeros(1, 10), entropy=[h])
    assert EntropyQuantile(0.2)(batch).squeeze(0).nonzero().squeeze(1).tolist() == [1, 3]
    assert float(exact_quantile(torch.tensor(h), 0.8)) == pytest.approx(0.86)
    same = TokenBatch.from_tensors(torch.zeros(1, 4), entropy=[[0.5] * 4])
    assert EntropyQuantile(0.2)(same).sum() == 4, "ties at the threshold all stay"


def test_masked_tokens_and_other_processes_take_part_as_they_should():
    # the tool's token has the highest entropy and neither counts nor is chosen
    batch = TokenBatch.from_tensors(torch.zeros(1, 3), mask=[[1.0, 0.0, 1.0]], entropy=[[0.2, 9.0, 0.1]])
    assert EntropyQuantile(0.5, "micro-batch")(batch).tolist() == [[1.0, 0.0, 0.0]]
    # tokens of another process lift the threshold above everything here
    batch.gather = lambda x: torch.cat([x, torch.tensor([5.0] * 8)])
    assert not EntropyQuantile(0.5, "micro-batch")(batch).any()
    nothing = TokenBatch.from_tensors(torch.zeros(1, 2), mask=torch.zeros(1, 2), entropy=torch.zeros(1, 2))
    assert not EntropyQuantile(0.5)(nothing).any()


def test_float64_entropy_is_not_compared_with_a_float32_threshold():
    # 0.1 is larger as a float32: compared with its own rounded value the token would drop out
    batch = TokenBatch.from_tensors(torch.zeros(1, 2, dtype=torch.float64), entropy=[[0.1, 0.7]])
    assert EntropyQuantile(1.0)(batch).tolist() == [[1.0, 1.0]]


def test_quantile_beyond_torch_s_limit():
    n = (1 << 24) + 2  # torch.quantile refuses more than 16 million values; 0, 1, 2, ... backwards
    assert float(exact_quantile(torch.arange(n, dtype=torch.float64).flip(0), 0.8)) == pytest.approx(0.8 * (n - 1))


def test_scopes():
    assert EntropyQuantile().scope == "window" and EntropyQuantile(span="micro-batch").scope == "local"
    assert variant("dapo", weight=[EntropyQuantile()]).scope == "window"
    assert variant("dapo", weight=[EntropyQuantile(span="micro-batch")]).scope == "local"


@pytest.mark.parametrize("selects", [True, False])
def test_a_weight_in_the_denominator(selects):
    """`in_denominator`: tokens with weight 0 leave the count, the others count as one."""
    label = f"test_in_denominator_{selects}"

    @hook("weight", label)
    class Half:
        """Weights 0 and 1, or 0 and 2."""

        def __call__(self, batch):
            return torch.tensor([[1.0, 0.0, 1.0, 0.0]]) * (1.0 if selects else 2.0)

    Half.selects, Half.in_denominator = selects, True
    batch = TokenBatch.from_tensors(torch.zeros(1, 4, requires_grad=True), advantage=[1.0])
    v = variant("dapo", weight=[label])
    loss = v.loss(batch)
    # two tokens are left: (1 + 1) / 2, and with weight 2 (2 + 2) / 2
    assert float(loss.loss) == pytest.approx(-1.0 if selects else -2.0)
    assert torch.autograd.grad(loss.loss, batch.logps)[0].tolist() == [
        [-0.5, 0.0, -0.5, 0.0] if selects else [-1.0, 0.0, -1.0, 0.0]
    ]
    assert v.scope == "window"


def test_several_weights_multiply_in_order():
    batch = TokenBatch.from_tensors(
        torch.full((1, 2), -1.0), [[-1.0, -1.0]], rollout_logps=[[-1.5, -1.0]], advantage=[-1.0]
    )
    v = variant(
        "dapo",
        weight=[{"sampler_correction": {"mode": "token_truncate"}}, {"off_policy_mask": {"threshold": 0.0}}],
    )
    # mean drift of the sampler (-.5 + 0) / 2 <= 0 keeps the row: e^.5 and 1
    assert v.loss(batch).objective.tolist() == [pytest.approx([-math.exp(0.5), -1.0])]


@pytest.mark.parametrize(
    "build_hook, message",
    [
        (lambda: SamplerCorrection("token_clip"), "sampler_correction.mode must be one of"),
        (lambda: SamplerCorrection(min=3.0, max=2.0), "sampler_correction.min 3.0 must be below max 2.0"),
        (lambda: EntropyQuantile(0.0), "entropy_quantile.keep must be > 0.0 and <= 1.0"),
        (
            lambda: EntropyQuantile(span="batch"),
            "did you mean micro-batch|must be one of 'window', 'micro-batch'",
        ),
    ],
)
def test_wrong_parameters(build_hook, message):
    with pytest.raises(VariantError, match=message):
        build_hook()
