"""The implicit process reward: where it starts, its loss and gradient by hand, and whom it learns from."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.trainer import toy
from tests.trainer.forked import run_forked
from trl_variants import VariantError, VariantGRPOTrainer

from .test_bodies import LORA, rows
from .test_critic import arguments, fixed_rollouts

BODIES = ("adapter", "model")


def first_is_a_digit(completions, **_):
    return [float(c[:1].isdigit()) for c in completions]


def run(body: str, learner: dict | None = None, cls=toy.train, **changes):
    edits = {"learners": [{"implicit_reward": {"body": body, **(learner or {})}}], **changes.pop("hooks", {})}
    given = {**arguments(body), **changes.pop("trainer_arguments", {})}
    changes = {"rewards": first_is_a_digit, "num_iterations": 1, **changes}
    return cls(VariantGRPOTrainer, variant="prime", hooks=edits, trainer_arguments=given, **changes)


def watched(learner: list, what: str = "process_rewards"):
    """A patch that notes what the learner gives each generation."""

    def patch(trainer):
        [worker] = trainer.team.workers.values()
        predict = worker.predict

        def noted(*given):
            found = predict(*given)
            learner.append(found[what].clone())
            return found

        worker.predict = noted
        fixed_rollouts(trainer)

    return patch


@pytest.mark.parametrize("body", BODIES)
def test_an_untrained_reward_model_says_exactly_nothing(body):
    """Rounding is not a reward: normalisation would make it as large as any."""
    after, before = [], []
    run(body, {"lr": 1e-2}, max_steps=4, hooks={"select": []}, patch=watched(after))
    assert not after[0].any() and after[1].any()
    run(body, {"lr": 1e-2, "order": "before"}, max_steps=2, hooks={"select": []}, patch=watched(before))
    assert before[0].any(), "it has learned from this very generation"


def test_scaled_rewards_are_beta_times_the_log_ratio():
    plain, scaled = [], []
    for found, edit in ((plain, {}), (scaled, {"scaled": True})):
        run("adapter", {"lr": 1e-2, "order": "before", **edit}, max_steps=2, patch=watched(found))
    torch.testing.assert_close(scaled[0], 0.05 * plain[0])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_its_gradient_is_that_of_the_written_loss(body, checkpointing):
    """Against autograd on a copy with no trainer and whole logits, masks and the sampling temperature included."""
    trainer = run(
        body,
        {"max_grad_norm": 1e9, "beta": 0.3},
        cls=toy.build,
        temperature=0.7,
        gradient_checkpointing=checkpointing,
        per_device_train_batch_size=3,
        num_generations=3,
    )
    [worker] = trainer.team.workers.values()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in worker.parameters().values():
            p.add_(0.02 * torch.randn(p.shape, generator=generator))
    trainer.model.train()
    batch = rows()
    reference = -torch.rand(batch["completion_ids"].shape, generator=generator)
    mask = batch["completion_mask"].float()
    mask[2, 1] = 0.0  # a tool's token
    right = torch.tensor([True, False, True, False])
    reward = torch.tensor([1.0, 0.0, float("nan"), 0.0])
    scored = toy_scored(reward, right, mask, reference)

    twin = copy.deepcopy(worker.body.model)
    vars(twin.get_base_model() if body == "adapter" else twin).pop("forward", None)
    named = dict(twin.named_parameters())
    own = {n: named[n.removeprefix("body.")] for n in worker.parameters()}
    if body == "adapter":
        twin.base_model.set_adapter(["process_reward"])
    for p in own.values():
        p.requires_grad_(True)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    logits = twin(input_ids=ids, attention_mask=attention).logits[:, 2:-1] / 0.7
    logps = logits.log_softmax(-1).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
    total = 0.3 * ((logps - reference) * mask).sum(1)
    # log sigma(x) for a right answer, log sigma(-x) for a wrong one; the row without a reward is left out
    wanted = -sum(torch.nn.functional.logsigmoid(s * total[i]) for i, s in ((0, 1), (1, -1), (3, -1))) / 3
    grads = torch.autograd.grad(wanted, list(own.values()), allow_unused=True)

    seen = {}
    worker.optimizer.step = lambda: seen.update({n: p.grad.clone() for n, p in worker.parameters().items()})
    before = {n: p.requires_grad for n, p in trainer.model.named_parameters()}
    metrics = worker.learn(batch, scored, None)
    assert {n: p.requires_grad for n, p in trainer.model.named_parameters()} == before
    assert all(p.grad is None for p in (*trainer.model.parameters(), *worker.parameters().values()))
    assert metrics["implicit_reward/loss"] == pytest.approx(float(wanted.detach()), rel=1e-5)
    for (name, parameter), g in zip(own.items(), grads, strict=True):
        g = torch.zeros_like(parameter) if g is None else g
        assert float((seen[name] - g).norm()) <= 2e-5 * float(g.norm()) + 1e-7, name
    assert max(float(g.abs().max()) for g in seen.values()) > 1e-3


def toy_scored(reward, right, mask, reference):
    from trl_variants import Scored

    return Scored(
        rewards=reward.unsqueeze(1),
        weights=torch.ones(1),
        group=torch.zeros(len(reward), dtype=torch.long),
        correct=right,
        tokens={"mask": mask, "ref_logps": reference},
    )


def test_it_learns_to_tell_right_from_wrong():
    """On answers it has not seen, of one character; the policy stands still."""
    out = run(
        "model",
        {"lr": 1e-3, "beta": 0.5, "minibatches": 2},
        rewards=lambda completions, **_: [float(c[:1] in "02468acegi") for c in completions],
        max_completion_length=1,
        max_steps=24,
        learning_rate=1e-9,
        data=toy.dataset(toy.PROMPTS * 8),
        per_device_train_batch_size=64,
        num_generations=8,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        hooks={"select": []},
    )
    accuracy, loss = out.logged("implicit_reward/accuracy"), out.logged("implicit_reward/loss")
    assert accuracy[0] < 0.7 and sum(accuracy[-6:]) / 6 > 0.85
    assert loss[0] > 0.65 and sum(loss[-6:]) / 6 < 0.55


def test_only_rows_of_the_loss_teach_it_afterwards_and_all_of_them_before():
    counts = {}

    def watch(order):
        def patch(trainer):
            [worker] = trainer.team.workers.values()
            fit = worker.fit

            def noted(rows, weight, *args):
                counts[order] = float(weight.sum())
                return fit(rows, weight, *args)

            worker.fit = noted
            fixed_rollouts(trainer)

        return patch

    for order in ("after", "before"):
        run(
            "adapter",
            {"order": order},
            max_steps=1,
            hooks={"select": [{"accuracy_band": {"high": 0.5}}]},
            patch=watch(order),
        )
    assert counts["before"] == 16 and counts["after"] in (4, 8, 12)


@pytest.mark.parametrize("body", BODIES)
def test_the_policy_trains_as_if_it_were_not_there(body):
    """Where no hook reads its rewards, weights are the same bit for bit."""
    edits = {"learners": [{"implicit_reward": {"body": body, "lr": 1e-2, "reference": "policy"}}]}
    beside = toy.train(VariantGRPOTrainer, variant="dapo", hooks=edits, trainer_arguments=arguments(body))
    alone = toy.train(VariantGRPOTrainer, variant="dapo", trainer_arguments=arguments(body))
    assert torch.equal(beside.change, alone.change) and float(alone.change.norm()) > 0
    for name in ("plan/tokens_processed", "plan/forwards_per_row"):
        assert beside.logged(name)[1:] == alone.logged(name)[1:], "its passes are none of the policy's"


def weights_of(out) -> torch.Tensor:
    [worker] = out.trainer.team.workers.values()
    return torch.cat([p.detach().flatten() for p in worker.parameters().values()])


def test_its_updates_do_not_depend_on_the_micro_batches():
    found = []
    for rows_, steps in ((4, 4), (16, 1), (2, 8)):
        split = dict(per_device_train_batch_size=rows_, steps_per_generation=steps, gradient_accumulation_steps=steps)
        learner = {"epochs": 2, "minibatches": 2, "lr": 1e-2}
        found.append(
            weights_of(run("adapter", learner, max_steps=2, patch=fixed_rollouts, dtype=torch.float64, **split))
        )
    assert all(toy.apart(other, found[0]) < 1e-5 for other in found[1:])


@pytest.mark.parametrize("body", ["adapter", pytest.param("model", marks=pytest.mark.slow)])
def test_two_processes_train_the_same_reward_model(body):
    def trained(rank: int, rows_: int = 16):
        out = run(
            body,
            {"epochs": 2, "minibatches": 3, "lr": 1e-2},
            per_device_train_batch_size=rows_,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            max_steps=3,
            dtype=torch.float64,
            patch=fixed_rollouts,
        )
        return out.change, weights_of(out), out.logged("implicit_reward/loss")

    toy.model()
    [alone] = run_forked(lambda r: trained(r))
    two = run_forked(lambda r: trained(r, 8), ranks=2)
    assert torch.equal(two[0][1], two[1][1]) and torch.equal(two[0][0], two[1][0]), "the same on both"
    assert toy.apart(two[0][1], alone[1]) < 1e-5 and toy.apart(two[0][0], alone[0]) < 1e-5
    assert two[0][2] == pytest.approx(alone[2], rel=1e-5)


def test_a_failure_inside_its_step_restores_the_adapter():
    held = {}

    def break_it(trainer):
        [worker] = trainer.team.workers.values()
        held["model"], held["flags"] = trainer.model, {n: p.requires_grad for n, p in trainer.model.named_parameters()}
        backward = worker._backward
        worker._backward = lambda rows, own, total, _: backward(rows, own, total, lambda *_: 1 / 0)

    with pytest.raises(VariantError, match="learner implicit_reward failed: ZeroDivisionError"):
        run("adapter", max_steps=1, patch=break_it)
    assert held["model"].active_adapters == ["default"]
    assert {n: p.requires_grad for n, p in held["model"].named_parameters()} == held["flags"]


def _predicts_on_one_rank(rank: int) -> str:
    def break_it(trainer):
        [worker] = trainer.team.workers.values()
        if rank == 1:
            worker.body.model = None
        fixed_rollouts(trainer)

    with pytest.raises(VariantError) as error:
        one = dict(steps_per_generation=1, gradient_accumulation_steps=1)
        run("model", max_steps=1, per_device_train_batch_size=8, patch=break_it, **one)
    return str(error.value)


def test_a_prediction_that_fails_on_one_rank_stops_all():
    toy.model()
    messages = run_forked(_predicts_on_one_rank, ranks=2, timeout=60)
    assert messages[0] == messages[1] and messages[0].startswith("process 1: learner implicit_reward failed: ")


def test_it_is_saved_apart_and_loads_as_a_language_model(tmp_path):
    from transformers import AutoModelForCausalLM

    out = run("model", {"lr": 1e-2}, max_steps=1, output_dir=str(tmp_path))
    out.trainer.save_model()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "_learners" / "implicit_reward")
    [worker] = out.trainer.team.workers.values()
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        got, policy = saved(ids).logits, out.trainer.model(ids).logits
        torch.testing.assert_close(got, worker.body.model(ids).logits)
    assert float((got - policy).abs().max()) > 1e-3


def test_a_policy_that_continues_an_adapter_is_refused():
    torch.manual_seed(0)
    model = get_peft_model(toy.model(), LoraConfig(**LORA))
    with pytest.raises(VariantError, match="merge_and_unload"):
        toy.build(VariantGRPOTrainer, variant="prime", model_given=model)
