from __future__ import annotations

import math

import pytest
import torch

from tests import references
from tests.batches import NAN, assert_close, build, inputs
from trl_variants import Scored, VariantError
from trl_variants.hooks.advantage import Grouped, LeaveOneOut, NormalizeEach, TokenWhitened, reward_to_go
from trl_variants.hooks.rewards import KLInReward


def scored(rewards, group=None, mask=None, **more) -> Scored:
    rewards = torch.tensor(rewards, dtype=torch.float64)
    rewards = rewards.unsqueeze(1) if rewards.dim() == 1 else rewards
    group = torch.zeros(len(rewards), dtype=torch.long) if group is None else torch.tensor(group)
    tokens = {} if mask is None else {"mask": torch.tensor(mask, dtype=torch.float64)}
    return Scored(rewards=rewards, weights=torch.ones(rewards.shape[1]), group=group, tokens=tokens, **more)


GROUPED = [
    Grouped(),
    Grouped(std="none"),
    Grouped(std="batch"),
    Grouped(mean="batch", std="batch"),
    Grouped(mean="none", std="none"),
    Grouped(mean="none", std="group"),
    Grouped(ddof=0, eps=1e-6),
    Grouped(singleton="raw"),
    Grouped(mean="batch", std="group"),
]


@pytest.mark.parametrize("h", GROUPED, ids=repr)
@pytest.mark.parametrize("seed", [0, 5])
def test_grouped_equals_the_loop_reference(h, seed):
    s = build(inputs(seed)).scored
    reward = references.combined_rewards(s.rewards, s.weights.tolist())
    slow = references.grouped(reward, s.group.tolist(), h.mean, h.std, h.ddof, h.eps, h.singleton)
    got = h(s)
    assert_close(got, slow, "advantage")
    assert torch.isfinite(got).all() and got.abs().max() > 0.1


@pytest.mark.parametrize("h", [NormalizeEach(), NormalizeEach(eps=1e-6, ddof=0)], ids=repr)
@pytest.mark.parametrize("seed", [0, 5])
def test_normalize_each_equals_the_loop_reference(h, seed):
    s = build(inputs(seed)).scored
    assert_close(
        h(s),
        references.normalize_each(s.rewards, s.weights.tolist(), s.group.tolist(), h.eps, h.ddof),
        "advantage",
    )


@pytest.mark.parametrize("h", [LeaveOneOut(), LeaveOneOut(normalize=True)], ids=repr)
@pytest.mark.parametrize("seed", [0, 5])
def test_leave_one_out_equals_the_loop_reference(h, seed):
    s = build(inputs(seed)).scored
    reward = references.combined_rewards(s.rewards, s.weights.tolist())
    assert_close(h(s), references.leave_one_out(reward, s.group.tolist(), h.normalize, h.eps), "advantage")


WHITENED = [
    TokenWhitened(),
    TokenWhitened(ddof=1),
    TokenWhitened("group"),
    TokenWhitened("group", gamma=0.9, shift_mean=False),
]


@pytest.mark.parametrize("kl", [False, True], ids=["", "with KL per token"])
@pytest.mark.parametrize("h", WHITENED, ids=repr)
def test_token_whitened_equals_the_loop_reference(h, kl):
    from trl_variants import variant

    batch = build(inputs(5))
    v = variant("dapo", advantage=h, rewards=[KLInReward(0.1, "token")] if kl else [])
    s = batch.scored
    for r in v.rewards:
        s = r(s)
    got = h(s)
    assert_close(got, references.advantages(v, batch)[0], "advantage")
    assert not got[batch.mask == 0].any() and got.abs().max() > 0.1
    if h.shift_mean:  # over the tokens that count: mean 0, variance 1
        live = (batch.mask > 0) & s.valid[:, None]
        assert float(got[live].mean()) == pytest.approx(0.0, abs=1e-9)
        assert float(got[live].var(correction=h.ddof)) == pytest.approx(1.0)


def test_group_centring_also_moves_rewards_that_are_spread_over_tokens():
    # scores 1 and 3 (mean 2), penalty .5 on the first token: rewards -.5 -1 | 0 1, returns -1.5 -1 | 1 1
    s = scored([1.0, 3.0], mask=[[1, 1], [1, 1]], token_rewards=torch.tensor([[-0.5, 1.0], [0.0, 3.0]]).double())
    got = TokenWhitened("group", shift_mean=False, var_floor=1.0)(s)
    # mean of the returns -.125, variance 1.296875
    assert got.tolist() == [pytest.approx([x / 1.296875**0.5 for x in row]) for row in ([-1.5, -1.0], [1.0, 1.0])]


