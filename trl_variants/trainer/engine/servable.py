"""Which adapters vLLM can serve as adapters; everything else is refused before a model or an engine loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ...errors import VariantError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's max_lora_rank accepts
MERGE = "or set vllm_adapter_sync: merge (TRL's way: merged into the engine's base at each sync, not for 4-bit bases)"
_ALTERS_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
_OUTER = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out")
# a LoraConfig field that vLLM's LoRA does not compute, and what it is called
_UNSERVED = {
    "use_dora": "DoRA",
    "lora_bias": "a LoRA bias",
    "modules_to_save": "modules_to_save",
    "trainable_token_indices": "trainable token indices",
    "target_parameters": "target_parameters",
    "layer_replication": "layer replication",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}


def served_rank(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM that holds an adapter of this rank."""
    fitting = [size for size in RANKS if size >= rank]
    if not fitting:
        raise VariantError(f"vLLM serves LoRA up to rank {RANKS[-1]} and the adapter has {rank}: lower r, {MERGE}")
    return fitting[0]


def ranks(config: Any) -> list[int]:
    """Every rank a LoraConfig names."""
    return [config.r, *(getattr(config, "rank_pattern", None) or {}).values()]


def require_servable_config(config: Any) -> None:
    """Raises VariantError where a PEFT configuration asks for what vLLM cannot serve as an adapter."""
    kind = getattr(getattr(config, "peft_type", None), "value", getattr(config, "peft_type", None))
    if kind != "LORA":
        raise VariantError(f"vLLM serves LoRA adapters and peft_config is {kind}: use a LoraConfig, {MERGE}")
    for name, what in _UNSERVED.items():
        if getattr(config, name, None):
            raise VariantError(f"vLLM cannot serve {what} in an adapter: leave peft_config.{name} unset, {MERGE}")
    if config.bias != "none":
        raise VariantError(f"vLLM cannot serve trained biases: set peft_config.bias to 'none', {MERGE}")
    start = config.init_lora_weights
    if isinstance(start, str) and start.lower().startswith(_ALTERS_BASE):
        raise VariantError(
            f"init_lora_weights={start!r} changes the base weights, and the engine loads the original ones: "
            f"use True, 'gaussian', 'orthogonal' or 'eva', {MERGE}"
        )
    named = [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules or ()
    _refuse_outer(named)
    served_rank(max(ranks(config)))


def require_servable(model: Any) -> str:
    """The name of a PEFT model's one active adapter, which vLLM can serve.

    Raises:
        VariantError: there is another active one, the adapter trains what vLLM does not serve, or its weights lie in
            shards that cannot be read here.
    """
    active = list(model.active_adapters)
    if len(active) != 1:
        raise VariantError(
            f"vLLM serves one adapter at a time and {', '.join(active) or 'none'} are active: "
            f"activate the one to train with model.set_adapter(name), {MERGE}"
        )
    require_servable_config(model.peft_config[active[0]])
    found = list(lora_layers(model, active[0]))
    _refuse_outer(name for name, _ in found)
    if not found:
        raise VariantError(f"the adapter {active[0]!r} touches no linear layer: check peft_config.target_modules")
    return active[0]


def lora_layers(model: nn.Module, adapter: str) -> Iterator[tuple[str, Any]]:
    """(name in the base model, layer) of every layer that holds this adapter."""
    for name, layer in model.named_modules():
        if adapter in getattr(layer, "lora_A", ()) or adapter in getattr(layer, "lora_embedding_A", ()):
            yield name.removeprefix("base_model.model."), layer


def _refuse_outer(names: Any) -> None:
    for name in names:
        if name.rsplit(".", 1)[-1] in _OUTER:
            raise VariantError(
                f"vLLM does not serve LoRA on embeddings or the head, and {name.rsplit('.', 1)[-1]} is a target: "
                f"leave it out of peft_config.target_modules, {MERGE}"
            )
