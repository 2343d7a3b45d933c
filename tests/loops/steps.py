"""Loop for step rewards in a window where each answer has one reward: one step, the group's z-score."""

from __future__ import annotations

from tests import references
from tests.loops import loop
from trl_variants import variant

COMPOSED = {
    "step rewards, biased std": variant("dapo", advantage={"step_rewards": {"ddof": 0, "per_step": True}}),
}


@loop("advantage", "step_rewards")
def step_rewards(h, batch, reward):
    return references.grouped(reward, batch.group.tolist(), ddof=h.ddof, eps=h.eps)
