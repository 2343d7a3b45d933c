"""Loops for credit over tokens, and for advantages that share an outcome out over a group's tokens."""

from __future__ import annotations

import math
from typing import Any

from tests import references
from tests.loops import loop
from trl_variants import TokenBatch, variant

ABSOLUTE = {"entropy_share": "shapes by entropy inside groups that are all right or all wrong"}
COMPOSED = {
    "highent, all tokens counted": variant("highent", weight=[{"entropy_quantile": {"keep": 0.3}}]),
    "highent, a third": variant(
        "highent", weight=[{"entropy_quantile": {"keep": 0.35, "denominator": "selected"}}], aggregate="sequence_mean"
    ),
    "advantage reweighting": variant(
        "lopti-ar", credit=[{"probability_weight": {"alpha": 0.2}}], regularizers=[{"kl": {"coef": 0.001}}]
    ),
    "lopti, live k1": variant(
        "lopti", regularizers=[{"kl_of_pass": {"coef": 0.2, "estimator": "k1", "weight": "live", "eta": 0.4}}]
    ),
    "gtpo, joint": variant("gtpo", advantage={"entropy_share": {"norm": "joint", "a2": 0.7}}),
    "gtpo, raw": variant("gtpo", advantage={"entropy_share": {"norm": "none", "floor": 0.8}}),
    "every-token trace": variant("grpo-lambda", credit=[{"lambda_trace": {"reading": "every", "lam": 0.9}}]),
    "every-token trace, limit": variant(
        "grpo-lambda", credit=[{"lambda_trace": {"reading": "every", "lam": 1.0, "floor": -0.1}}]
    ),
    "a3po, other shares": variant("a3po", credit=[{"polarity_boost": {"share_correct": 0.5, "share_wrong": 0.4}}]),
    "fipo, wide": variant(
        "fipo",
        credit=[{"future_kl": {"low": 0.5, "high": 2.0, "half_life": 3.0, "ratio_filter": 1.3, "safe_ratio": 1.1}}],
    ),
    "erpo, two buckets, no gate": variant("erpo", advantage={"entropy_gated": {"buckets": 2, "gate": "none"}}),
    "eg-grpo, paper": variant("eg-grpo", credit=[{"entropy_band": {"form": "paper", "low": 0.4, "vocabulary": 50}}]),
    "token credit on entropy flow": variant("opefo", credit=[{"discount": {"gamma": 0.8}}, "entropy_flow"]),
    "phases, raw weights": variant(
        "ht-grpo", credit=[{"phase_weights": {"weights": [0.0, 1.0, 3.0], "rescale": False}}]
    ),
    "process, per segment": variant(
        "unified-interleaved-grpo", advantage={"process": {"per_segment": True, "ddof": 0}}
    ),
}

Table = list[list[Any]]


def old(batch: TokenBatch, i: int, t: int) -> float:
    return references.number(references.anchor(batch, i, t))


def each_token(batch: TokenBatch, of: Any) -> Table:
    return references.table(batch, of)


# ---------------------------------------------------------------- credit by probability


@loop("credit", "probability_weight")
def probability_weight(h: Any, advantage: Table, batch: TokenBatch) -> Table:
    return each_token(batch, lambda i, t: advantage[i][t] * (h.alpha * math.exp(old(batch, i, t)) + 1 - h.alpha))


def in_pass(batch: TokenBatch, i: int, t: int, eta: float) -> float:
    low = math.exp(old(batch, i, t)) < eta
    return float(low if batch.iteration in (0, 2, 4) else not low)


@loop("credit", "low_probability_first")
def low_probability_first(h: Any, advantage: Table, batch: TokenBatch) -> Table:
    return each_token(batch, lambda i, t: advantage[i][t] * in_pass(batch, i, t, h.eta))


@loop("regularizers", "kl_of_pass")
def kl_of_pass(h: Any, v: Any, batch: TokenBatch, log_ratio: Table, active: Any, state: Any) -> Any:
    def term(i, t):
        d = batch.logps[i, t] - batch.ref_logps[i, t]
        if h.estimator == "exact":
            return batch.divergences["rkl/ref"][i, t] * in_pass(batch, i, t, h.eta)
        k = {"k1": d, "k2": d * d / 2, "k3": references.exp(-d) - 1 + d}[h.estimator]
        r = references.exp(log_ratio[i][t])
        scale = {"none": 1.0, "live": r, "detached": references.number(r)}[h.weight]
        return k * scale * in_pass(batch, i, t, h.eta)

    return h.coef * references.aggregate(v.aggregate, each_token(batch, term), batch)


