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
MARKERS: list[float] = []


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


class CounterWorker:
    """Predicts the row's number, attaches it to the batch, and counts what is asked of it."""

    trains_policy = freezes_policy = False
    provides = frozenset()

    def __init__(self, hook: Any, path: str):
        self.hook, self.path, self.learns = hook, path, hook.learns

    def predict(self, rows: dict[str, Any], scored: Scored) -> dict[str, torch.Tensor]:
        self.hook.seen.append("predict")
        assert scored.token_rewards is None, "before the rewards hooks"
        return {"number": torch.arange(float(len(rows["completion_ids"])))}

    def learn(self, rows: dict[str, Any], scored: Scored, advantage: Any) -> dict[str, float]:
        assert (advantage is None) == (self.learns == "before")
        self.hook.seen.append("learn")
        return {"learner/generations": float(self.hook.seen.count("learn"))}

    def attachments(self, rows: dict[str, Any], scored: Scored) -> dict[str, torch.Tensor]:
        return {"marker": 7.0 + scored.keys["number"]}

    def state_dict(self) -> tuple[dict, dict]:
        return {}, {}

    def restart(self) -> None:
        self.hook.seen.append("restart")


@hook("learners", "test_counter")
@dataclass(frozen=True)
class Counter:
    learns: str = "after"
    seen: list = field(default_factory=list)

    def attach(self, trainer: Any, path: str) -> CounterWorker:
        self.seen.append(type(trainer).__name__)
        return CounterWorker(self, path)


@hook("credit", "test_reads_marker")
@dataclass(frozen=True)
class ReadsMarker:
    """Needs what the learner attached."""

    def __call__(self, advantage: torch.Tensor, batch: Any) -> torch.Tensor:
        marker = batch.need("marker")
        assert marker.shape == (len(advantage),) and bool((marker >= 7.0).all()) and bool((marker < 23.0).all())
        MARKERS.extend(marker.tolist())
        return advantage


def test_prompts_hook_chooses_before_generation_and_is_told_the_results():
    CALLS.clear()
    out = toy.train(VariantGRPOTrainer, variant="grpo", hooks={"prompts": ["test_only_digits"]}, max_steps=1)
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


@pytest.mark.parametrize("learns, order", [("after", ["predict", "learn"]), ("before", ["learn", "predict"])])
def test_learner_predicts_learns_and_attaches_rows_that_survive_shuffle_and_split(learns, order):
    MARKERS.clear()
    learner = Counter(learns)
    hooks = {"learners": [learner], "credit": ["test_reads_marker"]}
    out = toy.train(VariantGRPOTrainer, variant="dapo", hooks=hooks, max_steps=5)
    assert learner.seen == ["VariantGRPOTrainer", "restart", *order, *order], "five steps use two generations"
    assert out.logged("learner/generations") == [1.0, 2.0]
    assert sorted(MARKERS[:16]) == [7.0 + i for i in range(16)], "every row once in the first pass"
    assert MARKERS[:16] != sorted(MARKERS[:16])


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
    assert CALLS == [] and set(learner.seen) == {"VariantGRPOTrainer", "predict"}, "predictions alone"


def test_the_signature_is_trl_s_and_two_more():
    import inspect

    from trl import GRPOTrainer

    own, stock = (list(inspect.signature(c.__init__).parameters) for c in (VariantGRPOTrainer, GRPOTrainer))
    assert own == [*stock, "variant", "teacher"]
