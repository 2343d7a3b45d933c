from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.batches import NAN, assert_close, build, gradient, inputs, leaves_of, split
from trl_variants import TokenBatch, VariantError, hook, variant
from trl_variants.hooks import Clipped, Term, base
from trl_variants.objective import advantages, call, coefficients, evaluate, with_advantages


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))


def test_order_of_the_seams():
    """Every hook writes its name down, and sees what the hooks before it left."""
    seen = []

    def note(seam, name, returns, selects=False):
        @hook(seam, name)
        class Noted:
            def __call__(self, *args):
                seen.append(name)
                return returns(*args)

        Noted.selects = selects

    note("rewards", "r", lambda s: s.reward + 1.0)
    note("select", "s", lambda s: torch.ones_like(s.keep))
    note("advantage", "a", lambda s: s.reward)
    note("credit", "c", lambda a, b: a + 10.0)
    note("weight", "later", lambda b: b.log_ratio.exp())  # sees the ratio
    note("weight", "first", lambda b: (b.advantage > 12.0).double() * b.mask, selects=True)  # sees the final advantage
    note("ratio", "q", lambda b: b.active * 0.0 + b.logps - b.anchor)
    note("clip", "k", lambda lr, a, b: lr.exp() * a * b.active)
    note("aggregate", "g", lambda x, b: (x * b.mask).sum() / b.window.tokens)
    note("regularizers", "t", lambda b: Term(b.logps, 0.5))
    v = variant(
        {
            "advantage": "a",
            "ratio": "q",
            "clip": "k",
            "aggregate": "g",
            "rewards": ["r"],
            "select": ["s"],
            "credit": ["c"],
            "weight": ["later", "first"],
            "regularizers": ["t"],
        }
    )
    batch = TokenBatch.from_tensors(torch.full((2, 1), -1.0), [[-2.0], [-2.0]], rewards=[1.0, 2.0])
    loss = v.loss(batch)
    assert seen == ["r", "s", "a", "c", "first", "q", "k", "later", "g", "t", "g"]
    # advantages 12 and 13; only 13 > 12 is selected: e * 13, times the weight e, over 2 tokens; the term -.5
    e = torch.tensor(1.0).exp()
    assert float(loss.terms["policy"]) == pytest.approx(float(-(e * 13 * e) / 2))
    assert float(loss.loss) == pytest.approx(float(loss.terms["policy"]) - 0.5)


def test_a_term_has_its_own_aggregate_coefficient_and_mask():
    @hook("regularizers", "own")
    def own(batch, which: str = "policy"):
        aggregate = None if which == "policy" else lambda x, b: (x * b.mask).sum() * 100
        return Term(torch.ones_like(batch.logps), 2.0, aggregate, mask=batch.mask * torch.tensor([[1.0, 0.0, 0.0]]))

    batch = TokenBatch.from_tensors(torch.zeros(2, 3), advantage=[0.0, 0.0])
    # the policy's token mean over the masked tokens is 1; own: two tokens * 100
    assert float(variant("dapo", regularizers=["own"]).loss(batch).loss) == pytest.approx(2.0)
    assert float(variant("dapo", regularizers=[{"own": {"which": "own"}}]).loss(batch).loss) == pytest.approx(400.0)


def test_weights_keep_no_graph():
    @hook("weight", "leaky")
    def leaky(batch):
        return batch.logps.exp()

    lp = torch.tensor([[-1.0]], requires_grad=True)
    loss = variant("dapo", weight=["leaky"]).loss(TokenBatch.from_tensors(lp, advantage=[1.0]))
    assert float(torch.autograd.grad(loss.loss, lp)[0]) == pytest.approx(-float(lp.detach().exp())), (
        "the weight is a constant"
    )


def test_a_clip_may_return_a_bare_objective_or_a_per_row_one():
    @hook("clip", "bare")
    def bare(log_ratio, advantage, batch):
        return advantage.squeeze(1)

    loss = variant("dapo", clip="bare").loss(
        TokenBatch.from_tensors(torch.zeros(2, 3), mask=[[1.0, 1, 1], [1, 0, 0]], advantage=[1.0, 2.0])
    )
    assert loss.objective.tolist() == [[1.0], [2.0]] and float(loss.loss) == pytest.approx(-(3 * 1 + 2) / 4)
    assert not loss.clipped.any() and Clipped(torch.ones(2, 1)).clipped.shape == (2, 1)


def test_coefficients_are_the_gradient_of_each_statistic():
    # L = -(A lp r/…) with r = 1: c = -A / 2; entropy: -.1 / 2
    batch = TokenBatch.from_tensors(torch.zeros(1, 2), advantage=[3.0], entropy=[[1.0, 2.0]])
    loss, c = coefficients(variant("dapo", regularizers=[{"entropy_bonus": {"coef": 0.1}}]), batch)
    assert c["logps"].tolist() == [[-1.5, -1.5]] and c["entropy"].tolist() == [pytest.approx([-0.05, -0.05])]
    assert float(loss.loss) == pytest.approx(-3.0 - 0.15)
    _, c = coefficients(variant("dapo"), batch)
    assert not c["entropy"].any(), "a statistic no hook uses has coefficient zero"
    with torch.no_grad():
        assert coefficients(variant("dapo"), batch)[1]["logps"].any(), "works inside no_grad"


