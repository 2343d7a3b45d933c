"""Which rows go through the model together: arithmetic on lengths, no tensors.

An *item* is a tuple of rows with one prompt, which is processed once; a lone row is an item of one. A *rectangle* is
what one forward processes: a list of its lines, each a list of items laid end to end, all lines as long as the longest.
A plan is a list of rectangles. Everything is a function of the lengths alone, so that a resumed run plans the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

Item = tuple[int, ...]
Rectangle = list[list[Item]]

MOST_TRIES = 8  # numbers of rectangles that are compared
LEAST_SAVING = 0.1  # of the estimated time, before prompts are shared: attention over a mask of its own is slower


@dataclass(frozen=True)
class Cost:
    """Estimated time of a rectangle, in tokens of a model without attention.

    `attention`: time of a token's attention to one key, in units of its time in the linear layers. `packs`: whether
    several items may stand on one line. `flat`: the attention kernel takes one line of any length and attends inside
    items only (flash attention). `overhead`: time of a forward and backward apart from its tokens.
    """

    attention: float = 5e-4
    overhead: float = 64.0
    packs: bool = True
    flat: bool = False

    def __call__(self, lines: int, length: int, masked: bool) -> float:
        keys = length if masked else length / 2  # without a mask of its own the kernel skips the upper triangle
        return lines * length * (1 + (0.0 if self.flat else self.attention * keys))


@dataclass(frozen=True)
class Lengths:
    """Tokens of each row: its prompt, its completion, and a key that rows with the same prompt share."""

    prompt: Sequence[int]
    completion: Sequence[int]
    key: Sequence[Hashable]

    def of(self, item: Item) -> int:
        """Tokens an item takes on its line."""
        return self.prompt[item[0]] + sum(self.completion[i] for i in item)


def attention_cost(config: Any) -> float:
    """`Cost.attention` of a decoder from its configuration: 4 a L against 8 h a + 6 h m operations a token and layer.

    a is the width of all heads, h the hidden size, m the feed-forward's.
    """
    hidden = getattr(config, "hidden_size", None) or 1024
    heads = getattr(config, "num_attention_heads", None) or 1
    width = heads * (getattr(config, "head_dim", None) or hidden // heads)
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    return 4 * width / (8 * hidden * width + 6 * hidden * inner)


def single(rows: Sequence[int]) -> list[Item]:
    """Every row an item of its own."""
    return [(i,) for i in rows]


def shared(rows: Sequence[int], lengths: Lengths, cost: Cost, budget: int) -> list[Item]:
    """Rows with the same prompt joined where that pays, at most `budget` tokens an item; every row alone if it does not
    save LEAST_SAVING of the time."""
    clusters: dict[Hashable, list[int]] = {}
    for i in rows:
        clusters.setdefault(lengths.key[i], []).append(i)
    items: list[Item] = []
    alone = together = 0.0
    for members in clusters.values():
        members = sorted(members, key=lambda i: (-lengths.completion[i], i))
        apart = single(members)
        best, least = apart, _estimate(apart, lengths, cost)
        alone += least
        size = 2
        while size < 2 * len(members):
            cut = [tuple(members[k : k + size]) for k in range(0, len(members), size)]
            estimate = _estimate(cut, lengths, cost)
            if estimate < least and max(map(lengths.of, cut)) <= budget:
                best, least = cut, estimate
            size *= 2
        together += least
        items += best
    return items if together <= (1 - LEAST_SAVING) * alone else single(rows)


def _estimate(items: Sequence[Item], lengths: Lengths, cost: Cost) -> float:
    return sum(cost(1, lengths.of(item), masked=len(item) > 1) for item in items)


def deal(items: Sequence[Item], lengths: Lengths, budget: int, cost: Cost) -> list[Rectangle]:
    """Rectangles of at most `budget` tokens each (one that holds a single line may exceed it), longest items first.

    A rectangle takes the longest items left, one a line, and fills the room behind them with shorter ones.
    """
    order = sorted(items, key=lambda item: (-lengths.of(item), item))
    if cost.flat:
        return _flat(order, lengths, budget)
    plan = []
    while order:
        longest = lengths.of(order[0])
        count = max(1, budget // max(longest, 1))
        heads, rest = order[:count], order[count:]
        lines: Rectangle = [[item] for item in heads]
        if cost.packs:
            lines, rest = _filled(lines, rest, longest, lengths, cost)
            lines = narrowed(lines, lengths, cost, budget)
        plan.append(lines)
        order = rest
    return plan


def _flat(order: Sequence[Item], lengths: Lengths, budget: int) -> list[Rectangle]:
    total = sum(map(lengths.of, order))
    count = max(1, -(-total // max(budget, 1))) if order else 0
    while True:
        lines = _even(order, lengths, count)
        if count >= len(order) or max(sum(map(lengths.of, line)) for line in lines) <= budget:
            return [[line] for line in lines if line]
        count += 1


def _filled(
    lines: Rectangle, rest: list[Item], length: int, lengths: Lengths, cost: Cost
) -> tuple[Rectangle, list[Item]]:
    """Shorter items in the room behind the first ones, each where it fits most tightly; nothing moves unless the
    padding it replaces outweighs the mask that several items on a line need."""
    room = [length - sum(map(lengths.of, line)) for line in lines]
    filled, later, gained = [list(line) for line in lines], [], 0
    for item in rest:
        size = lengths.of(item)
        fits = [k for k in range(len(room)) if room[k] >= size]
        if not fits:
            later.append(item)
            continue
        k = min(fits, key=lambda k: (room[k], k))
        filled[k].append(item)
        room[k] -= size
        gained += size
    masked = any(len(item) > 1 for line in lines for item in line)
    extra = cost(len(lines), length, masked=True) - cost(len(lines), length, masked=masked)
    return (filled, later) if gained > extra else (lines, rest)


def narrowed(lines: Rectangle, lengths: Lengths, cost: Cost, budget: int) -> Rectangle:
    """The same items on fewer, longer lines where that is estimated to be faster."""
    best, least = lines, _time(lines, lengths, cost)
    items = sorted((item for line in lines for item in line), key=lambda item: (-lengths.of(item), item))
    for count in range(len(lines) - 1, 0, -1):
        even = _even(items, lengths, count)
        size = count * max(sum(map(lengths.of, line)) for line in even)
        estimate = _time(even, lengths, cost)
        if estimate < least and size <= budget:
            best, least = even, estimate
    return best


def _time(lines: Rectangle, lengths: Lengths, cost: Cost) -> float:
    longest = max(sum(map(lengths.of, line)) for line in lines)
    masked = any(len(line) > 1 or len(line[0]) > 1 for line in lines)
    return cost(len(lines), longest, masked)


def _even(items: Sequence[Item], lengths: Lengths, count: int) -> Rectangle:
    """Items on `count` lines of about equal length: each, longest first, on the shortest line so far."""
    lines: Rectangle = [[] for _ in range(count)]
    heap = [(0, k) for k in range(count)]
    for item in items:
        used, k = heapq.heappop(heap)
        lines[k].append(item)
        heapq.heappush(heap, (used + lengths.of(item), k))
    return lines


def tokens(rectangle: Rectangle, lengths: Lengths) -> tuple[int, int]:
    """(processed, useful): all places of a rectangle, and those that hold a token."""
    lines = [sum(map(lengths.of, line)) for line in rectangle]
    return len(lines) * max(lines, default=0), sum(lines)


def fewest(dealt: Callable[[int], list[Rectangle]], budget: int, steps: int) -> tuple[list[Rectangle], int]:
    """`dealt(budget)`, or with the smallest larger budget found that gives at most `steps` rectangles.

    Returns the plan and the budget it took.
    """
    plan = dealt(budget)
    while len(plan) > steps:
        budget = budget + max(1, budget // 10)
        plan = dealt(budget)
    return plan, budget


def quickest(
    dealt: Callable[[int], list[Rectangle]], lengths: Lengths, budget: int, least: int, most: int, cost: Cost
) -> list[Rectangle]:
    """The plan of at least `least` and at most `most` rectangles that is estimated to be fastest: smaller rectangles
    fit the rows better, and each costs its overhead."""
    most = min(most, 2 * least + MOST_TRIES)
    counts = sorted({least + (most - least) * k // (MOST_TRIES - 1) for k in range(MOST_TRIES)})
    plans = [balanced(dealt, lengths, budget, count) for count in counts]
    return min(plans, key=lambda plan: sum(_time(r, lengths, cost) + cost.overhead for r in plan))


def balanced(
    dealt: Callable[[int], list[Rectangle]], lengths: Lengths, budget: int, count: int, tries: int = 12
) -> list[Rectangle]:
    """At most `count` rectangles within `budget`, about equally large: the smallest budget that gives no more."""
    best = dealt(budget)
    high = max((tokens(r, lengths)[0] for r in best), default=0)
    low = sum(tokens(r, lengths)[1] for r in best) // max(count, 1)
    for _ in range(tries):
        if high - low < max(1, high // 50):
            break
        middle = (low + high) // 2
        plan = dealt(middle)
        if len(plan) <= count and max(tokens(r, lengths)[0] for r in plan) <= budget:
            best, high = plan, middle
        else:
            low = middle
    return best
