"""Loops of the advantages that scale by difficulty, tokens, history or risk."""

from __future__ import annotations

import hashlib
import math

from tests.loops import loop
from trl_variants import variant

COMPOSED = {
    "f-grpo on centred rewards": variant("grpo", advantage={"focal": {"gamma": 1.0, "std": "none"}}),
    "a-grae, alpha below om": variant("dapo", advantage={"asymmetric": {"alpha": 0.4, "ddof": 0}}),
    "durian, two bins, mean length": variant(
        "grpo", advantage={"difficulty_shared_std": {"bins": 2, "length": "mean", "w_own": 0.3, "w_shared": 0.7}}
    ),
    "durian, a bin a prompt": variant("grpo", advantage={"difficulty_shared_std": {"bins": 9, "min_prompts": 1}}),
    "diva without batch z": variant("grpo", advantage={"local_global": {"batch_z": False, "low_reward": 0.8}}),
    "task-whitened, unbiased": variant("dapo", advantage={"task_whitened": {"ddof_task": 1, "std": "none"}}),
    "rcc, sums": variant("dapo", advantage={"reward_confidence": {"length": "sum", "bound": 0.3, "ddof": 1}}),
    "tight clamp": variant("grpo", advantage={"clamped": {"limit": 0.4}}),
    "constrained, one cost function": variant(
        "dapo", advantage={"constrained": {"costs": "functions", "limits": [0.3], "reward_weight": 2.0}}
    ),
    "history of everything": variant("grpo", advantage={"history_norm": {"key": "batch", "warmup_groups": 1.0}}),
    "risk, std": variant("dapo", advantage={"mixed_risk": {"bundle": 2, "share": "std", "natural_baseline": True}}),
    "risk, uniform": variant("dapo", advantage={"mixed_risk": {"bundle": 3, "share": "uniform", "high": 0.9}}),
}


def text_number(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)


ABSOLUTE = {
    "history_norm": "compares with the rewards of earlier generations",
    "mixed_risk": "compares with quantiles of earlier generations",
    "constrained": "costs may differ where the reward does not",
}
BY_POSITION = {"mixed_risk": "the k-th answers of a bundle's questions are paired"}
# one label has a long history, the other is still warming up (8 rewards are two groups of at most four)
STATES = {
    "history_norm": {
        str(text_number("task 0")): [9.0, 0.6, 1.7],
        str(text_number("task 1")): [7.0, 0.2, 0.4],
        "batch": [5.0, 0.4, 0.3],
    },
    "constrained": {"lambda": [0.7]},
    "mixed_risk": {"quantiles": [0.2 * k for k in range(19)]},
}


def scorable(reward: list[float]) -> list[int]:
    return [i for i, r in enumerate(reward) if not math.isnan(r)]


def mean(x: list[float]) -> float:
    return sum(x) / len(x) if x else 0.0


def std(x: list[float], ddof: int) -> float:
    """NaN where it is not defined."""
    if len(x) <= ddof:
        return math.nan
    m = mean(x)
    return math.sqrt(sum((v - m) ** 2 for v in x) / (len(x) - ddof))


def z(i: int, x: list[float], rows: list[int], ddof: int, eps: float) -> float:
    """z-score of x_i among x of `rows`; 0 where there is no spread to speak of."""
    values = [x[j] for j in rows]
    value = (x[i] - mean(values)) / (std(values, ddof) + eps)
    return 0.0 if math.isnan(value) else value


def group_rows(batch, reward: list[float], i: int) -> list[int]:
    group = batch.scored.group.tolist()
    return [j for j in scorable(reward) if group[j] == group[i]]


def group_advantage(h, batch, reward: list[float]) -> list[float]:
    """The grouped advantage that a subclass starts from: mean and std over the group."""
    assert h.mean == "group" and h.std in ("group", "batch", "none") and h.singleton == "zero"
    out = [0.0] * len(reward)
    for i in scorable(reward):
        mine = group_rows(batch, reward, i)
        value = reward[i] - mean([reward[j] for j in mine])
        over = mine if h.std == "group" else scorable(reward)
        if h.std != "none":
            value = value / (std([reward[j] for j in over], h.ddof) + h.eps)
        out[i] = 0.0 if math.isnan(value) else value
    return out


def right_share(batch, rows: list[int]) -> float:
    correct = batch.scored.correct.tolist()
    return mean([float(correct[j]) for j in rows])


def token_count(batch, i: int) -> int:
    return int(batch.scored.tokens["mask"][i].sum())


