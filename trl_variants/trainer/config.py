"""GRPOConfig with the variant in it, so that a YAML file or a command line says everything."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from trl import GRPOConfig

from ..composition import Variant, variant, with_hooks
from ..errors import VariantError
from ..hooks.base import hook_names


@dataclass
class VariantGRPOConfig(GRPOConfig):
    """trl.GRPOConfig plus the method.

    With neither `variant` nor `hooks`, the trainer is TRL's and every TRL setting keeps its meaning. With `hooks`
    alone, TRL's settings are the method and the hooks edit it. With a `variant`, TRL settings that a hook replaces
    (epsilon, beta, loss_type, ...) must stay at their defaults.
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS + ["variant", "hooks", "teacher"]

    variant: dict | str | None = field(
        default=None,
        metadata={"help": "Catalog name of the method (see `trl-variants list`), or a mapping seam -> hook."},
    )
    hooks: dict | str | None = field(
        default=None,
        metadata={"help": "Edits of the variant: mapping seam -> hook name -> parameters."},
    )
    teacher: dict | str | None = field(
        default=None,
        metadata={
            "help": "Where teacher log-probs come from: a model's name or folder, a teacher's name (base, live, ema, "
            "...) or a mapping teacher -> parameters. Replaces the variant's own."
        },
    )
    self_test: bool = field(
        default=True,
        metadata={
            "help": "For a named variant, check once on the run's own model that the on-policy ratio is 1 and that the "
            "gradient does not depend on the split, and print one line."
        },
    )
    correct_above: float = field(
        default=0.5,
        metadata={
            "help": "A completion counts as correct when its first reward exceeds this (metrics and hooks that ask)."
        },
    )
    plan_updates: bool = field(
        default=True,
        metadata={
            "help": "Process in the update phase only tokens that carry gradient: without padding, without rows that "
            "the method gives no gradient, in micro-batches of equal cost. Gradients are those of the same rows "
            "processed as TRL does. With no variant named only padding is left out."
        },
    )
    max_tokens_per_microbatch: int | None = field(
        default=None,
        metadata={
            "help": "Most tokens in one forward of the update phase. Default: per_device_train_batch_size times the "
            "longest prompt plus the longest completion of the optimizer step, which is what TRL processes."
        },
    )
    packing: Literal["auto", "none"] = field(
        default="auto",
        metadata={
            "help": "Several rows on one line of a micro-batch where the model keeps them apart (checked once, on the "
            "run's own model) and it is faster; none: one row a line."
        },
    )
    shared_prompt: Literal["auto", "none"] = field(
        default="auto",
        metadata={
            "help": "Process a prompt once for several of its completions where the model can (checked once, SDPA "
            "attention) and it is faster; none: a prompt for each completion."
        },
    )
    hub_private_repo: bool | None = field(
        default=True,
        metadata={
            "help": "Whether repositories made for this run are private: true unless set to false. One that exists "
            "already keeps what it is."
        },
    )
    hub_base_model: str | None = field(
        default=None,
        metadata={
            "help": "Hub id of the base model, for the card and adapter_config.json, where it was loaded from a local "
            "folder."
        },
    )

    vllm_adapter_sync: Literal["adapter", "merge"] = field(
        default="adapter",
        metadata={
            "help": "How an adapter reaches vLLM: as an adapter, under a fresh name each time, or merged into the "
            "engine's base as TRL does (for adapters vLLM cannot serve; never on a 4-bit base)."
        },
    )

    def __post_init__(self):
        self.variant, self.hooks, self.teacher = map(_mapping, (self.variant, self.hooks, self.teacher))
        for name in ("num_generations", "num_iterations", "gradient_accumulation_steps", "per_device_train_batch_size"):
            if (value := getattr(self, name)) < 1:
                raise VariantError(f"{name} must be at least 1, got {value}")
        if self.steps_per_generation is not None and self.steps_per_generation < 1:
            raise VariantError(f"steps_per_generation must be at least 1, got {self.steps_per_generation}")
        if self.max_tokens_per_microbatch is not None and self.max_tokens_per_microbatch < 1:
            raise VariantError(f"max_tokens_per_microbatch must be at least 1, got {self.max_tokens_per_microbatch}")
        for name in ("packing", "shared_prompt"):
            if (value := getattr(self, name)) not in ("auto", "none"):
                raise VariantError(f"{name} is 'auto' or 'none', got {value!r}")
        if self.vllm_adapter_sync not in ("adapter", "merge"):
            raise VariantError(f"vllm_adapter_sync is 'adapter' or 'merge', got {self.vllm_adapter_sync!r}")
        super().__post_init__()


def _mapping(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise VariantError(f"a variant given as text must be a name or JSON: {error}") from None
    return value


def variant_of(config: Any, given: Any = None) -> Variant | None:
    """The variant a run asks for, by argument or configuration; None when it asks for TRL's own.

    Raises:
        VariantError: the two disagree, or the composition is wrong.
    """
    named, edits = getattr(config, "variant", None), getattr(config, "hooks", None)
    if (teacher := getattr(config, "teacher", None)) is not None:
        edits = {**(edits or {}), "teacher": teacher_spec(teacher)}
    if given is not None and named is not None and variant(given) != variant(named):
        raise VariantError(
            "the trainer's variant= and the configuration's `variant` name different methods; give one of them"
        )
    named = given if given is not None else named
    if named is None:
        return with_hooks(Variant.from_config(config), edits) if edits else None
    return with_hooks(variant(named), edits)


def teacher_spec(given: Any) -> Any:
    """What a user names as the teacher, as a hook or its mapping: a text that is no teacher's name is a model's."""
    if isinstance(given, str) and given not in hook_names("teacher"):
        return {"model": {"path": given}}
    return given
