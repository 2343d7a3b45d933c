"""What precision, quantisation and adapter of a recipe ask of each other; findings without loading a model."""

from __future__ import annotations

from typing import Any

from ..adapters import DTYPES, is_adapter
from ..checks import Finding
from .recipe import RunSpec


def precision_findings(spec: RunSpec, variant: Any) -> list[Finding]:
    """Errors, warnings and notes about `load_in_4bit`, `use_peft`, `adapter`, `dtype`, `fp16` and `merge_adapter`.

    Args:
        variant: the run's Variant, None where the recipe names none.
    """
    recipe, config, model = spec.recipe, spec.config, spec.model
    found: list[Finding] = []
    error = lambda m, h="": found.append(Finding("error", m, h))  # noqa: E731
    warn = lambda m, h="": found.append(Finding("warning", m, h))  # noqa: E731
    bits = "4" if model.load_in_4bit else "8" if model.load_in_8bit else ""
    continues = recipe.adapter is not None or is_adapter(recipe.model or "")
    adapted = model.use_peft or continues
    learns = bool(variant is not None and variant.learners)
    if bits and not adapted:
        error(f"{bits}-bit weights are not trained themselves, only an adapter on them is", "use_peft: true")
    if recipe.merge_adapter is not None:
        if recipe.merge_adapter not in DTYPES:
            error(f"merge_adapter is one of {', '.join(DTYPES)}, got {recipe.merge_adapter!r}")
        if not adapted:
            error("merge_adapter: the run trains all weights, so there is no adapter to merge", "use_peft: true")
    if recipe.adapter is not None and is_adapter(recipe.model or ""):
        error("model and adapter both name an adapter", "adapter alone, or model: the base")
    if continues and model.use_peft:
        found.append(
            Finding("note", "the run goes on from an adapter, whose own rank and targets count: lora_* has no effect")
        )
    if config.fp16:
        found += _fp16(config, model, adapted, learns)
    elif bits == "4" and model.dtype == "float32" and not config.use_cpu:
        warn("4-bit weights are multiplied in float32, which is slow on a GPU", "dtype: bfloat16")
    return found


def _fp16(config: Any, model: Any, adapted: bool, learns: bool) -> list[Finding]:
    found: list[Finding] = []
    warn = lambda m, h="": found.append(Finding("warning", m, h))  # noqa: E731
    if model.dtype == "bfloat16":
        warn("dtype is bfloat16 under fp16, and a GPU that needs fp16 has no fast bfloat16", "dtype: float16")
    if model.dtype == "float16" and not adapted:
        found.append(
            Finding("error", "fp16 scales the loss, which cannot work on trained float16 weights", "dtype: float32")
        )
    if learns and model.dtype in ("float16", "bfloat16"):
        warn(
            f"a learner's loss is not scaled under fp16: its gradients may vanish in {model.dtype} activations",
            "dtype: float32",
        )
    if "flash" in (model.attn_implementation or ""):
        warn("flash attention needs an Ampere GPU or newer, which would train in bf16", "attn_implementation: sdpa")
    where = "on a CPU the run stays in full precision" if config.use_cpu else "as a T4 or V100 needs"
    kept = "; adapters and their optimizer are float32" if adapted else ""
    found.append(Finding("note", f"fp16 with loss scaling, {where}{kept}"))
    return found
