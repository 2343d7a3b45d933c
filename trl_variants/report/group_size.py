"""How many answers per prompt: the group-size law of 2603.01162."""

from __future__ import annotations

import math

from ..errors import VariantError


def best_group_size(between: float, within: float) -> float:
    """G* = sqrt(within / between), the group size with the smallest gradient error at any fixed number of samples.

    The error of N = B G samples is c1 G/N + c2/N + c3/(N G); c2 and N do not matter to the best G.

    Args:
        between: c1, spread of the per-prompt gradients, E ||g(x) - g||^2.
        within: c3, of the order of the squared score norm, E ||grad log pi||^2.

    Raises:
        VariantError: a constant that is not positive.
    """
    if not (between > 0 and within > 0):
        raise VariantError(f"both constants must be positive, got between={between}, within={within}")
    return math.sqrt(within / between)
