from __future__ import annotations

import math

import pytest
import torch

from tests import references
from tests.batches import assert_close, build, gradient, inputs, leaves_of
from trl_variants import Schedule, TokenBatch, VariantError
from trl_variants.hooks.clip import CISPO, GammaWeight, GeometricMean, PPOClip, SoftGate, Unclipped
from trl_variants.hooks.ratio import SequenceRatio, TokenRatio

CLIPS = [
    PPOClip(),
    PPOClip(0.1, 0.3, delta=1.6),
    PPOClip(0.2, 0.2, floor=1.5),
    PPOClip(3e-4, 4e-4),
    Unclipped(),
    CISPO(),
    CISPO(1.1, 0.9),
    SoftGate(),
    SoftGate(0.5, 3.0),
    GammaWeight(),
    GammaWeight(sampler="token_truncate", sampler_max=1.1),
    GeometricMean(),
    GeometricMean(0.1, 0.2),
]


# geometric_mean reduces token ratios itself; check refuses a sequence ratio below it
PAIRS = [
    (h, r)
    for h in CLIPS
    for r in (TokenRatio(), SequenceRatio())
    if not (isinstance(h, GeometricMean) and isinstance(r, SequenceRatio))
]


def random_advantages(batch: TokenBatch, per_token: bool) -> torch.Tensor:
    g = torch.Generator().manual_seed(4)
    a = torch.randn(len(batch.mask), batch.mask.shape[1] if per_token else 1, generator=g, dtype=torch.float64)
    a[0] = 0.0
    return a


@pytest.mark.parametrize("per_token", [False, True], ids=["A per row", "A per token"])
@pytest.mark.parametrize("h, ratio", PAIRS, ids=[f"{h}-{r.hook_name}" for h, r in PAIRS])
def test_equals_the_loop_reference(h, ratio, per_token):
    batch = build(inputs(2))
    advantage = random_advantages(batch, per_token)
    active = [[m > 0 for m in row] for row in batch.mask.tolist()]
    slow = references.objective(
        h, references.log_ratios(ratio, batch), advantage.expand_as(batch.mask).tolist(), batch, active
    )
    got = h(ratio(batch), advantage, batch).objective
    w = batch.mask * torch.arange(1.0, batch.mask.numel() + 1).reshape_as(batch.mask).sin()
    fast = (got * w).sum()
    by_loop = sum(x * float(w[i, t]) for i, row in enumerate(slow) for t, x in enumerate(row) if w[i, t] != 0)
    assert_close(fast, by_loop, "value")
    grads = gradient(fast, leaves_of(batch))["logps"]
    assert_close(grads, gradient(by_loop, leaves_of(batch))["logps"], "gradient")
    assert grads.abs().max() > 1e-2


def test_where_the_bound_takes_the_gradient_away():
    # |A| = 1, eps .2: r = .7, 1, 1.3 -> low only for A < 0, high only for A > 0
    r = torch.tensor([[0.7, 1.0, 1.3]], dtype=torch.float64)
    batch = TokenBatch.from_tensors(torch.zeros(1, 3, dtype=torch.float64))
    for sign, low, high in ((1.0, [0, 0, 0], [0, 0, 1]), (-1.0, [1, 0, 0], [0, 0, 0])):
        log_ratio = r.log().requires_grad_()
        out = PPOClip()(log_ratio, torch.tensor([[sign]]), batch)
        assert out.low.int().tolist() == [low] and out.high.int().tolist() == [high]
        grad = torch.autograd.grad(out.objective.sum(), log_ratio)[0]
        assert (grad == 0).tolist() == out.clipped.tolist(), "clipped is where the gradient is gone"
    assert not CISPO(cap=0.5)(r.log(), torch.tensor([[1.0]]), batch).clipped.any(), "cispo takes no gradient away"


def test_cispo_reports_the_capped_tokens_of_positive_rows():
    # r = 2, 2, 1 over cap 1.5 with A = 1, -1, 1: one of three
    batch = TokenBatch.from_tensors(torch.zeros(3, 1))
    out = CISPO(cap=1.5)(torch.tensor([[2.0], [2.0], [1.0]]).log(), torch.tensor([[1.0], [-1.0], [1.0]]), batch)
    assert out.metrics["cispo_clip_ratio"].value() == pytest.approx(1 / 3)


def test_a_missing_stop_gradient_in_cispo_would_show_in_the_gradient_only():
    # atlas: w A lp adds [-1.648721, -0.735759, 0] to 3 times the gradient and nothing to the value
    lp = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64, requires_grad=True)
    old, a = (
        torch.tensor([[-1.5, -1.0, -2.5]], dtype=torch.float64),
        torch.tensor([[1.0, 1.0, -1.0]], dtype=torch.float64),
    )
    batch = TokenBatch.from_tensors(lp, old)
    ours = CISPO()(lp - old, a, batch).objective.sum()
    leaky = ((lp - old).exp().clamp(max=5.0) * a * lp).sum()
    assert float(ours - leaky) == 0.0
    extra = torch.autograd.grad(leaky, lp)[0] - torch.autograd.grad(ours, lp)[0]
    assert extra.tolist() == [pytest.approx([-1.648721, -0.735759, 0.0], abs=1e-6)]


