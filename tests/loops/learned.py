"""Loops of what is learned beside the policy: implied values."""

from __future__ import annotations

import math

import torch

from tests.loops import loop
from trl_variants import variant


def number(x):
    return float(x.detach()) if hasattr(x, "detach") else float(x)


def positions(batch, i):
    return [t for t in range(batch.mask.shape[1]) if number(batch.mask[i, t]) > 0]


def rewards_of(batch):
    """The weighted sum of each row, None where no function applies."""
    out = []
    for row in batch.scored.rewards.tolist():
        given = [w * r for w, r in zip(batch.scored.weights.tolist(), row, strict=True) if not math.isnan(r)]
        out.append(sum(given) if given else None)
    return out


def z_of(h, batch, i, t):
    return h.beta * (batch.logps[i, t] - batch.ref_logps[i, t] - number(batch.divergences["rkl/ref"][i, t]))


COMPOSED = {
    "vimpo, lambda below one": variant(
        "vimpo", credit=[{"implicit_value": {"lam": 0.7, "coef": 0.1}}], aggregate="sequence_mean"
    ),
    "vimpo, one step": variant("vimpo", credit=[{"implicit_value": {"lam": 0.0, "beta": 0.3, "coef": 1.0}}]),
}


@loop("credit", "implicit_value")
def implicit_value(h, advantage, batch):
    out = [[0.0] * len(row) for row in advantage]
    flat = []
    for i in range(len(out)):
        here = positions(batch, i)
        for n, t in enumerate(here):
            out[i][t] = sum(h.lam**k * number(z_of(h, batch, i, s)) for k, s in enumerate(here[n:]))
            flat.append(out[i][t])
    mean = sum(flat) / max(len(flat), 1)
    variance = sum((x - mean) ** 2 for x in flat) / max(len(flat), 1)
    for i in range(len(out)):
        for t in positions(batch, i):
            out[i][t] = h.coef * (out[i][t] - mean) / math.sqrt(variance + h.eps)
    return out


@loop("regularizers", "implicit_value_regression")
def implicit_value_regression(h, variant_of, batch, log_ratio, active, state):
    reward, labels = rewards_of(batch), batch.group.tolist()
    total = torch.zeros((), dtype=torch.float64)
    for i, r in enumerate(reward):
        here = positions(batch, i)
        if r is None or not here:
            continue
        group = [x for x, label in zip(reward, labels, strict=True) if label == labels[i] and x is not None]
        residual = sum(z_of(h, batch, i, t) for t in here) - (r - sum(group) / len(group))
        total = total + 0.5 * residual**2
    return h.coef * total / len(reward)
