"""Two processes hear what one hears, and a killed run's teacher is where it was."""

from __future__ import annotations

import os

import pytest
import torch
from peft import LoraConfig

from tests.teachers.asked import PullWrongRows, keep_generations, teacher_of
from tests.teachers.test_exact import PullTogether
from tests.trainer import toy
from tests.trainer.forked import run_forked
from tests.trainer.test_resume import kill_and_resume

PEFT = {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}
TEMPLATE = "{prompt} {context} "
TEACHERS = {
    "model": {"model": {"path": toy.model_path("llama")}},
    "ema": {"ema": {"rate": 0.5}},
    "siblings": {
        "privileged": {"of": "base", "siblings": "any", "column": None, "pick": "random", "template": TEMPLATE}
    },
    "routed": {
        "routed": {"teachers": {"even": {"model": {"path": toy.model_path("llama")}}, "odd": "base"}, "column": "task"}
    },
}
GATED = {"regularizers": [{PullWrongRows.hook_name: {}}]}
EXACT = {"regularizers": [{PullTogether.hook_name: {}}]}


def heard(rank: int, teacher, hooks, world: int) -> list[dict]:
    """Each row's text and what the teacher said of it; completions are given, not sampled, so that both runs have
    the same."""
    seen: list[dict] = []

    def patch(trainer):
        keep_generations(seen)(trainer)
        trainer._generate_single_turn = lambda ids, *_: ([_written(i, trainer) for i in range(len(ids))], None)

    def _written(i, trainer):
        place = trainer.accelerator.process_index * (16 // world) + i
        return [2 + (3 * place + 5 * t) % 20 for t in range(1 + place % 5)] + [toy.EOS]

    toy.train(
        variant="dapo",
        teacher=teacher,
        hooks=hooks,
        patch=patch,
        max_steps=2,
        learning_rate=0.0,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4 // world,
        steps_per_generation=4 // world,
        num_iterations=1,
    )
    return [
        {k: v for k, v in g.items() if k in ("completion_ids", "teacher_logps", "teacher_mask", "completion_mask")}
        for g in seen
    ]


@pytest.mark.parametrize(
    "name, hooks",
    [("model", {}), ("model", GATED), ("ema", {}), ("siblings", GATED), ("routed", GATED)],
    ids=lambda value: value if isinstance(value, str) else ("gated" if value else "all"),
)
def test_two_processes_hear_what_one_hears(name, hooks):
    toy.model_path("llama")
    [alone] = run_forked(lambda rank: heard(rank, TEACHERS[name], hooks, 1))
    pair = run_forked(lambda rank: heard(rank, TEACHERS[name], hooks, 2), ranks=2)
    assert len(alone) == 2
    spoken = 0
    for whole, *parts in zip(alone, *pair, strict=True):
        width = whole["completion_ids"].shape[1]
        joined = {
            k: torch.cat([torch.nn.functional.pad(p[k], (0, width - p[k].shape[1])) for p in parts]) for k in whole
        }
        assert torch.equal(
            joined["completion_ids"] * joined["completion_mask"].long(),
            whole["completion_ids"] * whole["completion_mask"].long(),
        )
        assert torch.equal(joined["teacher_mask"], whole["teacher_mask"])
        torch.testing.assert_close(joined["teacher_logps"], whole["teacher_logps"], atol=1e-5, rtol=1e-5)
        spoken += int(whole["teacher_mask"].sum())
    assert spoken > 0


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_a_resumed_average_is_the_one_that_was_saved(lora, rate, tmp_path):
    settings = dict(
        variant="dapo",
        hooks=EXACT,
        teacher={"ema": {"rate": rate, "every": 2}},
        save_strategy="steps",
        save_steps=1,
        trainer_arguments=dict(PEFT) if lora else {},
    )
    whole = toy.train(max_steps=5, output_dir=str(tmp_path), **settings)
    resumed = toy.train(
        max_steps=5, output_dir=str(tmp_path / "again"), resume=str(tmp_path / "checkpoint-3"), **settings
    )
    one, other = teacher_of(whole.trainer), teacher_of(resumed.trainer)
    assert one.steps == other.steps == 5 and one.shadow
    for name in one.shadow:
        assert torch.equal(one.shadow[name], other.shadow[name]), name
    mine, theirs = (dict(t.model.named_parameters()) for t in (whole.trainer, resumed.trainer))
    assert all(torch.equal(mine[n], theirs[n]) for n in mine)
    assert whole.logged("teacher/kl")[3:] == resumed.logged("teacher/kl")[-2:]
    moving = next(n for n in one.shadow if not torch.equal(one.shadow[n], mine[n].detach()))
    assert moving  # the average is not the policy


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lora", "two processes"])
def test_a_killed_run_with_an_average(case):
    two = case == "two processes"
    kill_and_resume(
        dict(variant="dapo", teacher={"ema": {"rate": 0.2}}, hooks=EXACT, **({} if two else {"peft": "lora"})),
        at=10,
        ranks=2 if two else 1,
    )


def test_a_checkpoint_holds_no_frozen_teacher(tmp_path):
    from safetensors.torch import load_file

    toy.train(
        variant="dapo",
        teacher={"model": {"path": toy.model_path("llama")}},
        hooks=GATED,
        max_steps=1,
        save_strategy="steps",
        save_steps=1,
        output_dir=str(tmp_path),
    )
    kept = load_file(os.path.join(tmp_path, "checkpoint-1", "variant.safetensors"))
    assert not [name for name in kept if name.startswith("teacher/")]
