"""What a teacher costs, in rows through its forward: one a rollout row, none that a gate leaves out."""

from __future__ import annotations

import contextlib

import pytest
import torch
from peft import LoraConfig

from tests.teachers.asked import PullWrongRows, counted, keep_generations, question, teacher_of
from tests.teachers.test_exact import PullTogether
from tests.trainer import toy
from trl_variants.teachers.local import Base

pytestmark = pytest.mark.usefixtures("one_row_a_line")

MODEL = {"model": {"path": toy.model_path("llama")}}
PEFT = {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}
ROWS = 16  # of a generation
GATED = {"regularizers": [{PullWrongRows.hook_name: {}}]}
EXACT = {"regularizers": [{PullTogether.hook_name: {}}]}


def rows_through(teacher, module=lambda t: t.model.model, **changes):
    """(rows through a module of the teacher's, what its generations held) of two generations, each trained on twice."""
    seen: list[dict] = []
    with contextlib.ExitStack() as stack:
        counts: list[list[int]] = []

        def patch(trainer):
            keep_generations(seen)(trainer)
            counts.append(stack.enter_context(counted(module(teacher_of(trainer)))))

        out = toy.train(variant="dapo", teacher=teacher, patch=patch, max_steps=8, **changes)
    return sum(counts[0]), seen, out


@pytest.mark.parametrize("hooks", [{}, EXACT])
def test_one_forward_a_row_however_often_it_is_trained_on(hooks):
    rows, seen, _ = rows_through(MODEL, hooks=hooks)
    assert len(seen) == 2 and rows == 2 * ROWS


@pytest.mark.parametrize("exact", [False, True])
def test_no_row_that_a_gate_leaves_out_is_forwarded(exact):
    """The reader wants wrong rows; the hidden states of a divergence are of those rows alone too."""
    hooks = {"regularizers": [{PullWrongRows.hook_name: {"exact": exact}}]}
    rows, seen, out = rows_through(MODEL, hooks=hooks)
    wrong = sum(int((~generation["correct"]).sum()) for generation in seen)
    assert 0 < rows == wrong < 2 * ROWS
    for generation in seen:
        assert torch.equal(generation["teacher_mask"].sum(1) > 0, ~generation["correct"])
    assert out.logged("teacher/rows")[0] == pytest.approx(float((~seen[0]["correct"]).float().mean()))


@pytest.mark.parametrize("hooks", [GATED, {"regularizers": [{PullWrongRows.hook_name: {"exact": True}}]}])
def test_a_generation_that_the_gate_leaves_out_whole_costs_nothing(hooks):
    rows, seen, out = rows_through(MODEL, hooks=hooks, rewards=lambda completions, **_: [1.0] * len(completions))
    assert rows == 0 and not any(generation["teacher_mask"].any() for generation in seen)
    assert all(torch.isfinite(g).all() for g in out.gradients)


def test_empty_completions_are_not_asked_about():
    trainer, asked = toy.build(variant="dapo", teacher=MODEL), question()
    asked.batch["completion_mask"][2] = 0
    output = dict(asked.batch)
    with counted(teacher_of(trainer).model.model) as seen:
        trainer.teaching._ask(asked.rows, output, asked.scored)
    assert sum(seen) == 3 and not output["teacher_mask"][2].any() and output["teacher_mask"][[0, 1, 3]].any(1).all()


def policy_rows(**changes) -> int:
    """Rows through the policy's backbone without gradient, generation apart: what scoring costs."""
    total = []
    with contextlib.ExitStack() as stack:

        def patch(trainer):
            backbone = trainer.causal_lm(trainer.model).base_model
            inside = {"scoring": 0}

            def watched(inner):
                def scored(*args, **kwargs):
                    inside["scoring"] += 1
                    try:
                        return inner(*args, **kwargs)
                    finally:
                        inside["scoring"] -= 1

                return scored

            for name in ("_get_per_token_logps_and_entropies", "logps_and_entropy"):  # TRL's passes, and ours
                setattr(trainer, name, watched(getattr(trainer, name)))
            total.append(
                stack.enter_context(
                    counted(backbone, when=lambda: bool(inside["scoring"]) and not torch.is_grad_enabled())
                )
            )

        toy.train(patch=patch, max_steps=8, trainer_arguments=dict(PEFT), **changes)
    return sum(total[0])


