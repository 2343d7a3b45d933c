"""GSM8K, grade-school word problems: `load_task("gsm8k")`. The rows come from the Hub, or from a folder."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_variants.rewards.numbers import final_number_reward
from trl_variants.tasks.base import Task, choose, register_task

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "openai/gsm8k"
INSTRUCTION = "Reason step by step, and put the final number in \\boxed{}."
_CALCULATION = re.compile(r"<<[^<>]*>>")


def parts(answer: str) -> tuple[str, str]:
    """(reasoning without calculator notes, number without thousands separators) of a row's `answer`.

    Raises:
        ValueError: it does not end in `#### number`.
    """
    worked, mark, number = answer.rpartition("####")
    if not mark or not number.strip():
        raise ValueError(f"a GSM8K answer ends in '#### number', this one does not: {answer[-40:]!r}")
    return _CALCULATION.sub("", worked).strip(), number.strip().replace(",", "")


def to_row(question: str, answer: str, instruction: str) -> dict[str, Any]:
    """A row with the columns of every task; `difficulty` is the number of steps of the worked answer."""
    worked, number = parts(answer)
    return {
        "prompt": [{"role": "user", "content": f"{question}\n{instruction}"}],
        "answer": number,
        "id": f"gsm8k/{hashlib.sha256(question.encode()).hexdigest()[:16]}",
        "solution": f"{worked}\nThe answer is \\boxed{{{number}}}.",
        "task": "gsm8k",
        "difficulty": float(len(worked.splitlines())),
    }


def read(path: str, split: str) -> Dataset:
    """The columns `question` and `answer` of one split of a Hub data set or a folder (train.jsonl, test.jsonl)."""
    from datasets import load_dataset

    local = Path(path).is_dir()
    try:
        return load_dataset(path, None if local else "main", split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"cannot load {path} ({type(error).__name__}): give the folder of a copy (task.path), which holds "
            "train.jsonl and test.jsonl with the columns question and answer"
        ) from error


@register_task("gsm8k")
def gsm8k(
    path: str = HUB,
    train_size: int | None = None,
    eval_size: int = 200,
    seed: int = 0,
    instruction: str = INSTRUCTION,
    max_new_tokens: int = 512,
) -> Task:
    """7473 problems to train on and, of the 1319 of the test split, the first `eval_size`; for Qwen3-0.6B by default.

    Args:
        path: Hub id, or a folder with train.jsonl and test.jsonl.
        train_size: problems to train on, drawn with `seed`; None takes all, in an order that `seed` decides.
        eval_size: held-out problems.
        instruction: sentence after the question.
        max_new_tokens: completion budget of the evaluation, in tokens.

    Raises:
        ValueError: the rows are not to be had or not GSM8K's, or a size is out of range.
    """
    from datasets import Dataset

    rows = {}
    for split in ("train", "test"):
        found = read(path, split)
        if missing := {"question", "answer"} - set(found.column_names):
            raise ValueError(f"{path} has no column {' or '.join(sorted(missing))}")
        rows[split] = [to_row(r["question"], r["answer"], instruction) for r in found]
    train, held_out = choose(rows["train"], rows["test"], train_size, eval_size, seed)
    return Task(
        name="gsm8k",
        train_dataset=Dataset.from_list(train),
        eval_dataset=Dataset.from_list(held_out),
        reward_funcs=[final_number_reward],
        model="Qwen/Qwen3-0.6B",
        max_new_tokens=max_new_tokens,
    )
