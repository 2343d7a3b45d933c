"""Loops of the clip family: smooth gates and trust regions (`hooks/clip_*.py` and what they stand with)."""

from __future__ import annotations

import math

import torch

from tests.loops import loop
from trl_variants import variant


def _lib():
    from tests import references  # late: it imports this module

    return references


# ---------------------------------------------------------------- smooth gates


@loop("clip", "smooth_gate")
def smooth_gate(h, log_ratio, advantage, batch, active):
    r = _lib()

    def term(i, t):
        tau = h.tau_pos if advantage[i][t] > 0 else h.tau_neg
        x = tau * (r.exp(log_ratio[i][t]) - 1)
        if h.gate == "sigmoid":
            f = 4 / (1 + torch.exp(-x))
        elif h.gate == "erf":
            f = math.sqrt(math.pi) / 2 * torch.erf(x)
        elif h.gate == "arctan":
            f = torch.arctan(x)
        else:
            f = x / (1 + x) if r.number(x) >= 0 else x / (1 - x)
        return f / tau * advantage[i][t]

    return r.table(batch, term)


@loop("clip", "gaussian_weight")
def gaussian_weight(h, log_ratio, advantage, batch, active):
    r = _lib()

    def term(i, t):
        z = r.number(log_ratio[i][t]) / h.sigma
        return math.exp(-z * z / 2) * r.exp(log_ratio[i][t]) * advantage[i][t]

    return r.table(batch, term)


@loop("clip", "soft_sequence")
def soft_sequence(h, log_ratio, advantage, batch, active):
    r, out = _lib(), []
    for i, row in enumerate(log_ratio):
        here = [t for t in r.positions(batch, i) if active[i][t]]
        total = torch.zeros((), dtype=torch.float64)
        for t in here:
            total = total + torch.arctan(row[t])
        weight = torch.exp(total / max(len(here), 1))
        out.append([weight * (r.mean([advantage[i][t] for t in here]) if here else advantage[i][0])] * len(row))
    return out


@loop("clip", "hazard")
def hazard(h, log_ratio, advantage, batch, active):
    r = _lib()

    def term(i, t):
        psi = h.c * torch.tanh(torch.as_tensor(log_ratio[i][t] / h.c))
        p = r.number(psi)
        zeta = (math.log1p(math.exp(p)) / h.lambda_pos) ** h.k_pos
        zeta += (math.log1p(math.exp(-p)) / h.lambda_neg) ** h.k_neg
        return torch.exp(psi - zeta) * advantage[i][t]

    return r.table(batch, term)


# ---------------------------------------------------------------- trust regions


@loop("ratio", "cumulative")
def cumulative(h, batch):
    r = _lib()
    out = [[0.0] * batch.mask.shape[1] for _ in batch.mask]
    for i in range(len(out)):
        total = 0.0
        for t in r.positions(batch, i):
            total += min(max(r.number(batch.logps[i, t]) - r.number(r.anchor(batch, i, t, h.anchor)), -20.0), 20.0)
            out[i][t] = total + batch.logps[i, t] - r.number(batch.logps[i, t])
    return out


@loop("clip", "upper_cap")
def upper_cap(h, log_ratio, advantage, batch, active):
    r = _lib()

    def term(i, t):
        ratio = r.exp(log_ratio[i][t])
        return (ratio if r.number(ratio) <= 1 + h.eps_high else 1 + h.eps_high) * advantage[i][t]

    return r.table(batch, term)


@loop("clip", "widening")
def widening(h, log_ratio, advantage, batch, active):
    r = _lib()

    def term(i, t):
        pos = len([s for s in r.positions(batch, i) if s <= t])
        low, high, a = -h.eps_low * pos**h.power, h.eps_high * pos**h.power, advantage[i][t]
        x = r.number(log_ratio[i][t])
        free = r.exp(log_ratio[i][t]) * a
        held = math.exp(min(max(x, low), high)) * a if not low <= x <= high else free
        value = free if r.number(free) <= r.number(held) else r.constant(held)
        if h.dual is not None and a < 0:
            floor = math.exp(h.dual * pos**h.power) * a
            value = r.constant(floor) if r.number(value) < floor else value
        return value

    return r.table(batch, term)


