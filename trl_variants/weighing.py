"""Bytes of weights, counted on models without storage: a policy's, an adapter's, a teacher's, a critic's."""

from __future__ import annotations

from typing import Any

from .errors import VariantError

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BLOCK, _NESTED = 64, 256  # bitsandbytes: a scale for so many 4-bit weights, and for so many of those scales
_STATES = {"sgd": 0, "adafactor": 0, "lion": 1, "rmsprop": 1}  # values an optimizer keeps for each weight; others 2


def configuration(model: Any) -> Any:
    """A model's configuration by Hub id or folder (an adapter's is its base's); a configuration is returned as it is.

    Raises VariantError where there is none to be had.
    """
    from transformers import AutoConfig

    from .adapters import base_of, is_adapter

    if not isinstance(model, str):
        return model
    try:
        return AutoConfig.from_pretrained(base_of(model) if is_adapter(model) else model)
    except (OSError, ValueError) as error:
        raise VariantError(f"the configuration of {model!r} is not on this machine and not to be had") from error


def skeleton(config: Any, dtype: str) -> Any:
    """The model of a configuration without storage, weights tied as it ties them.

    Raises VariantError where the configuration is none of a causal language model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="eager")
    except ValueError as error:
        raise VariantError(f"{type(config).__name__} is not the configuration of a causal language model") from error
    model.tie_weights()
    return model


def weight_bytes(model: Any, bits: int | None = None, nested: bool = False) -> int:
    """Bytes of a model's weights; with `bits` those of its linear layers (but the head) as bitsandbytes packs them.

    Raises VariantError for `bits` other than 4, 8 or None.
    """
    from torch import nn

    if bits not in (None, 4, 8):
        raise VariantError(f"bits is 4, 8 or None, got {bits!r}")
    head, seen, total = model.get_output_embeddings(), set(), 0
    for module in model.modules():
        packed = bits is not None and isinstance(module, nn.Linear) and module is not head
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) in seen:
                continue
            seen.add(id(weight))
            count = weight.numel()
            if not packed or name != "weight":
                total += count * weight.element_size()
            elif bits == 8:
                total += count + 4 * weight.shape[0]  # a float32 scale for each row
            else:
                total += count // 2 + _scales(-(-count // _BLOCK), nested) + 16 * 4  # and the 16 values of the code
    return total


def _scales(count: int, nested: bool) -> int:
    return count + 4 * -(-count // _NESTED) + 256 * 4 if nested else 4 * count


def adapter_weights(base: Any, lora: Any) -> int:
    """Weights that a new adapter of this configuration trains on `base`, which keeps the adapter.

    Raises VariantError where it does not fit the model.
    """
    import torch
    from peft import get_peft_model

    try:
        with torch.device("meta"):
            return sum(p.numel() for p in get_peft_model(base, lora).parameters() if p.requires_grad)
    except ValueError as error:
        raise VariantError(f"the adapter does not fit the model: {str(error).splitlines()[0]}") from error


def optimizer_bytes(optimizer: Any, weights: int, item: int) -> int:
    """Bytes an optimizer keeps for so many trained weights of `item` bytes each."""
    name = str(getattr(optimizer, "value", optimizer))
    values = next((n for key, n in _STATES.items() if name.startswith(key)), 2)
    return values * weights * (1 if "8bit" in name else item)


def around(variant: Any, config: Any, dtype: str, trained: int, adapted: bool, continued: bool) -> dict[str, int]:
    """Bytes of reference model, teacher and critic of a method.

    Args:
        trained: bytes of what the policy trains. adapted: it trains an adapter. continued: one that was there before.
    """
    extra = {}
    if "ref_logps" in variant.needs and not adapted:
        extra["reference model"] = weight_bytes(skeleton(config, dtype))
    elif "ref_logps" in variant.needs and continued:
        extra["reference adapter"] = trained
    if variant.teacher is not None:
        extra["teacher"] = _teacher(variant.teacher, trained, adapted)
    for learner in variant.learners:
        if hasattr(learner, "body"):  # weights, gradients, Adam's two moments
            extra[learner.hook_name] = 4 * _critic(learner, config, dtype, adapted)
    return extra


def _teacher(teacher: Any, trained: int, adapted: bool) -> int:
    """Bytes of a teacher's own weights; one that is the policy in another state has none, or a copy."""
    kind = teacher.hook_name
    if kind == "model":
        dtype = "bfloat16" if teacher.dtype == "auto" else teacher.dtype
        return weight_bytes(skeleton(configuration(teacher.path), dtype), 4 if teacher.load_in_4bit else None)
    if kind in ("ema", "adapter") or (kind == "base" and not adapted):
        return trained
    inside = [getattr(teacher, "of", None), getattr(teacher, "default", None)]
    inside += (getattr(teacher, "teachers", None) or {}).values()
    return sum(_teacher(one, trained, adapted) for one in inside if hasattr(one, "hook_name"))


def _critic(learner: Any, config: Any, dtype: str, adapted: bool) -> int:
    """Bytes of a critic's trained weights, its head included."""
    from peft import LoraConfig

    head = 4 * (config.get_text_config().hidden_size + 1)
    body = learner.body if learner.body != "auto" else "adapter" if adapted else "model"
    if body == "trunk":
        return head
    if body == "model":
        whole = skeleton(config, dtype)
        inside = {id(p) for p in whole.base_model.parameters()}
        return head + sum(p.numel() * p.element_size() for p in whole.parameters() if id(p) in inside)
    targets = learner.targets if learner.targets == "all-linear" else learner.targets.replace(" ", "").split(",")
    lora = LoraConfig(r=learner.r, target_modules=targets, task_type="CAUSAL_LM")
    return head + 4 * adapter_weights(skeleton(config, dtype), lora)
