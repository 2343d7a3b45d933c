"""GRPOConfig with the variant in it, so that a YAML file or a command line says everything."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

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

    def __post_init__(self):
        self.variant, self.hooks, self.teacher = map(_mapping, (self.variant, self.hooks, self.teacher))
        for name in ("num_generations", "num_iterations", "gradient_accumulation_steps", "per_device_train_batch_size"):
            if (value := getattr(self, name)) < 1:
                raise VariantError(f"{name} must be at least 1, got {value}")
        if self.steps_per_generation is not None and self.steps_per_generation < 1:
            raise VariantError(f"steps_per_generation must be at least 1, got {self.steps_per_generation}")
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
