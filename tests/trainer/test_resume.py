"""A run that was killed and resumed is the run that was not, bit for bit: weights, optimizer, hooks, samples, logs."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass

import pytest
import torch
from transformers import TrainerCallback

from tests.batches import build, inputs
from trl_variants import Scored, VariantError, VariantGRPOTrainer, hook, variant, variants
from trl_variants.trainer.memory import HookMemory

from . import toy
from .forked import Killed, kill_self, run_forked

STEPS = 13  # two generations an epoch, four optimizer steps a generation: epochs end after steps 8 and 16
TIMES = ("runtime", "time", "per_second", "train_loss", "total_flos")


@hook("advantage", "test_running_baseline")
@dataclass(frozen=True)
class RunningBaseline:
    """A hook with every kind of memory: a number, a tensor, a list, and a random generator."""

    decay: float = 0.5
    needs = frozenset()
    update_every = "generation"
    random = True

    def init(self) -> dict:
        return {"mean": 0.0, "seen": torch.zeros(2), "history": []}

    def __call__(self, scored: Scored, state: dict, rng: torch.Generator) -> torch.Tensor:
        noise = torch.randn(len(scored.reward), generator=rng)
        return scored.reward - state["mean"] + 0.1 * noise + 0.01 * state["seen"].sum()

    def update(self, state: dict, scored: Scored) -> dict:
        mean = float(scored.reward.mean())
        return {
            "mean": self.decay * state["mean"] + (1 - self.decay) * mean,
            "seen": state["seen"] + torch.stack([scored.reward.sum(), scored.reward.max()]),
            "history": [*state["history"], mean],
        }


STATEFUL = {"advantage": "test_running_baseline"}
ADAPTIVE = {"regularizers": [{"adaptive_entropy": {"coef": 0.02, "target": 2.0}}]}
LORA = "lora"
CRITIC = {"learners": [{"critic": {"minibatches": 3, "epochs": 2, "lr": 1e-2}}]}
HELD_KL = {"adaptive_kl_in_reward": {"level": "token", "target": 0.1, "horizon": 100.0}}
CASES = {
    "trl-settings": {},
    "trl-adaptive-entropy": dict(use_adaptive_entropy=True, entropy_target=2.0, entropy_coef=0.01),
    "dapo-every-third-log": dict(variant="dapo", logging_steps=3),
    "running-baseline": dict(variant="grpo", hooks=STATEFUL),
    "adaptive-entropy": dict(variant="dapo", hooks=ADAPTIVE),
    "both-states": dict(variant="gspo", hooks={**STATEFUL, **ADAPTIVE}, logging_steps=2),
    "window-scope": dict(variant="dapo", hooks={"weight": [{"entropy_quantile": {"keep": 0.5}}], **ADAPTIVE}),
    "reference": dict(variant="reinforce-pp-baseline"),
    "attachments": dict(variant="dsdr", hooks={"regularizers": [{"distinct_entropy": {"coef": 0.1}}]}),
    "reference-in-reward": dict(variant="rloo", hooks=ADAPTIVE),
    "lora": dict(variant="cispo", peft=LORA, hooks=ADAPTIVE),
    "straddling": dict(variant="gmpo", gradient_accumulation_steps=3, hooks=STATEFUL),
    "schedule": dict(variant="dapo", hooks={"clip": {"ppo": {"eps_high": {"schedule": {"start": 0.5, "end": 0.01}}}}}),
    "critic-model": dict(variant="ppo", hooks={**CRITIC, "rewards": [HELD_KL]}),
    "critic-warm-up": dict(
        variant="vapo", hooks={"learners": [{"critic": {"body": "trunk", "lr": 1e-2, "warmup": 3}}]}
    ),
    "critic-adapter-warm-up": dict(
        variant="vapo", peft=LORA, hooks={"learners": [{"critic": {"lr": 1e-2, "warmup": 3}}]}
    ),
    "process-reward-adapter": dict(
        variant="prime",
        peft=LORA,
        hooks={"learners": [{"implicit_reward": {"lr": 1e-2, "minibatches": 2}}], "select": []},
    ),
    "contrastive-head-warm-up": dict(
        variant="clipo", hooks={"learners": [{"contrastive_head": {"dim": 8, "lr": 1e-2, "warmup": 2}}]}
    ),
    "completions-table": dict(variant="vespo", log_completions=True, hooks=ADAPTIVE, logging_steps=2),
}
TWO_PROCESSES = ("trl-settings", "both-states", "window-scope", "straddling", "critic-model")


class _KillAfter(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            kill_self()


def run(rank: int, case: dict, folder: str, kill_at: int | None = None, resume: str | None = None):
    """One run in a forked process. Returns what must be equal, and the hook state apart."""
    case = dict(case)
    seen: list[tuple[str, str]] = []

    def rewards(prompts, completions, **_):
        seen.extend(zip(prompts, completions, strict=True))
        return toy.digits(completions)

    given = {}
    if case.pop("peft", None) == LORA:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    if kill_at is not None:
        given["callbacks"] = [_KillAfter(kill_at)]
    out = toy.train(
        VariantGRPOTrainer,
        rewards=rewards,
        output_dir=folder,
        save_strategy="steps",
        save_steps=1,
        max_steps=STEPS,
        resume=resume,
        trainer_arguments=given,
        **case,
    )
    trainer = out.trainer
    weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    optimizer = [
        v for s in trainer.optimizer.state_dict()["state"].values() for v in s.values() if isinstance(v, torch.Tensor)
    ]
    logs = [sorted((k, v) for k, v in line.items() if not any(t in k for t in TIMES)) for line in out.logs]
    plain, tensors = trainer.memory.state_dict()
    for path, worker in trainer.team.workers.items():
        plain[path], own = worker.state_dict()
        tensors.update({f"{path}/{n}": t.detach().clone() for n, t in own.items()})
    return {
        "weights": weights,
        "optimizer": optimizer,
        "logs": logs,
        "plain": plain,
        "tensors": tensors,
        "seen": seen,
        "table": {k: list(v) for k, v in trainer._logs.items() if k in ("prompt", "completion", "advantages")},
    }


def assert_same_run(whole: dict, resumed: dict, same_table: bool = True) -> None:
    for name, weight in whole["weights"].items():
        assert torch.equal(weight, resumed["weights"][name]), name
    assert whole["optimizer"] and all(
        torch.equal(a, b) for a, b in zip(whole["optimizer"], resumed["optimizer"], strict=True)
    )
    assert repr(whole["logs"]) == repr(resumed["logs"])  # repr: NaN equals itself
    assert repr(whole["plain"]) == repr(resumed["plain"])
    assert whole["tensors"].keys() == resumed["tensors"].keys()
    assert all(torch.equal(whole["tensors"][k], resumed["tensors"][k]) for k in whole["tensors"])
    assert whole["seen"][len(whole["seen"]) - len(resumed["seen"]) :] == resumed["seen"]
    if same_table:
        assert whole["table"] == resumed["table"]


def kill_and_resume(case: dict, at: int, ranks: int = 1) -> dict:
    """What the whole run did, after the one that was killed and resumed was found to be the same."""
    with tempfile.TemporaryDirectory() as folder:
        toy.model()  # saved before the processes need it
        whole = run_forked(lambda r: run(r, case, os.path.join(folder, "whole")), ranks)
        killed = run_forked(lambda r: run(r, case, os.path.join(folder, "killed"), kill_at=at), ranks)
        assert killed == [Killed()] * ranks
        checkpoint = os.path.join(folder, "killed", f"checkpoint-{at}")
        resumed = run_forked(lambda r: run(r, case, os.path.join(folder, "killed"), resume=checkpoint), ranks)
    for a, b in zip(whole, resumed, strict=True):
        assert_same_run(a, b)
    return whole[0]


@pytest.mark.parametrize("name", CASES)
def test_killed_inside_a_generation_window_in_the_second_epoch(name):
    kill_and_resume(CASES[name], at=10)  # epoch 2 began after step 8; its first generation serves steps 9 to 12


@pytest.mark.parametrize("at", [1, 4, 8, 12])
def test_killed_at_any_step(at):
    kill_and_resume(
        CASES["both-states"], at
    )  # inside the first window, on its edge, on the epoch's edge, at the last step but one


@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_killed_with_two_processes(name):
    kill_and_resume(CASES[name], at=10, ranks=2)


def test_stock_trl_is_not_exact_here():
    """The reason for all this: TRL regenerates for prompts it has used, and restarts the permutation."""
    from trl import GRPOTrainer

    def stock(rank, folder, resume=None):
        out = toy.train(
            GRPOTrainer,
            output_dir=folder,
            save_strategy="steps",
            save_steps=1,
            max_steps=STEPS,
            resume=resume,
        )
        return out.trainer.model.state_dict()["model.embed_tokens.weight"].clone()

    with tempfile.TemporaryDirectory() as folder:
        [whole] = run_forked(lambda r: stock(r, folder))
        [resumed] = run_forked(lambda r: stock(r, folder, os.path.join(folder, "checkpoint-10")))
    assert not torch.equal(whole, resumed)


def test_a_run_resumed_at_its_end_takes_no_further_step(tmp_path):
    first = toy.train(
        VariantGRPOTrainer,
        variant="dapo",
        max_steps=2,
        save_strategy="steps",
        save_steps=2,
        output_dir=str(tmp_path),
    )
    again = toy.train(
        VariantGRPOTrainer,
        variant="dapo",
        max_steps=2,
        output_dir=str(tmp_path),
        resume=str(tmp_path / "checkpoint-2"),
    )
    assert again.trainer.state.global_step == 2
    for a, b in zip(first.trainer.model.parameters(), again.trainer.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_second_train_call_starts_at_a_generation_boundary():
    trainer = toy.build(VariantGRPOTrainer, variant="dapo", max_steps=3)
    trainer.train()
    assert trainer.inside_generation
    trainer.train()
    assert trainer._step == 6 and trainer.state.global_step == 3


def test_another_composition_is_refused_with_the_difference(tmp_path):
    toy.train(
        VariantGRPOTrainer,
        variant="dapo",
        max_steps=1,
        save_strategy="steps",
        save_steps=1,
        output_dir=str(tmp_path),
    )
    with pytest.raises(VariantError, match=r"another composition(.|\n)*clip: .*0\.28.*-> .*0\.3"):
        toy.train(
            VariantGRPOTrainer,
            variant="dapo",
            hooks={"clip": {"ppo": {"eps_high": 0.3}}},
            max_steps=2,
            resume=str(tmp_path / "checkpoint-1"),
        )


def test_a_checkpoint_of_another_number_of_processes_is_refused(tmp_path):
    toy.train(
        VariantGRPOTrainer,
        variant="dapo",
        max_steps=1,
        save_strategy="steps",
        save_steps=1,
        output_dir=str(tmp_path),
    )
    os.remove(tmp_path / "checkpoint-1" / "variant_rank0.json")
    with pytest.raises(VariantError, match="number of processes"):
        toy.train(VariantGRPOTrainer, variant="dapo", max_steps=2, resume=str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize("name", [v.name for v in variants] + ["both-states"])
def test_state_round_trip(name, tmp_path):
    """save -> load gives equal states for every catalog entry, through the files a checkpoint holds."""
    from trl_variants.trainer.checkpoint import load_shared, save_shared

    composition = variant("gspo").with_(**STATEFUL, **ADAPTIVE) if name == "both-states" else variant(name)
    memory = HookMemory(composition, seed=1)
    given = inputs()
    memory.update("generation", build(given, rewards=given["rewards"].nan_to_num()).scored)
    memory.update("step", {path: {"entropy": 0.5, "open": 0.5, "open_kl": 0.5} for path in memory.states})
    for generator in memory.rngs.values():
        torch.rand(3, generator=generator)
    save_shared(str(tmp_path), composition, *memory.state_dict())
    restored = HookMemory(composition, seed=2)
    restored.load_state_dict(*load_shared(str(tmp_path), composition))
    (plain, tensors), (plain2, tensors2) = memory.state_dict(), restored.state_dict()
    assert plain == plain2 and tensors.keys() == tensors2.keys()
    assert all(torch.equal(tensors[k], tensors2[k]) for k in tensors)
    if name == "both-states":
        assert plain != HookMemory(composition, seed=1).state_dict()[0]
        assert [
            torch.rand(1, generator=a) == torch.rand(1, generator=b)
            for a, b in zip(memory.rngs.values(), restored.rngs.values(), strict=True)
        ]


def test_state_of_a_type_that_cannot_be_saved_is_named():
    from trl_variants.trainer.memory import _split

    with pytest.raises(VariantError, match="not object"):
        _split({"x": object()}, "state/clip", {})
