"""A learner reaches the policy's gradient only where its class says so, and then by what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer import toy
from trl_variants import VariantGRPOTrainer, hook
from trl_variants.learners import TrunkBody, Worker


@hook("learners", "test_pulls_states")
@dataclass(frozen=True)
class PullsStates:
    """A head that is never trained, and a term that pulls the policy's states towards a constant."""

    coef: float = 0.1
    declares: bool = True
    lr: float | None = None
    max_grad_norm: float = 1.0

    def attach(self, trainer: Any, path: str) -> Worker:
        worker = PullingWorker(trainer, path, self, TrunkBody(trainer), {"unused": nn.Linear(2, 1)})
        worker.trains_policy = self.declares
        return worker


class PullingWorker(Worker):
    def learn(self, rows, scored, advantage):
        return {}

    def policy_term(self, hidden, batch):
        mask = batch["completion_mask"].unsqueeze(-1).to(hidden.dtype)
        return self.hook.coef * (hidden[:, :-1] ** 2 * mask).sum() / self.trainer.window.tokens


def first_gradient(*learners, rows: int = 8, steps: int = 2) -> torch.Tensor:
    from .test_critic import fixed_rollouts

    out = toy.train(
        VariantGRPOTrainer,
        variant="dapo",
        hooks={"learners": list(learners)},
        max_steps=1,
        num_iterations=1,
        per_device_train_batch_size=rows,
        steps_per_generation=steps,
        gradient_accumulation_steps=steps,
        patch=fixed_rollouts,
    )
    return out.gradients[0]


def test_undeclared_it_cannot():
    assert torch.equal(first_gradient(PullsStates(declares=False)), first_gradient())


def test_declared_its_gradient_is_added():
    base, one, two = first_gradient(), first_gradient(PullsStates(0.1)), first_gradient(PullsStates(0.2))
    assert toy.apart(one, base) > 1e-2
    torch.testing.assert_close(two - base, 2 * (one - base), rtol=1e-3, atol=1e-5)
    trainer = toy.build(VariantGRPOTrainer, variant="dapo")
    names = [n for n, _ in trainer.model.named_parameters()]
    assert "model.embed_tokens.weight" in names and float((one - base).norm()) > 0


def test_it_does_not_depend_on_the_micro_batches():
    assert (
        toy.apart(first_gradient(PullsStates(), rows=2, steps=8), first_gradient(PullsStates(), rows=16, steps=1))
        < 1e-5
    )


def test_it_is_logged_as_a_term():
    out = toy.train(VariantGRPOTrainer, variant="dapo", hooks={"learners": [PullsStates()]}, max_steps=1)
    assert out.logged("terms/test_pulls_states")[0] > 0


@pytest.mark.parametrize("wrong", ["deepspeed", "fsdp"])
def test_engines_that_are_not_built_are_refused(wrong):
    from types import SimpleNamespace

    from trl_variants import VariantError, variant
    from trl_variants.learners import Team

    stub = SimpleNamespace(
        variant=variant("ppo"), is_deepspeed_enabled=wrong == "deepspeed", is_fsdp_enabled=wrong == "fsdp"
    )
    with pytest.raises(VariantError, match="DeepSpeed and FSDP are not built"):
        Team(stub)
