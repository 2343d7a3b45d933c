"""The hooks: pure functions from records to tensors, one file per seam. Nothing here imports TRL or a config."""

from . import advantage, aggregate, clip, credit, ratio, regularizers, rewards, select, weight  # noqa: F401  (registers)
from .base import SEAMS, hook, hook_class, hook_names, instantiate, param
from .clip import Clipped
from .metrics import Max, Mean, Min
from .regularizers import Term

__all__ = [
    "SEAMS",
    "Clipped",
    "Max",
    "Mean",
    "Min",
    "Term",
    "hook",
    "hook_class",
    "hook_names",
    "instantiate",
    "param",
]
