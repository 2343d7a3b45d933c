"""A model on problems with a reward function: who is right, greedily and in k samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import MissingExtra, VariantError
from .metrics import metric_path


@dataclass(frozen=True)
class Problems:
    """What a model is measured on.

    Args:
        name: of the task or data set. label: the same with what sets it apart, for a table.
        rows: data set with a column `prompt`; its other columns reach the reward function.
        reward: f(prompts, completions, **columns) -> list of floats or None, as TRL calls it.
        max_new_tokens: budget of a completion, tokens.
        right_from: a completion is right when its reward is this or more; None (not scorable) is not right.
    """

    name: str
    label: str
    rows: Any
    reward: Callable[..., Any]
    max_new_tokens: int
    right_from: float = 1.0


def evaluate_model(
    model: Any,
    tokenizer: Any,
    problems: Problems,
    *,
    k: int = 0,
    limit: int | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 64,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Greedy accuracy on the first `limit` problems and, from `k` samples each, avg@k and pass@2, 4, ... k.

    Returns plain data: what was measured how (`name`, `label`, `n`, `k`, `temperature`, ...), `metrics` (name -> an
    `Estimate` as a mapping), `unscorable` (completions whose reward was None; they count as wrong), `seconds`.

    Raises:
        VariantError: no problem left, k or temperature out of range. MissingExtra: `evaluate` is not installed.
    """
    from ..tasks.evaluation import greedy_completions, sampled_completions

    metrics = load_metrics()
    if k < 0 or (k and temperature <= 0):
        raise VariantError(f"k must be 0 or more and temperature above 0, got k={k}, temperature={temperature}")
    rows = problems.rows if limit is None else problems.rows.select(range(min(limit, len(problems.rows))))
    if not len(rows):
        raise VariantError("there is no problem to evaluate on: limit must be at least 1 and the data not empty")
    columns = {name: list(rows[name]) for name in rows.column_names}
    prompts = columns.pop("prompt")
    how: dict[str, Any] = {
        "max_new_tokens": problems.max_new_tokens,
        "batch_size": batch_size,
        "chat_template_kwargs": chat_template_kwargs,
        "on_batch": on_batch,
    }
    began = time.perf_counter()
    greedy = [[text] for text in greedy_completions(model, tokenizer, prompts, **how)]
    right, unscorable = judge(problems, prompts, greedy, columns)
    found = metrics["greedy_accuracy"].compute(predictions=[row[0] for row in right])
    if k:
        drawing: dict[str, Any] = {"n": k, "temperature": temperature, "top_p": top_p, "seed": seed}
        sampled = sampled_completions(model, tokenizer, prompts, **drawing, **how)
        right, more = judge(problems, prompts, sampled, columns)
        unscorable += more
        for name in ("avg_at_k", "pass_at_k") if k > 1 else ("avg_at_k",):
            found |= metrics[name].compute(predictions=right, seed=seed)
    return {
        "name": problems.name,
        "label": problems.label,
        "n": len(rows),
        "k": k,
        "temperature": temperature,
        "top_p": top_p,
        "max_new_tokens": problems.max_new_tokens,
        "right_from": problems.right_from,
        "seed": seed,
        "batch_size": batch_size,
        "metrics": found,
        "unscorable": unscorable,
        "seconds": round(time.perf_counter() - began, 2),
    }


def judge(
    problems: Problems, prompts: list, completions: list[list[str]], columns: Mapping[str, list]
) -> tuple[list[list[bool]], int]:
    """(n problems, k) right or wrong, and how many rewards were None. The reward function is called once.

    A completion of a conversational prompt reaches it as one assistant message, as in training.
    """
    sizes = [len(texts) for texts in completions]

    def spread(values: list) -> list:
        return [value for value, size in zip(values, sizes, strict=True) for _ in range(size)]

    given = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, texts in zip(prompts, completions, strict=True)
        for text in texts
    ]
    scores = problems.reward(
        prompts=spread(prompts), completions=given, **{name: spread(values) for name, values in columns.items()}
    )
    flat = [score is not None and float(score) >= problems.right_from for score in scores]
    if len(flat) != len(given):
        raise VariantError(f"the reward function returned {len(flat)} rewards for {len(given)} completions")
    rest = iter(flat)
    return [[next(rest) for _ in range(size)] for size in sizes], sum(score is None for score in scores)


def load_metrics() -> dict[str, Any]:
    """The three modules of `metrics/` through Hugging Face `evaluate`; nothing is downloaded."""
    try:
        import evaluate
    except ImportError as error:
        raise MissingExtra("evaluation", "eval") from error
    names = ("greedy_accuracy", "avg_at_k", "pass_at_k")
    return {name: evaluate.load(metric_path(name), keep_in_memory=True) for name in names}
