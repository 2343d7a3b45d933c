"""An adapter's weights at one moment: the tensors vLLM reads, their fingerprint, and the folder they travel in."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...errors import VariantError
from .servable import MERGE, lora_layers


@dataclass(frozen=True)
class Snapshot:
    """`tensors`: name in PEFT's file -> A (r, in) or B (out, r) on the CPU, each B times its layer's scaling.

    vLLM reads one alpha and one r for the whole adapter. The scaling of each layer (rank and alpha patterns, rsLoRA)
    therefore stands in B, and the configuration says alpha = r.
    """

    tensors: dict[str, Tensor]
    modules: tuple[str, ...]
    rank: int

    @classmethod
    @torch.no_grad()
    def of(cls, model: Any, adapter: str) -> Snapshot:
        """Reads the adapter; where weights are sharded (FSDP2) every process must call this."""
        tensors, modules, rank = {}, [], 0
        for name, layer in lora_layers(model, adapter):
            a, b = whole(layer.lora_A[adapter].weight), whole(layer.lora_B[adapter].weight)
            key = f"base_model.model.{name}"
            tensors[f"{key}.lora_A.weight"] = a.to("cpu", copy=True).contiguous()
            tensors[f"{key}.lora_B.weight"] = (b.float() * layer.scaling[adapter]).to("cpu", b.dtype).contiguous()
            modules.append(name)
            rank = max(rank, a.shape[0])
        return cls(tensors, tuple(modules), rank)

    @property
    def fingerprint(self) -> str:
        """A hash of every byte."""
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(self.tensors):
            digest.update(name.encode())
            digest.update(self.tensors[name].view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def write(self, folder: str) -> None:
        """Writes the two files vLLM reads and reads them back.

        Raises:
            VariantError: the file lacks a target module's weights.
        """
        os.makedirs(folder)
        file = os.path.join(folder, "adapter_model.safetensors")
        save_file(self.tensors, file)
        settings = {"peft_type": "LORA", "r": self.rank, "lora_alpha": self.rank, "bias": "none"}
        settings["target_modules"] = sorted({name.rsplit(".", 1)[-1] for name in self.modules})
        with open(os.path.join(folder, "adapter_config.json"), "w") as out:
            json.dump(settings, out)
        require_complete(file, self.modules)


def require_complete(file: str, modules: tuple[str, ...]) -> None:
    """Raises VariantError unless the file holds A and B of every module."""
    with safe_open(file, "pt") as saved:
        held = set(saved.keys())
    missing = [m for m in modules if not {f"base_model.model.{m}.lora_{x}.weight" for x in "AB"} <= held]
    if missing:
        raise VariantError(f"the adapter sent to vLLM lacks {', '.join(missing[:3])}: is the disk of {file} full?")


def whole(parameter: Tensor) -> Tensor:
    """The parameter's full value. Collective for FSDP2's shards."""
    if hasattr(parameter, "ds_id"):
        raise VariantError(f"an adapter in ZeRO-3 shards cannot reach vLLM: use zero2, fsdp2 or multi_gpu, {MERGE}")
    value: Any = parameter.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value
