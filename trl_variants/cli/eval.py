"""`trl-variants eval MODEL`: greedy accuracy, avg@k and pass@k, with intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..errors import VariantError
from . import recipe as recipes
from .parser import Parser

EPILOG = """what to measure on: --task NAME (and --task.PARAMETER value), or --dataset_name D --reward_funcs F
[--dataset_test_split test]; a run folder is measured on its own task where neither is given. Other options are those of
a recipe: --load_in_4bit, --dtype bfloat16, --model_revision, --trust_remote_code, --imports ..."""


def run(words: list[str]) -> int:
    """Measures, prints a table, and adds the figures to a run folder's result.json and card.

    Raises:
        VariantError: model, task or data not to be had, or a number out of range.
    """
    parser = Parser(prog="trl-variants eval", description=__doc__, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("of", metavar="MODEL", help="model, adapter or run folder, Hub id, or `smollm2`")
    parser.add_argument("--base", help="an adapter's base, where adapter_config.json names none that is here")
    parser.add_argument("--k", type=int, default=0, help="samples a problem, for avg@k and pass@k (0: greedy alone)")
    parser.add_argument("--limit", type=int, help="the first N problems; default: all")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the samples")
    parser.add_argument("--top_p", type=float, default=1.0, help="of the samples")
    parser.add_argument("--max_new_tokens", type=int, help="budget of a completion; default: the task's, else 512")
    parser.add_argument("--right_from", type=float, default=1.0, help="a completion is right from this reward on")
    parser.add_argument("--eval_batch_size", type=int, default=64, help="completions in a batch")
    parser.add_argument("--seed", type=int, default=0, help="of samples and bootstrap")
    parser.add_argument("--num_threads", type=int, help="torch CPU threads")
    parser.add_argument("--out", help="also write the figures to this JSON file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options, rest = parser.parse_known_args(words)
    found = measure(options, rest)
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=2) + "\n")
    if (kept := run_folder_of(options.of)) is not None:
        from ..report.card import write_card
        from ..report.record import RunRecord, add_evaluation

        add_evaluation(kept, found)
        write_card(RunRecord.load(kept), kept)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    Console().print(table_of(found))
    if kept is not None:
        print(f"added to {kept}: result.json and the card")
    return 0


def run_folder_of(name: str) -> Path | None:
    """The run folder a model lies in, if it is one."""
    from ..report.record import RESULT, RUN

    folder = Path(name)
    return folder if any((folder / file).is_file() for file in (RESULT, RUN)) else None


def measure(options: Any, rest: list[str]) -> dict[str, Any]:
    """Loads what the options name and measures it; returns what `evaluate_model` says."""
    import torch
    from rich.progress import Progress

    from ..adapters import base_of
    from ..evaluation.measure import evaluate_model, load_metrics
    from . import sources

    for name, low in (("k", 0), ("limit", 1), ("max_new_tokens", 1), ("eval_batch_size", 1)):
        value = getattr(options, name)
        if value is not None and value < low:
            raise VariantError(f"--{name} must be at least {low}, got {value}")
    load_metrics()  # before minutes of loading
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    gpu = torch.cuda.is_available()
    spec = recipes.load(None, [*(() if gpu else ("--use_cpu", "true", "--bf16", "false")), *rest])
    _own_task(spec, options)
    problems, data = _problems(spec, options)
    adapter = adapter_folder(options.of)
    spec.recipe.model = options.of if adapter is None else options.base or base_of(adapter)
    model, tokenizer = sources.load_model(spec, data, adapter)
    if gpu and not getattr(model, "is_quantized", False):
        model = model.to("cuda")
    n = min(options.limit or len(problems.rows), len(problems.rows))
    with Progress(disable=options.json) as progress:
        bar = progress.add_task(f"{n} problems, 1 + {options.k} completions each", total=n * (1 + options.k))
        return evaluate_model(
            model,
            tokenizer,
            problems,
            k=options.k,
            limit=options.limit,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            batch_size=options.eval_batch_size,
            chat_template_kwargs=spec.config.chat_template_kwargs,
            on_batch=lambda count: progress.advance(bar, count),
        )


def _own_task(spec: recipes.RunSpec, options: Any) -> None:
    """A run folder is measured on what it was trained for, unless something else is named."""
    if spec.recipe.task is not None or spec.recipe.dataset_name is not None:
        return
    settings: dict[str, Any] = {}
    if (folder := run_folder_of(options.of)) is not None:
        from ..report.record import RunRecord

        settings = RunRecord.load(folder).result.get("settings") or {}
    spec.recipe.task = settings.get("task")
    spec.recipe.dataset_name = settings.get("dataset_name")
    spec.recipe.reward_funcs = spec.recipe.reward_funcs or settings.get("reward_funcs")
    if spec.recipe.task is None and spec.recipe.dataset_name is None:
        raise VariantError("eval needs --task NAME, or --dataset_name and --reward_funcs")


def _problems(spec: recipes.RunSpec, options: Any) -> tuple[Any, Any]:
    from ..evaluation.measure import Problems
    from . import sources

    recipe = spec.recipe
    if recipe.task is not None:
        data = sources.load_data(spec)
        rows, budget = data.test, data.max_new_tokens
        parameters = {k: v for k, v in recipe.task.items() if k != "name"} if isinstance(recipe.task, dict) else {}
        label = data.name + (f" {json.dumps(parameters, sort_keys=True)}" if parameters else "")
    else:
        rewards = [sources.reward_named(name) for name in recipe.reward_funcs or []]
        if not rewards:
            raise VariantError("--dataset_name needs --reward_funcs: the first one says what is right")
        rows, budget = sources.dataset_named(recipe, recipe.dataset_test_split), None
        data = sources.Data(recipe.dataset_name, rows, rows, rewards)
        label = f"{recipe.dataset_name} ({recipe.dataset_test_split})"
    tokens = options.max_new_tokens or budget or 512
    return Problems(data.name, label, rows, data.reward_funcs[0], tokens, options.right_from), data


def adapter_folder(name: str) -> Path | None:
    """The folder of an adapter, fetched where it is one of the Hub; None for whole models."""
    from huggingface_hub import hf_hub_download, snapshot_download

    from ..adapters import is_adapter

    if Path(name).is_dir() or name == "smollm2":
        return Path(name) if is_adapter(name) else None
    try:
        hf_hub_download(name, "adapter_config.json")
    except Exception:  # whatever it is, loading it as a model says so
        return None
    return Path(snapshot_download(name, allow_patterns=["adapter_*", "tokenizer*", "*.jinja", "special_tokens*"]))


def table_of(found: dict[str, Any]) -> Table:
    """What was measured, a row for each metric."""
    samples = f", {found['k']} samples each" if found["k"] else ""
    table = Table(title=f"{found['label']}: {found['n']} problems{samples}")
    for column in ("metric", "value", "95 % interval", "how"):
        table.add_column(column)
    for name, e in found["metrics"].items():
        table.add_row(name, f"{e['value']:.3f}", f"{e['low']:.3f} to {e['high']:.3f}", e["interval"])
    missing = (
        f"; {found['unscorable']} completions could not be scored and count as wrong" if found["unscorable"] else ""
    )
    table.caption = f"{found['seconds']:.1f} s{missing}"
    return table
