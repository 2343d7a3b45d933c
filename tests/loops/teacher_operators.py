"""Loops for a teacher in the ratio, the clip, the reward and the advantage."""

from __future__ import annotations

import math
from typing import Any

from tests import references
from tests.loops import loop
from trl_variants import TokenBatch, variant

ABSOLUTE = {
    "self_conditioned": "a group without a right answer is rewarded for what moves it",
    "teacher_baselined": "a teacher's word beside the reward",
}
NOT_ONE = {"teacher_mixture": "the teacher has a part in the denominator"}
COMPOSED = {
    "rlad, clamped, on gspo's clip": variant("rlad", ratio={"teacher_mixture": {"alpha": 0.3, "clamp": 0.4}}),
    "rlad, mostly old": variant("rlad", ratio={"teacher_mixture": {"alpha": 0.9}}, aggregate="token_mean"),
    "shaped on ppo": variant("dapo", clip={"origin_shaped": {"inner": {"ppo": {"eps_high": 0.28}}}}),
    "shaped against what is known": variant(
        "dr-grpo", clip={"origin_shaped": {"gamma": 0.3, "behaviour": "known", "inner": "sapo"}}
    ),
    "truncated on a sequence ratio": variant(
        "gspo", clip={"origin_shaped": {"form": "truncated", "cap": 0.4, "inner": {"ppo": {"eps_low": 3e-4}}}}
    ),
    "sequence on gmpo with selected tokens": variant(
        "gmpo",
        clip={"origin_shaped": {"form": "sequence", "behaviour": "known", "inner": "geometric_mean"}},
        weight=[{"entropy_quantile": {"keep": 0.6}}],
    ),
    "product on a mixture": variant("rlad", clip={"origin_shaped": {"form": "product", "inner": "ppo"}}),
    "opd, bounded and discounted": variant(
        "opd-sampled-token",
        credit=[{"teacher_advantage": {"discount": 0.5, "low": -0.4, "high": 0.3, "coef": 2.0, "of": "current"}}],
        clip="ppo",
    ),
    "rlsd, constant": variant("rlsd", credit=[{"teacher_magnitude": {"lam": 1.0, "eps": 0.4, "decay_steps": None}}]),
    "prefix weight on an interpolation": variant(
        "tb-direct-interpolation", credit=[{"teacher_interpolation": {"a": 0.6}}, {"prefix_weight": {"g": 2.0}}]
    ),
    "reopold, refinement": variant("reopold", weight=[{"teacher_phases": {"keep": 0.4, "switch": 0.0}}]),
    "reopold, a floor that binds": variant(
        "reopold",
        credit=[{"relaxed_teacher": {"lam": 0.95}}],
        weight=[{"teacher_phases": {"lam": 0.9, "switch": 1.0}}],
    ),
    "mopd, narrow band": variant("mopd", clip={"reinforce": {"low": 0.9, "high": 1.1}}),
    "sc-grpo, median": variant("sc-grpo", advantage={"self_conditioned": {"percentile": 50.0, "diversity": 0.5}}),
    "gap 2, exact": variant(
        "gap2-tb-teacher-group-baseline", advantage={"teacher_baselined": {"baseline": "exact", "discount": 0.5}}
    ),
    "gap 2, rows": variant(
        "gap2-tb-teacher-group-baseline",
        advantage={"teacher_baselined": {"baseline": "row", "match_scale": False, "a": 0.5}},
    ),
    "gap 2, divided, bounded": variant(
        "gap2-tb-teacher-group-baseline",
        advantage={"teacher_baselined": {"divide": True, "bound": 0.3, "match_scale": False}},
    ),
    "gap 2, no baseline": variant(
        "gap2-tb-teacher-group-baseline", advantage={"teacher_baselined": {"baseline": "none"}}
    ),
    "codistill, summed": variant("codistill-grpo", rewards=[{"teacher_reward": {"reduce": "sum", "alpha": 0.3}}]),
    "structure bonus, hard to earn": variant(
        "exgrpo-explanatory", rewards=[{"structure_bonus": {"nu": 1.5, "delta": 0.3}}]
    ),
}

