"""Loops of the squared log-ratio family, the whole-group contrasts, and the filters of groups and rows."""

from __future__ import annotations

import math

import torch

from tests.loops import loop
from trl_variants import Schedule, variant


def _refs():
    from tests import references

    return references


def _rows(batch, group=None):
    """Rows with a token, of one group or of all."""
    r = _refs()
    labels = batch.group.tolist()
    return [i for i in range(len(labels)) if r.positions(batch, i) and (group is None or labels[i] == group)]


# ---------------------------------------------------------------- clips


@loop("clip", "log_linear")
def log_linear(h, log_ratio, advantage, batch, active):
    return _refs().table(batch, lambda i, t: log_ratio[i][t] * advantage[i][t])


@loop("clip", "ratio_clamp")
def ratio_clamp(h, log_ratio, advantage, batch, active):
    r = _refs()

    def held(i, t):
        x = r.exp(log_ratio[i][t])
        if r.number(x) < h.low:
            x = r.constant(h.low)
        if r.number(x) > h.high:
            x = r.constant(h.high)
        return x * advantage[i][t]

    return r.table(batch, held)


def _scores(kind, log_ratio, batch, active):
    r, out = _refs(), []
    for i, row in enumerate(log_ratio):
        here = [t for t in r.positions(batch, i) if active[i][t]]
        tokens = [batch.logps[i, t] if kind == "log_likelihood" else r.exp(row[t]) for t in here]
        out.append(sum(tokens) / len(tokens) if tokens else None)
    return out


def _by_group(scores, advantage, batch, active, value):
    """value(right scores, wrong scores) of each group on its rows."""
    r = _refs()
    labels, out = batch.group.tolist(), []
    label = []
    for i, row in enumerate(advantage):
        here = [t for t in r.positions(batch, i) if active[i][t]]
        label.append(sum(row[t] for t in here) / len(here) if here else 0.0)
    for g in labels:
        own = [i for i in range(len(labels)) if labels[i] == g and scores[i] is not None]
        right, wrong = [scores[i] for i in own if label[i] > 0], [scores[i] for i in own if label[i] < 0]
        x = value(right, wrong) if right and wrong else r.constant(0.0)
        out.append([x] * batch.mask.shape[1])
    return out


@loop("clip", "group_contrast")
def group_contrast(h, log_ratio, advantage, batch, active):
    def value(right, wrong):
        if h.tau is None:
            worst = sum(wrong) / len(wrong)
        else:
            top = max(float(s.detach()) for s in wrong)
            total = sum(torch.exp((s - top) / h.tau) for s in wrong)
            worst = top + h.tau * torch.log(total / len(wrong))
        return sum(right) / len(right) - worst

    return _by_group(_scores(h.score, log_ratio, batch, active), advantage, batch, active, value)


@loop("clip", "info_nce")
def info_nce(h, log_ratio, advantage, batch, active):
    margin = h.margin(batch.progress) if isinstance(h.margin, Schedule) else h.margin

    def value(right, wrong):
        total = 0.0
        for s in right:
            mine = torch.exp((s - margin) / h.tau)
            total = total + h.tau * torch.log(mine / (mine + sum(torch.exp(w / h.tau) for w in wrong)))
        return total / len(right)

    return _by_group(_scores("log_likelihood", log_ratio, batch, active), advantage, batch, active, value)


# ---------------------------------------------------------------- regularizers


@loop("regularizers", "squared_log_ratio")
def squared_log_ratio(h, v, batch, log_ratio, active, state):
    r = _refs()
    return h.coef * r.aggregate(v.aggregate, r.table(batch, lambda i, t: log_ratio[i][t] * log_ratio[i][t]), batch)


@loop("regularizers", "kl_hinge")
def kl_hinge(h, v, batch, log_ratio, active, state):
    r = _refs()
    moved = [r.anchor(batch, i, t) - batch.logps[i, t] for i in _rows(batch) for t in r.positions(batch, i)]
    if not moved:
        return r.constant(0.0)
    over = sum(moved) / len(moved) - h.delta
    return h.coef * over * over / 2 if r.number(over) > 0 else r.constant(0.0) * over


@loop("regularizers", "fallen_tokens")
def fallen_tokens(h, v, batch, log_ratio, active, state):
    r = _refs()
    given, _ = r.advantages(v, batch)
    for c in v.credit:
        raise AssertionError(f"this loop knows no credit hook, and was given {c.hook_name}")
    good = [(i, t) for i in _rows(batch) for t in r.positions(batch, i) if given[i][t] >= 0]
    total = r.constant(0.0)
    for i, t in good:
        d = batch.logps[i, t] - r.anchor(batch, i, t)
        if math.exp(r.number(d)) <= h.threshold:
            total = total + d
    return -h.coef * total / max(len(good), 1)


