"""Two-digit addition with the tiny model inside the package: learns on a CPU in seconds, offline."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from trl_variants.tasks.base import Task, choose, register_task
from trl_variants.tasks.evaluation import completion_text

if TYPE_CHECKING:
    from datasets import Dataset

LIMIT = 100
HELD_OUT = 500
Pair = tuple[int, int]

_NUMBER = re.compile(r"\s*(\d{1,9})\s*")


def tiny_model_path() -> str:
    """Folder of the shipped model and tokenizer, for `from_pretrained`."""
    return str(files("trl_variants.tasks") / "tiny")


def split() -> tuple[list[Pair], list[Pair]]:
    """All pairs 0..99 as (train, held out), shuffled and disjoint.

    The border never moves: the tiny model was pretrained on the same train side, so held-out problems are new
    to it too.
    """
    pairs = [(a, b) for a in range(LIMIT) for b in range(LIMIT)]
    random.Random(0).shuffle(pairs)
    return pairs[HELD_OUT:], pairs[:HELD_OUT]


def carries(a: int, b: int) -> int:
    """Number of carries (0, 1 or 2) when adding two numbers below 100."""
    units = a % 10 + b % 10 >= 10
    return units + (a // 10 + b // 10 + units >= 10)


def arithmetic_reward(prompts: Any, completions: list[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1.0 where the completion is one non-negative integer, nothing else, equal to the answer; else 0.0."""
    matches = [_NUMBER.fullmatch(completion_text(completion)) for completion in completions]
    return [float(m is not None and int(m[1]) == int(right)) for m, right in zip(matches, answer, strict=True)]


def dataset(pairs: Sequence[Pair], conversational: bool = False) -> Dataset:
    """Rows for these pairs; `difficulty` is the number of carries."""
    from datasets import Dataset

    def row(a: int, b: int) -> dict[str, Any]:
        text = f"{a}+{b}="
        return {
            "prompt": [{"role": "user", "content": text}] if conversational else text,
            "answer": str(a + b),
            "id": f"arithmetic/{a}+{b}",
            "solution": str(a + b),
            "task": "arithmetic",
            "difficulty": float(carries(a, b)),
        }

    return Dataset.from_list([row(a, b) for a, b in pairs])


@register_task("arithmetic")
def arithmetic(
    train_size: int | None = None, eval_size: int = HELD_OUT, seed: int = 0, conversational: bool = False
) -> Task:
    """Prompts `a+b=` for 0..99, reward 1 for the exact sum.

    Args:
        train_size: number of training problems; None takes all 9500.
        eval_size: number of held-out problems, 1..500.
        seed: order and choice of the training problems. The held-out problems do not depend on it.
        conversational: prompts as messages; the tiny model's chat template renders them to the same text.

    Raises:
        ValueError: a size out of range.
    """
    train, held_out = choose(*split(), train_size, eval_size, seed)
    return Task(
        name="arithmetic",
        train_dataset=dataset(train, conversational),
        eval_dataset=dataset(held_out, conversational),
        reward_funcs=[arithmetic_reward],
        model=tiny_model_path(),
        max_new_tokens=4,
    )
