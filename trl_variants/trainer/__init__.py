"""The trainer: TRL's GRPOTrainer running a Variant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import VariantGRPOConfig
from .ppo_config import VariantPPOConfig

if TYPE_CHECKING:
    from .grpo import VariantGRPOTrainer
    from .ppo import VariantPPOTrainer

__all__ = ["VariantGRPOConfig", "VariantGRPOTrainer", "VariantPPOConfig", "VariantPPOTrainer"]


def __getattr__(name: str) -> Any:
    if name == "VariantGRPOTrainer":  # `trl-variants check` reads configurations without TRL's trainer
        from .grpo import VariantGRPOTrainer

        return VariantGRPOTrainer
    if name == "VariantPPOTrainer":
        from .ppo import VariantPPOTrainer

        return VariantPPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
