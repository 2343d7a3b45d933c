"""Rollouts hooks that keep some groups and replace the others by fresh prompts.

The trainer draws, samples and rewards, and asks `keeps(scored) -> (N,) bool` after each round; see
`trainer/resampling.py`. Such a hook has `draws_prompts = True`, `max_rounds`, `when_short` and, as its state, how many
prompts of the data set have been drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..records import Scored
from .base import hook, param
from .select_variance import ZeroVariance


@hook("rollouts", "dynamic_sampling")
@dataclass(frozen=True)
class DynamicSampling:
    """Keeps groups that are neither all right nor all wrong, (N,), and samples fresh prompts until the batch is full.

    DAPO (2503.14476) section 3.2. Raw correctness decides, before any shaping: a length penalty would keep groups that
    are all right. Each round draws as many prompts as places are open (rounded up to what the processes can share);
    groups beyond the batch are dropped. Prompts are drawn in TRL's shuffled order, one pass over the data after the
    other, each drawn once a pass. Metrics: dynamic/rounds, dynamic/kept (share of the sampled groups), dynamic/short
    (share of the batch without a mixed group), dynamic/prompts (drawn so far).

    Args:
        by: "correct", or "reward": a group is kept when its rewards are not all equal (verl's filter by score).
        max_rounds: generations per batch at most, the first included. The authors' scripts allow 10.
        when_short: then "train" on the groups there are, the open places out of the loss and every count, or "error",
            as the authors' code.
    """

    by: str = param("correct", choices=("correct", "reward"))
    max_rounds: int = param(10, low=1)
    when_short: str = param("train", choices=("train", "error"), ours=True)

    math = "groups with 0 < #right < G only, refilled from fresh prompts for up to {max_rounds} rounds"
    needs = frozenset({"extra_rollouts"})
    draws_prompts = True

    def init(self) -> dict[str, int]:
        return {"drawn": 0}

    def keeps(self, scored: Scored) -> Tensor:
        return ZeroVariance(by=self.by)(scored.with_(keep=None)).keep
