"""Greedy accuracy on held-out problems every so many optimizer steps, in the log beside the reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from ..errors import VariantError

ACCURACY, PROBLEMS = "accuracy/greedy", "accuracy/problems"


class EvaluateEvery(TrainerCallback):
    """Logs `accuracy/greedy` and `accuracy/problems`; the model is the one in training, nothing is copied.

        trainer.add_callback(EvaluateEvery(trainer, "arithmetic", steps=50, limit=64))

    Greedy decoding draws nothing and the model's mode is restored, so training is the same with it and without. Every
    process measures all problems: as long as on one, and in step.

    Args:
        trainer: the one it is added to.
        task: a task's name, a `Task`, or a function f(model, tokenizer, limit=...) -> accuracy in [0, 1].
        steps: optimizer steps between two measurements; the first comes before the first step, the last at the end.
        limit: how many held-out problems, from the first.

    Raises:
        VariantError: steps or limit below 1, an unknown task.
    """

    def __init__(self, trainer: Any, task: Any, steps: int, limit: int = 64):
        if steps < 1 or limit < 1:
            raise VariantError(f"EvaluateEvery needs steps and limit of at least 1, got {steps} and {limit}")
        self.trainer, self.steps, self.limit = trainer, steps, limit
        if isinstance(task, str):
            from ..tasks import load_task

            try:
                task = load_task(task)
            except ValueError as error:
                raise VariantError(str(error)) from error
        self.evaluate: Callable[..., float] = getattr(task, "evaluate", task)
        if hasattr(task, "eval_dataset"):
            self.limit = min(limit, len(task.eval_dataset))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.measure(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.steps == 0 or state.global_step == state.max_steps:
            self.measure(args, state, control)

    def measure(self, args: Any, state: Any, control: Any) -> float:
        """Measures now, logs, and returns the accuracy."""
        trainer = self.trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        accuracy = float(self.evaluate(model, trainer.processing_class, limit=self.limit))
        row = {ACCURACY: accuracy, PROBLEMS: self.limit, "epoch": state.epoch or 0.0}
        # not trainer.log: it would also close the running means of the training metrics
        state.log_history.append({**row, "step": state.global_step})
        due = control.should_log
        trainer.callback_handler.on_log(args, state, control, row)
        control.should_log = due  # on_log clears it, and the step's own line may still be to come
        return accuracy
