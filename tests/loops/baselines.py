"""Loops for other baselines and scales, and for KL and entropy terms."""

from __future__ import annotations

import itertools
import math
from typing import Any

from tests import references
from tests.loops import loop
from trl_variants import variant

ABSOLUTE = {
    "returns": "no baseline, or a constant one",
    "running_mean": "compares with earlier generations",
    "optimal_token_baseline": "no baseline where only the longest answer is left",
    "virtual_best": "equal rewards below the best are a failure of the whole group",
    "pass_at_k": "rows of equal reward may differ in correctness",
    "smooth_standardized": "compares with the prompt's earlier answers",
}
STATES: dict[str, Any] = {
    "running_mean": {"mean": 0.4, "count": 12},
    "ema_scaled": {"second_moment": 0.3},
    "entropy_controller": {"coef": 0.07},
    # prompt 1 was all wrong before, prompt 10 mixed, the others are new
    "smooth_standardized": {"prompt 1": [2.0, 0.3, 0.2], "prompt 10": [5.0, 0.8, 0.4], "prompt 4": [1.0, 0.1, 0.0]},
}
COMPOSED = {
    "reinforce, discounted, constant baseline": variant(
        "reinforce", advantage={"returns": {"gamma": 0.9, "baseline": 0.5}}
    ),
    "reinforce, running mean": variant("reinforce", advantage="running_mean"),
    "gpg, group std": variant("gpg", advantage={"live_rescaled": {"std": "group"}}),
    "otb with the tail": variant("otb", advantage={"optimal_token_baseline": {"zero_tail": False}}),
    "batch std of the centred, unbiased": variant("grpo", advantage={"batch_scaled": {"ddof": 1}}),
    "moving batch std": variant("grpo", advantage={"ema_scaled": {"rate": 0.1}}),
    "k1 with the gradient of k2": variant(
        "grpo", regularizers=[{"kl_straight_through": {"coef": 0.1, "value": "k1", "weight": "detached", "cap": 1.1}}]
    ),
    "k2 with the gradient of k3": variant(
        "dapo", regularizers=[{"kl_straight_through": {"coef": 0.1, "value": "k2", "gradient": "k3"}}]
    ),
    "ngrpo, population std, two virtual answers": variant(
        "ngrpo", advantage={"virtual_best": {"n_virtual": 2, "r_max": 1.5, "ddof": 0}}, select=[]
    ),
    "ngrpo, solved at .75": variant("ngrpo", select=[{"drop_solved": {"r_max": 0.625}}]),
    "agpo with its loss clip": variant(
        "agpo",
        aggregate={"floored_sequence_mean": {"rows": "live"}},
        regularizers=[{"kl": {"coef": 20.0, "estimator": "k2"}}],
    ),
    "winner's lead, not divided": variant("passk-grpo", advantage={"winner_lead": {"by_std": False}}),
    "pass@3": variant("passk-analytic", advantage={"pass_at_k": {"k": 3}}),
    "dcpo, wide bounds, mean": variant(
        "dcpo", clip={"probability_bounds": {"eps_low": 0.01, "eps_high": 0.01, "cap": 1.2}}, aggregate="sequence_mean"
    ),
    "entropy controller, below its target": variant(
        "adaptive-entropy",
        weight=[{"entropy_quantile": {"keep": 0.6}}],
        regularizers=[{"entropy_controller": {"target": 2.5, "max": 0.1}}],
    ),
}


def members(batch, reward, i) -> list[int]:
    """Rows of i's group whose reward is known."""
    group = batch.scored.group.tolist()
    return [j for j in range(len(reward)) if group[j] == group[i] and not math.isnan(reward[j])]


def centred(batch, reward) -> list[float]:
    out = []
    for i, r in enumerate(reward):
        mine = [reward[j] for j in members(batch, reward, i)]
        out.append(0.0 if math.isnan(r) or max(mine) - min(mine) <= 1e-8 else r - sum(mine) / len(mine))
    return out


def is_known(reward) -> list[float]:
    return [r for r in reward if not math.isnan(r)]


@loop("advantage", "returns")
def returns(h, batch, reward):
    rows, width = batch.mask.shape
    score = references.last_token_scores(batch, reward)
    out = [[0.0] * width for _ in range(rows)]
    for i in range(rows):
        if math.isnan(reward[i]):
            continue
        here = references.positions(batch, i)
        for t in here:
            later = [s for s in here if s >= t]
            out[i][t] = sum(h.gamma**n * score[i][s] for n, s in enumerate(later)) - h.baseline
    return out


