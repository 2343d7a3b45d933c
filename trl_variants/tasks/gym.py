"""Reasoning-gym's generators as tasks: `load_task("reasoning_gym", dataset="chain_sum", ...)`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trl_variants.rewards.text import completion_text, last_number
from trl_variants.tasks.base import RewardFunc, Task, register_task
from trl_variants.tasks.smollm2 import smollm2_path

if TYPE_CHECKING:
    from datasets import Dataset

Entry = dict[str, Any]

NUMBER_ONLY = "Answer with only the number."
ANSWER_ONLY = "Answer with only the final answer."
# item i of a generator draws from seed + i: neighbouring seeds give the same items
EVAL_SEED_OFFSET = 1_000_000_007
TRIES_PER_ITEM = 4


def is_number(answer: str) -> bool:
    """Whether an answer is one plain decimal number."""
    return re.fullmatch(r"-?\d+(\.\d+)?", answer) is not None


def gym_reward(score: Callable[[str | None, Entry], float], entries: Mapping[str, Entry], numeric: bool) -> RewardFunc:
    """Reward function by reasoning-gym's scorer `score(answer, entry)`.

    The answer is the last number of the completion where `numeric`, else the text in its last <answer> tag,
    else all of it. `entries` maps the dataset's `id` to the generator's entry; an unknown id raises KeyError.
    """

    def reasoning_gym_reward(prompts: Any, completions: list[Any], id: Sequence[str], **_: Any) -> list[float]:
        from reasoning_gym.utils import extract_answer

        scores = []
        for completion, key in zip(completions, id, strict=True):
            text = completion_text(completion).strip()
            answer = last_number(text) if numeric else extract_answer(text) or text
            scores.append(float(score(answer, entries[key])))
        return scores

    return reasoning_gym_reward


def draw(dataset: str, size: int, seed: int, params: Mapping[str, Any], exclude: set[str]) -> list[Entry]:
    """Up to `size` entries with distinct questions outside `exclude`; fewer if the generator has no more."""
    import reasoning_gym

    source = reasoning_gym.create_dataset(dataset, size=size * TRIES_PER_ITEM, seed=seed, **params)
    seen, entries = set(exclude), []
    for i in range(len(source)):
        entry = source[i]
        if entry["question"] not in seen:
            seen.add(entry["question"])
            entries.append(entry)
        if len(entries) == size:
            break
    return entries


def difficulty(entry: Entry) -> float:
    """Mean of the generator's numeric difficulty knobs for this entry, 0.0 where it reports none."""
    metadata = entry["metadata"]
    reported = metadata.get("difficulty")
    knobs = [metadata.get(knob) for knob in reported] if isinstance(reported, Mapping) else [reported]
    numbers = [float(k) for k in knobs if isinstance(k, int | float)]
    return sum(numbers) / len(numbers) if numbers else 0.0


def row_id(dataset: str, entry: Entry) -> str:
    """Id by content: the same question has the same id in every size and seed."""
    return f"{dataset}/{hashlib.sha256(entry['question'].encode()).hexdigest()[:16]}"


def to_dataset(dataset: str, entries: Sequence[Entry], instruction: str) -> Dataset:
    """Rows for these entries; `answer` and `solution` are empty where the generator has no reference answer.

    `metadata` is JSON, because its shape differs from row to row.
    """
    from datasets import Dataset

    def row(entry: Entry) -> dict[str, Any]:
        expression = entry["metadata"].get("expression")
        answer = "" if entry["answer"] is None else str(entry["answer"])
        worked = isinstance(expression, str) and is_number(answer)
        return {
            "prompt": [{"role": "user", "content": f"{entry['question']}\n{instruction}"}],
            "answer": answer,
            "id": row_id(dataset, entry),
            "solution": f"{expression} = {answer}" if worked else answer,
            "task": dataset,
            "difficulty": difficulty(entry),
            "metadata": json.dumps(entry["metadata"], default=str),
        }

    return Dataset.from_list([row(entry) for entry in entries])


@register_task("reasoning_gym")
def reasoning_gym(
    dataset: str = "chain_sum",
    size: int = 1000,
    seed: int = 0,
    params: Mapping[str, Any] | None = None,
    eval_size: int = 64,
    instruction: str | None = None,
    max_new_tokens: int | None = None,
) -> Task:
    """Any reasoning-gym generator, for SmolLM2-135M by default.

    The held-out set comes from another seed and is drawn first; training questions that are in it, and
    repeated ones, are dropped. A generator with few distinct questions gives fewer than `size` rows.

    Args:
        dataset: name of the generator.
        size: training questions asked for.
        seed: of the generator.
        params: the generator's own parameters.
        eval_size: held-out questions asked for.
        instruction: sentence after the question; None asks for only the number (or the final answer).
        max_new_tokens: completion budget in tokens; None takes 12 for numeric answers, else 128.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: unknown generator, or no training question is left beside the held-out ones.
    """
    try:
        import reasoning_gym as library
    except ImportError as error:
        raise ImportError('reasoning-gym is missing: pip install "trl_variants[tasks]"') from error

    params = dict(params or {})
    held_out = draw(dataset, eval_size, seed + EVAL_SEED_OFFSET, params, exclude=set())
    train = draw(dataset, size, seed, params, exclude={entry["question"] for entry in held_out})
    if not train:
        raise ValueError(
            f"{dataset} with {params} has no question beside the {len(held_out)} held-out ones: "
            "lower eval_size or widen params"
        )
    everything = [*train, *held_out]
    numeric = all(is_number(str(entry["answer"])) for entry in everything)
    text = instruction if instruction is not None else NUMBER_ONLY if numeric else ANSWER_ONLY
    entries = {row_id(dataset, entry): entry for entry in everything}
    return Task(
        name="reasoning_gym",
        train_dataset=to_dataset(dataset, train, text),
        eval_dataset=to_dataset(dataset, held_out, text),
        reward_funcs=[gym_reward(library.get_score_answer_fn(dataset), entries, numeric)],
        model=smollm2_path,
        max_new_tokens=max_new_tokens or (12 if numeric else 128),
    )
