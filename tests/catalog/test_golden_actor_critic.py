"""Golden numbers of the entries with a critic or a greedy baseline, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from trl_variants import TokenBatch, VariantError, variant
from trl_variants.hooks.learners_critic import Critic

D = torch.float64


def batch(logps, **given) -> TokenBatch:
    rows = len(logps)
    given.setdefault("truncated", [False] * rows)
    return TokenBatch.from_tensors(torch.tensor(logps, dtype=D, requires_grad=True), group=list(range(rows)), **given)


def test_the_surrogate_of_ppo():
    # (r, A) = (1.5, 1), (1.5, -1), (.5, 1), (.5, -1): 1.2, -1.5, .5, -.8; the 1st and the 4th have no gradient
    ratios = [[math.log(1.5)], [math.log(1.5)], [math.log(0.5)], [math.log(0.5)]]
    b = batch(ratios, old_logps=[[0.0]] * 4, advantage=[1.0, -1.0, 1.0, -1.0])
    out = variant("ppo").loss(b)
    [slope] = torch.autograd.grad(out.loss, b.logps)
    assert out.objective.squeeze(1).tolist() == pytest.approx([1.2, -1.5, 0.5, -0.8])
    # -1/4 r A where it is not clipped
    assert slope.squeeze(1).tolist() == pytest.approx([0.0, 1.5 / 4, -0.5 / 4, 0.0])


def test_dual_clip_is_the_clip_s_floor():
    b = batch([[math.log(5.0)]], old_logps=[[0.0]], advantage=[-1.0])
    assert float(variant("ppo").loss(b).objective.detach()) == pytest.approx(-5.0)
    floored = variant("ppo", clip={"ppo": {"floor": 3.0}})
    assert float(floored.loss(b).objective.detach()) == pytest.approx(-3.0)


def test_open_reasoner_zero_is_the_return_minus_the_value():
    v = variant("open-reasoner-zero", advantage={"gae": {"lam": 1.0, "bootstrap": False, "whiten": False}})
    b = batch([[-1.0, -1.0, -1.0]], values=[[0.3, 0.5, 0.8]], rewards=[1.0])
    out = v.loss(b)
    assert out.advantage[0].tolist() == pytest.approx([0.7, 0.5, 0.2])
    assert float(out.loss) == pytest.approx(-1.4 / 3) and not out.clipped.any() and not out.log_ratio.any()
    lam = v.with_(advantage={"gae": {"lam": 0.95, "bootstrap": False, "whiten": False}})
    assert lam.loss(b).advantage[0].tolist() == pytest.approx([0.6655, 0.49, 0.2])
    # right, and cut by the limit: worth nothing
    cut = batch([[-1.0]], values=[[0.3]], rewards=[1.0], truncated=[True])
    assert v.loss(cut).advantage.tolist() == [[pytest.approx(-0.3)]]
    assert variant("open-reasoner-zero").learners == (Critic(lam=1.0, clip=None, minibatches=12, lr=5e-6),)


def test_vapo_adds_imitation_of_right_answers():
    v = variant("vapo", advantage={"gae": {"length_alpha": 0.05, "bootstrap": False, "whiten": False}})
    b = batch([[-0.5, -0.7], [-2.0, -3.0]], values=[[0.5, 0.6], [0.1, 0.1]], rewards=[1.0, 0.0])
    out = v.loss(b)
    # two tokens: lambda 0, d = .1, .4 and 0, -.1; the policy term is -(.1 + .4 + 0 - .1) / 4, the NLL .1 * .6
    assert out.advantage.tolist() == [pytest.approx([0.1, 0.4]), pytest.approx([0.0, -0.1])]
    assert float(out.terms["nll"]) == pytest.approx(0.1 * 0.6)
    assert float(out.loss) == pytest.approx(-0.4 / 4 + 0.06)
    wrong = batch([[-0.5, -0.7]], values=[[0.5, 0.6]], rewards=[0.0])
    assert float(v.loss(wrong).terms["nll"]) == 0.0
    target, _ = v.advantage.value_targets(b.scored, v.learners[0].lam)
    assert target.tolist() == [pytest.approx([1.0, 1.0]), pytest.approx([0.0, 0.0])], "the whole return"


def test_rlhf_ppo_s_rewards():
    v = variant("rlhf-ppo", rewards=[{"kl_in_reward": {"coef": 0.1, "level": "token"}}],
                advantage={"gae": {"lam": 1.0, "whiten": False}})  # fmt: skip
    b = batch([[-1.0, -2.0, -0.5]], ref_logps=[[-1.2, -1.5, -0.9]], values=[[0.0] * 3], rewards=[1.0])
    assert v.loss(b).advantage[0].tolist() == pytest.approx([0.99, 1.01, 0.96])


REMAX = dict(
    logps=[[-0.9, -1.2, -0.7]], ref_logps=[[-1.0, -1.0, -1.0]], rewards=[0.7], columns={"greedy_reward": [0.2]}
)


@pytest.mark.parametrize(
    "edit, wanted",
    [
        # .5 - .1 * (.1, -.2, .3)
        ({}, [0.49, 0.52, 0.47]),
        # .9^3 * .5 - .01, .9^2 * .5 + .02, .9 * .5 - .03
        ({"gamma": 0.9}, [0.3545, 0.425, 0.42]),
        # .7 - .1 * (.2, .1, .3) - .2
        ({"form": "to_go"}, [0.48, 0.49, 0.47]),
        ({"limit": 0.3}, [0.29, 0.32, 0.27]),
    ],
)
def test_remax(edit, wanted):
    v = variant("remax", advantage={"greedy_baseline": {"beta": 0.1, **edit}})
    assert v.loss(batch(**REMAX)).advantage[0].tolist() == pytest.approx(wanted)


def test_remax_on_the_greedy_answer_itself_says_nothing():
    v = variant("remax", advantage={"greedy_baseline": {"beta": 0.0}})
    b = batch([[-1.0, -2.0]], rewards=[0.5], columns={"greedy_reward": [0.5]})
    assert not torch.autograd.grad(v.loss(b).loss, b.logps)[0].any()
    with pytest.raises(VariantError, match="`greedy_reward`.*learners"):
        v.loss(batch([[-1.0]], rewards=[0.7]))


def test_actor_critic_gae_is_the_whitened_advantage_times_log_pi():
    # r = [0, 0, 1], V = [.2, .5, .6], lambda .95: A = [.756, .48, .4], whitened by the unbiased std of the batch
    b = batch([[-0.5, -1.0, -2.0]], rewards=[1.0], values=[[0.2, 0.5, 0.6]])
    out = variant("actor-critic-gae").loss(b)
    [slope] = torch.autograd.grad(out.loss, b.logps)
    raw = variant("actor-critic-gae", advantage={"gae": {"lam": 0.95, "whiten": False}}).loss(b)
    assert raw.advantage.tolist()[0] == pytest.approx([0.756, 0.48, 0.4])
    assert out.advantage.tolist()[0] == pytest.approx([1.1279, -0.3498, -0.7781], abs=1e-4)
    # -A / 3 at each token: no ratio, no clip, token mean
    assert slope.tolist()[0] == pytest.approx([-1.1279 / 3, 0.3498 / 3, 0.7781 / 3], abs=1e-4)