@loop("clip", "hybrid")
def hybrid(h, log_ratio, advantage, batch, active):
    r = _lib()
    largest = max(
        [r.number(batch.entropy[i, t]) for i in range(len(batch.mask)) for t in r.positions(batch, i)], default=0.0
    )

    def held(x, low, high):
        return r.constant(min(max(r.number(x), 1 - low), 1 + high)) if not 1 - low <= r.number(x) <= 1 + high else x

    def term(i, t):
        w = h.w if h.mix == "averaged" else r.number(batch.entropy[i, t]) / largest
        level = r.mean([r.number(log_ratio[i][s]) for s in r.positions(batch, i)])
        token = r.exp(log_ratio[i][t])
        sequence = r.exp(level + log_ratio[i][t] - r.number(log_ratio[i][t]))
        m = (w * token + (1 - w) * sequence) * advantage[i][t]
        bounded = w * held(token, h.eps_low, h.eps_high) + (1 - w) * held(sequence, h.eps_low_seq, h.eps_high_seq)
        return m if r.number(m) <= r.number(bounded * advantage[i][t]) else bounded * advantage[i][t]

    return r.table(batch, term)


@loop("clip", "divergence_mask")
def divergence_mask(h, log_ratio, advantage, batch, active):
    r = _lib()

    def bernoulli_kl(mu, p):
        total = mu * math.log(mu / p) if mu > 0 else 0.0
        return total + ((1 - mu) * math.log((1 - mu) / (1 - p)) if mu < 1 else 0.0)

    def term(i, t):
        lp, a = r.number(batch.logps[i, t]), advantage[i][t]
        p, mu = math.exp(lp), min(math.exp(lp - r.number(log_ratio[i][t])), 1.0)
        far = (abs(p - mu) if h.divergence == "tv" else bernoulli_kl(mu, p)) > h.delta
        if far and ((a > 0 and p > mu) or (a <= 0 and p < mu)):
            return 0.0 * batch.logps[i, t]
        return min(r.number(r.exp(log_ratio[i][t])), h.cap) * a * batch.logps[i, t]

    return r.table(batch, term)


def _answer_ratio(r, log_ratio, batch, i):
    """Product over the answer; a per-answer ratio comes repeated and stands for itself."""
    here = r.positions(batch, i)
    values = [r.number(log_ratio[i][t]) for t in here]
    repeated = len(here) > 1 and len(set(values)) == 1 and values[0] != 0.0
    return r.number(r.exp(values[0] if repeated else sum(values)))


def _scores(r, weights, advantage, batch, active):
    out = []
    for i, row in enumerate(weights):
        total = torch.zeros((), dtype=torch.float64)
        for t in r.positions(batch, i):
            if active[i][t]:
                total = total + row[t] * advantage[i][t] * batch.logps[i, t]
        out.append([total] * len(row))
    return out


@loop("clip", "tapered")
def tapered(h, log_ratio, advantage, batch, active):
    r = _lib()
    weights = []
    for i, row in enumerate(advantage):
        rho = min(_answer_ratio(r, log_ratio, batch, i), h.cap)
        weights.append([1.0 if a >= 0 else rho for a in row])
    return _scores(r, weights, advantage, batch, active)


@loop("clip", "self_normalised")
def self_normalised(h, log_ratio, advantage, batch, active):
    r, labels = _lib(), batch.group.tolist()
    rho = [_answer_ratio(r, log_ratio, batch, i) for i in range(len(labels))]
    w = [min(max(x, 1 - h.eps_low), 1 + h.eps_high) for x in rho]
    weights = []
    for i, label in enumerate(labels):
        mine = [w[j] for j, other in enumerate(labels) if other == label and r.positions(batch, j)]
        weights.append([w[i] / (sum(mine) / len(mine)) if mine else 0.0] * batch.mask.shape[1])
    return _scores(r, weights, advantage, batch, active)


