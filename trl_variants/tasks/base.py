"""The `Task` record and the registry of tasks by name."""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RewardFunc = Callable[..., "Sequence[float | None]"]
COLUMNS = ("prompt", "answer", "id", "solution", "task", "difficulty")

_REGISTRY: dict[str, Callable[..., Task]] = {}


@dataclass(frozen=True)
class Task:
    """What a training run needs besides a method.

    Both datasets have the columns of `COLUMNS`: `prompt` (text, or a list of messages), `answer` (str), `id`
    (a string that depends on the problem's content only), `solution` (a reference completion that earns the
    full reward; empty where there is none), `task` (a label) and `difficulty` (float, larger is harder, 0.0
    where unknown). Their ids are disjoint.

    Args:
        name: registered name.
        train_dataset: problems to train on.
        eval_dataset: held-out problems.
        reward_funcs: functions `f(prompts, completions, **columns) -> list[float | None]`; the first one
            decides correctness, which is a reward of 1 or more.
        model: path of the default model, or a function without arguments that returns it.
        max_new_tokens: completion budget in tokens that suits the answers.
        teacher: likewise a stronger model with the same tokenizer; None where there is none.
    """

    name: str
    train_dataset: Dataset
    eval_dataset: Dataset
    reward_funcs: list[RewardFunc]
    model: str | Callable[[], str]
    max_new_tokens: int = 16
    teacher: str | Callable[[], str] | None = None

    def model_path(self) -> str:
        """Path of the default model; runs the loader if `model` is one."""
        return self.model() if callable(self.model) else self.model

    def teacher_path(self) -> str:
        """Path of the stronger model, for `teacher=`; ValueError for a task without one."""
        if self.teacher is None:
            raise ValueError(f"task {self.name} has no teacher of its own: name a model")
        return self.teacher() if callable(self.teacher) else self.teacher

    def load_model(self, **kwargs: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Default model and its tokenizer; `kwargs` go to `AutoModelForCausalLM.from_pretrained`."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = self.model_path()
        return AutoModelForCausalLM.from_pretrained(path, **kwargs), AutoTokenizer.from_pretrained(path)

    def evaluate(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int = 64,
        max_new_tokens: int | None = None,
        limit: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> float:
        """Greedy accuracy in [0, 1] on the first `limit` held-out problems (all by default)."""
        from trl_variants.tasks.evaluation import greedy_completions

        rows = self.eval_dataset
        if limit is not None:
            rows = rows.select(range(min(limit, len(rows))))
        columns = {name: list(rows[name]) for name in rows.column_names}
        prompts = columns.pop("prompt")
        completions = greedy_completions(
            model,
            tokenizer,
            prompts,
            max_new_tokens=max_new_tokens or self.max_new_tokens,
            batch_size=batch_size,
            chat_template_kwargs=chat_template_kwargs,
        )
        scores = self.reward_funcs[0](prompts=prompts, completions=completions, **columns)
        return sum(score is not None and score >= 1.0 for score in scores) / len(scores)


def choose(
    train: list[Any], held_out: list[Any], train_size: int | None, eval_size: int, seed: int
) -> tuple[list[Any], list[Any]]:
    """(training problems in an order that `seed` decides, the first held-out ones); None takes all of the former.

    Raises:
        ValueError: a size out of range.
    """
    if train_size is not None and not 1 <= train_size <= len(train):
        raise ValueError(f"train_size must be in 1..{len(train)}, got {train_size}")
    if not 1 <= eval_size <= len(held_out):
        raise ValueError(f"eval_size must be in 1..{len(held_out)}, got {eval_size}")
    order = list(train)
    random.Random(seed).shuffle(order)
    return order[:train_size], held_out[:eval_size]


def register_task(name: str) -> Callable[[Callable[..., Task]], Callable[..., Task]]:
    """Decorator that registers a function `f(**kwargs) -> Task`; a name taken already raises ValueError."""

    def decorate(build: Callable[..., Task]) -> Callable[..., Task]:
        if name in _REGISTRY:
            raise ValueError(f"task {name!r} is registered already")
        _REGISTRY[name] = build
        return build

    return decorate


def task_names() -> list[str]:
    """Registered names, sorted."""
    return sorted(_REGISTRY)


def load_task(name: str, **kwargs: Any) -> Task:
    """Build the task registered as `name` with that task's own `kwargs`; an unknown name: ValueError."""
    if name not in _REGISTRY:
        close = difflib.get_close_matches(name, _REGISTRY, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known tasks: {', '.join(task_names())}"
        raise ValueError(f"unknown task {name!r}; {hint}")
    return _REGISTRY[name](**kwargs)
