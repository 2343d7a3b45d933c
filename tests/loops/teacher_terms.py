"""Loops for terms towards a teacher, their gates and their controller."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests import references
from tests.loops import loop
from trl_variants import TokenBatch, Variant, variant

Table = list[list[Any]]


def term(name: str = "grpo", *terms: dict[str, Any], **seams: Any) -> Variant:
    return variant(name, regularizers=[{"teacher_kl": {"coef": 0.3, **t}} for t in terms], **seams)


COMPOSED = {
    "kdrl, response mask": term("kdrl", {"row_gate": "wrong"}),
    "kdrl, group mask over its own tokens": term("kdrl", {"row_gate": "all_fail", "normaliser": "gated"}),
    "kdrl by rows, term by tokens": term("kdrl", {"own_token_mean": True}, aggregate="sequence_mean"),
    "detached jsd where the clip is silent": term(
        "grpo", {"divergence": "jsd", "beta": 0.3, "estimator": "detached", "clip_interaction": "unclipped"}
    ),
    "detached fkl on clipped tokens of a sequence ratio": term(
        "gspo", {"divergence": "fkl", "estimator": "detached", "clip_interaction": "clipped_only", "x_max": 1.2}
    ),
    "ratio fkl on right rows": term("dapo", {"divergence": "fkl", "estimator": "ratio", "row_gate": "right"}),
    "ratio jsd, detached rkl with a cap": term(
        "dr-grpo",
        {"divergence": "jsd", "estimator": "ratio"},
        {"divergence": "rkl", "estimator": "detached", "ratio_cap": 1.1},
    ),
    "k3 by difficulty, ratio k3 in a band": term(
        "grpo",
        {"divergence": "fkl", "estimator": "k3", "row_gate": "difficulty", "power": 2.0},
        {"estimator": "ratio_k3", "token_gate": "band", "band": 0.4},
    ),
    "k2 on uncertain tokens, in two senses": term(
        "dapo",
        {"token_gate": "low_confidence", "share": 0.4},
        {"token_gate": "high_entropy", "share": 0.3, "normaliser": "gated"},
    ),
    "exact, everyone's tokens": term("grpo", {"estimator": "exact", "written_by": "anyone", "entry_cap": 0.05}),
    "exact on what others wrote": term(
        "grpo",
        {
            "divergence": "jsd",
            "estimator": "exact",
            "top_k": 64,
            "rest": "student",
            "written_by": "other",
            "normaliser": "gated",
            "own_token_mean": True,
        },
    ),
    "towards the reference": term("grpo", {"anchor": "ref", "estimator": "ratio_k3", "coef": 0.04}),
    "exact KL to the reference": variant("grpo", regularizers=[{"kl": {"coef": 0.3, "estimator": "exact"}}]),
    "lopti, exact KL of each pass": variant(
        "lopti", regularizers=[{"kl_of_pass": {"coef": 0.3, "estimator": "exact", "eta": 0.4}}]
    ),
    "a controlled term, exact": variant(
        "dapo", regularizers=[{"teacher_kl_dual": {"divergence": "fkl", "estimator": "exact", "row_gate": "wrong"}}]
    ),
}
STATES = {"teacher_kl_dual": {"coef": 0.07}}


@loop("advantage", "none")
def none(h: Any, batch: TokenBatch, reward: list[float]) -> list[float]:
    return [0.0] * len(reward)


def x_of(batch: TokenBatch, h: Any, i: int, t: int) -> float:
    """pi_T / pi of the sampled token."""
    other = batch.teacher_logps if h.anchor == "teacher" else batch.ref_logps
    return math.exp(min(max(float(other[i, t]) - references.number(batch.logps[i, t]), -20.0), 20.0))


def reward(h: Any, x: float) -> float:
    if h.divergence == "rkl":
        return math.log(x)
    if h.divergence == "fkl":
        return (x if h.x_max is None else min(x, h.x_max)) - 1
    return (1 - h.beta) * math.log(h.beta * x + 1 - h.beta)


def share_right(batch: TokenBatch, i: int) -> float:
    scored = batch.scored
    rewards = references.combined_rewards(scored.rewards, scored.weights.tolist())
    mine = [
        float(scored.correct[j])
        for j, r in enumerate(rewards)
        if int(scored.group[j]) == int(scored.group[i]) and not math.isnan(r)
    ]
    return sum(mine) / len(mine) if mine else math.nan


def row_weight(h: Any, batch: TokenBatch, i: int) -> float:
    right, p = bool(batch.correct[i]), share_right(batch, i)
    return {
        "all": lambda: 1.0,
        "wrong": lambda: float(not right),
        "right": lambda: float(right),
        "all_fail": lambda: float(p == 0),
        "difficulty": lambda: 0.0 if math.isnan(p) else (1 - p) ** h.power,
    }[h.row_gate]()


def top_share(batch: TokenBatch, of: Any, share: float) -> Any:
    """Whether a token is among the `share` of the window's tokens where `of` is largest."""
    everyone = [of(i, t) for i in range(len(batch.mask)) for t in references.positions(batch, i)]
    threshold = references.quantile(everyone, 1 - share) if everyone else 0.0
    return lambda i, t: float(of(i, t) >= threshold)


