"""Every LLM policy-optimization method as a value you can print, edit, combine and train, on Hugging Face TRL."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from .adapters import merge_adapter
from .catalog import variants
from .checks import Finding, check
from .composition import About, Variant, diff, variant
from .errors import RewardError, VariantError
from .footprint import MemoryEstimate, estimate_memory
from .hooks.base import hook
from .records import Run, Scored, TokenBatch, Window
from .schedule import Schedule

if TYPE_CHECKING:
    from .trainer import VariantGRPOConfig, VariantGRPOTrainer, VariantPPOConfig, VariantPPOTrainer

try:
    __version__ = version("trl_variants")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

__all__ = [
    "About",
    "Finding",
    "MemoryEstimate",
    "RewardError",
    "Run",
    "Schedule",
    "Scored",
    "TokenBatch",
    "Variant",
    "VariantError",
    "VariantGRPOConfig",
    "VariantGRPOTrainer",
    "VariantPPOConfig",
    "VariantPPOTrainer",
    "Window",
    "check",
    "diff",
    "estimate_memory",
    "hook",
    "merge_adapter",
    "variant",
    "variants",
]

_TRAINER = ("VariantGRPOConfig", "VariantGRPOTrainer", "VariantPPOConfig", "VariantPPOTrainer")


def __getattr__(name: str) -> Any:
    if name in _TRAINER:  # TRL takes seconds to import: listing and printing methods need not wait for it
        from . import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
