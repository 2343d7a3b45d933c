"""`trl-variants train RECIPE.yaml`: accuracy, training, accuracy, run folder, table."""

from __future__ import annotations

import copy
import re
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import VariantError
from . import launch
from . import recipe as recipes
from .check import findings

HELP = """usage: trl-variants train RECIPE.yaml [--any.override VALUE ...] [--resume]

  --variant gspo                       another method
  --hooks.clip.ppo.eps_high 0.3        one seam's hook and its parameters
  --max_steps 20 --learning_rate 1e-4  any field of VariantGRPOConfig (TRL's GRPOConfig)
  --use_peft --lora_r 16               any field of TRL's ModelConfig; with --load_in_4bit QLoRA
  --resume                             continue from the last checkpoint in output_dir
  --push_to_hub --hub_model_id NAME    push the model and its card, to a private repository
    (--hub_private_repo false: public; --hub_strategy checkpoint: with all a resume needs, at every save;
    --hub_base_model ID: what a local base is on the Hub; --log_completions_hub_repo NAME: completions too)
  --accelerate_config fsdp2            several processes: a file, a name of recipes/accelerate or of TRL's
                                       (--num_processes 4 and accelerate's options for several machines beside it)

Fields of a recipe that no config has:
"""


def run(words: list[str]) -> int:
    """Trains a recipe; returns 0, or 1 where all went well but a push. Raises VariantError for a mistake in it."""
    if "-h" in words or "--help" in words:
        print(HELP + _own_fields())
        return 0
    if any(word.split("=", 1)[0] == launch.OPTION for word in words):
        return launch.run(words)
    resume = "--resume" in words
    path, overrides = recipes.take_recipe([word for word in words if word != "--resume"], "train")
    result = train(recipes.load(path, overrides), resume=resume)
    return 1 if result.get("push_failures") else 0


