"""VIMPO through the trainer: what the exact KL costs, and what the first update descends."""

from __future__ import annotations

import pytest
import torch

from tests.trainer import toy
from trl_variants import VariantGRPOTrainer


def test_before_the_first_update_only_the_regression_has_a_gradient():
    """Policy and reference are one model: z is 0 on every token, so the loss is half the variance of R."""
    rewards = []

    def digits(completions, **_):
        rewards.extend(toy.digits(completions))
        return rewards[-len(completions) :]

    run = {"max_steps": 1, "num_iterations": 1, "gradient_accumulation_steps": 4, "rewards": digits}
    out = toy.train(VariantGRPOTrainer, variant="vimpo", dtype=torch.float64, **run)
    groups = torch.tensor(rewards[:16]).view(4, 4)
    wanted = 0.5 * ((groups - groups.mean(1, keepdim=True)) ** 2).mean()
    assert out.logged("terms/implicit_value_regression") == [pytest.approx(float(wanted), rel=1e-6)]
    assert abs(out.logged("kl")[0]) < 1e-12 and abs(out.logged("terms/policy")[0]) < 1e-9
    assert float(out.gradients[0].norm()) > 0


def test_the_detached_kl_costs_no_backward(monkeypatch):
    """It has no coefficient in the window objective, so its logits are computed without gradient."""
    from trl_variants.trainer import statistics

    graphs, live = [], []
    stock, objective = statistics.compare, VariantGRPOTrainer._evaluate_window

    def watched(trainer, hidden, batch, *given):
        found = stock(trainer, hidden, batch, *given)
        if "coefficients" in batch:
            graphs.extend(x.requires_grad for x in found.values())
        return found

    def window(self, batches):
        result = objective(self, batches)
        live.append(set(batches[0]["coefficients"]))
        return result

    monkeypatch.setattr(statistics, "compare", watched)
    monkeypatch.setattr(VariantGRPOTrainer, "_evaluate_window", window)
    toy.train(VariantGRPOTrainer, variant="vimpo", max_steps=1)
    assert live == [{"logps"}] and graphs and not any(graphs)
    graphs.clear(), live.clear()
    exact = {"regularizers": [{"implicit_value_regression": {}}, {"kl": {"coef": 0.1, "estimator": "exact"}}]}
    toy.train(VariantGRPOTrainer, variant="vimpo", hooks=exact, max_steps=1)
    assert live == [{"logps", "rkl/ref"}] and all(graphs), "a term that differentiates it keeps its graph"
