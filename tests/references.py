"""Slow references: plain loops over rows and tokens, written from the papers' formulas and from nothing else.

Every quantity is a number or a scalar tensor in a list of lists; nothing is vectorised and no helper of the
package is used, so that agreement means something. Denominators are counted here, never read from the batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from tests.loops import LOOPS, collected, modules
from trl_variants import TokenBatch, Variant

modules()  # registers the families' loops

Table = list[list[Any]]  # rows x tokens of numbers or scalar tensors


def positions(batch: TokenBatch, i: int) -> list[int]:
    return [t for t in range(batch.mask.shape[1]) if number(batch.mask[i, t]) > 0]


def table(batch: TokenBatch, of: Callable[[int, int], Any]) -> Table:
    rows, width = batch.mask.shape
    return [[of(i, t) if number(batch.mask[i, t]) > 0 else 0.0 for t in range(width)] for i in range(rows)]


def number(x: Any) -> float:
    return float(x.detach()) if isinstance(x, torch.Tensor) else float(x)


def exp(x: Any) -> Any:
    """exp of a log-ratio clamped to +-20, where it has no gradient."""
    x = torch.as_tensor(x, dtype=torch.float64)
    if abs(number(x)) > 20.0:
        return constant(math.exp(math.copysign(20.0, number(x))))
    return torch.exp(x)


def constant(x: float) -> torch.Tensor:
    """A number without gradient."""
    return torch.tensor(x, dtype=torch.float64)


def mean(values: list) -> Any:
    return sum(values) / len(values) if values else 0.0


# ---------------------------------------------------------------- rewards and advantages (numbers)


def combined_rewards(rewards: torch.Tensor, weights: list[float]) -> list[float]:
    out = []
    for row in rewards.tolist():
        given = [w * r for w, r in zip(weights, row, strict=True) if not math.isnan(r)]
        out.append(sum(given) if given else math.nan)
    return out


def std(values: list[float], ddof: int) -> float:
    if len(values) <= ddof:
        return math.nan
    m = sum(values) / len(values)
    return math.sqrt(sum((v - m) ** 2 for v in values) / (len(values) - ddof))


def grouped(
    reward: list[float],
    group: list[int],
    mean_key="group",
    std_key="group",
    ddof=1,
    eps=1e-4,
    singleton="zero",
) -> list[float]:
    out = []
    for i, r in enumerate(reward):
        if math.isnan(r):
            out.append(0.0)
            continue
        mine = [x for x, g in zip(reward, group, strict=True) if g == group[i] and not math.isnan(x)]
        everyone = [x for x in reward if not math.isnan(x)]
        if singleton == "raw" and mean_key == "group" and len(mine) == 1:
            out.append(r)
            continue
        centre = {"group": mean(mine), "batch": mean(everyone), "none": 0.0}[mean_key]
        scale = {"group": std(mine, ddof) + eps, "batch": std(everyone, ddof) + eps, "none": 1.0}[std_key]
        value = (r - centre) / scale
        out.append(0.0 if math.isnan(value) else value)
    return out


def normalize_each(rewards: torch.Tensor, weights: list[float], group: list[int], eps=1e-4, ddof=1) -> list[float]:
    rows, functions = rewards.shape
    total = [0.0] * rows
    for f in range(functions):
        column = rewards[:, f].tolist()
        for i in range(rows):
            mine = [x for x, g in zip(column, group, strict=True) if g == group[i] and not math.isnan(x)]
            value = (column[i] - mean(mine)) / (std(mine, ddof) + eps)
            total[i] += 0.0 if math.isnan(value) else weights[f] * value
    scorable = [any(not math.isnan(x) for x in row) for row in rewards.tolist()]
    everyone = [x for x, s in zip(total, scorable, strict=True) if s]
    return [
        (x - mean(everyone)) / (std(everyone, ddof) + eps) if s else 0.0 for x, s in zip(total, scorable, strict=True)
    ]


def leave_one_out(reward: list[float], group: list[int], normalize=False, eps=1e-4) -> list[float]:
    out, has_baseline = [], []
    for i, r in enumerate(reward):
        others = [
            x
            for j, (x, g) in enumerate(zip(reward, group, strict=True))
            if j != i and g == group[i] and not math.isnan(x)
        ]
        has_baseline.append(bool(others) and not math.isnan(r))
        out.append(r - mean(others) if has_baseline[-1] else 0.0)
    if normalize:
        real = [x for x, b in zip(out, has_baseline, strict=True) if b]
        out = [(x - mean(real)) / (std(real, 1) + eps) if b else 0.0 for x, b in zip(out, has_baseline, strict=True)]
    return out


def token_whitened(
    token_rewards: Table,
    batch: TokenBatch,
    reward: list[float],
    gamma=1.0,
    ddof=0,
    var_floor=1e-8,
    shift_mean=True,
) -> Table:
    """`token_rewards` already holds the (centred) score on the last token and any penalty."""
    rows, width = batch.mask.shape
    returns = [[0.0] * width for _ in range(rows)]
    for i in range(rows):
        running = 0.0
        for t in reversed(positions(batch, i)):
            running = token_rewards[i][t] + gamma * running
            returns[i][t] = running
    flat = [returns[i][t] for i in range(rows) if not math.isnan(reward[i]) for t in positions(batch, i)]
    centre = mean(flat)
    variance = sum((x - centre) ** 2 for x in flat) / max(len(flat) - ddof, 1)
    scale = math.sqrt(max(variance, var_floor))
    out = [[0.0] * width for _ in range(rows)]
    for i in range(rows):
        for t in positions(batch, i):
            if not math.isnan(reward[i]):
                out[i][t] = (returns[i][t] - (centre if shift_mean else 0.0)) / scale
    return out


def last_token_scores(batch: TokenBatch, reward: list[float]) -> Table:
    rows, width = batch.mask.shape
    out = [[0.0] * width for _ in range(rows)]
    for i in range(rows):
        here = positions(batch, i)
        if here and not math.isnan(reward[i]):
            out[i][here[-1]] = reward[i]
    return out


def kl_number(d: float, estimator: str) -> float:
    return {"k1": d, "k2": 0.5 * d * d, "k3": math.exp(-d) - 1 + d}[estimator]


def advantages(variant: Variant, batch: TokenBatch) -> tuple[Table, list[bool]]:
    """(advantage per token, row may enter the loss), through rewards, select and advantage hooks."""
    scored = batch.scored
    weights, group = scored.weights.tolist(), scored.group.tolist()
    reward = combined_rewards(scored.rewards, weights)
    rows, width = batch.mask.shape
    old = (batch.logps if batch.old_logps is None else batch.old_logps).tolist()
    penalty: Table | None = None
    for h in variant.rewards:
        if known := LOOPS.get(("rewards", h.hook_name)):
            reward = known(h, batch, reward)
            continue
        if h.hook_name == "clip_reward":
            reward = [r if math.isnan(r) else min(max(r, h.low), h.high) for r in reward]
            continue
        ref = batch.ref_logps.tolist()
        k = [
            [kl_number(old[i][t] - ref[i][t], h.estimator) if t in positions(batch, i) else 0.0 for t in range(width)]
            for i in range(rows)
        ]
        if h.level == "sequence":
            reward = [r - h.coef * sum(k[i]) for i, r in enumerate(reward)]
        else:
            penalty = [[h.coef * x for x in row] for row in k]
    enters = [True] * rows
    for h in variant.select:
        if known := LOOPS.get(("select", h.hook_name)):
            kept, baseline = known(h, batch, reward)
            enters = [e and k for e, k in zip(enters, kept, strict=True)]
            reward = [r if b else math.nan for r, b in zip(reward, baseline, strict=True)]
            continue
        assert h.hook_name == "mask_truncated"
        enters = [e and not bool(batch.truncated[i]) for i, e in enumerate(enters)]
    h = variant.advantage
    if known := LOOPS.get(("advantage", h.hook_name)):
        takes_variant = "variant_of" in inspect.signature(known).parameters  # it reads token penalties of rewards hooks
        found = known(h, batch, reward, **({"variant_of": variant} if takes_variant else {}))
        return [a if isinstance(a, list) else [a] * width for a in found], enters
    if h.hook_name == "token_whitened":
        centred = [
            r - mean([x for x, g in zip(reward, group, strict=True) if g == group[i] and not math.isnan(x)])
            for i, r in enumerate(reward)
        ]
        score = last_token_scores(batch, centred if h.center == "group" else reward)
        if penalty is not None:
            score = [[s - p for s, p in zip(a, b, strict=True)] for a, b in zip(score, penalty, strict=True)]
        return token_whitened(score, batch, reward, h.gamma, h.ddof, h.var_floor, h.shift_mean), enters
    if h.hook_name == "grouped" and h.mean in scored.columns:  # one column for both mean and std
        assert h.std == h.mean
        found = grouped(reward, scored.columns[h.mean], "group", "group", h.ddof, h.eps, h.singleton)
        return [[a] * width for a in found], enters
    per_row = {
        "grouped": lambda: grouped(reward, group, h.mean, h.std, h.ddof, h.eps, h.singleton),
        "normalize_each": lambda: normalize_each(scored.rewards, weights, group, h.eps, h.ddof),
        "leave_one_out": lambda: leave_one_out(reward, group, h.normalize, h.eps),
    }[h.hook_name]()
    return [[a] * width for a in per_row], enters


def discounted(advantage: Table, batch: TokenBatch, gamma: float) -> Table:
    out = []
    for i, row in enumerate(advantage):
        here = positions(batch, i)
        out.append([a * gamma ** len([s for s in here if s > t]) for t, a in enumerate(row)])
    return out


# ---------------------------------------------------------------- the loss (scalar tensors with gradient)


def anchor(batch: TokenBatch, i: int, t: int, which: str = "old") -> Any:
    if which == "rollout":
        x = batch.rollout_logps[i, t]
        return batch.logps[i, t].detach() if math.isnan(number(x)) else x
    if which == "sampler" and batch.rollout_logps is not None and not math.isnan(number(batch.rollout_logps[i, t])):
        return batch.rollout_logps[i, t]
    return batch.logps[i, t].detach() if batch.old_logps is None else batch.old_logps[i, t]


def log_ratios(h: Any, batch: TokenBatch) -> Table:
    """Per token; a per-row ratio is repeated."""
    if known := LOOPS.get(("ratio", h.hook_name)):
        return known(h, batch)
    if h.hook_name == "on_policy":
        return table(batch, lambda i, t: batch.logps[i, t] - batch.logps[i, t].detach())
    d = table(batch, lambda i, t: batch.logps[i, t] - anchor(batch, i, t, h.anchor))
    if h.hook_name == "token":
        return d
    out = []
    for i, row in enumerate(d):
        here = positions(batch, i)
        total = sum((row[t] for t in here), torch.zeros((), dtype=torch.float64))
        average = total / max(len(here), 1)
        if h.hook_name == "sequence":
            out.append([average] * len(row))
        elif h.hook_name == "product":
            out.append([total] * len(row))
        else:
            assert h.hook_name == "sequence_token"
            out.append([average.detach() + batch.logps[i, t] - batch.logps[i, t].detach() for t in range(len(row))])
    return out


def ppo(h: Any, log_ratio: Any, a: float) -> Any:
    r = exp(log_ratio)
    inside = r
    if number(r) < 1 - h.eps_low:
        inside = constant(1 - h.eps_low)
    if number(r) > 1 + h.eps_high:
        inside = constant(1 + h.eps_high)
    capped = r if h.delta is None or number(r) <= h.delta else constant(h.delta)
    value = capped * a if number(capped * a) <= number(inside * a) else inside * a
    if h.floor is not None and a < 0 and number(value) < h.floor * a:
        value = constant(h.floor * a)
    return value


def objective(h: Any, log_ratio: Table, advantage: Table, batch: TokenBatch, active: list[list[bool]]) -> Table:
    """Per token, to be maximised; a per-row value is repeated."""
    name = h.hook_name
    if known := LOOPS.get(("clip", name)):
        return known(h, log_ratio, advantage, batch, active)
    if name == "ppo":
        return table(batch, lambda i, t: ppo(h, log_ratio[i][t], advantage[i][t]))
    if name == "none":
        return table(batch, lambda i, t: exp(log_ratio[i][t]) * advantage[i][t])
    if name == "cispo":

        def capped(i, t):
            w = min(number(exp(log_ratio[i][t])), h.cap)
            return max(w, h.floor) if h.floor is not None else w

        return table(batch, lambda i, t: capped(i, t) * advantage[i][t] * batch.logps[i, t])
    if name == "sapo":

        def gate(i, t):
            tau = h.tau_pos if advantage[i][t] > 0 else h.tau_neg
            return 4 / tau / (1 + torch.exp(-tau * (exp(log_ratio[i][t]) - 1))) * advantage[i][t]

        return table(batch, gate)
    if name == "gamma_weight":
        rows, width = batch.mask.shape
        log_w = []
        for i in range(rows):
            total = 0.0
            for t in positions(batch, i):
                total += min(max(number(batch.logps[i, t] - anchor(batch, i, t)), -20.0), 20.0)
            if h.sampler and batch.rollout_logps is not None:
                for t in positions(batch, i):
                    w = correction_ratio(batch, i, [t], h.sampler, h.sampler_min, h.sampler_max)
                    total += max(math.log(w), math.log(1e-8)) if w > 0 else math.log(1e-8)
            log_w.append(min(max(total, math.log(1e-8)), 20.0))

        def weighted(i, t):
            k, lam = (h.k_pos, h.lambda_pos) if advantage[i][t] >= 0 else (h.k_neg, h.lambda_neg)
            w = math.exp(log_w[i])
            return w**k * math.exp(lam * (1 - w)) * advantage[i][t] * batch.logps[i, t]

        return table(batch, weighted)
    assert name == "geometric_mean"
    out = []
    for i, row in enumerate(log_ratio):
        here = [t for t in positions(batch, i) if active[i][t]]
        kept, adv = torch.zeros((), dtype=torch.float64), 0.0
        for t in here:
            x = row[t]
            if advantage[i][t] > 0 and number(x) > h.eps_high:
                x = h.eps_high
            if advantage[i][t] <= 0 and number(x) < -h.eps_low:
                x = -h.eps_low
            kept = kept + x
            adv += advantage[i][t]
        value = exp(kept / max(len(here), 1)) * (adv / len(here) if here else advantage[i][0])
        out.append([value] * len(row))
    return out


def correction_ratio(
    batch: TokenBatch, i: int, here: list[int], mode: str, low: float | None, high: float | None
) -> float:
    total = 0.0
    for t in here:
        d = number(anchor(batch, i, t)) - number(batch.rollout_logps[i, t])
        total += 0.0 if math.isnan(d) else d
    if mode.startswith("geometric"):
        total /= max(len(here), 1)
    w = math.exp(total)
    outside = (low is not None and w < low) or (high is not None and w > high)
    if mode.endswith("mask"):
        return 0.0 if outside else w
    w = w if low is None else max(w, low)
    return w if high is None else min(w, high)


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def weight(h: Any, batch: TokenBatch, advantage: Table, log_ratio: Table | None = None) -> Table:
    name = h.hook_name
    if known := LOOPS.get(("weight", name)):
        return known(h, batch, advantage, log_ratio)
    if name == "entropy_quantile":
        threshold = quantile(
            [number(batch.entropy[i, t]) for i in range(len(batch.mask)) for t in positions(batch, i)],
            1 - h.keep,
        )
        return table(batch, lambda i, t: number(number(batch.entropy[i, t]) >= threshold))
    if name == "off_policy_mask":

        def keeps(i, t):
            drift = []
            for s in positions(batch, i):
                sampler = anchor(batch, i, s) if batch.rollout_logps is None else batch.rollout_logps[i, s]
                d = number(sampler) - number(batch.logps[i, s])
                drift.append(0.0 if math.isnan(d) else d)
            return number(advantage[i][t] >= 0 or mean(drift) <= h.threshold)

        return table(batch, keeps)
    assert name == "sampler_correction"
    if batch.rollout_logps is None:
        return table(batch, lambda i, t: 1.0)
    if not h.mode.startswith("token"):
        return table(batch, lambda i, t: correction_ratio(batch, i, positions(batch, i), h.mode, h.min, h.max))
    return table(batch, lambda i, t: correction_ratio(batch, i, [t], h.mode, h.min, h.max))


def aggregate(h: Any, x: Table, batch: TokenBatch, counted: list[list[bool]] | None = None) -> Any:
    """`counted`: tokens that enter, a part of the mask."""
    rows, width = batch.mask.shape
    counted = counted or [[t in positions(batch, i) for t in range(width)] for i in range(rows)]
    zero = torch.zeros((), dtype=torch.float64)
    here = [[t for t in range(width) if counted[i][t]] for i in range(rows)]
    sums = [sum((x[i][t] for t in here[i]), zero) for i in range(rows)]
    tokens = sum(len(ts) for ts in here)
    name = h.hook_name
    if known := LOOPS.get(("aggregate", name)):
        return known(h, x, batch, counted)
    if name == "token_mean":
        return sum(sums, zero) / max(tokens, 1)
    if name == "sequence_mean":
        count = rows if h.rows == "all" else len([ts for ts in here if ts])
        return sum((s / max(len(ts), 1) for s, ts in zip(sums, here, strict=True)), zero) / max(count, 1)
    if name == "sequence_sum":
        return sum(sums, zero) / rows
    if name == "constant":
        return sum(sums, zero) / (rows * (h.length or batch.run.max_completion_length))
    assert name == "prompt_mean"
    labels = batch.group.tolist()
    size: dict[int, int] = {}
    for i, label in enumerate(labels):
        size[label] = size.get(label, 0) + len(here[i])
    live = len([n for n in size.values() if n])
    return sum((s / max(size[label], 1) for s, label in zip(sums, labels, strict=True)), zero) / max(live, 1)


class TokenMeanLike:
    hook_name = "token_mean"


def regularizer(
    h: Any, variant: Variant, batch: TokenBatch, log_ratio: Table, active: list[list[bool]], state: Any = None
) -> Any:
    """The term as it stands in the loss, coefficient included."""
    name = h.hook_name
    if known := LOOPS.get(("regularizers", name)):
        return known(h, variant, batch, log_ratio, active, state)
    if name == "kl":

        def term(i, t):
            d = batch.logps[i, t] - batch.ref_logps[i, t]
            if h.estimator == "exact":
                return batch.divergences["rkl/ref"][i, t]
            k = {"k1": d, "k2": d * d / 2, "k3": exp(-d) - 1 + d}[h.estimator]
            r = exp(log_ratio[i][t])
            return k * {"none": 1.0, "live": r, "detached": number(r)}[h.weight]

        return h.coef * aggregate(TokenMeanLike if h.own_token_mean else variant.aggregate, table(batch, term), batch)
    if name in ("entropy_bonus", "adaptive_entropy"):
        coef = h.coef
        if name == "adaptive_entropy":
            state = state or {"coef": h.coef, "last_entropy": math.inf}
            coef = state["coef"] if state["last_entropy"] <= h.target else 0.0
        return -coef * aggregate(TokenMeanLike, table(batch, lambda i, t: batch.entropy[i, t]), batch, active)
    assert name == "nll"
    right = [
        [bool(batch.correct[i]) and t in positions(batch, i) for t in range(batch.mask.shape[1])]
        for i in range(len(batch.mask))
    ]
    return -h.coef * aggregate(TokenMeanLike, table(batch, lambda i, t: batch.logps[i, t]), batch, right)


def loss(variant: Variant, batch: TokenBatch, states: dict[str, Any] | None = None, given: Table | None = None) -> Any:
    """The loss of a whole window by loops, from its rewards or from `given` advantages."""
    advantage, enters = advantages(variant, batch) if given is None else (given, [True] * len(given))
    keep = torch.tensor(enters, dtype=batch.mask.dtype).unsqueeze(1)
    batch = TokenBatch(**{**vars(batch), "mask": batch.mask * keep, "active": None})
    rows, width = batch.mask.shape
    for h in variant.credit:
        known = LOOPS.get(("credit", h.hook_name))
        advantage = known(h, advantage, batch) if known else discounted(advantage, batch, h.gamma)
    active = [[t in positions(batch, i) for t in range(width)] for i in range(rows)]
    ratio = log_ratios(variant.ratio, batch)
    weights = [weight(h, batch, advantage, ratio) for h in variant.weight]
    if batch.origin is not None:  # what another policy wrote has not drifted
        theirs = [[int(o) in (1, 2) for o in row] for row in batch.origin.tolist()]
        weights = [
            [[1.0 if theirs[i][t] and h.drift else x for t, x in enumerate(row)] for i, row in enumerate(w)]
            for h, w in zip(variant.weight, weights, strict=True)
        ]
    for h, w in zip(variant.weight, weights, strict=True):
        if h.selects:
            active = [[a and w[i][t] > 0 for t, a in enumerate(row)] for i, row in enumerate(active)]
    x = objective(variant.clip, ratio, advantage, batch, active)
    bound = getattr(variant.clip, "inner", variant.clip)
    for h, w in zip(variant.weight, weights, strict=True):
        if not (h.selects and bound.hook_name in {"geometric_mean", *collected("OVER_TOKENS")}):
            x = [[v * w[i][t] for t, v in enumerate(row)] for i, row in enumerate(x)]
    counted = [[t in positions(batch, i) for t in range(width)] for i in range(rows)]
    for h, w in zip(variant.weight, weights, strict=True):
        if h.in_denominator:
            counted = [[c and w[i][t] != 0 for t, c in enumerate(row)] for i, row in enumerate(counted)]
    total = -aggregate(variant.aggregate, x, batch, counted)
    for i, h in enumerate(variant.regularizers):
        total = total + regularizer(h, variant, batch, ratio, active, (states or {}).get(f"regularizers.{i}"))
    if bound := LOOPS.get(("bound", variant.aggregate.hook_name)):
        return bound(variant.aggregate, total)
    return total
