"""What a checkpoint holds beside weights and optimizer, so that a resumed run is the run that was killed.

variant.json            format version, composition, hook states (plain part)
variant.safetensors     hook states (tensors), random generators
variant_rank{r}.json    micro-step, metrics waiting for the next log line, completions table
variant_rank{r}.safetensors  rows that are generated but not trained on yet
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..composition import Variant, diff, variant
from ..errors import VariantError

FORMAT = 1


def save_shared(folder: str, composition: Variant, plain: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Writes the part that is the same on every process."""
    body = {"format": FORMAT, "composition": composition.to_mapping(), "states": plain}
    _write(os.path.join(folder, "variant.json"), body)
    save_file(tensors, os.path.join(folder, "variant.safetensors"))


def load_shared(folder: str, composition: Variant) -> tuple[Any, dict[str, torch.Tensor]] | None:
    """Reads it back; None for a checkpoint that another trainer wrote.

    Raises:
        VariantError: the checkpoint was trained with another composition (the difference is in the message), or its
            format is newer.
    """
    path = os.path.join(folder, "variant.json")
    if not os.path.exists(path):
        return None
    with open(path) as f:
        body = json.load(f)
    if body["format"] > FORMAT:
        raise VariantError(
            f"{folder} was written by a newer trl_variants (format {body['format']}, this one reads {FORMAT})"
        )
    if body["composition"] != json.loads(json.dumps(composition.to_mapping())):
        try:
            changes = diff(variant(body["composition"]), composition)
        except VariantError as error:  # a hook of the checkpoint is not registered here
            changes = [str(error)]
        listed = "\n  ".join(changes or [f"name: {body['composition'].get('name')!r} -> {composition.name!r}"])
        raise VariantError(
            f"{folder} was trained with another composition:\n  {listed}\nresume with that one, or start a new run"
        )
    return body["states"], load_file(os.path.join(folder, "variant.safetensors"))


def save_rank(folder: str, rank: int, plain: dict[str, Any], batches: list[dict] | None) -> None:
    """Writes one process's part; `batches` are the buffered micro-batches, None when all were used."""
    tensors: dict[str, torch.Tensor] = {}
    lists: list[dict[str, Any]] = []
    for i, batch in enumerate(batches or []):
        other = {}
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{i}/{name}"] = value.detach().cpu().clone().contiguous()
            else:
                other[name] = value
        lists.append({"tensors": [n for n in batch if f"{i}/{n}" in tensors], "order": list(batch), "other": other})
    _write(
        os.path.join(folder, f"variant_rank{rank}.json"),
        {**plain, "batches": None if batches is None else lists},
    )
    save_file(tensors, os.path.join(folder, f"variant_rank{rank}.safetensors"))


def load_rank(folder: str, rank: int, device: torch.device, processes: int) -> tuple[dict[str, Any], list[dict] | None]:
    """Reads one process's part back.

    Raises:
        VariantError: the checkpoint was written by another number of processes.
    """
    first, written = os.path.join(folder, "variant_rank0.json"), processes
    if os.path.exists(first):
        with open(first) as f:
            written = json.load(f).get("processes", processes)
    if written != processes:
        raise VariantError(
            f"{folder} was written by {written} processes and this run has {processes}: resume with the number of "
            "processes that wrote it"
        )
    path = os.path.join(folder, f"variant_rank{rank}.json")
    if not os.path.exists(path):
        raise VariantError(
            f"{folder} holds nothing for process {rank}: resume with the number of processes that wrote it"
        )
    with open(path) as f:
        plain = json.load(f)
    tensors = load_file(os.path.join(folder, f"variant_rank{rank}.safetensors"))
    stored = plain.pop("batches")
    if stored is None:
        return plain, None
    batches = []
    for i, body in enumerate(stored):
        values = {n: tensors[f"{i}/{n}"].to(device) for n in body["tensors"]} | body["other"]
        batches.append({name: values[name] for name in body["order"]})
    return plain, batches


def _write(path: str, body: Any) -> None:
    # written beside and renamed, so that a killed process never leaves half a file
    with open(path + ".tmp", "w") as f:
        json.dump(body, f)
    os.replace(path + ".tmp", path)
