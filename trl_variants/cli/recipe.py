"""A recipe: one YAML file plus the command line, read into typed settings.

TRL's conventions: a key is a field of VariantGRPOConfig, of TRL's ModelConfig or of RecipeArguments; an `env`
mapping is exported first; the command line beats the file. Added: dotted keys reach into mappings
(`--hooks.clip.ppo.eps_high 0.3`), and an unknown key is refused with the closest known one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import sys
import types
import typing
import warnings
from dataclasses import dataclass, fields
from typing import Any

from ..errors import VariantError, did_you_mean
from .overrides import put, read_recipe, split_words, structured

SECRETS = ("hub_token", "push_to_hub_token")  # read, never written to a run folder
NESTED = ("task", "variant", "hooks", "teacher", "warm_up")  # a word or a mapping: read as YAML, never by argparse


@dataclass
class RunSpec:
    """One run as asked for: the recipe's `path`, its three groups of settings, and what was written, in the file and on
    the command line, as one `mapping`; `command` repeats it."""

    path: str | None
    recipe: Any  # RecipeArguments
    config: Any  # VariantGRPOConfig
    model: Any  # ModelArguments
    mapping: dict[str, Any]
    command: str = ""


def take_recipe(words: list[str], command: str) -> tuple[str, list[str]]:
    """Splits the words after a command into the recipe's path and the overrides.

    The path stands first, last or after `--config`. Raises VariantError where there is none.
    """
    words = list(words)
    if "--config" in words:
        at = words.index("--config")
        if at + 1 < len(words):
            return words[at + 1], words[:at] + words[at + 2 :]
    elif words and not words[0].startswith("--"):
        return words[0], words[1:]
    elif words and words[-1].endswith((".yaml", ".yml")):
        return words[-1], words[:-1]
    raise VariantError(f"{command} needs a recipe: trl-variants {command} recipes/quickstart.yaml")


def load(path: str | None, words: list[str]) -> RunSpec:
    """Reads a recipe and its command-line overrides.

    Raises:
        VariantError: unknown key, wrong type, value outside its choices, contradicting settings.
    """
    mapping = read_recipe(path) if path else {}
    env = mapping.pop("env", None) or {}
    if not isinstance(env, dict):
        raise VariantError("env must be a mapping of environment variables")
    os.environ.update({str(key): str(value) for key, value in env.items()})

    parser, hints = _parser()
    flat: list[str] = []
    for option, values in split_words(words):
        head, *rest = option.split(".")
        head = head.replace("-", "_")
        if rest or head in NESTED:
            put(mapping, [head, *rest], structured(values))
        else:
            flat += [f"--{head}", *values]
    for key in mapping:
        if key not in hints:
            raise VariantError(f"unknown setting {key!r}{did_you_mean(key, hints)}")
    parser.set_defaults_with_config(**{key: _typed(parser, key, value, hints[key]) for key, value in mapping.items()})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            recipe, config, model, unknown = parser.parse_args_into_dataclasses(
                flat, return_remaining_strings=True, look_for_args_file=False
            )
    except VariantError:
        raise
    except (ValueError, TypeError) as error:
        if "bf16/gpu" in str(error):
            raise VariantError("bf16 needs a GPU: on this machine set use_cpu: true and bf16: false") from error
        raise VariantError(str(error)) from error
    if unknown:
        name = unknown[0].lstrip("-")
        known = [*hints, "resume", "debug"]
        raise VariantError(f"unknown setting {name!r}{did_you_mean(name, known)}")
    if recipe.model and model.model_name_or_path and recipe.model != model.model_name_or_path:
        raise VariantError("model and model_name_or_path name two different models; keep one")
    recipe.model = recipe.model or model.model_name_or_path
    _import(recipe.imports or [])
    from ..report.run_folder import plain  # with transformers behind it

    for key in (word[2:].replace("-", "_") for word in flat if word.startswith("--")):
        of = next((group for group in (recipe, config, model) if hasattr(group, key)), None)
        if of is not None:
            mapping[key] = plain(getattr(getattr(of, key), "value", getattr(of, key)))
    mapping = {key: value for key, value in mapping.items() if key not in SECRETS}
    shown = [word for key, values in split_words(words) if key not in SECRETS for word in (f"--{key}", *values)]
    command = shlex.join(["trl-variants", "train", *([str(path)] if path else []), *shown])
    return RunSpec(path, recipe, config, model, mapping, command)


def _import(modules: list[str]) -> None:
    sys.path.insert(0, os.getcwd())  # a hook's module usually lies beside the recipe that names it
    try:
        for name in modules:
            importlib.import_module(name)
    except ImportError as error:
        raise VariantError(f"imports: {name} cannot be imported ({error})") from error
    finally:
        sys.path.remove(os.getcwd())


def _parser() -> tuple[Any, dict[str, Any]]:
    """Returns TRL's parser over the three dataclasses, and the type hint of every key."""
    from trl import TrlParser

    from ..trainer.config import VariantGRPOConfig
    from .arguments import ModelArguments, RecipeArguments

    class Parser(TrlParser):
        def error(self, message):
            raise VariantError(_readable(message))

    groups = (RecipeArguments, VariantGRPOConfig, ModelArguments)
    parser = Parser(groups, prog="trl-variants train", allow_abbrev=False, add_help=False)
    for action in parser._actions:
        if action.dest in NESTED:
            action.type = None
    of_groups = [(typing.get_type_hints(group), fields(group)) for group in groups]
    return parser, {f.name: hints[f.name] for hints, own in of_groups for f in own if f.init}


def _readable(message: str) -> str:
    """Turns argparse's `argument --max_steps/--max-steps: invalid ...` into `max_steps: invalid ...`."""
    return re.sub(r"^argument --(?:no_)?(\w+)\S*: ", r"\1: ", message)


def _kinds(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _typed(parser: Any, key: str, value: Any, hint: Any) -> Any:
    """Returns a YAML value converted as the command line would, since argparse leaves defaults unchecked."""
    if key in NESTED:
        return value
    kinds = _kinds(hint)
    bare = {typing.get_origin(kind) or kind for kind in kinds}
    wanted = " or ".join(sorted(getattr(kind, "__name__", str(kind)) for kind in bare if kind is not type(None)))
    if value is None:
        if type(None) not in kinds:
            raise VariantError(f"{key} must be {wanted}, got null")
        return None
    if isinstance(value, dict):
        if dict not in bare:
            raise VariantError(f"{key} must be {wanted}, got a mapping")
        return value
    action = next(a for a in parser._actions if a.dest == key)
    if isinstance(value, list) and list not in bare:
        raise VariantError(f"{key} must be {wanted}, got a list")
    # TRL reads `scale_rewards: true` and its like as a bool, though the field says str
    if isinstance(value, bool) and action.type is str:
        return value
    try:
        if action.nargs in ("+", "*"):
            items = value if isinstance(value, list) else [value]
            return [parser._get_value(action, str(item)) for item in items]
        if isinstance(value, list):
            return value
        typed = parser._get_value(action, str(value))
        parser._check_value(action, typed)
        return typed
    except argparse.ArgumentError as error:
        raise VariantError(_readable(str(error))) from error
