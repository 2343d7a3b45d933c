"""The contrastive head: its losses and its step by hand, whom it compares, and what it leaves alone."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from tests.trainer import toy
from tests.trainer.forked import run_forked
from trl_variants import VariantGRPOTrainer

from .test_critic import fixed_rollouts


def early_half(completions, **_):
    return [float(c[:1] < "a") for c in completions]


def run(head: dict | None = None, cls=toy.train, **changes):
    edits = {"learners": [{"contrastive_head": {"dim": 8, "tau": 0.5, **(head or {})}}], **changes.pop("hooks", {})}
    changes = {"rewards": early_half, "num_iterations": 1, "max_steps": 2, **changes}
    if cls is toy.train:
        changes.setdefault("patch", fixed_rollouts)
    return cls(VariantGRPOTrainer, variant="clipo", hooks=edits, **changes)


def watched(seen: list):
    """A patch that notes what goes into the head and comes out of it, each generation."""

    def patch(trainer):
        [worker] = trainer.team.workers.values()
        predict = worker.predict

        def noted(rows, scored):
            known = worker._known
            found = predict(rows, scored)["contrastive_loss"]
            seen.append((copy.deepcopy(worker.head), known, scored, found.clone()))
            return {"contrastive_loss": found}

        worker.predict = noted
        fixed_rollouts(trainer)

    return patch


def by_hand(weight: torch.Tensor, states: torch.Tensor, scored, positive: torch.Tensor, tau: float) -> list:
    """A scalar or None for each row, by loops."""
    length = weight @ states.T
    z = [length[:, i] / length[:, i].norm() for i in range(len(states))]
    group, right = scored.group.tolist(), scored.correct.tolist()
    out = []
    for i in range(len(z)):
        members = [a for a in range(len(z)) if group[a] == group[i] and a != i]
        friends = [a for a in members if right[a]]
        if not right[i] or not friends or all(right[a] for a in members):
            out.append(None)
            continue
        p = int(positive[i])
        assert p in friends
        s = {a: (z[i] * z[a]).sum() / tau for a in members}
        out.append(torch.stack(list(s.values())).exp().sum().log() - s[p])
    return out


def test_rewards_read_the_losses_after_its_step():
    seen: list = []
    run({"lr": 0.1}, max_steps=4, dtype=torch.float64, patch=watched(seen))
    assert len(seen) == 2 and not torch.equal(seen[0][0].weight, seen[1][0].weight)
    for head, (states, anchors, positive), scored, found in seen:
        losses = by_hand(head.weight.detach(), states, scored, positive, 0.5)
        assert [x is not None for x in losses] == anchors.tolist() and anchors.any()
        wanted = [math.nan if x is None else float(x) for x in losses]
        assert found.tolist() == pytest.approx(wanted, rel=1e-6, nan_ok=True)  # rewards are float32


def test_the_gradient_of_its_step():
    seen, grads = [], []
    trainer = run(cls=toy.build, dtype=torch.float64)
    fixed_rollouts(trainer)
    [worker] = trainer.team.workers.values()
    before = worker.head.weight.detach().clone()
    worker.optimizer.step = lambda: grads.append(worker.head.weight.grad.clone())
    learn = worker.learn
    worker.learn = lambda rows, scored, a: (learn(rows, scored, a), seen.append((scored, *worker._known)))[0]
    trainer.args.max_steps = 1
    trainer.train()
    [(scored, states, anchors, positive)] = seen
    leaf = before.requires_grad_()
    losses = [x for x in by_hand(leaf, states, scored, positive, 0.5) if x is not None]
    [slope] = torch.autograd.grad(torch.stack(losses).mean(), leaf)
    norm = float(slope.norm())
    torch.testing.assert_close(grads[0], slope * min(1.0, 1.0 / (norm + 1e-6)), rtol=1e-9, atol=1e-12)
    assert norm > 1e-3 and len(losses) >= 2


def test_an_answer_is_the_mean_of_its_states():
    """Against the model without a trainer: the state after each token, tool tokens and padding left out."""
    from trl_variants import Scored

    trainer = run(cls=toy.build, per_device_train_batch_size=3, num_generations=3)
    [worker] = trainer.team.workers.values()
    from .test_bodies import rows

    batch = rows()
    mask = batch["completion_mask"].float()
    mask[2, 1] = 0.0
    blank = torch.zeros(4, dtype=torch.long)
    scored = Scored(rewards=torch.ones(4, 1), weights=torch.ones(1), group=blank, tokens={"mask": mask})
    found = worker._pooled(batch, scored)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        hidden = trainer.model.base_model(ids, attention_mask=attention).last_hidden_state[:, 3:]
    for i in range(4):
        kept = [hidden[i, t] for t in range(5) if mask[i, t] > 0]
        torch.testing.assert_close(found[i], sum(kept) / len(kept), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("right, expected", [([1, 0, 0, 0], 0), ([1, 1, 1, 1], 0), ([1, 1, 0, 0], 2), ([0] * 4, 0)])
def test_only_right_answers_with_both_kinds_beside_them_have_a_loss(right, expected):
    from trl_variants import Scored

    trainer = run(cls=toy.build)
    [worker] = trainer.team.workers.values()
    scored = Scored(
        rewards=torch.tensor(right).float().unsqueeze(1),
        weights=torch.ones(1),
        group=torch.zeros(4, dtype=torch.long),
        tokens={"mask": torch.ones(4, 3)},
    )
    anchors, positive = worker._pairs(scored)
    assert int(anchors.sum()) == expected
    if expected:
        assert positive[:2].tolist() == [1, 0], "never itself, never a wrong one"
        missing = scored.with_(rewards=torch.tensor([[1.0], [math.nan], [0.0], [0.0]]))
        assert not worker._pairs(missing)[0].any(), "an answer without a reward is no one's positive"


def test_the_policy_does_not_feel_the_head_itself():
    beside = toy.train(VariantGRPOTrainer, variant="dapo", hooks={"learners": [{"contrastive_head": {}}]})
    alone = toy.train(VariantGRPOTrainer, variant="dapo")
    assert torch.equal(beside.change, alone.change) and float(alone.change.norm()) > 0


def test_the_warm_up_trains_the_head_alone():
    out = run({"warmup": 2, "lr": 1e-2}, max_steps=2 * 2, weight_decay=0.5)  # two optimizer steps a generation
    assert not out.change.any() and out.logged("contrastive_head/warming_up") == [1.0, 1.0]
    later = run({"warmup": 2, "lr": 1e-2}, max_steps=2 * 3, weight_decay=0.5)
    assert float(later.change.norm()) > 0 and later.logged("contrastive_head/warming_up") == [1.0, 1.0, 0.0]
    assert len(set(later.logged("contrastive_head/loss"))) == 3


def test_evaluation_compares_and_does_not_train():
    out = run(
        trainer_arguments={"eval_dataset": toy.dataset()}, per_device_eval_batch_size=8, patch=lambda trainer: None
    )
    [worker] = out.trainer.team.workers.values()
    before, generations = worker.head.weight.detach().clone(), worker.generations
    assert "eval_reward" in out.trainer.evaluate()
    assert torch.equal(worker.head.weight, before) and worker.generations == generations


def head_and_policy(rows_: int = 16, steps: int = 1):
    split = dict(per_device_train_batch_size=rows_, steps_per_generation=steps, gradient_accumulation_steps=steps)
    out = run({"lr": 1e-2}, max_steps=3, dtype=torch.float64, **split)
    [worker] = out.trainer.team.workers.values()
    return worker.head.weight.detach(), out.change, out.logged("contrastive_head/loss")


def test_neither_head_nor_policy_depends_on_micro_batches_or_processes():
    toy.model()
    head, policy, losses = head_and_policy()
    assert float(policy.norm()) > 0 and len(losses) == 3
    found = [head_and_policy(2, 8), *run_forked(lambda rank: head_and_policy(8), ranks=2)]
    for other in found:
        assert toy.apart(other[0], head) < 1e-6 and toy.apart(other[1], policy) < 1e-5
        assert other[2] == pytest.approx(losses, rel=1e-6)
    assert torch.equal(found[1][0], found[2][0]) and torch.equal(found[1][1], found[2][1]), "the same on both"
