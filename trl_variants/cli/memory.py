"""The memory a recipe needs, said before its model is loaded."""

from __future__ import annotations

import os
from typing import Any

from ..adapters import base_of, config_of, is_adapter
from ..errors import VariantError
from ..footprint import MemoryEstimate, estimate_memory
from .recipe import RunSpec

PROMPT = 256  # tokens, where the data are not looked at


def memory_of(spec: RunSpec, variant: Any, model: str) -> MemoryEstimate:
    """The estimate of a run of `model`, on each of the devices this process was launched for.

    Raises VariantError where a configuration is not to be had.
    """
    from trl import get_peft_config

    config, arguments = spec.config, spec.model
    adapter = spec.recipe.adapter or (model if is_adapter(model) else None)
    micro = config.per_device_train_batch_size
    return estimate_memory(
        model,
        variant,
        dtype=arguments.dtype or "float32",
        bits=4 if arguments.load_in_4bit else 8 if arguments.load_in_8bit else None,
        nested=arguments.use_bnb_nested_quant,
        lora=get_peft_config(arguments) if adapter is None else config_of(adapter),
        continued=adapter is not None,
        fp16=config.fp16,
        mixed=config.bf16 or config.fp16,
        optimizer=config.optim,
        rows=micro,
        generated_rows=micro * (config.steps_per_generation or config.gradient_accumulation_steps),
        prompt_tokens=PROMPT,
        completion_tokens=config.max_completion_length or 256,
        gradient_checkpointing=config.gradient_checkpointing,
        use_vllm=config.use_vllm,
        shards=shards(),
    )


def memory_lines(spec: RunSpec, variant: Any) -> list[str]:
    """The estimate as `check` prints it; one line where it cannot be made, none where no model is named."""
    recipe = spec.recipe
    try:
        model = recipe.model or (base_of(recipe.adapter) if recipe.adapter else None)
        if model is None or model == "smollm2":
            return []
        return str(memory_of(spec, variant, model)).splitlines()
    except VariantError as error:
        return [f"memory not estimated: {error}"]


def shards() -> int:
    """Devices that share the weights under FSDP or ZeRO-3, as accelerate tells the processes it launches; else 1."""
    said = os.environ.get
    sharded = said("ACCELERATE_USE_FSDP") == "true" or said("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
    return int(said("WORLD_SIZE", "1")) if sharded else 1