@loop("clip", "balanced")
def balanced(h, log_ratio, advantage, batch, active):
    r = _lib()
    tokens = [(i, t) for i in range(len(batch.mask)) for t in r.positions(batch, i) if active[i][t]]

    def share(low, high):
        positive = negative = 0.0
        for i, t in tokens:
            x, a = r.number(r.exp(log_ratio[i][t])), advantage[i][t]
            q = math.exp(min(r.number(r.anchor(batch, i, t)), 20.0)) if h.measure == "paper" else 1.0
            if h.measure == "active" and (a > 0 and x > high or a < 0 and x < low):
                continue
            if h.measure != "active":
                x = min(x, high) if a >= 0 else max(x, low)
            positive, negative = positive + max(q * x * a, 0.0), negative + max(-q * x * a, 0.0)
        return positive / (positive + negative) if positive + negative > 0 else 1.0

    low, high = h.c_low_min, h.c_high_min
    for bound in ("high", "low") if h.first == "high" else ("low", "high"):
        while share(low, high) < h.rho0 and (
            high < h.c_high_max - 1e-9 if bound == "high" else low < h.c_low_max - 1e-9
        ):
            if bound == "high":
                high = min(high + h.step_high, h.c_high_max)
            else:
                low = min(low + h.step_low, h.c_low_max)

    class Found:
        eps_low, eps_high, delta, floor = 1 - low, high - 1, None, h.floor

    return r.table(batch, lambda i, t: r.ppo(Found, log_ratio[i][t], advantage[i][t]))


def _covariances(r, advantage, batch, active):
    tokens = [(i, t) for i in range(len(batch.mask)) for t in r.positions(batch, i) if active[i][t]]
    a = r.mean([advantage[i][t] for i, t in tokens])
    lp = r.mean([r.number(batch.logps[i, t]) for i, t in tokens])
    return {(i, t): (advantage[i][t] - a) * (r.number(batch.logps[i, t]) - lp) for i, t in tokens}


@loop("clip", "clip_cov")
def clip_cov(h, log_ratio, advantage, batch, active):
    r = _lib()
    cov = _covariances(r, advantage, batch, active)

    def clipped(i, t):
        x, a = r.number(r.exp(log_ratio[i][t])), advantage[i][t]
        return (a > 0 and x > 1 + h.eps_high) or (a < 0 and x < 1 - h.eps_low)

    candidates = sorted([k for k, c in cov.items() if h.cov_low < c < h.cov_high and not clipped(*k)], key=cov.get)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(0)).tolist()
    drawn = [candidates[k] for k in order[: max(1, int(h.share * len(cov)))]]

    class Inner:
        eps_low, eps_high, delta, floor = h.eps_low, h.eps_high, None, None

    return r.table(batch, lambda i, t: 0.0 if (i, t) in drawn else r.ppo(Inner, log_ratio[i][t], advantage[i][t]))


@loop("regularizers", "kl_cov")
def kl_cov(h, variant, batch, log_ratio, active, state):
    r = _lib()
    cov = _covariances(r, r.advantages(variant, batch)[0], batch, active)
    top = sorted(cov, key=cov.get, reverse=True)[: max(1, int(h.share * len(cov)))]

    def term(i, t):
        moved = batch.logps[i, t] - r.number(r.anchor(batch, i, t))
        return moved * (1 if r.number(moved) > 0 else -1 if r.number(moved) < 0 else 0) if (i, t) in top else 0.0

    return h.coef * r.aggregate(variant.aggregate, r.table(batch, term), batch)


@loop("aggregate", "sequence_constant")
def sequence_constant(h, x, batch, counted):
    total = torch.zeros((), dtype=torch.float64)
    for row, here in zip(x, counted, strict=True):
        kept = [v for v, c in zip(row, here, strict=True) if c]
        total = total + (sum(kept) / len(kept) if kept else 0.0)
    return total / (len(x) * (h.length or batch.run.max_completion_length))


@loop("aggregate", "prompt_constant")
def prompt_constant(h, x, batch, counted):
    total = torch.zeros((), dtype=torch.float64)
    for row, here in zip(x, counted, strict=True):
        for v, c in zip(row, here, strict=True):
            total = total + v if c else total
    prompts = {label for label, here in zip(batch.group.tolist(), counted, strict=True) if any(here)}
    sizes = [batch.group.tolist().count(label) for label in batch.group.tolist()]
    return total / (max(len(prompts), 1) * max(sizes) * (h.length or batch.run.max_completion_length))


@loop("select", "winners")
def winners(h, batch, reward):
    group, wins = batch.scored.group.tolist(), []
    for x, label in zip(reward, group, strict=True):
        mine = [y for y, other in zip(reward, group, strict=True) if other == label and not math.isnan(y)]
        centre = sum(mine) / len(mine) if mine else math.nan
        wins.append(x - centre > h.margin * (1 + abs(centre)))
    return wins, [True] * len(reward)