@loop("advantage", "running_mean")
def running_mean(h, batch, reward):
    return [0.0 if math.isnan(r) else r - STATES["running_mean"]["mean"] for r in reward]


@loop("advantage", "live_rescaled")
def live_rescaled(h, batch, reward):
    c = centred(batch, reward)
    live = 0
    for i, r in enumerate(reward):
        mine = [reward[j] for j in members(batch, reward, i)]
        live += not math.isnan(r) and max(mine) - min(mine) > 1e-8
    out = []
    for i, x in enumerate(c):
        scale = 1.0
        if h.std == "group" and x:
            scale = references.std([reward[j] for j in members(batch, reward, i)], h.ddof) + h.eps
        out.append(len(is_known(reward)) / live * x / scale if live else 0.0)
    return out


@loop("advantage", "length_weighted")
def length_weighted(h, batch, reward):
    size = [len(references.positions(batch, i)) for i in range(len(reward))]
    out = []
    for i, r in enumerate(reward):
        mine = members(batch, reward, i)
        if math.isnan(r) or len(mine) < 2 or not sum(size[j] for j in mine):
            out.append(0.0)
        else:
            out.append(r - sum(size[j] * reward[j] for j in mine) / sum(size[j] for j in mine))
    return out


@loop("advantage", "optimal_token_baseline")
def optimal_token_baseline(h, batch, reward):
    rows, width = batch.mask.shape
    squares = batch.scored.tokens["sum_sq_probs"].tolist()
    old = batch.scored.tokens["old_logps"].tolist()
    norms = []  # of the row's own tokens, accumulated
    for i in range(rows):
        total, mine = 0.0, []
        for t in references.positions(batch, i):
            total += 1 - 2 * math.exp(old[i][t]) + squares[i][t]
            mine.append(total)
        norms.append(mine)
    out = [[0.0] * width for _ in range(rows)]
    for i, r in enumerate(reward):
        mine = members(batch, reward, i)
        if math.isnan(r) or len(mine) < 2:
            continue
        for k, t in enumerate(references.positions(batch, i)):
            alive = [j for j in mine if len(norms[j]) > k]
            top, bottom = sum(norms[j][k] * reward[j] for j in alive), sum(norms[j][k] for j in alive)
            out[i][t] = r - (0.0 if h.zero_tail and len(alive) == 1 else top / (bottom + h.eps))
    return out


@loop("advantage", "batch_scaled")
def batch_scaled(h, batch, reward):
    c = centred(batch, reward)
    scale = references.std([x for x, r in zip(c, reward, strict=True) if not math.isnan(r)], h.ddof) + h.eps
    return [x / scale if x else 0.0 for x in c]


@loop("advantage", "ema_scaled")
def ema_scaled(h, batch, reward):
    c = centred(batch, reward)
    if not is_known(reward):
        return [0.0] * len(reward)
    now = sum(x * x for x in c) / len(is_known(reward))
    moved = (1 - h.rate) * STATES["ema_scaled"]["second_moment"] + h.rate * now
    return [x / (math.sqrt(moved) + h.eps) for x in c]


@loop("regularizers", "kl_straight_through")
def kl_straight_through(h, variant, batch, log_ratio, active, state):
    def estimate(d, name):
        return {"k1": d, "k2": d * d / 2, "k3": references.exp(-d) - 1 + d}[name]

    def term(i, t):
        d = batch.logps[i, t] - batch.ref_logps[i, t]
        slope = estimate(d, h.gradient)
        w = 1.0
        if h.weight == "detached":
            w = references.number(references.exp(log_ratio[i][t]))
            w = w if h.cap is None else min(w, h.cap)
        return w * (slope - slope.detach() + estimate(d.detach(), h.value))

    return h.coef * references.aggregate(variant.aggregate, references.table(batch, term), batch)


@loop("regularizers", "entropy_controller")
def entropy_controller(h, variant, batch, log_ratio, active, state):
    coef = h.coef if state is None else state["coef"]
    here = [(i, t) for i, row in enumerate(active) for t, a in enumerate(row) if a]
    mean = sum(references.number(batch.entropy[i, t]) for i, t in here) / max(len(here), 1)
    if mean >= h.target:
        return 0.0
    table = references.table(batch, lambda i, t: batch.entropy[i, t])
    return -min(coef + h.step, h.max) * references.aggregate(references.TokenMeanLike, table, batch, active)