Table = list[list[Any]]


def says(batch: TokenBatch, i: int, t: int) -> bool:
    return t in references.positions(batch, i) and (batch.teacher_mask is None or float(batch.teacher_mask[i, t]) > 0)


def rt(batch: TokenBatch, i: int, t: int, of: str = "old") -> float:
    if not says(batch, i, t):
        return 0.0
    own = references.anchor(batch, i, t) if of == "old" else batch.logps[i, t]
    return references.number(batch.teacher_logps[i, t]) - references.number(own)


def groups(batch: TokenBatch, reward: list[float]) -> list[list[int]]:
    """Rows with a reward, by group."""
    by_label: dict[int, list[int]] = {}
    for i, label in enumerate(batch.scored.group.tolist()):
        if not math.isnan(reward[i]):
            by_label.setdefault(label, []).append(i)
    return list(by_label.values())


# ---------------------------------------------------------------- ratio and clip


@loop("ratio", "teacher_mixture")
def teacher_mixture(h: Any, batch: TokenBatch) -> Table:
    def mixed(i, t):
        own = batch.logps[i, t] - references.anchor(batch, i, t)
        if not says(batch, i, t):
            return own
        gap = batch.logps[i, t] - batch.teacher_logps[i, t]
        if h.clamp is not None and abs(references.number(gap)) > h.clamp:
            gap = references.constant(math.copysign(h.clamp, references.number(gap)))
        return h.alpha * own + (1 - h.alpha) * gap

    return references.table(batch, mixed)


@loop("clip", "origin_shaped")
def origin_shaped(h: Any, log_ratio: Table, advantage: Table, batch: TokenBatch, active: list) -> Table:
    own = references.objective(h.inner, log_ratio, advantage, batch, active)
    if batch.origin is None:
        return own

    def log_u(i, t):
        known = h.behaviour == "known" and batch.rollout_logps is not None
        below = references.number(batch.rollout_logps[i, t]) if known else math.nan
        return batch.logps[i, t] - (0.0 if math.isnan(below) else below)

    out = [list(row) for row in own]
    reduces = h.inner.hook_name in {"geometric_mean", *references.collected("OVER_TOKENS")}
    for i in range(len(out)):
        theirs = [t for t in references.positions(batch, i) if int(batch.origin[i, t]) == 1]
        for t in theirs:
            if h.form == "shaped":
                u = references.exp(log_u(i, t))
                factor = u / (u + h.gamma)
            elif h.form == "truncated":
                factor = min(references.number(references.exp(log_u(i, t))), h.cap) * batch.logps[i, t]
            else:
                total = sum(log_u(i, s) for s in theirs)
                factor = references.exp(total / len(theirs) if h.form == "sequence" else total)
            out[i][t] = factor * advantage[i][t] * (active[i][t] if reduces else 1.0)
    return out


@loop("clip", "reinforce")
def reinforce(h: Any, log_ratio: Table, advantage: Table, batch: TokenBatch, active: list) -> Table:
    def term(i, t):
        r = references.number(references.exp(log_ratio[i][t]))
        outside = (h.low is not None and r < h.low) or (h.high is not None and r > h.high)
        return 0.0 * batch.logps[i, t] if outside else r * advantage[i][t] * batch.logps[i, t]

    return references.table(batch, term)


# ---------------------------------------------------------------- credit


@loop("credit", "teacher_advantage")
def teacher_advantage(h: Any, advantage: Table, batch: TokenBatch) -> Table:
    def signal(i, t):
        x = rt(batch, i, t, h.of)
        x = x if h.low is None else max(x, h.low)
        return x if h.high is None else min(x, h.high)

    def total(i, t):
        here = references.positions(batch, i)
        later = [s for s in here if s >= t]
        return h.keep * advantage[i][t] + h.coef * sum(h.discount**k * signal(i, s) for k, s in enumerate(later))

    return references.table(batch, total)


