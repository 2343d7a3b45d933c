"""Accuracy, avg@k and pass@k with intervals: plain functions of right and wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from ..errors import VariantError

Z = 1.959963984540054  # the 97.5 % point of the normal distribution
RESAMPLES = 10_000


@dataclass(frozen=True)
class Estimate:
    """A share in [0, 1] with its 95 % interval.

    Args:
        value: the estimate. low, high: ends of the interval.
        interval: how it was made: "Wilson 95 %" (right or wrong, problems drawn independently) or "bootstrap over
            problems 95 %" (percentiles; the samples of a problem stay together).
        n: problems. k: samples a problem.
    """

    value: float
    low: float
    high: float
    interval: str
    n: int
    k: int = 1

    def to_mapping(self) -> dict[str, float | int | str]:
        return asdict(self)


def wilson(right: int, n: int) -> Estimate:
    """Share of `right` among `n` with Wilson's score interval (1927), which stays inside [0, 1] near its ends.

    Raises VariantError unless 0 <= right <= n and n > 0.
    """
    if not (n > 0 and 0 <= right <= n):
        raise VariantError(f"accuracy needs 0 <= right <= n and n > 0, got {right} of {n}")
    p = right / n
    centre = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    low = 0.0 if right == 0 else max(centre - half, 0.0)
    high = 1.0 if right == n else min(centre + half, 1.0)
    return Estimate(p, low, high, "Wilson 95 %", n)


def bootstrap(values: Sequence[float], k: int, seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """Mean of one value in [0, 1] a problem, (n,), with percentiles of the means of resampled problems.

    Where all values are equal the resamples are too: the interval then has no width, whatever n, and says so.
    """
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or not len(x):
        raise VariantError(f"an interval over problems needs at least one problem, got shape {x.shape}")
    rng = np.random.default_rng(seed)
    block = max(1, 2_000_000 // len(x))  # a few million numbers at a time
    means = np.concatenate(
        [
            x[rng.integers(0, len(x), (min(block, resamples - done), len(x)))].mean(1)
            for done in range(0, resamples, block)
        ]
    )
    low, high = np.quantile(means, [0.025, 0.975])
    how = "bootstrap over problems 95 %" + ("; too narrow, all problems are alike" if np.ptp(x) == 0 else "")
    return Estimate(float(x.mean()), float(low), float(high), how, len(x), k)


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold one of the `right` ones.

    1 - C(n - right, k) / C(n, k), as a product: unbiased for n >= k (Chen et al. 2021, 2107.03374, eq. 1).
    Raises VariantError unless 1 <= k <= n and 0 <= right <= n.
    """
    if not (1 <= k <= n and 0 <= right <= n):
        raise VariantError(f"pass@{k} needs 1 <= k <= n and 0 <= right <= n, got n={n}, right={right}")
    if n - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - right + 1, n + 1))


def powers_up_to(k: int) -> list[int]:
    """1, 2, 4, ... and k itself: the k at which pass@k is reported."""
    found = [2**i for i in range(k.bit_length()) if 2**i <= k]
    return found if found[-1] == k else [*found, k]
