"""Why TRL's trainer could not be built: a model that is not here, or an optional package. One sentence each."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

from huggingface_hub import try_to_load_from_cache

from ..errors import MissingExtra, VariantError


def missing_model(arguments: dict[str, Any], role: str = "the model") -> VariantError | None:
    """The error for what raised OSError on these arguments of a GRPOTrainer; None when everything they name is here."""
    for what, name, instead in _sources(**arguments):
        what = role if what == "the model" else what
        if not _is_here(name):
            given = f"{what} {name!r}" if name else f"{what} (the model has no path it came from)"
            return VariantError(f"{given} is not on this machine and could not be fetched from the Hub: {instead}")
    return None


def missing_extra(arguments: dict[str, Any]) -> MissingExtra | None:
    """The error for one that raised ImportError: which extra brings the package."""
    if getattr(arguments.get("args"), "use_vllm", False) and importlib.util.find_spec("vllm") is None:
        return MissingExtra("use_vllm", "vllm")
    if arguments.get("quantization_config") is not None and importlib.util.find_spec("bitsandbytes") is None:
        return MissingExtra("quantization_config", "quantization")
    return None


def _sources(
    model: Any,
    reward_funcs: Any = None,
    args: Any = None,
    processing_class: Any = None,
    peft_config: Any = None,
    **_: Any,
) -> Iterator[tuple[str, str, str]]:
    """What TRL loads by name, in its order: (what, name, what to pass instead)."""
    name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
    if isinstance(model, str):
        yield "the model", name, "pass a folder with its config.json and weights, or a loaded model"
    if processing_class is None:
        yield "the tokenizer", name, "pass processing_class="
    for function in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        if isinstance(function, str):
            yield (
                "the reward model",
                function,
                "pass a folder with its config.json and weights, or a Python function",
            )
    adapted = peft_config is not None or hasattr(model, "peft_config")
    if getattr(args, "beta", 0.0) and not adapted:
        yield (
            "the reference model",
            name,
            "pass the model's folder as model=, load the model from a folder, use peft_config=, or train without a KL",
        )


def _is_here(name: str) -> bool:
    if not name:
        return False
    return os.path.isdir(name) or (name.count("/") < 2 and isinstance(try_to_load_from_cache(name, "config.json"), str))
