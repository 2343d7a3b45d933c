"""Slow references of the hooks for trajectories from elsewhere, and compositions that bring in the rollouts hooks."""

from __future__ import annotations

import math

from tests.loops import loop
from trl_variants import variant

COMPOSED = {
    "dapo, filter by reward": variant("dapo", rollouts=[{"dynamic_sampling": {"by": "reward", "max_rounds": 3}}]),
    "prefix-rft, half of the prefix": variant("prefix-rft", credit=[{"prefix_entropy": {"keep": 0.5}}]),
    "luffy, clipped": variant("luffy", clip={"origin_shaped": {"inner": "ppo"}}),
}
STATES = {"student_history": {"prompt 1": 0.25, "prompt 10": 0.5}}
ABSOLUTE = {
    "prefix_baseline": "tokens after a prefix have no other row to be compared with",
    "student_history": "a teacher's rows are compared with the policy's past",
}


def _here(batch, i):
    return [t for t in range(batch.mask.shape[1]) if float(batch.mask[i, t]) > 0]


def _hybrid(batch, i):
    return any(int(batch.origin[i, t]) == 3 for t in _here(batch, i))


@loop("advantage", "prefix_baseline")
def prefix_baseline(h, batch, reward):
    group, width, out = batch.scored.group.tolist(), batch.mask.shape[1], []
    for i, r in enumerate(reward):
        if math.isnan(r):
            out.append([0.0] * width)
            continue
        mates = [j for j in range(len(reward)) if group[j] == group[i] and not math.isnan(reward[j])]
        own = [reward[j] for j in mates if not _hybrid(batch, j)]
        mean = sum(own) / len(own) if own else 0.0
        if not _hybrid(batch, i):
            out.append([r - mean] * width)
            continue
        hybrids = sum(_hybrid(batch, j) for j in mates)
        out.append([(r - mean) / hybrids if int(batch.origin[i, t]) == 3 else r for t in range(width)])
    return out


def _teacher(batch, i):
    here = _here(batch, i)
    return bool(here) and int(batch.origin[i, here[0]]) == 1


@loop("advantage", "student_history")
def student_history(h, batch, reward):
    group, keys, out = batch.scored.group.tolist(), batch.scored.prompt_key, []
    for i, r in enumerate(reward):
        if math.isnan(r):
            out.append(0.0)
        elif _teacher(batch, i):
            out.append(r - STATES["student_history"].get(keys[i], h.start))
        else:
            own = [
                x for j, x in enumerate(reward) if group[j] == group[i] and not math.isnan(x) and not _teacher(batch, j)
            ]
            mean = sum(own) / len(own)
            if len(own) < 2:
                out.append(0.0)
                continue
            std = math.sqrt(sum((x - mean) ** 2 for x in own) / (len(own) - h.ddof))
            out.append((r - mean) / (std + h.eps))
    return out


@loop("credit", "prefix_entropy")
def prefix_entropy(h, advantage, batch):
    given = [(float(batch.entropy[i, t]), i, t) for i in range(len(batch.mask)) for t in _here(batch, i)]
    given = sorted(x for x in given if int(batch.origin[x[1], x[2]]) == 3)
    out = [list(row) for row in advantage]
    for _, i, t in given[: int((1 - h.keep) * len(given) + 1e-9)]:
        out[i][t] = 0.0
    return out