def token_weight(h: Any, batch: TokenBatch) -> Any:
    gap = lambda i, t: math.log(x_of(batch, h, i, t))  # noqa: E731
    return {
        "none": lambda: lambda i, t: 1.0,
        "sigmoid": lambda: lambda i, t: 1 / (1 + math.exp(-h.sharpness * gap(i, t))),
        "band": lambda: lambda i, t: float(abs(gap(i, t)) <= h.band),
        "low_confidence": lambda: top_share(batch, lambda i, t: -references.number(batch.logps[i, t]), h.share),
        "high_entropy": lambda: top_share(batch, lambda i, t: references.number(batch.entropy[i, t]), h.share),
    }[h.token_gate]()


def is_clipped(v: Variant, batch: TokenBatch, log_ratio: Table) -> Any:
    """Of a PPO clip, by the sign of the advantage."""
    advantage, _ = references.advantages(v, batch)

    def clipped(i: int, t: int) -> bool:
        r, a = math.exp(references.number(log_ratio[i][t])), advantage[i][t]
        return (r > 1 + v.clip.eps_high and a > 0) or (r < 1 - v.clip.eps_low and a < 0)

    return clipped


def gates(h: Any, v: Variant, batch: TokenBatch, log_ratio: Table) -> Table:
    tokens = token_weight(h, batch)
    clipped = is_clipped(v, batch, log_ratio) if h.clip_interaction != "additive" else None

    def gate(i: int, t: int) -> float:
        if h.anchor == "teacher" and batch.teacher_mask is not None and float(batch.teacher_mask[i, t]) == 0:
            return 0.0
        by_other = batch.origin is not None and int(batch.origin[i, t]) in (1, 2)
        if h.written_by != "anyone" and by_other != (h.written_by == "other"):
            return 0.0
        if clipped is not None and clipped(i, t) != (h.clip_interaction == "clipped_only"):
            return 0.0
        w = row_weight(h, batch, i) * tokens(i, t)
        if h.ratio_cap is not None:
            old = references.number(references.anchor(batch, i, t))
            w *= min(math.exp(min(max(references.number(batch.logps[i, t]) - old, -20.0), 20.0)), h.ratio_cap)
        return w

    return references.table(batch, gate)


def value(h: Any, batch: TokenBatch, i: int, t: int) -> Any:
    lp = batch.logps[i, t]
    if h.estimator == "exact":
        return batch.divergences[h.divergences[0].key][i, t]
    if h.estimator == "detached":
        return -reward(h, x_of(batch, h, i, t)) * torch.exp(lp - lp.detach())
    rho = references.exp(lp - references.anchor(batch, i, t))
    if h.estimator == "ratio":
        return -reward(h, x_of(batch, h, i, t)) * rho
    d = lp - (batch.teacher_logps if h.anchor == "teacher" else batch.ref_logps)[i, t]
    k3 = references.exp(-d) - 1 + d
    return {"k1": -d, "k2": d * d / 2, "k3": k3, "ratio_k3": rho * k3}[h.estimator]


@loop("regularizers", "teacher_kl")
def teacher_kl(
    h: Any, v: Variant, batch: TokenBatch, log_ratio: Table, active: Any, state: Any, coef: float | None = None
) -> Any:
    gate = gates(h, v, batch, log_ratio)
    x = references.table(batch, lambda i, t: gate[i][t] * value(h, batch, i, t) if gate[i][t] else 0.0)
    counted = [[g != 0 for g in row] for row in gate] if h.normaliser == "gated" else None
    aggregate = references.TokenMeanLike if h.own_token_mean else v.aggregate
    coef = max(h.coef - h.decay * batch.step, h.floor) if coef is None else coef
    return coef * references.aggregate(aggregate, x, batch, counted)


@loop("regularizers", "teacher_kl_dual")
def teacher_kl_dual(h: Any, v: Variant, batch: TokenBatch, log_ratio: Table, active: Any, state: Any) -> Any:
    return teacher_kl(h, v, batch, log_ratio, active, state, (state or {"coef": h.coef})["coef"])
