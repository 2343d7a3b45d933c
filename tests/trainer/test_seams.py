"""The seams whose first hooks come later are called where the pipeline says, with what they need."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from trl_variants import Scored, VariantError, VariantGRPOTrainer, hook
from trl_variants.records import Rollouts

from . import toy

CALLS: list[str] = []


@hook("prompts", "test_only_digits")
@dataclass(frozen=True)
class OnlyDigits:
    """Replaces every prompt by one that starts with a digit."""

    def __call__(self, rows: list[dict[str, Any]], services: Any) -> list[dict[str, Any]]:
        CALLS.append("prompts")
        digits = [row for row in services.dataset if row["prompt"][0].isdigit()]
        return [digits[(i // 4) % len(digits)] for i in range(len(rows))]

    def observe(self, scored: Scored) -> None:
        CALLS.append(f"observed {len(scored.reward)}")


@hook("rollouts", "test_planted")
@dataclass(frozen=True)
class Planted:
    """Replaces the first row of each group by a written one, scored by the policy, outside the baseline."""

    text: str = "0123"

    def __call__(self, rollouts: Rollouts, services: Any) -> Rollouts:
        CALLS.append("rollouts")
        ids = toy.tokenizer()(self.text).input_ids
        planted = [i % 4 == 0 for i in range(len(rollouts.completion_ids))]
        rows = [ids if p else old for p, old in zip(planted, rollouts.completion_ids, strict=True)]
        first = services.score(rollouts.prompt_ids[:1], [ids])[0]
        assert first.shape == (len(ids),) and bool((first < 0).all())
        more, _ = services.generate(rollouts.prompt_ids[:1], n=2, max_new_tokens=3)
        assert len(more) == 2 and all(1 <= len(m) <= 3 for m in more)
        return replace(
            rollouts,
            completion_ids=rows,
            origin=[int(p) for p in planted],
            in_baseline=[not p for p in planted],
            in_policy_loss=[True] * len(rows),
        )


@hook("learners", "test_counter")
@dataclass(frozen=True)
class Counter:
    """Attaches a value per row to the batch, and counts optimizer steps."""

    seen: list = field(default_factory=list)

    def attach(self, trainer: Any) -> None:
        self.seen.append(type(trainer).__name__)

    def observe(self, scored: Scored, output: dict[str, Any]) -> dict[str, Any]:
        return {"marker": torch.full((len(output["advantages"]),), 7.0)}

    def learn(self) -> dict[str, float]:
        self.seen.append("step")
        return {"learner/steps": float(self.seen.count("step"))}


@hook("credit", "test_reads_marker")
@dataclass(frozen=True)
class ReadsMarker:
    """Needs what the learner attached."""

    def __call__(self, advantage: torch.Tensor, batch: Any) -> torch.Tensor:
        assert bool((batch.need("marker") == 7.0).all())
        return advantage


def test_prompts_hook_chooses_before_generation_and_is_told_the_results():
    CALLS.clear()
    out = toy.train(VariantGRPOTrainer, variant="dapo", hooks={"prompts": ["test_only_digits"]}, max_steps=1)
    assert CALLS == ["prompts", "observed 16"]
    assert set(out.tables[-1]["prompt"]) == {"0", "77"}


def test_rollouts_hook_replaces_rows_and_marks_their_origin():
    CALLS.clear()
    out = toy.train(
        VariantGRPOTrainer, variant="grpo", hooks={"rollouts": ["test_planted"], "regularizers": []}, max_steps=1
    )
    table = out.tables[-1]
    assert CALLS == ["rollouts"] and table["completion"][::4] == ["0123"] * 4  # decoded again for the reward functions
    assert all(a == 0 for a in table["advantages"][::4])  # not in the baseline
    assert any(a != 0 for a in table["advantages"])


def test_rollouts_hook_that_loses_rows_is_an_error():
    @hook("rollouts", "test_loses_rows")
    @dataclass(frozen=True)
    class LosesRows:
        def __call__(self, rollouts: Rollouts, services: Any) -> Rollouts:
            return replace(rollouts, completion_ids=rollouts.completion_ids[:-1])

    with pytest.raises(VariantError, match="must return 16 non-empty completions, got 15"):
        toy.train(VariantGRPOTrainer, variant="dapo", hooks={"rollouts": [LosesRows()]}, max_steps=1)


def test_learner_attaches_rows_that_survive_shuffle_and_split_and_reports():
    learner = Counter()
    hooks = {"learners": [learner], "credit": ["test_reads_marker"]}
    out = toy.train(VariantGRPOTrainer, variant="dapo", hooks=hooks, max_steps=3)
    assert learner.seen == ["VariantGRPOTrainer", "step", "step", "step"]
    assert out.logged("learner/steps") == [1.0, 2.0, 3.0]


def test_none_of_them_runs_in_evaluation():
    CALLS.clear()
    hooks = {"prompts": ["test_only_digits"], "rollouts": ["test_planted"], "learners": [learner := Counter()]}
    trainer = toy.build(
        VariantGRPOTrainer,
        variant="dapo",
        hooks=hooks,
        per_device_eval_batch_size=4,
        trainer_arguments={"eval_dataset": toy.dataset()},
    )
    trainer.evaluate()
    assert CALLS == [] and learner.seen == ["VariantGRPOTrainer"]


def test_the_signature_is_trl_s_and_two_more():
    import inspect

    from trl import GRPOTrainer

    own, stock = (list(inspect.signature(c.__init__).parameters) for c in (VariantGRPOTrainer, GRPOTrainer))
    assert own == [*stock, "variant", "teacher"]
