from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.batches import NAN, assert_close, build, inputs, split
from trl_variants import Run, Scored, TokenBatch, VariantError, variant
from trl_variants.objective import with_advantages
from trl_variants.records import LOG_RATIO_BOUND, bounded_exp, column, masked_mean, weighted_sum


def test_log_ratios_are_bounded_before_exp():
    x = torch.tensor([-1e9, -1.0, 0.0, 1e9], requires_grad=True)
    y = bounded_exp(x)
    assert y.tolist() == pytest.approx([math.exp(-LOG_RATIO_BOUND), math.exp(-1), 1.0, math.exp(LOG_RATIO_BOUND)])
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == pytest.approx([0.0, math.exp(-1), 1.0, 0.0])


def test_small_helpers():
    assert column(torch.zeros(3)).shape == (3, 1) and column(torch.zeros(3, 2)).shape == (3, 2)
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    assert masked_mean(torch.tensor([[1.0, 3.0], [5.0, 9.0], [7.0, 7.0]]), mask).tolist() == [
        [2.0],
        [5.0],
        [0.0],
    ]


def test_weighted_sum_leaves_out_what_does_not_apply():
    # 1*2 + .5*4; only the second; none
    got = weighted_sum(torch.tensor([[2.0, 4.0], [NAN, 4.0], [NAN, NAN]]), torch.tensor([1.0, 0.5]))
    assert got[:2].tolist() == [4.0, 2.0] and math.isnan(float(got[2]))


def test_scored_fills_in_reward_and_flags():
    s = Scored(torch.tensor([[1.0], [0.2], [NAN]]), torch.ones(1), torch.tensor([0, 0, 0]))
    assert s.correct.tolist() == [True, False, False] and s.keep.all() and s.in_baseline.all()
    assert s.valid.tolist() == [True, True, False]
    s = s.with_(in_baseline=torch.tensor([True, False, True]))
    assert s.valid.tolist() == [True, False, False]
    doubled = s.with_(rewards=2 * s.rewards)
    assert doubled.reward[0] == 2.0 and s.reward[0] == 1.0
    assert s.with_(rewards=2 * s.rewards, reward=s.reward).reward[0] == 1.0
    with pytest.raises(VariantError, match="`values` per token"):
        s.need("values")


def test_window_totals_of_a_whole_batch():
    # |y| = 2, 0, 1, 3 in groups 4, 4, 7, 9; group 5 has no token at all
    mask = [[1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]]
    batch = TokenBatch.from_tensors(torch.zeros(5, 3), mask=torch.tensor(mask), group=[4, 4, 7, 9, 5])
    w = batch.window
    assert (w.rows, w.live_rows, w.tokens, w.prompts, w.micro_batches) == (5, 3, 6, 3, 1)
    assert batch.prompt_tokens.tolist() == [2, 2, 1, 3, 0]
    assert batch.generation_tokens.tolist() == batch.micro_tokens.tolist() == [6.0] * 5
    assert batch.whole and batch.mask.dtype == batch.logps.dtype


def test_recounting_under_another_mask():
    batch = replace(build(inputs(0)), advantage=torch.zeros(13, 1))
    half = batch.mask.clone()
    half[:, ::2] = 0
    counted = batch.with_mask(half)
    assert counted.window.tokens == float(half.sum()) and counted.window.rows == 13
    assert counted.generation_tokens.tolist() == counted.micro_tokens.tolist() == [float(half.sum())] * 13
    assert batch.window.tokens == float(batch.mask.sum()), "the batch itself is as it was"
    # a part only knows its own micro-batch, and the number of micro-batches
    piece = split(batch, [[0, 1, 2], list(range(3, 13))])[0].with_mask(half[[0, 1, 2]])
    assert (
        math.isnan(piece.window.tokens) and math.isnan(piece.window.rows) and torch.isnan(piece.generation_tokens).all()
    )
    assert piece.micro_tokens.tolist() == [float(half[[0, 1, 2]].sum())] * 3 and piece.window.micro_batches == 2
    # in a window of several generations the tokens per generation are not known either
    batch.generation_tokens = torch.arange(1.0, 14.0)
    assert torch.isnan(batch.with_mask(half).generation_tokens).all()


def test_from_tensors_of_lists_and_one_row():
    batch = TokenBatch.from_tensors([-1.0, -2.0], old_logps=[-1.5, -1.0], advantage=[1.0], entropy=[0.1, 0.2])
    assert batch.logps.shape == batch.old_logps.shape == batch.mask.shape == batch.entropy.shape == (1, 2)
    assert batch.advantage.tolist() == [[1.0]] and batch.run == Run(max_completion_length=2, group_size=1)
    assert TokenBatch.from_tensors([[-1]]).logps.is_floating_point()


def test_from_tensors_keeps_the_precision_of_the_log_probs():
    logps = torch.tensor([[-0.7]], dtype=torch.float64)
    batch = TokenBatch.from_tensors(logps, old_logps=[[-0.7]], advantage=[0.1], rewards=[[0.3]], reward_weights=[0.1])
    assert float(batch.old_logps) == -0.7 and float(batch.advantage) == 0.1
    assert float(batch.scored.rewards) == 0.3 and float(batch.scored.weights) == 0.1


