"""Running sums written step by step, with a tiny model inside the package: right answers of 18 to 31 tokens, offline.

`3+8+5+9=` is answered `3+8=11;11+5=16;16+9=25`. Each step copies the last sum and adds the next digit, so one slip
spoils the rest. The shipped model mostly forgets the carry of a large digit, sometimes guesses without any steps, and
repeats itself after a slip: length, entropy and accuracy have room to move, which two-digit sums do not give.

A second split, `unsolved`, starts from a number of two digits, `37+6+4+1=`: the shipped model has never read one and
never gets there (no right answer in 256 samples of any problem that was tried), so a method needs help from outside.
The shipped teacher, of the same size and with the same tokenizer, solves both.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from trl_variants.tasks.base import Task, choose, register_task
from trl_variants.tasks.evaluation import completion_text

if TYPE_CHECKING:
    from datasets import Dataset

TERMS = (4, 5)
TRAIN = 9500
HELD_OUT = 500
TWO_DIGIT_FIRST, TWO_DIGIT_OTHERS, UNSOLVED_FROM = range(20, 40), range(1, 7), 30
MAX_NEW_TOKENS = 48
Terms = tuple[int, ...]


def scratchpad_model_path() -> str:
    """Folder of the shipped model and tokenizer, for `from_pretrained`."""
    return str(files("trl_variants.tasks") / "scratchpad_tiny")


def scratchpad_teacher_path() -> str:
    """Folder of the shipped teacher and its tokenizer, which is the model's."""
    return str(files("trl_variants.tasks") / "scratchpad_teacher")


@functools.cache
def _problems() -> tuple[Terms, ...]:
    rng = random.Random(0)
    found: dict[Terms, None] = {}  # a set that keeps the order
    while len(found) < TRAIN + HELD_OUT:
        found[tuple(rng.randint(1, 9) for _ in range(rng.choice(TERMS)))] = None
    return tuple(found)


def split() -> tuple[list[Terms], list[Terms]]:
    """Problems of four and five digits 1..9 as (train, held out), disjoint.

    The border never moves: the tiny model was pretrained on the same train side, so held-out problems are new to it
    too.
    """
    problems = list(_problems())
    return problems[HELD_OUT:], problems[:HELD_OUT]


def two_digit() -> tuple[list[Terms], list[Terms]]:
    """3820 and 500 problems of a number 20..39 and three digits 1..6 as (train, held out), disjoint.

    The teacher was pretrained on this train side and on that of `split`, the tiny model on the latter alone.
    """
    problems = list(itertools.product(TWO_DIGIT_FIRST, *[TWO_DIGIT_OTHERS] * 3))
    random.Random(0).shuffle(problems)
    return problems[HELD_OUT:], problems[:HELD_OUT]


def unsolved() -> tuple[list[Terms], list[Terms]]:
    """The 1917 and 243 problems of `two_digit` that begin at 30 or above.

    Sums of smaller numbers are among those that the tiny model sometimes guesses.
    """
    train, held_out = ([p for p in side if p[0] >= UNSOLVED_FROM] for side in two_digit())
    return train, held_out


SPLITS: dict[str, Callable[[], tuple[list[Terms], list[Terms]]]] = {"standard": split, "unsolved": unsolved}


def text(terms: Terms) -> str:
    """The prompt: `3+8+5+9=`."""
    return "+".join(map(str, terms)) + "="


def steps(terms: Terms) -> str:
    """The reference completion: `3+8=11;11+5=16;16+9=25`."""
    sums = [sum(terms[: i + 1]) for i in range(len(terms))]
    return ";".join(f"{a}+{b}={c}" for a, b, c in zip(sums, terms[1:], sums[1:], strict=False))


def carries(terms: Terms) -> int:
    """Number of steps whose units exceed 9."""
    return sum(sum(terms[:i]) % 10 + terms[i] >= 10 for i in range(1, len(terms)))


def scratchpad_reward(prompts: Any, completions: list[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1.0 where what follows the last `=` (everything, without one) is the answer and nothing else; else 0.0."""
    finals = [completion_text(completion).rpartition("=")[2].strip() for completion in completions]
    return [float(final == right) for final, right in zip(finals, answer, strict=True)]


def dataset(problems: Sequence[Terms], conversational: bool = False) -> Dataset:
    """Rows for these problems; `difficulty` is the number of carries."""
    from datasets import Dataset

    def row(terms: Terms) -> dict[str, Any]:
        prompt = text(terms)
        return {
            "prompt": [{"role": "user", "content": prompt}] if conversational else prompt,
            "answer": str(sum(terms)),
            "id": f"scratchpad/{prompt[:-1]}",
            "solution": steps(terms),
            "task": "scratchpad",
            "difficulty": float(carries(terms)),
        }

    return Dataset.from_list([row(terms) for terms in problems])


def _traced(problems: Sequence[Terms], conversational: bool, count: int) -> Dataset:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_variants.tasks.traces import with_traces

    path = scratchpad_teacher_path()
    teacher, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    found = with_traces(dataset(problems), teacher, tokenizer, count=count, max_new_tokens=MAX_NEW_TOKENS)
    rows = dataset(problems, conversational)
    return rows.add_column("target", found["target"][:]).add_column("target_logps", found["target_logps"][:])


@register_task("scratchpad")
def scratchpad(
    train_size: int | None = None,
    eval_size: int | None = None,
    seed: int = 0,
    conversational: bool = False,
    split: str = "standard",
    traces: int = 0,
) -> Task:
    """Prompts `a+b+c+d=` or `a+b+c+d+e=` of digits 1..9, reward 1 for the right final sum.

    Column `solution` holds the reference steps (24 tokens with the end token in `unsolved`). They can serve as a
    teacher's trace; `traces` asks the shipped one for its own.

    Args:
        train_size: number of training problems; None takes all 9500 (1917 of `unsolved`).
        eval_size: number of held-out problems; None takes all 500 (243 of `unsolved`).
        seed: order and choice of the training problems. The held-out problems do not depend on it.
        conversational: prompts as messages; the tiny model's chat template renders them to the same text.
        split: "standard", or "unsolved": a number 30..39 and three digits 1..6, which the tiny model never solves.
        traces: answers of the shipped teacher for each training problem, in column `target` with their log-probs in
            `target_logps` (see `traces.with_traces`); a few seconds for a thousand. 0: no such columns.

    Raises:
        ValueError: a size out of range, or an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if traces < 0:
        raise ValueError(f"traces must be 0 or more, got {traces}")
    train, held_out = SPLITS[split]()
    train, held_out = choose(train, held_out, train_size, len(held_out) if eval_size is None else eval_size, seed)
    return Task(
        name="scratchpad",
        train_dataset=_traced(train, conversational, traces) if traces else dataset(train, conversational),
        eval_dataset=dataset(held_out, conversational),
        reward_funcs=[scratchpad_reward],
        model=scratchpad_model_path(),
        max_new_tokens=MAX_NEW_TOKENS,
        teacher=scratchpad_teacher_path(),
    )
