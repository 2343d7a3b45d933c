"""Loops for the rewards hooks: one row at a time, from the papers' formulas."""

from __future__ import annotations

import math
import re

from tests.loops import loop
from trl_variants import Schedule, variant
from trl_variants.rewards.embeddings import characters
from trl_variants.schedule import at

COMPOSED = {
    "kimi-k1-5 length, after the warm-up": variant("grpo", rewards=[{"relative_length": {"weight": 0.7}}]),
    "effort budget that bites": variant("grpo", rewards=[{"effort_budget": {"tau": 0.9, "failure": -2.0}}]),
    "effort budget of the data set": variant("dapo", rewards=[{"effort_budget": {"column": "difficulty"}}]),
    "laser-de": variant("laser", rewards=["outcome_reward", {"target_length_bonus": {"explore": True, "target": 4}}]),
    "laser-de, per difficulty": variant(
        "laser-d", rewards=["outcome_reward", {"difficulty_target_bonus": {"explore": True, "ngram": 2}}]
    ),
    "dast added": variant("dapo", rewards=[{"adaptive_budget": {"limit": "group", "add": True, "success": 0.8}}]),
    "gapo with the number of answers": variant("gapo", rewards=[{"answer_frequency": {"column": "difficulty"}}]),
    "diver, texts": variant("diver", rewards=[{"diversity_bonus": {"measure": "textual", "weight": 0.3}}]),
    "diver, both": variant("diver", rewards=[{"diversity_bonus": {"measure": "mix", "weight": 1.0, "sigma": 0.42}}]),
    "dr-seg, one metric": variant("dr-seg", rewards=[{"history_rank": {"functions": [1], "zeros": 3, "decimals": 2}}]),
    "thinkprune, one stage": variant("thinkprune", rewards=[{"staged_limit": {"stages": [0.4]}}]),
    "soft overlong, then clipped": variant(
        "dapo", rewards=[{"soft_overlong": {"cache_share": 0.5, "max_length": 6, "weight": 0.4}}, "clip_reward"]
    ),
}
STATES = {
    "effort_budget": {"b0": {"prompt 1": 3.0, "prompt 10": 2.5}},
    "difficulty_target_bonus": {
        "targets": {"easy": 3.0, "medium": 4.0, "hard": 5.0},
        "refreshed": 3,
        "seen": [[0, [3.0, 4.0]]],
    },
    "history_rank": {"history": {"0": [0.0, 0.5, 1.0, 1.0], "1": [0.1, 0.3, 0.3, 0.7, 0.9]}},
}


def length(batch, i):
    return len([t for t in range(batch.mask.shape[1]) if float(batch.mask[i, t]) > 0])


def peers(batch, i, reward):
    """Rows of i's group that have a reward."""
    labels = batch.group.tolist()
    return [j for j in range(len(labels)) if labels[j] == labels[i] and not math.isnan(reward[j])]


def right(batch, i):
    return bool(batch.correct[i])


def rows(of):
    """A rewards loop from a function of one scorable row."""

    def run(h, batch, reward):
        h = at(h, batch.progress)
        return [r if math.isnan(r) else of(h, batch, reward, i) for i, r in enumerate(reward)]

    return run


@loop("rewards", "outcome_reward")
@rows
def outcome(h, batch, reward, i):
    return h.right if right(batch, i) else min(h.wrong, reward[i])


@loop("rewards", "soft_overlong")
@rows
def soft_overlong(h, batch, reward, i):
    limit = h.max_length or batch.run.max_completion_length
    cache, n = h.cache_share * limit, length(batch, i)
    if n <= limit - cache:
        return reward[i]
    return reward[i] + h.weight * (-1.0 if n > limit else (limit - cache - n) / cache)


@loop("rewards", "relative_length")
@rows
def relative_length(h, batch, reward, i):
    n = [length(batch, j) for j in peers(batch, i, reward)]
    if max(n) == min(n):
        return reward[i]
    value = 0.5 - (length(batch, i) - min(n)) / (max(n) - min(n))
    return reward[i] + h.weight * (value if right(batch, i) else min(0.0, value))


@loop("rewards", "adaptive_budget")
@rows
def adaptive_budget(h, batch, reward, i):
    group = peers(batch, i, reward)
    good = lambda j: right(batch, j) if h.success is None else reward[j] >= h.success  # noqa: E731
    solved = [length(batch, j) for j in group if good(j)]
    longest = batch.run.max_completion_length if h.limit == "run" else max(length(batch, j) for j in group)
    p = len(solved) / len(group)
    budget = (p * sum(solved) / len(solved) if solved else 0.0) + (1 - p) * longest
    x = (length(batch, i) - budget) / budget if budget else 0.0
    if good(i):
        value = max(h.right_offset - h.right_slope * x, h.right_floor)
    else:
        value = min(h.wrong_slope * x - h.wrong_offset, -h.wrong_offset)
    return value + (reward[i] if h.add else 0.0)


@loop("rewards", "staged_limit")
@rows
def staged_limit(h, batch, reward, i):
    k = 0
    while k + 1 < len(h.stages) and batch.progress >= (k + 1) / len(h.stages):
        k += 1
    finished = not bool(batch.truncated[i])
    return reward[i] if finished and length(batch, i) <= h.stages[k] * batch.run.max_completion_length else 0.0