@loop("credit", "teacher_interpolation")
def teacher_interpolation(h: Any, advantage: Table, batch: TokenBatch) -> Table:
    return references.table(batch, lambda i, t: (1 - h.a) * advantage[i][t] + h.a * rt(batch, i, t))


@loop("credit", "teacher_until")
def teacher_until(h: Any, advantage: Table, batch: TokenBatch) -> Table:
    return references.table(batch, lambda i, t: rt(batch, i, t) if batch.step + 1 <= h.steps else advantage[i][t])


@loop("credit", "teacher_on_wrong")
def teacher_on_wrong(h: Any, advantage: Table, batch: TokenBatch) -> Table:
    return references.table(batch, lambda i, t: advantage[i][t] if batch.correct[i] else rt(batch, i, t))


@loop("credit", "teacher_extrapolation")
def teacher_extrapolation(h: Any, advantage: Table, batch: TokenBatch) -> Table:
    def total(i, t):
        if not says(batch, i, t):
            return advantage[i][t]
        old = references.number(references.anchor(batch, i, t))
        base, theirs = references.number(batch.ref_logps[i, t]), references.number(batch.teacher_logps[i, t])
        return advantage[i][t] + h.lam * (theirs - base) - (old - base)

    return references.table(batch, total)


@loop("credit", "teacher_magnitude")
def teacher_magnitude(h: Any, advantage: Table, batch: TokenBatch) -> Table:
    share = h.lam if h.decay_steps is None else h.lam * max(0.0, 1 - batch.step / h.decay_steps)

    def total(i, t):
        a = advantage[i][t]
        w = math.exp(min(max(((a > 0) - (a < 0)) * rt(batch, i, t), -600.0), 600.0))
        return a * (1 - share + share * min(max(w, 1 - h.eps), 1 + h.eps))

    return references.table(batch, total)


@loop("credit", "prefix_weight")
def prefix_weight(h: Any, advantage: Table, batch: TokenBatch) -> Table:
    def total(i, t):
        apart = {s: abs(rt(batch, i, s)) for s in references.positions(batch, i)}
        before = sum(x for s, x in apart.items() if s < t)
        return advantage[i][t] * (1 + h.g * (1 - before / (sum(apart.values()) + h.eps)))

    return references.table(batch, total)


@loop("credit", "relaxed_teacher")
def relaxed_teacher(h: Any, advantage: Table, batch: TokenBatch) -> Table:
    floor = math.log(h.lam) / (1 - h.lam)
    return references.table(batch, lambda i, t: advantage[i][t] + max(rt(batch, i, t, "current"), floor))


@loop("weight", "teacher_phases")
def teacher_phases(h: Any, batch: TokenBatch, advantage: Table, log_ratio: Table) -> Table:
    told = [(i, t) for i in range(len(batch.mask)) for t in references.positions(batch, i) if says(batch, i, t)]
    if batch.progress < h.switch:
        floor = math.log(h.lam) / (1 - h.lam)
        kept = {(i, t) for i, t in told if rt(batch, i, t, "current") >= floor}
    else:
        entropy = {(i, t): references.number(batch.entropy[i, t]) for i, t in told}
        cut = references.quantile(list(entropy.values()), 1 - h.keep) if entropy else 0.0
        kept = {place for place, x in entropy.items() if x >= cut}
    return references.table(batch, lambda i, t: float((i, t) in kept))


# ---------------------------------------------------------------- rewards and advantages


@loop("rewards", "teacher_reward")
def teacher_reward(h: Any, batch: TokenBatch, reward: list[float]) -> list[float]:
    out = []
    for i, r in enumerate(reward):
        told = [rt(batch, i, t) for t in references.positions(batch, i) if says(batch, i, t)]
        out.append(r + h.alpha * (references.mean(told) if h.reduce == "mean" else sum(told)))
    return out


