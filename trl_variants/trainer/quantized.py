"""What 4-bit bases and loss scaling ask of a policy, its adapters and their copies, once it is built."""

from __future__ import annotations

import copy
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from trl.trainer.utils import create_model_from_path

from ..adapters import base_of, continued, is_adapter
from ..errors import VariantError


def keep_4bit_trainable_on_cpu(model: nn.Module) -> int:
    """Stops bitsandbytes from repacking NF4 weights in evaluation on a CPU, after which they have no gradient.

    Returns the number of layers it changed.
    """
    changed = 0
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010
            changed += 1
    return changed


def settle(model: nn.Module, loss_scaling: bool) -> None:
    """A policy as training needs it, in place.

    * 4-bit layers keep their gradient on a CPU;
    * with `loss_scaling` (fp16) trained adapters are float32, since a loss scaler refuses 16-bit gradients and TRL
      makes the adapters of a quantised base bfloat16;
    * the adapter that stands for the reference is the trained one, bit for bit: TRL copies it before it rounds that.
    """
    keep_4bit_trainable_on_cpu(model)
    if not is_peft_model(model):
        return
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        if loss_scaling and parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    if "ref" in getattr(model, "peft_config", {}):
        for name, parameter in parameters.items():
            twin = parameters.get(name.replace(".ref.", ".default."))
            if ".ref." in name and twin is not None:
                parameter.data = twin.detach().clone()


def adapter_on_its_base(arguments: dict[str, Any]) -> dict[str, Any]:
    """A trainer's arguments with a loaded model where `model` is an adapter's folder, so that the run goes on from it.

    Raises VariantError where a `peft_config` asks for a new adapter as well.
    """
    folder = arguments.get("model")
    if not isinstance(folder, str) or not is_adapter(folder):
        return arguments
    if arguments.get("peft_config") is not None:
        raise VariantError(
            f"{folder} is an adapter, and peft_config asks for a new one: leave peft_config out to train it further, "
            "or merge it first (trl_variants.merge_adapter) and train a new one on the result"
        )
    args = copy.copy(arguments["args"])
    options = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    args.model_init_kwargs = None
    if arguments.get("quantization_config") is not None:
        options["quantization_config"] = arguments["quantization_config"]
    if args.world_size > 1:  # "auto" would spread the model over the processes' devices
        options["device_map"] = None
    model = continued(create_model_from_path(base_of(folder), **options), folder)
    return {**arguments, "args": args, "model": model, "quantization_config": None}