@loop("advantage", "virtual_best")
def virtual_best(h, batch, reward):
    out = []
    for i, r in enumerate(reward):
        mine = [reward[j] for j in members(batch, reward, i)]
        if math.isnan(r) or len(mine) < 2:
            out.append(0.0)
            continue
        everyone = mine + [h.r_max] * h.n_virtual
        centre = sum(everyone) / len(everyone)
        scale = references.std(everyone, h.ddof) + h.eps
        out.append((r - centre) / scale if abs(r - centre) > 1e-8 else 0.0)
    return out


@loop("advantage", "winner_lead")
def winner_lead(h, batch, reward):
    out = []
    for i, r in enumerate(reward):
        mine = sorted((reward[j] for j in members(batch, reward, i)), reverse=True)
        lead = mine[0] - mine[1] if not math.isnan(r) and len(mine) > 1 and r == mine[0] else 0.0
        out.append(lead / (references.std(mine, h.ddof) + h.eps) if lead and h.by_std else lead)
    return out


@loop("advantage", "pass_at_k")
def pass_at_k(h, batch, reward):
    # over all subsets: each subset's standardised reward, averaged over the subsets that hold the row
    out = []
    for i, r in enumerate(reward):
        mine = members(batch, reward, i)
        subsets = list(itertools.combinations(mine, h.k))
        if math.isnan(r) or not subsets:
            out.append(0.0)
            continue
        value = [float(any(bool(batch.correct[j]) for j in s)) for s in subsets]
        scale = references.std(value, 0)
        own = [v for v, s in zip(value, subsets, strict=True) if i in s]
        out.append((sum(own) / len(own) - sum(value) / len(value)) / scale if scale > 1e-12 else 0.0)
    return out


@loop("advantage", "smooth_standardized")
def smooth_standardized(h, batch, reward):
    state = STATES["smooth_standardized"]
    out = []
    for i, r in enumerate(reward):
        mine = [reward[j] for j in members(batch, reward, i)]
        if math.isnan(r) or len(mine) < 2:
            out.append(0.0)
            continue
        mu, sd = sum(mine) / len(mine), references.std(mine, 1)
        n, m, s = 1.0, mu, sd
        if (before := state.get(batch.scored.prompt_key[i])) is not None:
            n = before[0] + 1
            m = ((n - 1) * before[1] + mu) / n
            s = math.sqrt(((n - 1) * before[2] ** 2 + sd**2 + (n - 1) / n * (mu - before[1]) ** 2) / n)
        new = (r - mu) / sd if sd > 1e-8 else 0.0
        total = (r - m) / s if s > 1e-8 else 0.0
        out.append(min(((n - 1) * new + total) / n, (new + (n - 1) * total) / n, key=abs))
    return out


@loop("clip", "probability_bounds")
def probability_bounds(h, log_ratio, advantage, batch, active):
    def bounded(i, t):
        q, a = references.number(references.exp(references.anchor(batch, i, t))), advantage[i][t]
        r = references.exp(log_ratio[i][t])
        low = 0.5 + 0.5 * math.sqrt(max(1 - 4 * h.eps_low / q, 0.0))
        high = min(0.5 + 0.5 * math.sqrt(1 + 4 * h.eps_high / q), h.cap)
        value = references.number(r)
        if a >= 0:
            return a * (r if value <= high else references.constant(high))
        return a * (r if low <= value <= h.cap else references.constant(min(max(value, low), h.cap)))

    return references.table(batch, bounded)


@loop("aggregate", "prompt_sum")
def prompt_sum(h, x, batch, counted):
    labels = batch.group.tolist()
    total, live = references.constant(0.0), set()
    for i, label in enumerate(labels):
        here = [t for t, c in enumerate(counted[i]) if c]
        if here:
            live.add(label)
            total = total + sum(x[i][t] for t in here) / len(here)
    return total / max(len(live), 1)


@loop("aggregate", "floored_sequence_mean")
def floored_sequence_mean(h, x, batch, counted):
    total, rows = references.constant(0.0), 0
    for i in range(len(x)):
        here = [t for t, c in enumerate(counted[i]) if c]
        rows += h.rows == "all" or bool(here)
        total = total + sum((x[i][t] for t in here), references.constant(0.0)) / max(len(here), 1)
    return total / max(rows, 1)


@loop("bound", "floored_sequence_mean")
def floored(h, total):
    return total if references.number(total) > 0 else references.constant(0.0) * total


@loop("select", "drop_solved")
def drop_solved(h, batch, reward):
    keep = []
    for i in range(len(reward)):
        mine = [reward[j] for j in members(batch, reward, i)]
        keep.append(not mine or min(mine) < h.r_max - 1e-8)
    return keep, [True] * len(reward)