def test_from_tensors_takes_correctness_with_and_without_rewards():
    assert TokenBatch.from_tensors(torch.zeros(2, 1), advantage=[0, 0], correct=[True, False]).correct.tolist() == [
        True,
        False,
    ]
    with_both = TokenBatch.from_tensors(torch.zeros(2, 1), rewards=[0.9, 0.1], correct=[False, True])
    assert with_both.correct.tolist() == [False, True]
    assert TokenBatch.from_tensors(torch.zeros(2, 1), rewards=[0.9, 0.1]).correct.tolist() == [True, False]


@pytest.mark.parametrize(
    "given, message",
    [
        ({"old_logps": [[-1.0]]}, r"old_logps has shape \(1, 1\), expected \(2, 3\) to fit logps \(2, 3\)"),
        ({"mask": [1.0, 1.0, 1.0]}, r"mask has shape \(3,\), expected \(2, 3\)"),
        ({"advantage": [1.0]}, r"advantage has shape \(1,\), expected \(2,\) or \(2, 3\)"),
        ({"rewards": [1.0]}, "rewards has 1 rows, logps has 2"),
        ({"group": [0, 0, 0]}, r"group has shape \(3,\), expected \(2,\)"),
        ({"entropie": 1}, "TokenBatch.from_tensors has no argument 'entropie'"),
    ],
)
def test_from_tensors_says_what_does_not_fit(given, message):
    with pytest.raises(VariantError, match=message):
        TokenBatch.from_tensors(torch.zeros(2, 3), **given)


def test_need_looks_in_extra_too():
    batch = TokenBatch.from_tensors(torch.zeros(2, 1), extra={"teacher_margin": [1.0, 2.0]})
    assert batch.need("teacher_margin").tolist() == [1.0, 2.0]
    with pytest.raises(VariantError, match="`ref_logps`.*pass ref_logps= to TokenBatch.from_tensors"):
        batch.need("ref_logps")


def test_the_anchor_is_the_old_policy_or_the_current_one():
    logps = torch.tensor([[-1.0]], requires_grad=True)
    assert TokenBatch.from_tensors(logps, [[-2.0]]).anchor.tolist() == [[-2.0]]
    on_policy = TokenBatch.from_tensors(logps).anchor
    assert on_policy.tolist() == [[-1.0]] and not on_policy.requires_grad


def test_advantages_are_filled_in_once():
    v = variant("dr-grpo")
    filled = with_advantages(v, TokenBatch.from_tensors(torch.zeros(2, 1), rewards=[1.0, 0.0]))
    assert filled.advantage.tolist() == [[0.5], [-0.5]] and filled.reward.tolist() == [1.0, 0.0]
    assert with_advantages(v, filled) is filled
    with pytest.raises(VariantError, match="neither advantages nor rewards"):
        v.loss(TokenBatch.from_tensors(torch.zeros(2, 1)))
    nan = with_advantages(v, TokenBatch.from_tensors(torch.zeros(2, 1), rewards=[1.0, NAN]))
    assert_close(nan.advantage, torch.zeros(2, 1))


@pytest.mark.parametrize(
    "given, words",
    [
        ({"old_logps": torch.zeros(3, 4, 2)}, r"old_logps has shape \(3, 4, 2\), expected \(3, 4\)"),
        ({"correct": torch.ones(3, 4)}, r"correct has shape \(3, 4\), expected \(3,\)"),
        ({"group": torch.ones(3, 4)}, r"group has shape \(3, 4\)"),
        ({"mask": torch.full((3, 4), 2.0)}, "mask holds other values than 0 and 1"),
        ({"rewards": torch.ones(3, 1, 1)}, r"rewards has shape \(3, 1, 1\)"),
        ({"rewards": torch.ones(3, 2), "reward_weights": [1.0]}, r"reward_weights has shape \(1,\), rewards \(3, 2\)"),
        ({"reward_weights": [1.0, 2.0]}, r"reward_weights has shape \(2,\), rewards \(3, 1\)"),
        ({"entropy": "high"}, "'high' is no tensor of numbers"),
        ({"logps": torch.zeros(3, 4, 5)}, r"logps has shape \(3, 4, 5\)"),
        ({"logps": torch.zeros(0, 4), "rewards": []}, "at least one row"),
        ({"logps": [[1.0, 2.0], [1.0]], "rewards": [1, 0]}, "logps is no"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(given, words):
    with pytest.raises(VariantError, match=words):
        TokenBatch.from_tensors(**{"logps": torch.zeros(3, 4), "rewards": [1.0, 0.0, 1.0], **given})


@pytest.mark.parametrize("group", [["a", "a", "b"], [-1, -1, -2], [10**12, 10**12, 5]])
def test_groups_may_be_any_labels_and_a_reward_may_be_none(group):
    batch = TokenBatch.from_tensors(torch.zeros(3, 4), rewards=[1.0, 0.0, None], group=group)
    assert batch.run.group_size == 2 and batch.reward[2].isnan()
    assert variant("dr-grpo").loss(batch).advantage.flatten().tolist() == [0.5, -0.5, 0.0]
