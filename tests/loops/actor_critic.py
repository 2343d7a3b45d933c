"""Loops of GAE, of what PPO does to rewards before it, and of the value loss."""

from __future__ import annotations

import math

from tests.loops import loop
from trl_variants import variant


def number(x):
    return float(x.detach()) if hasattr(x, "detach") else float(x)


def positions(batch, i):
    return [t for t in range(batch.mask.shape[1]) if number(batch.mask[i, t]) > 0]


def penalty(h, batch, i, t):
    """k1, k2 or k3 of the sampled token, times the coefficient of the hook, fixed or held."""
    old = batch.logps if batch.old_logps is None else batch.old_logps
    d = number(old[i, t]) - number(batch.ref_logps[i, t])
    coef = h.coef if h.hook_name == "kl_in_reward" else STATES["adaptive_kl_in_reward"]["coef"]
    return coef * {"k1": d, "k2": 0.5 * d * d, "k3": math.exp(min(max(-d, -20.0), 20.0)) - 1 + d}[h.estimator]


COMPOSED = {
    "gae, bare": variant("ppo", advantage={"gae": {"gamma": 0.9, "lam": 0.7, "whiten": False}}),
    "gae, population std, whitened rewards": variant("ppo", advantage={"gae": {"ddof": 0, "whiten_rewards": True}}),
    "gae of TRL 1.12": variant(
        "rlhf-ppo",
        advantage={"gae": {"bootstrap": False, "score_after_end": True, "whiten_rewards": True}},
        rewards=[{"missing_eos_penalty": {"penalty": 0.6}}, {"kl_in_reward": {"level": "token", "estimator": "k3"}}],
    ),
    "gae after a penalty on token rewards": variant(
        "rlhf-ppo", rewards=[{"kl_in_reward": {"level": "token"}}, {"missing_eos_penalty": {"penalty": 0.6}}]
    ),
    "gae under a held KL": variant("rlhf-ppo", rewards=[{"adaptive_kl_in_reward": {"level": "token", "target": 0.5}}]),
    "gae, adaptive lambda, bootstrapped": variant("vapo", advantage={"gae": {"length_alpha": 0.4}}),
    "leave-one-out under a held KL": variant("rloo", rewards=[{"adaptive_kl_in_reward": {"target": 0.5}}]),
}
COMPOSED |= {
    "remax, to go": variant("remax", advantage={"greedy_baseline": {"form": "to_go", "gamma": 0.9, "limit": 0.6}}),
    "remax, discounted, no KL": variant("remax", advantage={"greedy_baseline": {"gamma": 0.8, "beta": 0.0}}),
}
STATES = {"adaptive_kl_in_reward": {"coef": 0.03}}
ABSOLUTE = {
    "gae": "compares with a value, not with the group",
    "greedy_baseline": "compares with another answer's reward, not with the group",
}


@loop("rewards", "missing_eos_penalty")
def missing_eos_penalty(h, batch, reward):
    return [r - h.penalty if bool(batch.truncated[i]) else r for i, r in enumerate(reward)]


@loop("rewards", "zero_truncated")
def zero_truncated(h, batch, reward):
    return [0.0 if bool(batch.truncated[i]) and not math.isnan(r) else r for i, r in enumerate(reward)]


@loop("rewards", "adaptive_kl_in_reward")
def adaptive_kl_in_reward(h, batch, reward):
    if h.level == "token":
        return reward  # stays on its tokens: `token_rewards` below
    return [r - sum(penalty(h, batch, i, t) for t in positions(batch, i)) for i, r in enumerate(reward)]


def token_rewards(variant_of, batch, reward):
    """The score on the last token, minus every penalty that stays on its token."""
    rewards = [[0.0] * batch.mask.shape[1] for _ in reward]
    for i, row in enumerate(rewards):
        here = positions(batch, i)
        if here and not math.isnan(reward[i]):
            row[here[-1]] = reward[i]
        for h in variant_of.rewards:
            if h.hook_name in ("kl_in_reward", "adaptive_kl_in_reward") and h.level == "token":
                for t in here:
                    row[t] -= penalty(h, batch, i, t)
    return rewards


def states_of(h, batch, reward, i, rewards):
    """[(reward, value)] of a row's states in order, and the value after the last; [] for a row without a score."""
    here = positions(batch, i)
    if math.isnan(reward[i]) or not here:
        return [], 0.0
    steps = [[rewards[i][t], number(batch.values[i, t])] for t in here]
    after = number(batch.scored.bootstrap[i])
    cut = bool(batch.truncated[i])
    if h.score_after_end:
        short = here[-1] + 1 < batch.run.max_completion_length
        if short:
            steps[-1][0] -= reward[i]
            steps.append([reward[i], after])
        return steps, 0.0 if short or not h.bootstrap else after
    return steps, after if cut and h.bootstrap else 0.0


def recursion(steps, after, gamma, lam):
    """A_t = sum_k (gamma lam)^(k - t) d_k, each written out."""
    values = [v for _, v in steps] + [after]
    deltas = [r + gamma * values[k + 1] - values[k] for k, (r, _) in enumerate(steps)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(steps))) for t in range(len(steps))]


@loop("advantage", "gae")
def gae(h, batch, reward, variant_of=None):
    rewards = token_rewards(variant_of, batch, reward)
    rows, width = batch.mask.shape
    unrolled = [states_of(h, batch, reward, i, rewards) for i in range(rows)]
    if h.whiten_rewards:
        flat = [r for steps, _ in unrolled for r, _ in steps]
        m = sum(flat) / len(flat) if flat else 0.0
        variance = sum((r - m) ** 2 for r in flat) / max(len(flat) - 1, 1)
        unrolled = [([((r - m) / math.sqrt(variance + 1e-8) + m, v) for r, v in steps], a) for steps, a in unrolled]
    out = [[0.0] * width for _ in range(rows)]
    for i, (steps, after) in enumerate(unrolled):
        here = positions(batch, i)
        lam = h.lam if h.length_alpha is None else max(0.0, 1 - 1 / (h.length_alpha * max(len(here), 1)))
        for t, a in zip(here, recursion(steps, after, h.gamma, lam), strict=False):  # the end state has no token
            out[i][t] = a
    if h.whiten:
        flat = [out[i][t] for i in range(rows) if not math.isnan(reward[i]) for t in positions(batch, i)]
        m = sum(flat) / len(flat) if flat else 0.0
        variance = sum((a - m) ** 2 for a in flat) / max(len(flat) - h.ddof, 1)
        for i in range(rows):
            for t in positions(batch, i):
                out[i][t] = 0.0 if math.isnan(reward[i]) else (out[i][t] - m) / math.sqrt(variance + h.eps)
    return out


@loop("advantage", "greedy_baseline")
def greedy_baseline(h, batch, reward):
    rows, width = batch.mask.shape
    old = batch.logps if batch.old_logps is None else batch.old_logps
    greedy = batch.scored.keys["greedy_reward"].tolist()
    out = [[0.0] * width for _ in range(rows)]
    for i in range(rows):
        here = positions(batch, i)
        if math.isnan(reward[i]):
            continue
        kl = [h.beta * (number(old[i, t]) - number(batch.ref_logps[i, t])) if h.beta else 0.0 for t in here]
        for n, t in enumerate(here):
            left = len(here) - 1 - n
            if h.form == "one_step":
                out[i][t] = h.gamma ** (left + 1) * min(max(reward[i] - greedy[i], -h.limit), h.limit) - kl[n]
            else:
                later = sum(h.gamma**k * kl[n + k] for k in range(left + 1))
                out[i][t] = h.gamma**left * reward[i] - later - greedy[i]
    return out
