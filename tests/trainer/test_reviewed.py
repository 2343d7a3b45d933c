"""Mistakes and corner cases that a review found: each of these crashed, hung or was silently wrong."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from trl_variants import RewardError, VariantError, VariantGRPOTrainer, hook, variant
from trl_variants.hooks import base
from trl_variants.trainer.memory import HookMemory

from . import toy
from .forked import run_forked
from .test_resume import RunningBaseline  # noqa: F401  (registers test_running_baseline)
from .test_seams import Counter


@pytest.fixture
def own():
    """Registers a function as a hook for one test."""
    made: list[tuple[str, str]] = []

    def register(seam: str, function):
        name = f"reviewed_{len(made)}"
        made.append((seam, name))
        return hook(seam, name)(function)()

    yield register
    for key in made:
        del base._REGISTRY[key]


def run(hooks=None, **changes):
    return toy.train(VariantGRPOTrainer, variant=changes.pop("variant", "dapo"), hooks=hooks, max_steps=2, **changes)


# --- schedules ------------------------------------------------------------------------------------

FALLING = {"schedule": {"start": 0.1, "end": 0.02}}


def test_a_scheduled_number_reaches_report():
    out = run({"regularizers": [{"entropy_bonus": {"coef": FALLING}}]})
    assert out.logged("entropy_coef") == pytest.approx([0.1, 0.06])


@pytest.mark.parametrize("field", ["coef", "step", "target"])
def test_a_scheduled_number_reaches_init_and_update(field):
    composition = variant("dapo", regularizers=[{"adaptive_entropy": {field: FALLING}}])
    memory = HookMemory(composition, seed=1)
    first = memory.states["regularizers.0"]["coef"]
    assert first == (0.1 if field == "coef" else 0.0)
    memory.update("step", {"regularizers.0": {"entropy": 0.05}}, progress=0.5)
    moved = memory.states["regularizers.0"]["coef"] - first
    assert moved == pytest.approx({"coef": 0.005, "step": 0.06, "target": 0.005}[field])
    memory.update("step", {"regularizers.0": {"entropy": 0.05}}, progress=1.0)
    again = memory.states["regularizers.0"]["coef"] - first - moved
    assert again == pytest.approx({"coef": 0.005, "step": 0.02, "target": -0.005}[field])  # target 0.02 < 0.05 now


@pytest.mark.parametrize("wrong", [{"begin": "x"}, {"begin": True}, {"until": None}])
def test_a_schedule_takes_numbers(wrong):
    eps = {"schedule": {"start": 1.0, "end": 2.0, **wrong}}
    with pytest.raises(VariantError, match="must be a number"):
        variant("dapo", clip={"ppo": {"eps_high": eps}})


# --- configuration and data -----------------------------------------------------------------------


@pytest.mark.parametrize("hooks", ["clip", ["clip"], 3])
def test_hooks_that_are_no_mapping(hooks):
    with pytest.raises(VariantError, match="hooks is a mapping seam -> hook"):
        toy.build(variant="dapo", hooks=hooks)


@pytest.mark.parametrize(
    "name",
    ["num_generations", "num_iterations", "gradient_accumulation_steps", "per_device_train_batch_size"]
    + ["steps_per_generation"],
)
def test_a_count_of_zero(name):
    with pytest.raises(VariantError, match=f"{name} must be at least 1, got 0"):
        toy.build(**{name: 0})


def test_an_evaluation_set_without_prompts_among_several():
    sets = {"a": toy.dataset(), "b": toy.dataset().rename_column("prompt", "problem")}
    with pytest.raises(VariantError, match="no column `prompt`"):
        toy.build(trainer_arguments={"eval_dataset": sets}, eval_strategy="steps", eval_steps=1)


@pytest.mark.parametrize("method", [None, "dapo"])
def test_a_data_set_smaller_than_one_generation(method):
    with pytest.raises(VariantError, match="has 2 prompts and one generation takes 4"):
        run(variant=method, data=toy.dataset(toy.PROMPTS[:2]))


# --- hooks of one's own ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seam", "function", "words"),
    [
        ("clip", lambda log_ratio, advantage, batch: (log_ratio * advantage).mean(), r"it returned shape \(\)"),
        ("clip", lambda log_ratio, advantage, batch: None, "it returned None"),
        ("ratio", lambda batch: batch.logps.mean(0), r"must return a tensor \(\d,\) or \(\d, 6\)"),
        ("credit", lambda advantage, batch: advantage[:1], r"it returned shape \(1, 1\)"),
        ("weight", lambda batch: torch.tensor(2.0), r"it returned shape \(\)"),
        ("advantage", lambda scored: scored.reward[:8], r"must return a tensor \(16,\) or \(16, T\)"),
        ("aggregate", lambda x, batch: x.mean(1), "must return a scalar"),
        ("regularizers", lambda batch: batch.logps.mean(), "must return a Term"),
        ("rewards", lambda scored: scored.reward[:3], "one value per row"),
        ("select", lambda scored: None, "must return the Scored record"),
        ("select", lambda scored: scored.reward, "must return bool"),
    ],
)
def test_a_hook_that_returns_something_else(own, seam, function, words):
    made = own(seam, function)
    with pytest.raises(VariantError, match=words):
        run({seam: made if seam in base.SINGLE else [made]})


def test_a_nan_stops_before_it_reaches_the_weights(own):
    broken = own("clip", lambda log_ratio, advantage, batch: log_ratio * advantage * float("nan"))
    trainer = toy.build(VariantGRPOTrainer, variant="dapo", hooks={"clip": broken})
    with pytest.raises(VariantError, match="the policy term of the loss is NaN at step 0"):
        trainer.train()
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())


def test_a_nan_advantage_of_a_row_with_a_reward_is_said(own):
    broken = own("advantage", lambda scored: scored.reward.where(scored.group > 0, torch.nan))
    with pytest.warns(UserWarning, match="is NaN for 4 rows that have a reward"):
        run({"advantage": broken})


def test_the_self_test_shows_hooks_what_a_learner_attached(capsys):
    run({"learners": [Counter()], "credit": ["test_reads_marker"]}, self_test=True)
    assert "(ok)" in capsys.readouterr().out


def test_the_self_test_of_micro_batches_of_one_row(capsys):
    run(self_test=True, per_device_train_batch_size=1, gradient_accumulation_steps=8, steps_per_generation=16)
    assert "(ok)" in capsys.readouterr().out


def test_evaluation_leaves_the_generators_of_hooks_alone():
    trainer = toy.build(
        VariantGRPOTrainer,
        variant="grpo",
        hooks={"advantage": "test_running_baseline"},
        per_device_eval_batch_size=4,
        trainer_arguments={"eval_dataset": toy.dataset()},
    )
    before = trainer.memory.rngs["advantage"].get_state().clone()
    trainer.evaluate()
    assert torch.equal(trainer.memory.rngs["advantage"].get_state(), before)


def test_a_hook_without_a_formula_is_named_in_the_objective(own):
    assert "[ reviewed_0 ]" in variant("dapo", clip=own("clip", lambda r, a, b: r * a)).describe()


# --- rewards --------------------------------------------------------------------------------------


def test_an_infinite_reward():
    with pytest.raises(RewardError, match="infinite reward"):
        run(rewards=lambda completions, **_: [float("-inf")] + [0.0] * (len(completions) - 1))


def test_the_error_of_a_reward_function_keeps_its_traceback():
    def broken(completions, **_):
        raise KeyError("answer")

    with pytest.raises(RewardError) as caught:
        run(rewards=broken)
    assert isinstance(caught.value.__cause__, KeyError)


# --- checkpoints ----------------------------------------------------------------------------------


def test_a_checkpoint_of_weights_alone_says_that_it_is_no_exact_resume(tmp_path):
    saving = dict(save_strategy="steps", save_steps=1, save_only_model=True, output_dir=str(tmp_path))
    run(**saving)
    with pytest.warns(UserWarning, match="the checkpoint holds weights only"):
        run(output_dir=str(tmp_path), resume=str(tmp_path / "checkpoint-1"))


# --- two processes --------------------------------------------------------------------------------


class Judge(nn.Module):
    """A reward model that fails on the second process."""

    class config:
        _name_or_path = "judge"
        pad_token_id = 0

    def __init__(self, fails: bool):
        super().__init__()
        self.weight, self.fails = nn.Parameter(torch.zeros(1)), fails

    def forward(self, input_ids, **_):
        if self.fails:
            raise KeyError("judge")

        @dataclass
        class Output:
            logits: torch.Tensor

        return Output(torch.zeros(len(input_ids), 1))


def _two(rank: int) -> dict:
    out = run(  # every row is masked from the second step on, so no process has a token
        variant=None,
        mask_truncated_completions=True,
        max_completion_length=1,
        top_entropy_quantile=0.5,
        learning_rate=1.0,
    )
    saving = toy.folder()
    run(output_dir=saving, save_strategy="steps", save_steps=1)
    judge = dict(trainer_arguments={"reward_processing_classes": toy.tokenizer()})
    try:
        run(rewards=Judge(fails=rank == 1), **judge)
        said = "nothing"
    except RewardError as error:
        said = str(error)
    return {"last": float(out.gradients[-1].norm()), "said": said}


def test_two_processes(tmp_path):
    """No row with a token anywhere; a reward model that fails on one; a checkpoint resumed by one process."""
    toy.model()
    found = run_forked(_two, ranks=2)
    assert [f["last"] for f in found] == [0.0, 0.0]
    assert {f["said"] for f in found} == {"process 1: the rewards failed: KeyError('judge')"}
    with pytest.raises(VariantError, match="was written by 2 processes and this run has 1"):
        run(output_dir=str(tmp_path), resume=f"{toy.folder()}/checkpoint-1")
