"""The language-model head as a function of hidden states, for statistics that need whole distributions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """hidden (n, H) -> logits (n, V) in fp32 at the run's temperature.

    Multipliers and soft-capping are those the model's configuration asks for, by the names its family uses.
    """

    weight: Tensor
    bias: Tensor | None
    temperature: float
    scale: float = 1.0
    softcap: float | None = None
    is_copy: bool = False
    fp32: bool = False  # projects in fp32 outside autocast, as cast_lm_head_to_fp32 does

    @classmethod
    def of(cls, model: Any, temperature: float, fp32: bool = False) -> Head:
        """The head of a causal LM, which is looked up anew: FSDP and PEFT replace it."""
        config, layer = model.config.get_text_config(), model.get_output_embeddings()
        found = (getattr(config, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"))
        scale = next((s for s in found if s is not None), None)
        divisor = getattr(config, "logits_scaling", None)
        if scale is None and divisor is not None:
            scale = divisor if config.model_type == "hyperclovax" else 1 / divisor
        return cls(
            weight=_whole(layer.weight),
            bias=None if layer.bias is None else _whole(layer.bias),
            temperature=temperature,
            scale=1.0 if scale is None else scale,
            softcap=getattr(config, "final_logit_softcapping", None),
            fp32=fp32,
        )

    def frozen(self) -> Head:
        """The head as it is now: weights the optimizer may change are copied."""
        if not self.weight.requires_grad:
            return self
        bias = None if self.bias is None else self.bias.detach().clone()
        return replace(self, weight=self.weight.detach().clone(), bias=bias, is_copy=True)

    def copied(self) -> dict[str, Tensor]:
        """The weights that are no one else's, for a checkpoint."""
        return {k: v for k, v in (("weight", self.weight), ("bias", self.bias)) if self.is_copy and v is not None}

    def with_copied(self, tensors: Mapping[str, Tensor]) -> Head:
        """The head with the weights that `copied` gave."""
        return replace(self, **{k: v.to(self.weight) for k, v in tensors.items()})  # type: ignore[arg-type]

    def __call__(self, hidden: Tensor) -> Tensor:
        hidden = hidden.to(self.weight.device)
        if self.fp32:
            with torch.autocast(hidden.device.type, enabled=False):
                bias = None if self.bias is None else self.bias.float()
                logits = torch.nn.functional.linear(hidden.float(), self.weight.float(), bias)
        else:
            logits = torch.nn.functional.linear(hidden, self.weight.to(hidden.dtype), _as(self.bias, hidden))
            logits = logits if logits.dtype == torch.float64 else logits.float()
        logits = logits * self.scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature


def _whole(parameter: Any) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # FSDP2 shards it


def _as(x: Tensor | None, like: Tensor) -> Tensor | None:
    return None if x is None else x.to(like.dtype)
