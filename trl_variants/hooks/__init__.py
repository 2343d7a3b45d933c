"""The hooks: pure functions from records to tensors, by seam. Nothing here imports TRL or a config.

Every module of this folder is imported, so a new file with a hook in it is registered by being there.
"""

import importlib
import pkgutil

from .base import SEAMS, hook, hook_class, hook_names, instantiate, param
from .clip import Clipped
from .metrics import Max, Mean, Min
from .regularizers import Term

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["SEAMS", "Clipped", "Max", "Mean", "Min", "Term", "hook", "hook_class", "hook_names", "instantiate", "param"]
