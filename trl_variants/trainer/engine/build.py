"""Which engine a run gets, how TRL comes to build it, and how its memory is given back."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Iterator
from typing import Any, Self

import torch
from accelerate.utils import is_peft_model
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from ...errors import VariantError
from .generation import AdapterGeneration
from .servable import require_servable_config

_GROUP = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # which TRL sets for an engine of its own


@contextlib.contextmanager
def own_engine(trainer: Any) -> Iterator[None]:
    """While TRL's constructor runs inside, the engine it asks for is `build_engine`'s."""
    stock = grpo_trainer.VLLMGeneration
    trainer.environment_before = {name: os.environ.get(name) for name in _GROUP}
    grpo_trainer.VLLMGeneration = functools.partial(build_engine, trainer)
    try:
        yield
    finally:
        grpo_trainer.VLLMGeneration = stock


def build_engine(trainer: Any, **settings: Any) -> VLLMGeneration:
    """Adapters are served as adapters; full fine-tuning and `vllm_adapter_sync: merge` keep TRL's weight sync."""
    if is_peft_model(settings["model"]) and not merges(trainer.args):
        return AdapterGeneration(trainer, **settings)
    return VLLMGeneration(**settings)


def merges(args: Any) -> bool:
    return getattr(args, "vllm_adapter_sync", "adapter") == "merge"


def refuse_unservable(args: Any, model: Any, peft_config: Any, quantization_config: Any) -> None:
    """Raises VariantError, before anything loads, for an adapter that cannot reach the engine."""
    if not args.use_vllm:
        return
    adapted = hasattr(model, "peft_config")
    if merges(args):
        given = getattr(args, "model_init_kwargs", None)
        init = given if isinstance(given, dict) else {}
        quantized = quantization_config is not None or "quantization_config" in init or is_4bit(model)
        if quantized and (adapted or peft_config is not None):
            raise VariantError(
                "vllm_adapter_sync: merge on a 4-bit base loses small updates and changes the base at each sync: "
                "leave it at adapter"
            )
        return
    for config in [peft_config] if peft_config is not None else _active(model):
        require_servable_config(config)


def is_4bit(model: Any) -> bool:
    return bool(getattr(model, "is_loaded_in_4bit", False))


def _active(model: Any) -> list:
    if not hasattr(model, "peft_config"):
        return []
    return [model.peft_config[name] for name in model.active_adapters]


class Closed:
    """What stands in the place of an engine that was freed."""

    def __getattr__(self, name: str) -> Any:
        raise VariantError("the trainer was closed: build a new one to generate")


class ClosesEngine:
    """A part of the trainer: `close()`, or a `with` block around its use."""

    accelerator: Any
    environment_before: dict[str, str | None]

    def close(self) -> None:
        """Frees the vLLM engine, for the next trainer in a notebook; this one generates no more. Twice is once."""
        generation = getattr(self, "vllm_generation", None)
        if isinstance(generation, AdapterGeneration):
            generation.remove_adapter()
        llm = getattr(generation, "llm", None)
        if generation is None or llm is None or isinstance(llm, Closed):  # none, or a server
            return
        llm.llm_engine.engine_core.shutdown()
        generation.llm = Closed()
        del llm
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        destroy_model_parallel()
        if self.accelerator.num_processes == 1:  # with several it is the trainer's own process group
            destroy_distributed_environment()
            for name, value in self.environment_before.items():  # or the next trainer would look for that group
                if value is None:
                    os.environ.pop(name, None)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
