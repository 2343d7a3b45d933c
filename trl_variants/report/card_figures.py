"""The figures of a card: accuracy with intervals, rewards with the number of completions behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..evaluation.callback import ACCURACY, PROBLEMS
from ..evaluation.estimators import wilson
from .curves import series
from .record import RunRecord


def figures(record: RunRecord) -> str:
    """Markdown: a row for each measured quantity, with its sample size; one sentence where nothing was measured."""
    rows = [*_accuracies(record), *_rewards(record)]
    lines = ["| | start | end | best | samples |", "|---|---|---|---|---|", *rows] if rows else []
    for found in record.result.get("evaluations") or []:
        lines += ["", *_evaluation(found)]
    return "\n".join(lines).strip() or "Nothing was measured in this run."


def _accuracies(record: RunRecord) -> Iterator[str]:
    result = record.result
    n, before, after = result.get("eval_problems"), result.get("accuracy_before"), result.get("accuracy_after")
    steps, during = series(record.history, ACCURACY)
    if before is not None and after is not None:
        size = f"{n} held-out problems" if n else "held-out problems; how many was not recorded"
        shown = [f"{value:.3f}{_interval(value, n)}" for value in (before, after)]
        yield f"| greedy accuracy | {shown[0]} | {shown[1]} | | {size} |"
    if during:
        sizes = series(record.history, PROBLEMS)[1]
        best = max(during)
        at = steps[during.index(best)]
        yield (
            f"| greedy accuracy during training | {during[0]:.3f} | {during[-1]:.3f} | {best:.3f} (step {at}) | "
            f"{int(sizes[-1]) if sizes else '?'} problems, {len(during)} times; the best of several is biased upwards |"
        )


def _interval(value: float, n: int | None) -> str:
    if not n:
        return ""
    found = wilson(round(value * n), n)
    return f" [{found.low:.3f}, {found.high:.3f}]"


def _rewards(record: RunRecord) -> Iterator[str]:
    steps, values = series(record.history, "reward")
    if not values:
        return
    best = max(values)
    each = record.result.get("completions_per_log")
    refilled = record.composition and any(h.draws_prompts for h in record.composition.rollouts)
    at_least = "at least " if refilled else ""
    size = f"{at_least}{each} completions a logged value" if each else "training completions; how many was not recorded"
    tenth = max(1, len(values) // 10)
    first, last = sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth
    yield (
        f"| reward while sampling, first and last tenth of the run | {first:.3f} | {last:.3f} | "
        f"{best:.3f} (step {steps[values.index(best)]}) | {size}, {len(values)} logged |"
    )


def _evaluation(found: Mapping[str, Any]) -> list[str]:
    how = f"at most {found['max_new_tokens']} tokens"
    if found["k"]:
        how = f"{found['k']} samples each at temperature {found['temperature']:g}, {how}, seed {found['seed']}"
    lines = [f"Evaluated on {found['n']} problems of {found['label']} ({how}):", ""]
    lines += ["| metric | value | interval | problems x samples |", "|---|---|---|---|"]
    for name, e in found["metrics"].items():
        lines.append(
            f"| {name} | {e['value']:.3f} | [{e['low']:.3f}, {e['high']:.3f}], {e['interval']} | {e['n']} x {e['k']} |"
        )
    return lines


def model_index(record: RunRecord) -> list[Any]:
    """huggingface_hub.EvalResult of every accuracy that was measured on held-out problems."""
    from huggingface_hub import EvalResult

    result, out = record.result, []
    task: dict[str, Any] = {"task_type": "text-generation", "task_name": "Text Generation"}
    after = result.get("accuracy_after")
    if after is not None:
        name = str(result.get("task") or result.get("dataset") or "held-out")
        size = f", {n} problems" if (n := result.get("eval_problems")) else ""
        out.append(
            EvalResult(
                **task,
                dataset_type=name,
                dataset_name=f"{name} (held-out{size})",
                metric_type="accuracy",
                metric_name="greedy accuracy",
                metric_value=round(float(after), 4),
            )
        )
    for found in result.get("evaluations") or []:
        for name, e in found["metrics"].items():
            out.append(
                EvalResult(
                    **task,
                    dataset_type=str(found["name"]),
                    dataset_name=f"{found['label']} ({e['n']} problems)",
                    metric_type="accuracy" if name.endswith("accuracy") else name.split("@")[0] + "@k",
                    metric_name=f"{name} [{e['low']:.3f}, {e['high']:.3f}] {e['interval']}",
                    metric_value=round(float(e["value"]), 4),
                )
            )
    return out