@loop("regularizers", "correct_entropy")
def correct_entropy(h, v, batch, log_ratio, active, state):
    r = _refs()
    total = r.constant(0.0)
    for i in _rows(batch):
        if bool(batch.correct[i]):
            here = r.positions(batch, i)
            token = [-r.exp(batch.logps[i, t] - r.anchor(batch, i, t)) * batch.logps[i, t] for t in here]
            total = total + sum(token) / len(here)
    return -h.coef * total / len(batch.mask)


# ---------------------------------------------------------------- advantages and selection (numbers)


def _scorable(batch, reward, i):
    labels = batch.scored.group.tolist()
    return [j for j in range(len(labels)) if labels[j] == labels[i] and not math.isnan(reward[j])]


@loop("advantage", "balanced_labels")
def balanced_labels(h, batch, reward):
    out = []
    for i in range(len(reward)):
        mine = _scorable(batch, reward, i)
        right = [j for j in mine if bool(batch.scored.correct[j])]
        wrong = [j for j in mine if j not in right]
        if i not in mine or not right or not wrong:
            out.append(0.0)
        else:
            out.append(1 / len(right) if i in right else -1 / len(wrong))
    return out


@loop("advantage", "log_partition")
def log_partition(h, batch, reward):
    out = []
    for i in range(len(reward)):
        mine = _scorable(batch, reward, i)
        z = sum(math.exp(reward[j] / h.tau) for j in mine) / max(len(mine), 1)
        out.append(reward[i] - h.tau * math.log(z) if i in mine else 0.0)
    return out


@loop("select", "zero_variance")
def zero_variance(h, batch, reward):
    out = []
    for i in range(len(reward)):
        mine = _scorable(batch, reward, i)
        seen = [float(batch.scored.correct[j]) if h.by == "correct" else reward[j] for j in mine]
        out.append(bool(seen) and max(seen) - min(seen) > h.tol)
    return out, [True] * len(reward)


@loop("select", "top_advantage")
def top_advantage(h, batch, reward):
    size = [abs(a) for a in _refs().grouped(reward, batch.scored.group.tolist())]
    out = []
    for i in range(len(reward)):
        every = [j for j in range(len(reward)) if not math.isnan(reward[j])]
        mine = every if h.within == "batch" else _scorable(batch, reward, i)
        count = max(1, math.floor(len(mine) * (1 - h.rate) + 1e-9))
        before = [j for j in mine if size[j] > size[i] + 1e-5 or (abs(size[j] - size[i]) <= 1e-5 and j < i)]
        out.append(i in mine and len(before) < count)
    return out, [True] * len(reward)


BY_POSITION = {"top_advantage": "ties go to the earlier row"}
COMPOSED = {
    "disco, ratio score": variant("disco", clip={"group_contrast": {"score": "likelihood_ratio", "tau": 1.0}}),
    "disco-b": variant("disco", clip={"group_contrast": {"tau": None}}),
    "disco by rows, token advantages": variant(
        "disco", advantage="grouped", credit=[{"discount": {"gamma": 0.9}}], aggregate="sequence_mean", regularizers=[]
    ),
    "conspo, a sharp temperature, a margin": variant("conspo", clip={"info_nce": {"tau": 0.5, "margin": 0.3}}),
    "conspo over all prompts": variant("conspo", select=[]),
    "balanced labels under a clip": variant("dapo", advantage="balanced_labels"),
    "dro, sequence form": variant("dro", ratio="product", aggregate="sequence_mean"),
    "kimi-k3 with a sequence ratio": variant("kimi-k3", ratio="sequence"),
    "geometric mask": variant(
        "dapo", weight=[{"sampler_correction": {"mode": "geometric_mask", "min": 0.95, "max": 1.05}}]
    ),
    "geometric truncation": variant(
        "gspo", weight=[{"sampler_correction": {"mode": "geometric_truncate", "max": 1.02}}]
    ),
    "zero variance of correctness": variant("dapo", select=[{"zero_variance": {"by": "correct"}}]),
    "pruned over the batch": variant("cppo-pruning", select=[{"top_advantage": {"rate": 0.7, "within": "batch"}}]),
    "a hinge on grpo": variant("grpo", regularizers=[{"kl_hinge": {"coef": 3.0, "delta": 0.0}}]),
    "fallen tokens, all of them": variant("grpo", regularizers=[{"fallen_tokens": {"coef": 0.3, "threshold": 5.0}}]),
}
