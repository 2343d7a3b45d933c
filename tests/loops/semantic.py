"""Loops for hooks that read sentence embeddings: the encoder's own vectors, cosines by hand."""

from __future__ import annotations

import math
import re

from tests import references
from tests.loops import loop
from tests.loops.rewards import cosine, far, peers, right, rows, text
from trl_variants import variant

COMPOSED = {
    "dra-dr-grpo": variant("dr-grpo", rewards=["semantic_density"]),
    "diver, embeddings": variant("diver", rewards=[{"diversity_bonus": {"measure": "semantic", "weight": 0.5}}]),
    "dsdr, strong and uniform": variant(
        "dsdr",
        rewards=[{"diversity_bonus": {"measure": "semantic_mix", "weight": 1.0, "sigma": 0.3}}],
        regularizers=[{"distinct_entropy": {"coef": 0.5, "tau": 0.0}}],
    ),
    "dsdr, strong and capped": variant("dsdr", regularizers=[{"distinct_entropy": {"coef": 0.5, "sigma": 0.35}}]),
}


def own_formulas(batch, i, others):
    own = set(re.findall(r"\$(.*?)\$", text(batch, i)))
    shared = {f for j in others for f in re.findall(r"\$(.*?)\$", text(batch, j))}
    return len(own - shared) / len(own) if own else 0.0


@loop("rewards", "semantic_density")
@rows
def semantic_density(h, batch, reward, i):
    total = sum(cosine(text(batch, i), text(batch, j)) if j != i else 1.0 for j in peers(batch, i, reward))
    return reward[i] / (max(total, h.floor) + 1e-6)


@loop("regularizers", "distinct_entropy")
def distinct_entropy(h, v, batch, log_ratio, active, state):
    reward = references.combined_rewards(batch.scored.rewards, batch.scored.weights.tolist())
    labels = batch.group.tolist()
    live = {labels[i] for i in range(len(labels)) if references.positions(batch, i)}
    total = references.constant(0.0)
    for label in live:
        group = [i for i in range(len(labels)) if labels[i] == label and not math.isnan(reward[i])]
        good = [i for i in group if right(batch, i)]
        size = {}
        for i in good:
            others = [j for j in group if j != i]
            d = (far(batch, i, others) + own_formulas(batch, i, others)) / 2
            size[i] = math.exp(h.tau * min(max(d, 0.0), h.sigma))
        for i in good:
            lp, old = batch.logps[i], [references.anchor(batch, i, t) for t in range(batch.mask.shape[1])]
            tokens = [-references.exp(lp[t] - old[t]) * lp[t] for t in references.positions(batch, i)]
            total = total + size[i] / sum(size.values()) * references.mean(tokens)
    return -h.coef * total / len(live)