@loop("advantage", "truncation_dropout")
def truncation_dropout(h, batch, reward):
    r, scored = _lib(), batch.scored
    out = r.grouped(reward, scored.group.tolist(), ddof=h.ddof, eps=h.eps)
    facts = [
        (g, -math.inf if math.isnan(x) else x, n)
        for g, x, n in zip(scored.group.tolist(), reward, scored.length.tolist(), strict=True)
    ]
    u = torch.rand(len(out), generator=torch.Generator().manual_seed(0)).tolist()
    for k, i in enumerate(sorted(range(len(out)), key=lambda i: facts[i])):
        masked = bool(scored.correct[i]) == (h.criterion == "non_incorrect")
        if bool(scored.truncated[i]) and masked and u[k] < h.rho:
            out[i] = 0.0
    return out


OVER_TOKENS = {
    "tapered": "the answer's log-likelihood",
    "self_normalised": "the answer's log-likelihood",
    "soft_sequence": "a mean over the answer's tokens",
}

COMPOSED = {
    f"sapo, {gate} gate": variant("sapo", clip={"smooth_gate": {"gate": gate, "tau_pos": 0.7, "tau_neg": 1.6}})
    for gate in ("sigmoid", "erf", "arctan", "softsign")
} | {
    "gspo + gaussian weight": variant("gspo", clip={"gaussian_weight": {"sigma": 0.1}}),
    "sspo + top-entropy tokens": variant("sspo", weight=[{"entropy_quantile": {"keep": 0.6}}]),
    "gspo-token + hazard": variant("gspo-token", clip={"hazard": {"c": 0.5, "k_pos": 2.5, "lambda_neg": 0.9}}),
    "dhpo, entropy-guided": variant("dhpo", clip={"hybrid": {"mix": "entropy", "eps_low": 0.05, "eps_high": 0.02}}),
    "gspo + upper cap": variant("gspo", clip={"upper_cap": {"eps_high": 0.02}}),
    "ctpo without the dual clip": variant("ctpo", clip={"widening": {"power": 1.0, "dual": None}}),
    "ctpo from the sampler": variant("ctpo", ratio={"cumulative": {"anchor": "sampler"}}),
    "token ratio + widening": variant("dapo", clip={"widening": {"dual": 0.1}}),
    "dppo, kl": variant("dppo", clip={"divergence_mask": {"divergence": "kl", "delta": 0.01, "cap": 1.1}}),
    "dppo from the old policy": variant("dppo", ratio="token", clip={"divergence_mask": {"delta": 0.05}}),
    "token ratio + tapered": variant("topr", ratio="token"),
    "topr + top-entropy tokens": variant("topr", weight=[{"entropy_quantile": {"keep": 0.6}}]),
    "stabledrl, the authors' cap": variant("stabledrl", clip={"self_normalised": {"eps_low": 1.0, "eps_high": 0.5}}),
    "stabledrl + top-entropy tokens": variant("stabledrl", ratio="token", weight=["entropy_quantile"]),
    "tic-grpo, token means": variant("tic-grpo", ratio="token"),
    **{
        f"bapo, {measure}, {first} first": variant(
            "bapo", clip={"balanced": {"measure": measure, "first": first, "rho0": rho0, "c_high_min": 1.05}}
        )
        for measure in ("active", "surrogate", "paper")
        for first, rho0 in (("high", 0.45), ("low", 0.6))
    },
    "clip-cov, many tokens": variant(
        "clip-cov", clip={"clip_cov": {"share": 0.1, "cov_low": 0.1, "eps_low": 0.2, "eps_high": 0.2}}
    ),
    "gspo-token + clip-cov": variant("gspo-token", clip={"clip_cov": {"share": 0.05, "cov_low": 0.0}}),
    "kl-cov, many tokens": variant("kl-cov", regularizers=[{"kl_cov": {"share": 0.2}}]),
    "microcoder-grpo, all of the incorrect": variant(
        "microcoder-grpo", advantage={"truncation_dropout": {"rho": 1.0, "criterion": "incorrect"}}
    ),
    "wapo over kept tokens": variant("wapo", aggregate="token_mean"),
    "all answers per prompt": variant("dr-grpo", aggregate={"prompt_constant": {"length": 5}}),
}