def text(batch, i):
    return batch.scored.texts["completions"][i]


def bonus(h, batch, reward, i, target):
    n = length(batch, i)
    words = text(batch, i).split()
    twice = any(
        words[a : a + h.ngram] == words[b : b + h.ngram]
        for a in range(len(words) - h.ngram + 1)
        for b in range(a + 1, len(words) - h.ngram + 1)
    )
    if right(batch, i):
        return reward[i] + (h.bonus if n <= target else 0.0)
    earns = h.explore and n > target and reward[i] > h.bad_format and not twice
    return reward[i] + (h.bonus if earns else 0.0)


@loop("rewards", "target_length_bonus")
@rows
def target_length_bonus(h, batch, reward, i):
    return bonus(h, batch, reward, i, h.target or batch.run.max_completion_length / 2)


@loop("rewards", "difficulty_target_bonus")
@rows
def difficulty_target_bonus(h, batch, reward, i):
    group = peers(batch, i, reward)
    accuracy = sum(right(batch, j) for j in group) / len(group)
    name = "easy" if accuracy >= 2 / 3 else "medium" if accuracy >= 1 / 3 else "hard"
    return bonus(h, batch, reward, i, STATES["difficulty_target_bonus"]["targets"][name])


@loop("rewards", "effort_budget")
@rows
def effort_budget(h, batch, reward, i):
    if h.column:
        base = batch.scored.columns[h.column][i]
    else:
        keys = batch.scored.prompt_key
        same = [length(batch, j) for j, k in enumerate(keys) if k == keys[i] and not math.isnan(reward[j])]
        base = STATES["effort_budget"]["b0"].get(keys[i], sum(same) / len(same))
    return h.failure if length(batch, i) > h.tau * base else reward[i]


def answer(batch, i):
    found = re.search("<answer> (.) </answer>", text(batch, i))
    return found.group(1) if found else ""


@loop("rewards", "answer_frequency")
@rows
def answer_frequency(h, batch, reward, i):
    if not right(batch, i):
        return h.invalid
    valid = [answer(batch, j) for j in peers(batch, i, reward) if right(batch, j)]
    choices = int(batch.scored.columns[h.column][i]) if h.column else len(set(valid))
    return 1 - (valid.count(answer(batch, i)) / len(valid) - 1 / choices)


def similarity(a, b):
    """BLEU of words a against b: precisions of 1 to 5 words, an absent match counts 0.1."""
    if not a or not any(w in b for w in a):
        return 0.0
    log = 0.0
    for n, w in zip(range(1, 6), (0.02, 0.1, 0.15, 0.25, 0.38), strict=True):
        grams = [tuple(a[k : k + n]) for k in range(len(a) - n + 1)]
        left = [tuple(b[k : k + n]) for k in range(len(b) - n + 1)]
        hits = 0
        for g in grams:
            if g in left:
                left.remove(g)
                hits += 1
        log += w * math.log((hits if hits else 0.1) / max(len(grams), 1))
    return math.exp(log) * (math.exp(1 - len(b) / len(a)) if len(a) < len(b) else 1.0)


def cosine(a, b):
    if a == b:
        return 1.0
    x, y = (characters([t])[0].tolist() for t in (a, b))
    norms = math.sqrt(sum(v * v for v in x)) * math.sqrt(sum(v * v for v in y))
    return sum(v * w for v, w in zip(x, y, strict=True)) / norms if norms else 0.0


def far(batch, i, others):
    """Mean over the others of half the cosine distance."""
    here = [(1 - cosine(text(batch, i), text(batch, j))) / 2 for j in others]
    return sum(here) / len(here) if here else 0.0


@loop("rewards", "diversity_bonus")
@rows
def diversity_bonus(h, batch, reward, i):
    if not right(batch, i):
        return reward[i]
    others = [j for j in peers(batch, i, reward) if j != i]
    own = set(re.findall(r"\$(.*?)\$", text(batch, i)))
    shared = {f for j in others for f in re.findall(r"\$(.*?)\$", text(batch, j))}
    equation = len(own - shared) / len(own) if own else 0.0
    if h.measure.startswith("semantic"):
        semantic = far(batch, i, others)
        d = semantic if h.measure == "semantic" else (semantic + equation) / 2
        return reward[i] + h.weight * min(max(d, 0.0), h.sigma)
    words = lambda j: text(batch, j)[:1000].split()  # noqa: E731
    apart = [1 - (similarity(words(i), words(j)) + similarity(words(j), words(i))) / 2 for j in others]
    textual = sum(apart) / len(apart) if apart else 0.0
    d = {"equation": equation, "textual": textual, "mix": (equation + textual) / 2}[h.measure]
    return reward[i] + h.weight * min(max(d, 0.0), h.sigma)


@loop("rewards", "history_rank")
@rows
def history_rank(h, batch, reward, i):
    total = 0.0
    for f, x in enumerate(batch.scored.rewards[i].tolist()):
        history = STATES["history_rank"]["history"][str(f)]
        if math.isnan(x):
            continue
        if h.functions is None or f in h.functions:
            x = round(len([q for q in history if q <= x]) / len(history), h.decimals)
        total += float(batch.scored.weights[f]) * x
    return total


assert isinstance(variant("diver").rewards[0].weight, Schedule), "its loop reads the number of the moment"