@loop("rewards", "structure_bonus")
def structure_bonus(h: Any, batch: TokenBatch, reward: list[float]) -> list[float]:
    question, probes = batch.scored.columns[h.question], batch.scored.columns[h.probes]
    out = list(reward)
    for label in set(question):
        rows = [i for i, q in enumerate(question) if q == label and not math.isnan(reward[i])]
        most = max((probes[i] for i in rows), default=0)
        full, part = [i for i in rows if probes[i] == most], [i for i in rows if probes[i] < most]
        right = [float(batch.scored.correct[i]) for i in range(len(reward))]
        if part and references.mean([right[i] for i in full]) > h.nu * references.mean([right[i] for i in part]):
            for i in full:
                out[i] += h.delta * right[i]
    return out


def host(h: Any, batch: TokenBatch, reward: list[float]) -> list[float]:
    return references.grouped(reward, batch.scored.group.tolist(), h.mean, h.std, h.ddof, h.eps, h.singleton)


@loop("advantage", "self_conditioned")
def self_conditioned(h: Any, batch: TokenBatch, reward: list[float]) -> Table:
    base, width = host(h, batch, reward), batch.mask.shape[1]
    shift = batch.divergences["fkl/teacher"].detach()
    out = [[a if t in references.positions(batch, i) else 0.0 for t in range(width)] for i, a in enumerate(base)]
    routes, pool = [], []
    for members in groups(batch, reward):
        right = len([i for i in members if bool(batch.scored.correct[i])])
        if right == 0 or 2 <= right < len(members):
            told = {i: [t for t in range(width) if says(batch, i, t)] for i in members}
            routes.append((right, told))
            pool += [float(shift[i, t]) for i, ts in told.items() for t in ts]
    c = max(references.quantile(pool, h.percentile / 100), h.floor) if pool else h.floor
    f = lambda i, t: float(shift[i, t]) / (float(shift[i, t]) + c)  # noqa: E731
    for right, told in routes:
        if right:
            for i, ts in told.items():
                for t in ts:
                    out[i][t] = f(i, t) * base[i]
            continue
        s = {i: references.mean([f(i, t) for t in ts]) for i, ts in told.items() if ts}
        spread = references.std(list(s.values()), 1) if len(s) > 1 else math.nan
        for i in told:
            value = h.diversity * (s[i] - references.mean(list(s.values()))) / (spread + h.eps_s) if i in s else 0.0
            value = 0.0 if math.isnan(value) else value
            out[i] = [value if t in references.positions(batch, i) else 0.0 for t in range(width)]
    return out


@loop("advantage", "teacher_baselined")
def teacher_baselined(h: Any, batch: TokenBatch, reward: list[float]) -> Table:
    base, width = host(h, batch, reward), batch.mask.shape[1]
    signal: dict[tuple[int, int], float] = {}
    for members in groups(batch, reward):
        told = [(i, t) for i in members for t in range(width) if says(batch, i, t)]
        gap = {p: rt(batch, *p) for p in told}
        if h.bound is not None:
            gap = {p: min(max(x, -h.bound), h.bound) for p, x in gap.items()}
        if h.baseline == "exact":
            gap = {(i, t): x + references.number(batch.divergences["rkl/teacher"][i, t]) for (i, t), x in gap.items()}
        elif h.baseline == "row":
            rows = {i: references.mean([x for (j, _), x in gap.items() if j == i]) for i, _ in told}
            gap = {(i, t): rows[i] - references.mean(list(rows.values())) for i, t in told}
        elif h.baseline == "group" and gap:
            centre = references.mean(list(gap.values()))
            scale = references.std(list(gap.values()), 0) + h.eps_teacher if h.divide else 1.0
            gap = {p: (x - centre) / scale for p, x in gap.items()}
        signal |= gap
    togo = {}
    for i in range(len(base)):
        running = 0.0
        for t in reversed(references.positions(batch, i)):
            running = signal.get((i, t), 0.0) + h.discount * running
            togo[i, t] = running
    factor = 1.0
    if h.match_scale and signal:
        factor = references.std([base[i] for i, _ in signal], 0) / (
            references.std([togo[p] for p in signal], 0) + h.eps_teacher
        )
    return [
        [
            (1 - h.a) * base[i] + h.a * factor * togo[i, t] if t in references.positions(batch, i) else 0.0
            for t in range(width)
        ]
        for i in range(len(base))
    ]