def test_coefficients_refuse_a_part_of_a_window():
    whole = with_advantages(variant("dapo"), build(inputs(0)))
    part = split(whole, [[0, 1], list(range(2, 13))])[0]
    with pytest.raises(VariantError, match="needs the whole window"):
        coefficients(variant("dapo"), part)


@pytest.mark.parametrize("name", ["dapo", "gspo", "cispo"])
def test_back_propagating_the_coefficients_through_a_model_is_the_direct_gradient(name):
    # a model of two parameters: lp = x w + sin(y u), entropy = (x u)^2
    g = torch.Generator().manual_seed(0)
    given = inputs(1)
    shape = given["logps"].shape
    x, y = torch.rand(shape, generator=g).double(), torch.rand(shape, generator=g).double()
    w, u = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (-1.0, 0.5))
    model = lambda: {"logps": x * w - 1 + torch.sin(y * u), "entropy": (x * u) ** 2}  # noqa: E731
    v = variant(name, weight=[{"entropy_quantile": {"keep": 0.5}}], regularizers=[{"entropy_bonus": {"coef": 0.3}}])
    batch = with_advantages(v, TokenBatch.from_tensors(**(given | model())))
    direct = torch.autograd.grad(evaluate(v, batch).loss, [w, u])
    _, c = coefficients(v, batch)
    rows = torch.randperm(len(x), generator=g)
    accumulated = [0.0, 0.0]
    for part in (rows[:4], rows[4:5], rows[5:]):
        back = sum((c[n][part] * s[part]).sum() for n, s in model().items())
        accumulated = [a + d for a, d in zip(accumulated, torch.autograd.grad(back, [w, u]), strict=True)]
    assert_close(torch.stack(accumulated), torch.stack(direct), name)
    assert min(abs(float(d)) for d in direct) > 1e-4


def test_states_are_given_by_path_and_default_to_the_initial_one():
    v = variant("dapo", regularizers=[{"adaptive_entropy": {"coef": 0.5}}])
    batch = TokenBatch.from_tensors(torch.zeros(1, 1), advantage=[0.0], entropy=[[2.0]])
    assert float(v.loss(batch).loss) == 0.0, "the first window applies nothing"
    assert float(v.loss(batch, {"regularizers.0": {"coef": 0.25, "last_entropy": 0.0}}).loss) == pytest.approx(-0.5)
    assert float(v.loss(batch, {"regularizers.7": {"coef": 0.25, "last_entropy": 0.0}}).loss) == 0.0


def test_stateful_hooks_before_the_loss():
    @hook("advantage", "running")
    class Running:
        def init(self):
            return {"mean": 0.25}

        def __call__(self, scored, state):
            return scored.reward - state["mean"]

    v = variant("clip-higher", advantage="running")
    batch = TokenBatch.from_tensors(torch.zeros(2, 1), rewards=[1.0, NAN])
    assert v.loss(batch).advantage.squeeze(1).tolist() == [0.75, 0.0]
    assert v.loss(batch, {"advantage": {"mean": 0.5}}).advantage.squeeze(1).tolist() == [0.5, 0.0]
    assert v.stateful.keys() == {"advantage"}
    assert call(v.advantage, batch.scored, path="advantage", states=None).shape == (2,)


def test_an_advantage_hook_cannot_leak_nan_or_move_an_unscorable_row():
    @hook("advantage", "careless")
    def careless(scored):
        return torch.stack([scored.reward * 0 + torch.nan, torch.ones_like(scored.reward)], 1)

    batch = TokenBatch.from_tensors(torch.zeros(2, 2), rewards=[1.0, NAN])
    assert advantages(variant("dapo", advantage="careless"), batch.scored).tolist() == [
        [0.0, 1.0],
        [0.0, 0.0],
    ]


def test_the_batch_given_is_left_alone():
    batch = build(inputs(0))
    before = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in vars(batch).items()}
    variant("dapo", weight=[{"entropy_quantile": {"keep": 0.5}}], regularizers=[{"kl": {}}]).loss(batch)
    for name, value in before.items():
        now = getattr(batch, name)
        assert (
            torch.equal(torch.nan_to_num(now), torch.nan_to_num(value))
            if isinstance(value, torch.Tensor)
            else now is value
        ), name


def test_active_starts_from_the_mask_in_every_evaluation():
    # a batch cut from another one may carry an `active` of its own: same numbers, another object, or stale
    v = variant("dapo", regularizers=[{"entropy_bonus": {"coef": 0.1}}])
    batch = with_advantages(v, build(inputs(0)))
    stale = replace(batch, active=torch.zeros_like(batch.mask))
    assert_close(evaluate(v, stale).loss, evaluate(v, batch).loss)


def test_masked_positions_may_hold_anything():
    given = inputs(0)
    outside = given["mask"] == 0
    finite = build(given, logps=given["logps"].masked_fill(outside, 1e30))
    loss = variant("dapo").loss(finite)
    assert torch.isfinite(loss.loss) and not gradient(loss.loss, leaves_of(finite))["logps"][outside].any()
    for anything in (NAN, -torch.inf):
        filled = build(given, logps=given["logps"].masked_fill(outside, anything))
        result = variant("dapo").loss(filled)
        assert_close(result.loss, loss.loss)
        assert not gradient(result.loss, leaves_of(filled))["logps"][outside].any()
