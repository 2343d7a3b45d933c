"""Loops of what is learned beside the policy, or read off it: process rewards, implied values, a contrast."""

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
COMPOSED |= {
    "prime, paper form": variant(
        "prime", advantage={"process_and_outcome": {"form": "paper", "gamma": 0.9, "normalize": False}}, select=[]
    ),
    "prime, discounted, not whitened": variant(
        "prime", advantage={"process_and_outcome": {"gamma": 0.8, "whiten": False}}, select=[]
    ),
    "prime, another band": variant("prime", select=[{"accuracy_band": {"low": 0.0, "high": 0.5}}]),
}
ABSOLUTE = {"process_and_outcome": "process rewards tell answers of equal reward apart"}


@loop("rewards", "contrastive_bonus")
def contrastive_bonus(h, batch, reward):
    loss = batch.scored.keys["contrastive_loss"].tolist()
    ranked = [bool(batch.correct[i]) and not math.isnan(x) for i, x in enumerate(loss)]
    return [r + max(-h.lam * loss[i], h.floor) if ranked[i] else r for i, r in enumerate(reward)]


@loop("select", "accuracy_band")
def accuracy_band(h, batch, reward):
    labels, kept = batch.group.tolist(), []
    for label in labels:
        group = [j for j, g in enumerate(labels) if g == label and not math.isnan(reward[j])]
        share = sum(bool(batch.correct[j]) for j in group) / len(group) if group else math.nan
        kept.append(h.low - 1e-9 <= share <= h.high + 1e-9)
    return kept, kept


@loop("advantage", "process_and_outcome")
def process_and_outcome(h, batch, reward):
    rows, labels = len(batch.mask), batch.group.tolist()
    given = batch.scored.tokens["process_rewards"]
    scorable = [not math.isnan(r) for r in reward]
    r = [[number(given[i, t]) for t in positions(batch, i)] if scorable[i] else [] for i in range(rows)]
    if h.normalize:
        largest = max((abs(sum(row[n:])) for row in r for n in range(len(row))), default=0.0)
        r = [[x / (largest + 1e-6) for x in row] for row in r]
    out = [[0.0] * batch.mask.shape[1] for _ in range(rows)]
    for i in range(rows):
        group = [j for j in range(rows) if labels[j] == labels[i] and scorable[j]]
        written = [sum(r[j]) / len(r[j]) for j in group if r[j]]
        k, outcome = len(written), 0.0
        if scorable[i] and len(group) > 1:
            outcome = reward[i] - sum(reward[j] for j in group if j != i) / (len(group) - 1)
        if k < 2 or not r[i]:
            process = [0.0] * len(r[i])
        elif h.form == "code":
            process = [x * k / (k - 1) - sum(written) / (k - 1) for x in r[i]]
        else:
            process = [x - (sum(written) - sum(r[i]) / len(r[i])) / (k - 1) for x in r[i]]
        for n, t in enumerate(positions(batch, i)[: len(r[i])]):
            left = len(r[i]) - 1 - n
            to_go = sum(h.gamma**m * x for m, x in enumerate(process[n:]))
            out[i][t] = to_go + (h.gamma**left if h.form == "code" else 1.0) * outcome
    if not h.whiten:
        return out
    places = [(i, t) for i in range(rows) if scorable[i] for t in positions(batch, i)]
    mean = sum(out[i][t] for i, t in places) / max(len(places), 1)
    variance = sum((out[i][t] - mean) ** 2 for i, t in places) / max(len(places) - 1, 1)
    for i, t in places:
        out[i][t] = (out[i][t] - mean) / math.sqrt(variance + h.eps)
    return out


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