@loop("advantage", "focal")
def focal(h, batch, reward):
    a = group_advantage(h, batch, reward)
    return [x and x * (1 - right_share(batch, group_rows(batch, reward, i))) ** h.gamma for i, x in enumerate(a)]


@loop("advantage", "asymmetric")
def asymmetric(h, batch, reward):
    a, om, out = group_advantage(h, batch, reward), right_share(batch, scorable(reward)), []
    for i, x in enumerate(a):
        p = right_share(batch, group_rows(batch, reward, i))
        if x == 0 or p in (0.0, 1.0):
            out.append(0.0)
            continue
        x = x * (om / 2 / math.sqrt(p) + (1 - om) / 2 / math.sqrt(1 - p))
        out.append(x * min(1.0, om / h.alpha) if x > 0 else x)
    return out


@loop("advantage", "difficulty_shared_std")
def difficulty_shared_std(h, batch, reward):
    from tests.references import quantile

    mask, old = batch.scored.tokens["mask"].tolist(), batch.scored.tokens["old_logps"].tolist()
    group = batch.scored.group.tolist()
    prompts: dict[int, list[float]] = {}
    for i in scorable(reward):
        lps = [lp for lp, m in zip(old[i], mask[i], strict=True) if m > 0]
        prompts.setdefault(group[i], []).append(mean(lps) if h.length == "mean" else sum(lps))
    level = {g: mean(v) for g, v in prompts.items()}
    bins = max(1, min(h.bins, len(level) // h.min_prompts))
    borders = [quantile(list(level.values()), k / bins) for k in range(1, bins)]
    bin_of = {g: len([b for b in borders if x > b]) for g, x in level.items()}
    out = [0.0] * len(reward)
    for i in scorable(reward):
        mine = [reward[j] for j in group_rows(batch, reward, i)]
        alike = [reward[j] for j in scorable(reward) if bin_of[group[j]] == bin_of[group[i]]]
        for w, values in ((h.w_own, mine), (h.w_shared, alike)):
            part = (reward[i] - mean(mine)) / (std(values, h.ddof) + h.eps)
            out[i] += 0.0 if math.isnan(part) else w * part
    return out


@loop("advantage", "local_global")
def local_global(h, batch, reward):
    columns, rows = batch.scored.columns, scorable(reward)
    of_problem = lambda i: [j for j in rows if columns[h.problem][j] == columns[h.problem][i]]  # noqa: E731
    local, whole = [0.0] * len(reward), [0.0] * len(reward)
    for i in rows:
        local[i] = z(i, reward, group_rows(batch, reward, i), 1, h.eps)
        whole[i] = z(i, reward, of_problem(i), 1, h.eps)
    if h.batch_z:
        local = [z(i, local, rows, 1, h.eps) if i in rows else 0.0 for i in range(len(reward))]
        whole = [z(i, whole, rows, 1, h.eps) if i in rows else 0.0 for i in range(len(reward))]
    out = [0.0] * len(reward)
    for i in rows:
        level = columns[h.difficulty]
        harder = level[i] - mean([level[j] for j in of_problem(i)])
        sign = (whole[i] > 0) - (whole[i] < 0)
        damp = lambda js: h.low_scale if all(reward[j] < h.low_reward for j in js) else 1.0  # noqa: E731
        out[i] = damp(group_rows(batch, reward, i)) * local[i]
        out[i] += damp(of_problem(i)) * math.exp(h.k * harder * sign) * whole[i]
    return out


@loop("advantage", "clamped")
def clamped(h, batch, reward):
    return [min(max(x, -h.limit), h.limit) for x in group_advantage(h, batch, reward)]


@loop("advantage", "task_whitened")
def task_whitened(h, batch, reward):
    a, task = group_advantage(h, batch, reward), batch.scored.columns[h.task]
    out = [0.0] * len(reward)
    for i in scorable(reward):
        tokens = [a[j] for j in scorable(reward) if task[j] == task[i] for _ in range(token_count(batch, j))]
        spread = std(tokens, h.ddof_task)
        if not math.isnan(spread) and spread > 1e-12:
            out[i] = (a[i] - mean(tokens)) / (spread + h.eps_task)
    return out


@loop("advantage", "length_weighted_leave_one_out")
def length_weighted_leave_one_out(h, batch, reward):
    out = [0.0] * len(reward)
    for i in scorable(reward):
        others = [(token_count(batch, j), reward[j]) for j in group_rows(batch, reward, i) if j != i]
        total = sum(w for w, _ in others)
        if total > 0:
            out[i] = reward[i] - sum(w * r for w, r in others) / total
    return out


@loop("advantage", "reward_confidence")
def reward_confidence(h, batch, reward):
    tokens = batch.scored.tokens
    gap = []
    for i in range(len(reward)):
        d = [
            float(tokens["old_logps"][i, t] - tokens["ref_logps"][i, t])
            for t in range(tokens["mask"].shape[1])
            if tokens["mask"][i, t] > 0
        ]
        gap.append(min(max(mean(d) if h.length == "mean" else sum(d), -h.bound), h.bound))
    out = [0.0] * len(reward)
    for i in scorable(reward):
        mine = group_rows(batch, reward, i)
        r, d = [reward[j] for j in mine], [gap[j] for j in mine]
        covariance = mean([(x - mean(r)) * (y - mean(d)) for x, y in zip(r, d, strict=True)])
        value = (reward[i] - (mean(r) + 2 * covariance)) / (std(r, h.ddof) + h.eps)
        out[i] = 0.0 if math.isnan(value) else value
    return out


@loop("advantage", "history_norm")
def history_norm(h, batch, reward):
    size = max(batch.scored.group.tolist().count(g) for g in batch.scored.group.tolist())
    out = [0.0] * len(reward)
    for i in scorable(reward):
        label = "batch" if h.key == "batch" else str(text_number(batch.scored.columns[h.key][i]))
        count, m, squares = STATES["history_norm"].get(label, (0, 0, 0))
        if count >= h.warmup_groups * size:
            out[i] = (reward[i] - m) / (math.sqrt(squares / (count - h.ddof)) + h.eps)
        else:
            out[i] = z(i, reward, group_rows(batch, reward, i), h.ddof, h.eps)
    return out


@loop("advantage", "constrained")
def constrained(h, batch, reward):
    scored = batch.scored
    if h.costs == "truncated":
        costs = [float(x) for x in scored.truncated.tolist()]
        gain = list(reward)
    else:
        costs = scored.rewards[:, -1].tolist()
        gain = [
            math.nan if math.isnan(r) else float(scored.weights[0]) * x
            for r, (x, _) in zip(reward, scored.rewards.tolist(), strict=True)
        ]
    out = [0.0] * len(reward)
    [multiplier] = STATES["constrained"]["lambda"]
    for i in scorable(reward):
        mine = group_rows(batch, reward, i)
        if not math.isnan(gain[i]):
            out[i] += h.reward_weight * z(i, gain, [j for j in mine if not math.isnan(gain[j])], h.ddof, h.eps)
        if not math.isnan(costs[i]):
            out[i] -= multiplier * z(i, costs, [j for j in mine if not math.isnan(costs[j])], h.ddof, h.eps)
    return out


@loop("advantage", "mixed_risk")
def mixed_risk(h, batch, reward):
    q = STATES["mixed_risk"]["quantiles"]
    qa, qb = q[round(h.low / 0.05) - 1], q[round(h.high / 0.05) - 1]
    group = batch.scored.group.tolist()
    questions = sorted({group[i] for i in scorable(reward)})
    out = [0.0] * len(reward)
    for start in range(0, len(questions), h.bundle):
        members = [[i for i in scorable(reward) if group[i] == g] for g in questions[start : start + h.bundle]]
        means = [mean([reward[i] for i in rows]) for rows in members]
        width = max(len(rows) for rows in members)
        at = lambda rows, m, k: reward[rows[k]] if k < len(rows) else m  # noqa: E731
        scores = [sum(at(r, m, k) for r, m in zip(members, means, strict=True)) for k in range(width)]
        spread = std(scores, 1)
        spread = 1.0 if math.isnan(spread) else spread
        for k, s in enumerate(scores):
            rv = (max(s - qa, 0) - max(s - qb, 0) + (qa - qb if h.natural_baseline else 0)) / (h.high - h.low + 1e-6)
            cv = -max(qa - s, 0) / (h.low + 1e-6)
            value = (h.w * cv + rv) / (h.w + 1) / (spread + 1e-6)
            total = sum(at(r, m, k) - m for r, m in zip(members, means, strict=True))
            for rows, m in zip(members, means, strict=True):
                if k >= len(rows):
                    continue
                i = rows[k]
                if h.share == "uniform":
                    out[i] = value
                elif h.share == "std":
                    own = std([reward[j] for j in rows], 1)
                    out[i] = value / ((own if own >= 1e-3 else 1.0) + 1e-6)
                else:
                    out[i] = value * (reward[i] - m) / total if abs(total) > 1e-6 else value / len(members)
    return out