@loop("credit", "polarity_boost")
def polarity_boost(h: Any, advantage: Table, batch: TokenBatch) -> Table:
    out = [list(row) for row in advantage]
    m = max(h.start - h.decay * batch.step, 1.0)
    for i in range(len(out)):
        here = references.positions(batch, i)
        if not here:
            continue
        right = bool(batch.correct[i])
        k = max(1, int((h.share_correct if right else h.share_wrong) * len(here)))
        ranked = sorted(here, key=lambda t, i=i: old(batch, i, t), reverse=not right)
        for t in ranked[:k]:
            out[i][t] = out[i][t] * m
    return out


# ---------------------------------------------------------------- credit by what follows


@loop("credit", "lambda_trace")
def lambda_trace(h: Any, advantage: Table, batch: TokenBatch) -> Table:
    g = h.gamma * h.lam

    def weighted(i, t):
        a = advantage[i][t] if h.floor is None else max(advantage[i][t], h.floor)
        d = len([s for s in references.positions(batch, i) if s > t])
        return a * (g**d if h.reading == "terminal" else sum(g**k for k in range(d + 1)))

    return each_token(batch, weighted)


@loop("credit", "future_kl")
def future_kl(h: Any, advantage: Table, batch: TokenBatch) -> Table:
    def weighted(i, t):
        here = references.positions(batch, i)
        drift = {s: references.number(batch.logps[i, s]) - old(batch, i, s) for s in here}
        total = 0.0
        for distance, s in enumerate(s for s in here if s >= t):
            if math.exp(min(drift[s], 20.0)) <= h.ratio_filter:
                total += 0.5 ** (distance / h.half_life) * drift[s]
        f = min(max(math.exp(min(max(total, -20.0), 20.0)), h.low), h.high)
        if advantage[i][t] < 0 and math.exp(min(drift[t], 20.0)) > h.safe_ratio:
            f = min(max(f, h.safe_low), h.safe_high)
        return f * advantage[i][t]

    return each_token(batch, weighted)


# ---------------------------------------------------------------- credit by entropy, credit by phase


def entropy_of(batch: TokenBatch, i: int, t: int) -> float:
    return references.number(batch.entropy[i, t])


@loop("credit", "entropy_flow")
def entropy_flow(h: Any, advantage: Table, batch: TokenBatch) -> Table:
    def flow(i, t):
        lp = references.number(batch.logps[i, t])
        return -advantage[i][t] * (1 - math.exp(lp)) ** 2 * (lp + entropy_of(batch, i, t))

    flows = each_token(batch, flow)
    up = sum(x for row in flows for x in row if x > 0)
    down = -sum(x for row in flows for x in row if x < 0)
    balance = (down - up) / (down + up) if up > 0 and down > 0 else 0.0

    def scaled(i, t):
        sign = (flows[i][t] > 0) - (flows[i][t] < 0)
        return advantage[i][t] * (1 + balance * sign)

    return each_token(batch, scaled)


@loop("credit", "entropy_band")
def entropy_band(h: Any, advantage: Table, batch: TokenBatch) -> Table:
    unit = math.log(h.vocabulary) if h.vocabulary else 1.0
    rows, taken, room = [], 0.0, 0.0
    for i in range(len(advantage)):
        here = references.positions(batch, i)
        ordered = sorted(entropy_of(batch, i, t) for t in here)
        cut = lambda share, o=ordered: o[min(int(share * len(o)), len(o) - 1)]  # noqa: E731
        low = [t for t in here if entropy_of(batch, i, t) < cut(h.low) - 1e-5]
        high = [t for t in here if entropy_of(batch, i, t) > cut(h.high_from) + 1e-5 and advantage[i][t] != 0]
        rows.append((low, high))
        for t in low:
            taken += abs(advantage[i][t]) / len(here)
        for t in high:
            room += entropy_of(batch, i, t) / unit / len(here)

    def banded(i, t):
        low, high = rows[i]
        a, level = advantage[i][t], entropy_of(batch, i, t) / unit
        if h.form == "code":
            return 0.0 if t in low else a + (min(h.cap * abs(a), h.coef * level) if t in high else 0.0)
        bonus = h.kappa * taken / room * level if room > 0 and t in high else 0.0
        return (0.0 if t in low else a) + bonus

    return each_token(batch, banded)


@loop("credit", "phase_weights")
def phase_weights(h: Any, advantage: Table, batch: TokenBatch) -> Table:
    def phase(i, t):
        here = references.positions(batch, i)
        part = len(h.weights) * here.index(t) // len(here) if h.by == "position" else int(getattr(batch, h.by)[i, t])
        return h.weights[min(part, len(h.weights) - 1)]

    def weighted(i, t):
        here = references.positions(batch, i)
        average = sum(phase(i, s) for s in here) / len(here)
        w = phase(i, t)
        return advantage[i][t] * (w / average if h.rescale and average else 0.0 if h.rescale else w)

    return each_token(batch, weighted)


