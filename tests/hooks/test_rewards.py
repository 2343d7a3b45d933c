from __future__ import annotations

import math

import pytest
import torch

from tests import references
from tests.batches import NAN, assert_close, build, inputs
from trl_variants import Scored, VariantError, hook, variant
from trl_variants.hooks.rewards import ClipReward, KLInReward, score_on_last_token
from trl_variants.objective import score


def three_tokens(**more) -> Scored:
    # k1 = old - ref = .2, -.5, .4; the second row's last token is not the policy's
    tokens = {
        "mask": torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]),
        "old_logps": torch.tensor([[-1.0, -1.0, -1.0]] * 2),
        "ref_logps": torch.tensor([[-1.2, -0.5, -1.4]] * 2),
    }
    return Scored(torch.tensor([[1.0], [0.5]]), torch.ones(1), torch.tensor([0, 0]), tokens=tokens, **more)


def test_kl_of_the_whole_answer():
    # 1 - .1 (.2 - .5 + .4) = .99; .5 - .1 (.2 - .5) = .53
    got = KLInReward(0.1)(three_tokens())
    assert got.reward.tolist() == pytest.approx([0.99, 0.53])
    assert got.rewards.tolist() == [[1.0], [0.5]], "the functions' own rewards stay as they are"


def test_kl_per_token():
    got = KLInReward(0.1, "token")(three_tokens()).token_rewards
    assert got[0].tolist() == pytest.approx([-0.02, 0.05, 1 - 0.04])
    assert got[1].tolist() == pytest.approx([-0.02, 0.05 + 0.5, 0.0])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_equals_the_loop_reference(estimator, level):
    batch = build(inputs(2))
    h = KLInReward(0.3, level, estimator)
    s = h(batch.scored)
    got = s.reward if level == "sequence" else s.token_rewards
    reward = references.combined_rewards(batch.scored.rewards, batch.scored.weights.tolist())
    score = references.last_token_scores(batch, reward)
    for i in range(len(batch.mask)):
        penalty = {
            t: 0.3 * references.kl_number(float(batch.old_logps[i, t] - batch.ref_logps[i, t]), estimator)
            for t in references.positions(batch, i)
        }
        if level == "sequence":
            assert math.isnan(reward[i]) == math.isnan(float(got[i]))
            assert math.isnan(reward[i]) or float(got[i]) == pytest.approx(reward[i] - sum(penalty.values()))
        else:
            assert got[i].tolist() == pytest.approx([score[i][t] - penalty.get(t, 0.0) for t in range(got.shape[1])])


def test_kl_keeps_no_graph():
    s = three_tokens()
    s.tokens["old_logps"].requires_grad_()
    assert not KLInReward()(s).reward.requires_grad and not KLInReward(level="token")(s).token_rewards.requires_grad


def test_clip_reward_keeps_nan():
    s = Scored(torch.tensor([[5.0], [-5.0], [NAN]]), torch.ones(1), torch.zeros(3, dtype=torch.long))
    got = ClipReward(-1.0, 2.0)(s)
    assert got[:2].tolist() == [2.0, -1.0] and math.isnan(float(got[2]))


def test_score_on_the_last_policy_token():
    s = three_tokens()
    assert score_on_last_token(s).tolist() == [[0.0, 0.0, 1.0], [0.0, 0.5, 0.0]]
    s.tokens["mask"][1] = 0.0
    s.reward[0] = NAN
    assert not score_on_last_token(s).any(), "an empty and an unscorable row"


def test_what_a_rewards_hook_may_return():
    # (N,) replaces the combined reward, (N, F) the matrix (then combined again), a record replaces the record
    @hook("rewards", "test_double_combined")
    def double_combined(scored):
        return 2 * scored.reward

    @hook("rewards", "test_double_matrix")
    def double_matrix(scored):
        return 2 * scored.rewards

    s = Scored(torch.tensor([[1.0, NAN], [2.0, 3.0]]), torch.tensor([1.0, 10.0]), torch.tensor([0, 0]))
    assert s.reward.tolist() == [1.0, 32.0]
    base = variant("dapo")
    one = score(base.with_(rewards=["test_double_combined"]), s)
    assert one.reward.tolist() == [2.0, 64.0] and one.rewards[1].tolist() == [2.0, 3.0]
    two = score(base.with_(rewards=["test_double_matrix", "test_double_combined"]), s)
    assert two.rewards[1].tolist() == [4.0, 6.0] and two.reward.tolist() == [4.0, 128.0]
    assert_close(s.reward, [1.0, 32.0], "the record given is not changed")


@pytest.mark.parametrize("name", ["mask", "old_logps", "ref_logps"])
def test_each_missing_tensor_is_named(name):
    s = three_tokens()
    s.tokens.pop(name)
    with pytest.raises(VariantError, match=f"`{name}`"):
        KLInReward()(s)
