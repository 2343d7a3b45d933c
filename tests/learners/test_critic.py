"""The critic: its loss and gradient by hand, its independence of splits, and the policy's independence of it."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig

from tests.trainer import toy
from tests.trainer.forked import run_forked
from trl_variants import TokenBatch, VariantError, VariantGRPOTrainer, variant
from trl_variants.learners.critic import explained_variance, value_loss

from .test_bodies import LORA, rows

BODIES = ("adapter", "model", "trunk")


def arguments(body: str) -> dict:
    return {"peft_config": LoraConfig(**LORA)} if body == "adapter" else {}


def hooks(body: str, **critic) -> dict:
    return {"advantage": {"gae": {"bootstrap": False}}, "learners": [{"critic": {"body": body, **critic}}]}


def run(body: str, critic: dict | None = None, **changes):
    given = {**arguments(body), **changes.pop("trainer_arguments", {})}
    edits = hooks(body, **(critic or {}))
    return toy.train(VariantGRPOTrainer, variant="dapo", hooks=edits, trainer_arguments=given, **changes)


# ---------------------------------------------------------------- the loss


@pytest.mark.parametrize(
    "value, target, loss, slope",
    [
        # V_old .5, clip .2: Vc = .7. Target .9: plain .01, clipped .04, the larger has no gradient
        (1.0, 0.9, 0.5 * 0.04, 0.0),
        # target .75: plain .0625 > .0025, dL/dV = 2 (1 - .75) / 2
        (1.0, 0.75, 0.5 * 0.0625, 0.25),
        # inside the range both are the same
        (0.6, 0.0, 0.5 * 0.36, 0.6),
    ],
)
def test_clipped_value_loss(value, target, loss, slope):
    v = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    old, goal = (torch.tensor([[x]], dtype=torch.float64) for x in (0.5, target))
    got, clipped = value_loss(v, old, goal, 0.2)
    got.sum().backward()
    assert float(got) == pytest.approx(loss) and float(v.grad) == pytest.approx(slope)
    assert bool(clipped) == (slope == 0.0)
    plain, none = value_loss(v.detach(), old, goal, None)
    assert float(plain) == pytest.approx(0.5 * (value - target) ** 2) and not none.any()


def test_the_value_loss_of_open_reasoner_zero_s_check():
    # V = .3, .5, .8 and R = 1: .5 * mean(.49, .25, .04) = .13
    loss, _ = value_loss(torch.tensor([[0.3, 0.5, 0.8]]), torch.zeros(1, 3), torch.ones(1, 3), None)
    assert float(loss.mean()) == pytest.approx(0.13)


def test_explained_variance():
    goal, mask = torch.tensor([[1.0, 0.0, 9.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    assert explained_variance(goal, goal, mask) == 1.0
    assert explained_variance(torch.full((1, 3), 0.3), goal, mask) == pytest.approx(0.0)
    # residuals .5, -.5: variance .25 of .25
    assert explained_variance(torch.tensor([[0.5, 0.5, 0.0]]), goal, mask) == pytest.approx(0.0)
    assert explained_variance(torch.tensor([[0.8, 0.0, 0.0]]), goal, mask) == pytest.approx(1 - 0.01 / 0.25)
    assert explained_variance(goal, torch.ones(1, 3), mask) != explained_variance(goal, torch.ones(1, 3), mask), "NaN"


# ---------------------------------------------------------------- through the trainer


@pytest.mark.slow
def test_it_explains_returns_it_has_not_seen():
    """The policy stands still and the first character decides: a critic that reads it explains more and more."""
    out = run(
        "model",
        {"lam": 1.0, "clip": None, "epochs": 4, "minibatches": 2, "lr": 3e-3},
        rewards=lambda completions, **_: [float(c[:1].isdigit()) for c in completions],
        data=toy.dataset(toy.PROMPTS * 8),
        max_steps=40,
        num_iterations=1,
        learning_rate=1e-9,
        per_device_train_batch_size=32,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
    )
    explained = out.logged("critic/explained_variance")
    assert abs(explained[0]) < 1e-6 and sum(explained[-5:]) / 5 > 0.3


@pytest.mark.parametrize("body", BODIES)
def test_the_policy_trains_as_if_the_critic_were_not_there(body):
    """Where no hook reads the values, weights are the same bit for bit: no gradient, no random number in common."""
    edits = {"learners": [{"critic": {"body": body, "epochs": 2, "minibatches": 3}}]}
    with_critic = toy.train(VariantGRPOTrainer, variant="dapo", hooks=edits, trainer_arguments=arguments(body))
    without = toy.train(VariantGRPOTrainer, variant="dapo", trainer_arguments=arguments(body))
    assert torch.equal(with_critic.change, without.change) and float(without.change.norm()) > 0
    assert len(with_critic.logged("critic/loss")) == 2


@pytest.mark.parametrize("body", BODIES)
def test_it_learns_and_leaves_no_gradient(body):
    trainer = None

    def keep(built):
        nonlocal trainer
        trainer = built

    critic = {"epochs": 4, "minibatches": 2, "lr": 3e-3, "init": 0.25, "lam": 1.0, "clip": None}
    one = dict(rewards=lambda completions, **_: [1.0] * len(completions))
    out = run(body, critic, max_steps=20, num_iterations=1, patch=keep, learning_rate=1e-6, **one)  # no group differs
    losses, means = out.logged("critic/loss"), out.logged("critic/value_mean")
    assert means[0] == pytest.approx(0.25), "the head starts at a constant"
    assert losses[-1] < 0.2 * losses[0] and abs(means[-1] - 1.0) < 0.3, "towards the return, 1"
    [worker] = trainer.team.workers.values()
    assert all(p.grad is None for p in worker.parameters().values())
    owned = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert not owned & {id(p) for p in worker.parameters().values()}, "the policy's optimizer does not hold them"


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_its_gradient_is_that_of_the_written_loss(body, checkpointing):
    """One step of plain gradient descent, against autograd on a copy with no trainer, masks and all."""
    trainer = toy.build(
        VariantGRPOTrainer,
        variant="dapo",
        hooks=hooks(body, coef=0.7, lr=0.1, max_grad_norm=1e9),
        trainer_arguments=arguments(body),
        gradient_checkpointing=checkpointing,
        per_device_train_batch_size=3,
        num_generations=3,
    )
    [worker] = trainer.team.workers.values()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in worker.parameters().values():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    trainer.model.train()
    batch = rows()
    old = worker.predict(batch, None)["values"]
    goal = torch.rand(old.shape, generator=generator)
    mask = batch["completion_mask"].float()
    twin = copy.deepcopy(trainer.model if body == "trunk" else worker.body.model)
    head = copy.deepcopy(worker.head)
    named = dict(twin.named_parameters())
    own = {n: named[n.removeprefix("body.")] for n in worker.parameters() if n.startswith("body.")}
    own |= {f"value.{n}": p for n, p in head.named_parameters()}
    if body == "adapter":
        twin.base_model.set_adapter(["critic"])
    for p in own.values():
        p.requires_grad_(True)
    inner = twin.get_base_model().base_model if body == "adapter" else twin.base_model
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    hidden = inner(ids, attention_mask=attention).last_hidden_state[:, 2:-1]
    hidden = hidden.detach() if body == "trunk" else hidden
    wanted = 0.7 * (0.5 * (head(hidden).squeeze(-1) - goal) ** 2 * mask).sum() / mask.sum()
    grads = torch.autograd.grad(wanted, list(own.values()), allow_unused=True)

    seen = {}

    def step():
        seen.update({n: p.grad.clone() for n, p in worker.parameters().items()})

    worker.optimizer.step = step

    def loss_sum(part, index):
        values = worker.values(part)
        w = values.shape[1] - 1
        loss, _ = value_loss(values[:, :w], old[index, :w], goal[index, :w], None)
        return 0.7 * (loss * mask[index, :w]).sum()

    before = {n: p.requires_grad for n, p in trainer.model.named_parameters()}
    fitted = worker.fit(batch, mask.sum(1), loss_sum, epochs=1, minibatches=1)
    assert {n: p.requires_grad for n, p in trainer.model.named_parameters()} == before
    assert all(p.grad is None for p in trainer.model.parameters())
    assert fitted["grad_norm"] == pytest.approx(float(torch.stack([g.norm() for g in seen.values()]).norm()), rel=1e-5)
    for (name, parameter), g in zip(own.items(), grads, strict=True):
        g = torch.zeros_like(parameter) if g is None else g
        torch.testing.assert_close(seen[name], g, rtol=2e-5, atol=2e-7, msg=name)
    assert max(float(g.abs().max()) for g in seen.values()) > 1e-3


@pytest.mark.parametrize("body", BODIES)
def test_its_updates_do_not_depend_on_the_micro_batches(body):
    critic = {"epochs": 2, "minibatches": 2, "lr": 1e-2}
    weights = []
    for rows_, steps in ((4, 4), (8, 2), (2, 8)):
        out = run(
            body,
            critic,
            per_device_train_batch_size=rows_,
            steps_per_generation=steps,
            gradient_accumulation_steps=steps,
            num_iterations=1,
            max_steps=2,
            patch=fixed_rollouts,
        )
        [worker] = out.trainer.team.workers.values()
        weights.append(torch.cat([p.detach().flatten() for p in worker.parameters().values()]))
        assert len(out.logged("critic/loss")) == 2
    for other in weights[1:]:
        assert toy.apart(other, weights[0]) < 2e-5


def fixed_rollouts(trainer) -> None:
    """Completions that depend on the row and the generation alone."""
    calls = iter(range(100))

    def rollout(prompts, _):
        generation, first = next(calls), trainer.accelerator.process_index * len(prompts)
        ids = []
        for row in range(first, first + len(prompts)):
            g = torch.Generator().manual_seed(1000 * generation + row)
            length = 1 + row % 5
            ids.append(torch.randint(2, 20, (length,), generator=g).tolist() + [toy.EOS] * (row % 3 > 0))
        prompt_ids = [toy.tokenizer()(p).input_ids for p in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}

    trainer.rollout_func = rollout


@pytest.mark.parametrize("body", [pytest.param(b, marks=[pytest.mark.slow] * (b != "adapter")) for b in BODIES])
def test_two_processes_train_the_same_critic_and_policy(body):
    def weights(rank: int, rows_: int = 16):
        out = run(
            body,
            {"epochs": 2, "minibatches": 3, "lr": 1e-2},
            per_device_train_batch_size=rows_,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            num_iterations=2,
            max_steps=4,
            patch=fixed_rollouts,
        )
        [worker] = out.trainer.team.workers.values()
        learned = torch.cat([p.detach().flatten() for p in worker.parameters().values()])
        return out.change, learned, out.logged("critic/loss"), out.logged("critic/explained_variance")

    toy.model()
    [(alone, critic, losses, explained)] = run_forked(lambda r: weights(r))
    two = run_forked(lambda r: weights(r, 8), ranks=2)
    assert torch.equal(two[0][1], two[1][1]) and torch.equal(two[0][0], two[1][0]), "the same on both"
    assert toy.apart(two[0][1], critic) < 2e-5 and toy.apart(two[0][0], alone) < 1e-4
    assert two[0][2] == pytest.approx(losses, rel=1e-4) and two[0][3] == pytest.approx(explained, rel=1e-3, abs=1e-5)


def test_warm_up_leaves_the_policy_exactly_where_it_was():
    """Weight decay included: the optimizer skips every weight, and training proper begins on time."""
    critic = {"warmup": 2, "lr": 1e-2}
    frozen = run("model", critic, max_steps=8, weight_decay=0.5)  # four optimizer steps a generation
    assert not frozen.change.any() and not any(g.any() for g in frozen.gradients)
    assert frozen.logged("critic/warming_up") == [1.0, 1.0]
    later = run("model", critic, max_steps=9, weight_decay=0.5)
    assert float(later.change.norm()) > 0 and later.logged("critic/warming_up") == [1.0, 1.0, 0.0]
    assert later.gradients[-1].any()


def test_rows_that_left_the_policy_s_loss_still_teach_the_critic():
    def only_first(scored):
        return torch.arange(len(scored.reward)) == 0

    from trl_variants import hook

    if "test_only_first" not in __import__("trl_variants.hooks.base", fromlist=["hook_names"]).hook_names("select"):
        hook("select", "test_only_first")(only_first)
    seen = []

    def watch(trainer):
        [worker] = trainer.team.workers.values()
        fit = worker.fit

        def watched(rows, weight, *args, **kwargs):
            seen.extend(weight.tolist())
            return fit(rows, weight, *args, **kwargs)

        worker.fit = watched

    edits = {"learners": [{"critic": {"body": "model"}}], "select": ["test_only_first"]}
    toy.train(VariantGRPOTrainer, variant="dapo", hooks=edits, max_steps=1, patch=watch)
    assert len(seen) == 16 and all(tokens > 0 for tokens in seen), "every row weighs by its tokens"


def test_a_failure_inside_a_critic_step_is_named_and_restores_the_adapter():
    broken = {}

    def break_it(trainer):
        [worker] = trainer.team.workers.values()
        broken["model"] = trainer.model
        broken["flags"] = {n: p.requires_grad for n, p in trainer.model.named_parameters()}
        values = worker.values
        worker.values = lambda part: values(part) if not torch.is_grad_enabled() else 1 / 0

    with pytest.raises(VariantError, match="learner critic failed: ZeroDivisionError"):
        run("adapter", max_steps=1, patch=break_it)
    model = broken["model"]
    assert model.active_adapters == ["default"]
    assert {n: p.requires_grad for n, p in model.named_parameters()} == broken["flags"]
    assert all(p.grad is None for p in model.parameters())


def test_a_value_that_is_not_finite_stops_the_run():
    def blow_up(trainer):
        [worker] = trainer.team.workers.values()
        worker.head.bias.data.fill_(float("inf"))

    with pytest.raises(VariantError, match="gradient of learner critic is not finite"):
        run("model", {"clip": None}, max_steps=1, patch=blow_up)


def test_a_classifier_given_as_value_model_brings_its_own_head():
    from transformers import AutoModelForSequenceClassification

    path = toy.model_path()
    given = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    out = None

    class WithValueModel(VariantGRPOTrainer):
        def __init__(self, *args, **kwargs):
            self.given_models = {"value_model": given}
            super().__init__(*args, **kwargs)

    out = toy.train(WithValueModel, variant="dapo", hooks=hooks("auto"), max_steps=1)
    [worker] = out.trainer.team.workers.values()
    assert worker.body.model is given and worker.head is given.score and not worker.heads
    assert "body.score.weight" in worker.parameters()


def test_on_six_numbers_without_a_model():
    batch = TokenBatch.from_tensors(
        torch.zeros(1, 3, dtype=torch.float64, requires_grad=True),
        values=[[0.2, 0.5, 0.6]],
        rewards=[1.0],
        truncated=[False],
    )
    out = variant("ppo", advantage={"gae": {"whiten": False}}).loss(batch)
    assert out.advantage[0].tolist() == pytest.approx([0.756, 0.48, 0.4])