def test_ragged_groups_in_any_order():
    # group 7: 1, 0, 1 -> mean 2/3; group 2: 5 alone
    got = Grouped(std="none")(scored([1.0, 5.0, 0.0, 1.0], group=[7, 2, 7, 7]))
    assert got.tolist() == pytest.approx([1 / 3, 0.0, -2 / 3, 1 / 3])


def test_a_row_out_of_the_baseline_moves_no_statistic():
    # the third row (say a teacher's) would lift the mean from .5 to 4
    s = scored([1.0, 0.0, 11.0], in_baseline=torch.tensor([True, True, False]))
    for h in (Grouped(std="none"), LeaveOneOut()):
        assert h(s).tolist() == pytest.approx([0.5, -0.5, 0.0] if isinstance(h, Grouped) else [1.0, -1.0, 0.0])


def test_missing_rewards():
    nothing = scored([NAN, NAN, 1.0, 0.0], group=[0, 0, 1, 1])
    for h in (Grouped(), Grouped(std="batch"), LeaveOneOut(), LeaveOneOut(normalize=True), NormalizeEach()):
        got = h(nothing)
        assert got[:2].tolist() == [0.0, 0.0] and float(got[2]) > 0.1, h
    # a function that does not apply to one row leaves its own mean only: a = 1, 0, -; b = 0, 1, 2
    got = NormalizeEach()(scored([[1.0, 0.0], [0.0, 1.0], [NAN, 2.0]]))
    z = [0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4)]
    s = [z[0] - 1 / 1.0001, z[1], 1 / 1.0001]
    assert (got / got[2]).tolist() == pytest.approx([(x - sum(s) / 3) / (s[2] - sum(s) / 3) for x in s])


def test_singletons():
    s = scored([0.7, 1.0, 0.0], group=[0, 1, 1])
    assert float(Grouped()(s)[0]) == 0.0 and float(Grouped(singleton="raw")(s)[0]) == pytest.approx(0.7)
    assert float(LeaveOneOut()(s)[0]) == 0.0
    assert float(Grouped(std="batch")(s)[0]) == 0.0


def test_a_key_column_of_the_data_set():
    s = scored([1.0, 0.0, 4.0, 2.0], group=[0, 0, 1, 1], keys={"task": torch.tensor([5, 9, 5, 9])})
    # centred by prompt: .5, -.5, 1, -1; scaled by task: std of (1, 4) and of (0, 2)
    by_task = [abs(4 - 1) / 2**0.5, abs(2 - 0) / 2**0.5]
    got = Grouped(mean="group", std="task", eps=0.0)(s)
    assert got.tolist() == pytest.approx([0.5 / by_task[0], -0.5 / by_task[1], 1 / by_task[0], -1 / by_task[1]])
    with pytest.raises(
        VariantError, match="grouped by 'tusk'.*did you mean task.*known keys: group, batch, none, task"
    ):
        Grouped(mean="tusk")(s)


def test_reward_to_go():
    # gamma .5: 4 | .5*4 + 2 | skips the tool token | .5*4 + 1
    got = reward_to_go(torch.tensor([[1.0, 9.0, 2.0, 4.0]]), torch.tensor([[1.0, 0.0, 1.0, 1.0]]), 0.5)
    assert got.tolist() == [[3.0, 0.0, 4.0, 4.0]]


def test_whitening_needs_tokens_and_is_finite_on_nothing():
    with pytest.raises(VariantError, match="`mask`"):
        TokenWhitened()(scored([1.0, 0.0]))
    assert "tokens" in TokenWhitened().needs
    got = TokenWhitened()(scored([1.0, math.nan], mask=[[0, 0], [1, 1]]))
    assert not got.any()


@pytest.mark.parametrize(
    "cls, params, message",
    [
        (Grouped, {"ddof": 2}, "grouped.ddof must be one of 0, 1, got 2"),
        (Grouped, {"eps": -1.0}, "grouped.eps must be >= 0.0"),
        (Grouped, {"singleton": "raww"}, "did you mean raw"),
        (TokenWhitened, {"gamma": 0.0}, r"token_whitened.gamma must be > 0.0 and <= 1.0, got 0.0"),
        (LeaveOneOut, {"normalize": 1}, "leave_one_out.normalize must be bool, got 1"),
    ],
)
def test_wrong_parameters(cls, params, message):
    with pytest.raises(VariantError, match=message):
        cls(**params)