def test_the_policys_own_base_costs_one_forward_a_row_and_none_beside_a_reference():
    """dapo has no reference: the base is one forward more. With a KL to the reference, the base is that pass."""
    kl = {"regularizers": [{"kl": {"coef": 0.01}}]}
    plain, taught = policy_rows(variant="dapo"), policy_rows(variant="dapo", teacher="base")
    assert taught - plain == 2 * ROWS
    with_reference, both = policy_rows(variant="dapo", hooks=kl), policy_rows(variant="dapo", hooks=kl, teacher="base")
    assert with_reference - plain == 2 * ROWS and both == with_reference


@pytest.mark.parametrize("lora", [False, True])
def test_the_references_pass_is_the_bases_answer_to_the_bit(lora):
    seen: list[dict] = []
    out = toy.train(
        variant="dapo",
        hooks={"regularizers": [{"kl": {"coef": 0.01}}]},
        teacher="base",
        max_steps=6,
        patch=keep_generations(seen),
        trainer_arguments=dict(PEFT) if lora else {},
    )
    teacher = teacher_of(out.trainer)
    assert isinstance(teacher, Base) and not teacher.state_dict()
    generation = seen[-1]
    live = generation["teacher_mask"] > 0
    assert live.any() and torch.equal(generation["teacher_logps"][live], generation["ref_per_token_logps"][live])
    assert torch.equal(_forwarded(teacher, generation)[live], generation["teacher_logps"][live])
    assert (generation["old_per_token_logps"] - generation["teacher_logps"])[live].abs().max() > 0  # the policy moved


def _forwarded(teacher, generation):
    """The base's own forward, with the reference's result out of sight."""
    asked = {k: v for k, v in generation.items() if not k.startswith("ref_")}
    with teacher.weights():
        return teacher.trainer.frozen_pass(teacher.model, asked, False)[0]


def test_a_reference_that_moves_or_differs_is_not_the_base():
    moving = toy.build(variant="reinforce-pp-baseline", teacher="base", sync_ref_model=True)
    assert not isinstance(teacher_of(moving), Base)
    model = toy.model()
    model.lm_head.weight.data.add_(0.1)  # TRL reads its reference from the path, without this
    differs = toy.build(variant="reinforce-pp-baseline", teacher="base", model_given=model)
    assert not isinstance(teacher_of(differs), Base)
    same = toy.build(variant="reinforce-pp-baseline", teacher="base")
    assert isinstance(teacher_of(same), Base)


def test_evaluation_asks_once_about_the_rows_whose_kl_it_logs():
    counts = {}
    with contextlib.ExitStack() as stack:

        def patch(trainer):
            module = teacher_of(trainer).model.model
            counts["train"] = stack.enter_context(counted(module, when=lambda: trainer.model.training))
            counts["eval"] = stack.enter_context(counted(module, when=lambda: not trainer.model.training))

        out = toy.train(
            variant="dapo",
            teacher=MODEL,
            patch=patch,
            max_steps=4,
            eval_strategy="steps",
            eval_steps=4,
            per_device_eval_batch_size=4,
            trainer_arguments={"eval_dataset": toy.dataset()},
        )
    evaluated = len(toy.PROMPTS) * out.trainer.num_generations_eval
    assert sum(counts["train"]) == ROWS and sum(counts["eval"]) == evaluated
    assert len(out.logged("eval_teacher/kl")) == 1


def test_a_silent_answer_costs_no_memory_of_hidden_states():
    trainer = toy.build(variant="dapo", hooks=EXACT, teacher=MODEL)
    asked = question()
    output = {**asked.batch, "x": None}
    trainer.teaching.wanted_rows = lambda scored: torch.zeros(4, dtype=torch.bool)
    trainer.teaching._ask(asked.rows, output, asked.scored)
    assert output["teacher_hidden"].shape == (*output["completion_ids"].shape, 32) and not output["teacher_mask"].any()
