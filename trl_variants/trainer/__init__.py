"""The trainer: TRL's GRPOTrainer running a Variant."""

from .config import VariantGRPOConfig
from .grpo import VariantGRPOTrainer

__all__ = ["VariantGRPOConfig", "VariantGRPOTrainer"]