def test_soft_gate_limits():
    # tau -> 0 is the unclipped surrogate in gradient, w = sech^2(tau (r - 1) / 2) -> 1; at r = 1 w is 1 for
    # any tau
    lr = torch.tensor([[0.0, 0.5]], dtype=torch.float64, requires_grad=True)
    batch = TokenBatch.from_tensors(torch.zeros(1, 2, dtype=torch.float64))

    def grad(tau):
        gate = SoftGate(tau, tau)(lr, torch.ones(1, 1, dtype=torch.float64), batch).objective
        return torch.autograd.grad(gate.sum(), lr)[0][0].tolist()

    assert grad(1e-4) == pytest.approx([1.0, math.exp(0.5)], abs=1e-6)
    assert grad(20.0)[0] == pytest.approx(1.0) and grad(20.0)[1] < 1e-3


def test_vespo_weight_is_one_at_one_and_peaks_at_k_over_lambda():
    # k / lambda = 2/3 for A >= 0: W = 1, 2/3 and a little to both sides, one token each at lp = -1
    w = torch.tensor([[1.0], [2 / 3 - 0.01], [2 / 3], [2 / 3 + 0.01]], dtype=torch.float64)
    logps = torch.full_like(w, -1.0)
    batch = TokenBatch.from_tensors(logps, logps - w.log())
    out = GammaWeight()(TokenRatio()(batch), torch.ones_like(w), batch)
    one, before, peak, after = (-out.objective).squeeze(1).tolist()
    assert one == pytest.approx(1.0) and peak == pytest.approx(4 / 9 * math.e)  # (2/3)^2 e^(3 - 2)
    assert max(before, after) < peak
    assert out.metrics["vespo/phi_seq_mean"].value() == pytest.approx((one + before + peak + after) / 4)
    zero = GammaWeight()(TokenRatio()(batch), torch.zeros_like(w), batch)
    assert zero.metrics["vespo/phi_seq_mean"].value() == pytest.approx((one + before + peak + after) / 4), (
        "A = 0 is positive"
    )


def test_vespo_folds_the_sampler_into_the_product_once():
    # one token: old/rollout = e^.5, policy/old = e^.1 -> W = e^.6 when the correction is not truncated
    batch = TokenBatch.from_tensors(torch.tensor([[-1.0]]).double(), [[-1.1]], rollout_logps=[[-1.6]])
    one = torch.ones(1, 1, dtype=torch.float64)
    w = math.exp(0.6)
    got = GammaWeight(sampler="token_truncate")(TokenRatio()(batch), one, batch).objective
    assert float(got) == pytest.approx(-(w**2) * math.exp(3 * (1 - w)), rel=1e-9)
    assert GammaWeight().needs == {"old_logps"} and "rollout_logps" in GammaWeight(sampler="token_mask").needs
    with pytest.raises(VariantError, match="sampler must be one of"):
        GammaWeight(sampler="sequence_mask")


def test_gmpo_uses_the_active_tokens_only():
    # log-ratios .1, .3, .2 with the middle token not selected: exp(.15)
    batch = TokenBatch.from_tensors(torch.zeros(1, 3, dtype=torch.float64))
    batch.active = torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64)
    out = GeometricMean()(
        torch.tensor([[0.1, 0.3, 0.2]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64), batch
    )
    assert float(out.objective) == pytest.approx(math.exp(0.15)) and out.over_tokens


def test_the_precision_of_the_loss_is_kept():
    # 1.05 is not a float32: two plain numbers in torch.where would round tau to 1.0499999523
    batch = TokenBatch.from_tensors(torch.zeros(1, 1, dtype=torch.float64))
    got = SoftGate(tau_neg=1.05)(
        torch.zeros(1, 1, dtype=torch.float64), -torch.ones(1, 1, dtype=torch.float64), batch
    ).objective
    assert abs(float(got) + 2 / 1.05) < 1e-14


@pytest.mark.parametrize(
    "params, message",
    [
        ({"eps_low": -0.1}, "ppo.eps_low must be >= 0.0, got -0.1"),
        ({"eps_low": "wide"}, "ppo.eps_low must be float, got 'wide'"),
        ({"eps_high": math.nan}, "ppo.eps_high is NaN"),
        ({"delta": 1.1}, r"ppo.delta must exceed 1 \+ eps_high = 1.2, got 1.1"),
        ({"floor": 1.2}, r"ppo.floor must exceed 1 \+ eps_high"),
        ({"floor": 0.5}, "ppo.floor must be > 1.0, got 0.5"),
        ({"eps_low": Schedule(0.2, -1.0)}, "ppo.eps_low must be >= 0.0, got -1.0"),
    ],
)
def test_wrong_parameters(params, message):
    with pytest.raises(VariantError, match=message):
        PPOClip(**params)


def test_a_schedule_may_stand_for_a_width():
    assert PPOClip(eps_high=Schedule(0.2, 0.3), delta=1.1).delta == 1.1, "bounds that move are not compared"
