"""Where a recipe's data, rewards, model and trainer come from."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MissingExtra, VariantError, did_you_mean
from .recipe import RunSpec

FILES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass
class Data:
    """What a run trains on. `evaluate(model, tokenizer)` gives held-out greedy accuracy in [0, 1], if any."""

    name: str
    train: Any
    test: Any
    reward_funcs: list[Any]
    model_path: Callable[[], str] | None = None  # the task's own model; may convert it first
    evaluate: Callable[[Any, Any], float] | None = None
    model_label: str | None = None
    teacher_path: Callable[[], str] | None = None  # the task's own teacher
    problems: int | None = None  # how many `evaluate` counts
    max_new_tokens: int | None = None  # budget that suits the task's answers

    def accuracy(self, model: Any, tokenizer: Any) -> float | None:
        """Returns held-out greedy accuracy, None where the data has no evaluation."""
        return None if self.evaluate is None else float(self.evaluate(model, tokenizer))


def load_data(spec: RunSpec) -> Data:
    """Loads the recipe's task, or its dataset; `reward_funcs` of the recipe replace the task's.

    Raises:
        VariantError: unknown task or parameter, data not to be had, no `prompt` column, unknown reward.
    """
    recipe = spec.recipe
    rewards = [reward_named(name) for name in recipe.reward_funcs or []]
    if recipe.task is not None:
        from ..tasks import load_task

        options = dict(recipe.task) if isinstance(recipe.task, dict) else {"name": recipe.task}
        name = options.pop("name")
        try:
            task = load_task(name, **options)
        except VariantError:
            raise
        except (TypeError, ValueError, ImportError) as error:
            raise VariantError(f"task {name}: {error}") from error
        return Data(
            name,
            task.train_dataset,
            task.eval_dataset,
            rewards or task.reward_funcs,
            task.model_path,
            functools.partial(task.evaluate, chat_template_kwargs=spec.config.chat_template_kwargs),
            teacher_path=task.teacher_path,
            problems=len(task.eval_dataset),
            max_new_tokens=task.max_new_tokens,
        )
    if not rewards:
        raise VariantError("dataset_name needs reward_funcs: names of TRL's or dotted import paths")
    train = dataset_named(recipe, recipe.dataset_train_split)
    wants_test = str(getattr(spec.config.eval_strategy, "value", spec.config.eval_strategy)) != "no"
    test = dataset_named(recipe, recipe.dataset_test_split) if wants_test else None
    return Data(recipe.dataset_name, train, test, rewards)


def dataset_named(recipe: Any, split: str) -> Any:
    """The split of a recipe's `dataset_name`. Raises VariantError where it is not to be had or has no `prompt`."""
    from datasets import load_dataset

    name = recipe.dataset_name
    kind = FILES.get(Path(name).suffix)
    try:
        if kind:
            data = load_dataset(kind, data_files=name, split="train")
        else:
            data = load_dataset(name, name=recipe.dataset_config, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise VariantError(
            f"cannot load the dataset {name!r} ({type(error).__name__}); "
            "pass a file (--dataset_name data.jsonl) or a built-in task (--task arithmetic)"
        ) from error
    if "prompt" not in data.column_names:
        raise VariantError(f"dataset {name!r} has no `prompt` column, only {', '.join(data.column_names)}")
    return data


def reward_named(name: str) -> Any:
    """Returns TRL's reward function of that name, what a dotted import path leads to, or the name of a reward model (a
    folder, or a Hub id with its slash), which TRL loads as a sequence classifier with one output."""
    if "/" in name or os.path.isdir(name):
        return name
    import trl.rewards

    own = {
        "accuracy_reward": lambda: trl.rewards.accuracy_reward,
        "reasoning_accuracy_reward": lambda: trl.rewards.reasoning_accuracy_reward,
        "think_format_reward": lambda: trl.rewards.think_format_reward,
        # TRL's own script uses these two numbers
        "get_soft_overlong_punishment": lambda: trl.rewards.get_soft_overlong_punishment(1280, 256),
    }
    if name in own:
        return own[name]()
    module, _, attribute = name.rpartition(".")
    if not module:
        raise VariantError(
            f"unknown reward function {name!r}{did_you_mean(name, own)}; write one of {', '.join(own)}, a dotted path, "
            "or a reward model's folder or Hub id"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise VariantError(f"cannot import the reward function {name!r}: {error}") from error


def load_model(spec: RunSpec, data: Data, folder: Path | None = None) -> tuple[Any, Any]:
    """Loads the recipe's model (or the task's own) and its tokenizer; sets `data.model_label`.

    `folder` holds weights of that model that are to be taken instead, or an adapter on it.
    Raises VariantError where the model is neither a local folder nor to be had from the Hub.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import get_quantization_config

    from ..adapters import continued, is_adapter

    arguments, adapter, asked = spec.model, spec.recipe.adapter, spec.recipe.model
    if asked is not None and is_adapter(asked):
        adapter, asked = asked, None
    name = base_name(spec, data)
    data.model_label = asked or Path(name).name
    whole = folder is not None and not (folder / "adapter_config.json").is_file()
    if whole:
        name = str(folder)
    if arguments.load_in_4bit or arguments.load_in_8bit:
        if importlib.util.find_spec("bitsandbytes") is None:
            raise MissingExtra("a 4-bit or 8-bit model", "quantization")
    shared = {"revision": arguments.model_revision, "trust_remote_code": spec.config.trust_remote_code}
    options = {
        **shared,
        "dtype": arguments.dtype,
        "attn_implementation": arguments.attn_implementation,
        "quantization_config": get_quantization_config(arguments),
        **(spec.config.model_init_kwargs or {}),
    }
    try:
        model = AutoModelForCausalLM.from_pretrained(name, **{k: v for k, v in options.items() if v is not None})
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", **shared)
    except (OSError, ValueError) as error:
        raise VariantError(
            f"cannot load the model {name!r}: it is no local folder and the Hub gave nothing; "
            "pass --model FOLDER, or leave `model` out to train the task's own"
        ) from error
    if folder is not None and not whole:
        adapter = str(folder)
    return (model if adapter is None else continued(model, adapter)), tokenizer


def with_task_teacher(given: Any, data: Data) -> Any:
    """A recipe's `teacher` with the task's own where it says `task`, alone or as the path of a model teacher.

    Raises VariantError where the task has none.
    """
    if isinstance(given, dict):
        named = dict(given)
        for name, value in given.items():
            if isinstance(value, dict) or name == "of":  # other texts may be names of columns
                named[name] = with_task_teacher(value, data)
            elif name == "path" and value == "task":
                named[name] = _own_teacher(data)
        return named
    return {"model": {"path": _own_teacher(data)}} if given == "task" else given


def _own_teacher(data: Data) -> str:
    try:
        if data.teacher_path is None:
            raise ValueError("no task is named, whose teacher could be taken: give the teacher's folder or Hub id")
        return data.teacher_path()
    except ValueError as error:
        raise VariantError(f"teacher: task: {error}") from error


def base_name(spec: RunSpec, data: Data) -> str:
    """The folder or Hub id of the weights a run starts from; those below an adapter where it goes on from one."""
    from ..adapters import base_of, is_adapter

    asked, adapter = spec.recipe.model, spec.recipe.adapter
    if asked is not None and is_adapter(asked):
        asked, adapter = None, asked
    return base_of(adapter) if adapter is not None and asked is None else _model_name(asked, data)


def _model_name(asked: str | None, data: Data) -> str:
    """Returns the folder or Hub id to load: what was asked for, `smollm2`'s folder, or the task's own."""
    if asked not in (None, "smollm2"):
        return str(asked)
    from ..tasks import smollm2_path

    own = smollm2_path if asked == "smollm2" else data.model_path
    if own is None:
        raise VariantError("no model named; pass --model with a folder or a Hub id")
    try:
        return str(own())
    except (OSError, ImportError) as error:
        raise VariantError(str(error)) from error


def build_trainer(spec: RunSpec, data: Data, model: Any, tokenizer: Any) -> Any:
    """Returns the VariantGRPOTrainer of a recipe. Raises VariantError for settings that TRL refuses."""
    from accelerate.utils import is_peft_model
    from trl import get_peft_config

    from ..trainer import VariantGRPOTrainer

    spec.config.model_init_kwargs = None  # the trainer refuses init arguments beside a loaded model
    spec.config.teacher = with_task_teacher(spec.config.teacher, data)
    evaluates = str(getattr(spec.config.eval_strategy, "value", spec.config.eval_strategy)) != "no"
    try:
        return VariantGRPOTrainer(
            model=model,
            reward_funcs=data.reward_funcs,
            args=spec.config,
            train_dataset=data.train,
            eval_dataset=data.test if evaluates else None,
            processing_class=tokenizer,
            peft_config=None if is_peft_model(model) else get_peft_config(spec.model),
        )
    except VariantError:
        raise
    except ValueError as error:
        raise VariantError(str(error)) from error