# ---------------------------------------------------------------- advantages over a group's tokens


def group_rows(batch: TokenBatch, reward: list[float]) -> list[list[int]]:
    """Scorable rows of each group."""
    labels = batch.scored.group.tolist()
    return [
        [i for i, g in enumerate(labels) if g == label and not math.isnan(reward[i])] for label in sorted(set(labels))
    ]


def scaled(values: dict, eps: float) -> dict:
    """z-scores (population std) of a dict of numbers."""
    average = references.mean(list(values.values()))
    deviation = references.std(list(values.values()), 0) if values else 0.0
    return {k: (x - average) / (deviation + eps) if deviation + eps > 0 else 0.0 for k, x in values.items()}


@loop("advantage", "entropy_share")
def entropy_share(h: Any, batch: TokenBatch, reward: list[float]) -> Table:
    out = [[0.0] * batch.mask.shape[1] for _ in reward]
    correct = batch.scored.correct.tolist()
    for members in group_rows(batch, reward):
        shaped: dict[bool, dict] = {}
        for right in (True, False):
            rows = [i for i in members if bool(correct[i]) == right]
            tokens = {i: references.positions(batch, i) for i in rows}
            shaped[right] = {}
            for k in range(batch.mask.shape[1]):
                alive = [i for i in rows if len(tokens[i]) > k]
                value = {i: max(entropy_of(batch, i, tokens[i][k]), h.floor) ** (1 if right else -1) for i in alive}
                for i in alive:
                    r = h.a1 + h.a2 * len(alive) * value[i] / sum(value.values())
                    shaped[right][i, tokens[i][k]] = r if right else -r
        everything = {**shaped[True], **shaped[False]}
        sets = [shaped[True], shaped[False]] if h.norm == "per_kind" else [everything]
        for part in sets:
            average = references.mean(list(part.values()))
            variance = references.mean([(x - average) ** 2 for x in part.values()])
            for (i, t), r in part.items():
                out[i][t] = r if h.norm == "none" else (r - average) / math.sqrt(variance + 1e-8)
    return out


@loop("advantage", "entropy_gated")
def entropy_gated(h: Any, batch: TokenBatch, reward: list[float]) -> Table:
    labels = batch.scored.group.tolist()
    base = references.grouped(reward, labels, h.mean, h.std, h.ddof, h.eps, h.singleton)
    out = [[0.0] * batch.mask.shape[1] for _ in reward]
    for members in group_rows(batch, reward):
        tokens = [(i, t) for i in members for t in references.positions(batch, i)]
        buckets: dict[int, dict] = {}
        for i, t in tokens:
            here = references.positions(batch, i)
            number = h.buckets * here.index(t) // len(here)
            gap = old(batch, i, t) - references.number(batch.ref_logps[i, t])
            buckets.setdefault(number, {})[i, t] = gap
        signal = {k: x for part in buckets.values() for k, x in scaled(part, h.eps_token).items()}
        gate = scaled({(i, t): entropy_of(batch, i, t) for i, t in tokens}, h.eps_token)
        for i, t in tokens:
            sign = (base[i] > 0) - (base[i] < 0)
            signal[i, t] *= sign * (1 / (1 + math.exp(-gate[i, t])) if h.gate == "sigmoid" else 1.0)
        spread = references.std(list(signal.values()), 0) if signal else 0.0
        combined = {(i, t): base[i] + h.eta * h.target_std * signal[i, t] / (spread + h.eps_token) for i, t in tokens}
        for (i, t), x in scaled(combined, h.eps_token).items():
            out[i][t] = x
    return out


@loop("advantage", "process")
def process(h: Any, batch: TokenBatch, reward: list[float]) -> Table:
    matrix = (batch.scored.rewards * batch.scored.weights).tolist()
    ids = batch.scored.tokens.get("ids")
    out = [[0.0] * batch.mask.shape[1] for _ in reward]
    for members in group_rows(batch, reward):
        pool = [r for i in members for r in matrix[i] if not math.isnan(r)]
        deviation = references.std(pool, h.ddof)
        for i in members:
            here = references.positions(batch, i)
            ends = [t for t in here if t == here[-1] or (ids is not None and int(ids[i, t]) in h.delimiters)]
            count = len([r for r in matrix[i] if not math.isnan(r)])
            for j, r in enumerate(matrix[i]):
                if math.isnan(r) or math.isnan(deviation) or not here:
                    continue
                z = (r - references.mean(pool)) / (deviation + h.eps) / (count if h.per_segment else 1)
                end = ends[min(j, len(ends) - 1)]
                for t in here:
                    out[i][t] += z if t <= end else 0.0
    return out