def train(spec: recipes.RunSpec, *, resume: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Runs a recipe from data to run folder and returns what `result.json` holds."""
    console = console or Console()
    chosen = _composition(spec, console)
    checkpoint = _checkpoint(spec, resume)

    import torch
    from transformers import set_seed

    from ..report import LiveCurve, before_after_table, write_result
    from ..report.record import facts_of
    from . import sources
    from .memory import shards
    from .warm_up import run_warm_up, warm_folder, warm_up_of

    if spec.recipe.num_threads:
        torch.set_num_threads(spec.recipe.num_threads)
    set_seed(spec.config.seed)
    data = sources.load_data(spec)
    _say_memory(spec, data, console)
    if shards() > 1 and data.evaluate is not None:  # before training no process has all weights on its device
        data.evaluate = None
        if spec.config.process_index == 0:
            console.print("accuracy is not measured while weights are in shards", highlight=False)
    warm, warmed = warm_up_of(spec), None
    if warm is not None and not (checkpoint and warm_folder(spec).is_dir()):
        warmed = run_warm_up(warm, spec, data, *sources.load_model(spec, data))
        if spec.config.process_index == 0:
            console.print(f"warm-up: {warmed['steps']} steps, loss {warmed['loss_last']:.3f}", highlight=False)
    model, tokenizer = sources.load_model(spec, data, None if warm is None else warm_folder(spec))
    trainer = sources.build_trainer(spec, data, model, tokenizer)
    main_process = trainer.is_world_process_zero()
    curve = LiveCurve(console=console).attach(trainer)
    trainer.facts = known = {
        "recipe": spec.path,
        "command": spec.command,
        "task": data.name if spec.recipe.task is not None else None,
        "dataset": spec.recipe.dataset_name,
        "model": data.model_label,
        "settings": spec.mapping,
        "threads": torch.get_num_threads(),
        "resumed_from": checkpoint,
        **({} if data.evaluate is None else {"eval_problems": data.problems}),
    }

    if spec.recipe.accuracy_every is not None and shards() == 1:
        trainer.add_callback(_accuracy_every(trainer, spec, data))
    before = data.accuracy(trainer.accelerator.unwrap_model(trainer.model), tokenizer)
    if before is not None and main_process:
        console.print(f"accuracy before: {before:.3f}", highlight=False)
    started = time.perf_counter()
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    finally:
        curve.close()
    seconds = time.perf_counter() - started
    after = data.accuracy(trainer.accelerator.unwrap_model(trainer.model), tokenizer)

    history = trainer.state.log_history
    outcome = {
        "accuracy_before": before,
        "accuracy_after": after,
        "train_seconds": round(seconds, 2),
        "steps": trainer.state.global_step,
        **({} if warmed is None else {"warm_up": {**warmed, "accuracy_after": before}}),
        **_rewards(history),
    }
    trainer.facts = {**outcome, **known}
    result = {**facts_of(trainer), **trainer.facts, "task": data.name}
    trainer.save_model(spec.config.output_dir, _internal_call=True)
    trainer.save_learners(spec.config.output_dir)
    if main_process:
        composition = chosen.describe() if chosen is not None else None
        write_result(spec.config.output_dir, result, history=history, composition=composition, picture=False)
        trainer.create_model_card()
        console.print(before_after_table(result))
        console.print(f"run folder: {spec.config.output_dir}", highlight=False, soft_wrap=True)
    if spec.recipe.merge_adapter and main_process:
        from ..adapters import merge_adapter

        done = merge_adapter(spec.config.output_dir, dtype=spec.recipe.merge_adapter, overwrite=True)
        console.print(f"merged model: {done.path}", highlight=False, soft_wrap=True)
    if spec.config.push_to_hub:
        sent = trainer.push_to_hub()
        if sent is not None and main_process:
            console.print(f"pushed: {sent.commit_url}", highlight=False, soft_wrap=True)
    if hasattr(trainer, "end"):
        trainer.end()
    trainer.close()
    return {**result, "push_failures": trainer.push_failures} if trainer.push_failures else result


def _say_memory(spec: recipes.RunSpec, data: Any, console: Console) -> None:
    """One line, before anything large is loaded; an estimate that cannot be made does not stop a run."""
    from ..trainer.config import variant_of
    from . import sources
    from .memory import memory_of

    if spec.config.process_index != 0:
        return
    resolved = copy.copy(spec.config)
    resolved.teacher = sources.with_task_teacher(resolved.teacher, data)
    try:
        estimate = memory_of(spec, variant_of(resolved), sources.base_name(spec, data))
    except VariantError as error:
        console.print(f"memory not estimated: {error}", highlight=False, soft_wrap=True)
        return
    console.print(str(estimate).splitlines()[0], highlight=False, soft_wrap=True)


def _accuracy_every(trainer: Any, spec: recipes.RunSpec, data: Any) -> Any:
    from ..evaluation import EvaluateEvery

    if data.evaluate is None:
        raise VariantError("accuracy_every needs a task with held-out problems (task: arithmetic)")
    limit = min(spec.recipe.accuracy_problems, data.problems)
    return EvaluateEvery(trainer, data.evaluate, spec.recipe.accuracy_every, limit)


def _composition(spec: recipes.RunSpec, console: Console) -> Any:
    """Returns the run's Variant after its findings were shown. Raises VariantError where one is an error."""
    chosen, found = findings(spec)
    if spec.config.process_index == 0:
        for finding in found:
            if finding.level != "error":
                console.print(str(finding), style="yellow", markup=False, highlight=False, soft_wrap=True)
    errors = [f"{f.message} ({f.hint})" if f.hint else f.message for f in found if f.level == "error"]
    if errors:
        raise VariantError("; ".join(errors))
    return chosen


def _checkpoint(spec: recipes.RunSpec, resume: bool) -> str | None:
    """Returns the checkpoint folder to resume from, if any. Raises VariantError where --resume finds none."""
    asked = spec.config.resume_from_checkpoint
    if not resume and asked not in ("true", "True", True):
        if asked and not (Path(asked) / "trainer_state.json").is_file():
            raise VariantError(f"{asked} is no checkpoint: it holds no trainer_state.json")
        return asked
    folder = Path(spec.config.output_dir)
    numbered = [
        (int(found[1]), str(child))
        for child in (folder.iterdir() if folder.is_dir() else ())
        if (found := re.fullmatch(r"checkpoint-(\d+)", child.name))
        and (child / "trainer_state.json").is_file()  # written last: without it the run died while saving
    ]
    if not numbered:
        off = spec.config.save_strategy == "no"
        why = " (save_strategy is 'no': set --save_strategy steps --save_steps N)" if off else ""
        raise VariantError(f"no checkpoint to resume from in {folder}{why}; train without --resume")
    return max(numbered)[1]


def _rewards(history: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the mean reward over the first and the last tenth of the logs, {} where none was logged."""
    values = [row["reward"] for row in history if row.get("reward") is not None]
    if len(values) < 2:  # one logged point says nothing of a change
        return {}
    n = max(1, len(values) // 10)
    return {"reward_first": sum(values[:n]) / n, "reward_last": sum(values[-n:]) / n}


def _own_fields() -> str:
    from dataclasses import fields

    from .arguments import RecipeArguments

    return "".join(f"  {f.name:<21}{f.metadata['help']}\n" for f in fields(RecipeArguments))
