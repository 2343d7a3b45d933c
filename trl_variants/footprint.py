"""What a run needs in memory, from configuration files alone: `estimate_memory(...)`. No weights are loaded.

Weights, adapters, gradients and optimizer state are counted on a model without storage, layer by layer. Activations and
the key-value cache follow formulas whose assumptions are printed with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import VariantError
from .weighing import BYTES, adapter_weights, around, configuration, optimizer_bytes, skeleton, weight_bytes

_TILE = (4096, 32768)  # tokens and entries of the vocabulary whose logits exist at once: TRL's fused head
_SAMPLING = 4 * 4  # bytes for each entry of one step's logits: float32, and copies while sampling


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on each device, by what they are for.

    Args:
        held: what stays for the whole run.
        passing: what is there in turn (update, generation); only the largest counts.
        assumptions: what the numbers rest on, one line each.
    """

    held: Mapping[str, int]
    passing: Mapping[str, int]
    assumptions: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Everything held, and the largest of what passes."""
        return sum(self.held.values()) + max(self.passing.values(), default=0)

    def __str__(self) -> str:
        rows = [*self.held.items(), *((f"{name}, in turn", size) for name, size in self.passing.items())]
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}} {_readable(size):>10}" for name, size in rows if size]
        notes = [f"  assumed: {note}" for note in self.assumptions]
        return "\n".join([f"memory of each device, estimated: {_readable(self.total)}", *lines, *notes])


def estimate_memory(
    model: Any,
    variant: Any = None,
    *,
    dtype: str = "float32",
    bits: int | None = None,
    nested: bool = False,
    lora: Any = None,
    continued: bool = False,
    fp16: bool = False,
    mixed: bool = False,
    optimizer: str = "adamw_torch",
    rows: int = 8,
    generated_rows: int | None = None,
    prompt_tokens: int = 256,
    completion_tokens: int = 256,
    gradient_checkpointing: bool = True,
    use_vllm: bool = False,
    shards: int = 1,
) -> MemoryEstimate:
    """Memory of a training run on each of its devices.

    Args:
        model: Hub id, folder or a transformers configuration; only its configuration is read.
        variant: the method, a name or a Variant; its teacher, critic and reference model are added.
        dtype: of weights that are not quantised. bits: 4 or 8 for a quantised base. nested: double quantisation.
        lora: a peft.LoraConfig; None trains all weights. continued: the adapter was there before, and a KL copies it.
        fp16: loss scaling, under which adapters are float32. mixed: activations have 16 bits (bf16 or fp16 autocast).
        optimizer: as `optim` of the configuration.
        rows: of a micro-batch. generated_rows: sampled at once on a device; default the same.
        prompt_tokens, completion_tokens: of each row.
        use_vllm: the engine samples, in memory of its own.
        shards: devices among which FSDP or ZeRO-3 deals weights, gradients and optimizer state.

    Raises:
        VariantError: a configuration that is not to be had, or an unknown dtype or number of bits.
    """
    from .composition import variant as named

    config = configuration(model)
    dtype = "bfloat16" if dtype == "auto" else dtype
    if dtype not in BYTES:
        raise VariantError(f"dtype is auto or one of {', '.join(BYTES)}, got {dtype!r}")
    base = skeleton(config, dtype)
    held = {"weights": weight_bytes(base, bits, nested)}
    if lora is None:
        weights, item = sum(p.numel() for p in base.parameters()), BYTES[dtype]
    else:  # TRL makes the adapter of a quantised base bfloat16, PEFT makes any other float32
        weights, item = adapter_weights(base, lora), 2 if bits and not fp16 else 4
        held["adapter"] = weights * item
    held["gradients"] = weights * item
    held["optimizer"] = optimizer_bytes(optimizer, weights, item)
    if variant is not None:
        held |= around(named(variant), config, dtype, weights * item, lora is not None, continued)
    held = {name: -(-size // shards) for name, size in held.items()}
    text, tokens = config.get_text_config(), prompt_tokens + completion_tokens
    wide = 2 if mixed else BYTES[dtype]
    passing = {"update": _update(text, rows * tokens, wide, gradient_checkpointing)}
    sampled = generated_rows or rows
    if not use_vllm:
        passing["generation"] = _generation(text, sampled, tokens, wide)
    notes = [
        f"update of {rows} rows of {prompt_tokens} + {completion_tokens} tokens, "
        + ("layers recomputed" if gradient_checkpointing else "all activations kept"),
        "vLLM's share of the device comes on top" if use_vllm else f"key-value cache of {sampled} rows",
        "not counted: fragmentation, and the CUDA context of about 1 GB",
    ]
    if shards > 1:
        notes.insert(0, f"weights, gradients and optimizer are dealt to {shards} devices")
    return MemoryEstimate(held, passing, tuple(notes))


def _heads(text: Any) -> tuple[int, int]:
    """Widths of all queries and of all keys of a layer."""
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return heads * size, (getattr(text, "num_key_value_heads", None) or heads) * size


def _update(text: Any, tokens: int, item: int, recompute: bool) -> int:
    """Activations of one micro-batch: what each layer keeps for its backward, one layer's gradients, logits."""
    queries, keys = _heads(text)
    layer = item * (6 * text.hidden_size + 3 * queries + 2 * keys + 4 * text.intermediate_size)
    layer += 8 * text.hidden_size  # norms compute in float32
    kept = item * text.hidden_size if recompute else layer
    return tokens * (text.num_hidden_layers * kept + 2 * layer) + 4 * min(tokens, _TILE[0]) * min(
        text.vocab_size, _TILE[1]
    )


def _generation(text: Any, rows: int, tokens: int, item: int) -> int:
    """Key-value cache at its fullest, and the logits of one step."""
    _, keys = _heads(text)
    return rows * (2 * text.num_hidden_layers * keys * tokens * item + _SAMPLING * text.vocab_size)


def _readable(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
