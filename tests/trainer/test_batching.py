"""Plans of rows: every row once, within the budget, and what they are estimated to save."""

from __future__ import annotations

import random

import pytest

from trl_variants.trainer.batching import (
    Cost,
    Lengths,
    attention_cost,
    balanced,
    deal,
    fewest,
    quickest,
    shared,
    single,
    tokens,
)


def drawn(seed: int, groups: int = 4, size: int = 8) -> Lengths:
    rng = random.Random(seed)
    prompts = [rng.randint(30, 120) for _ in range(groups)]
    rows = [(prompts[g], int(min(80 * rng.lognormvariate(0, 0.9), 512)), g) for g in range(groups) for _ in range(size)]
    return Lengths(*map(list, zip(*rows, strict=True)))


def rows_of(plan) -> list[int]:
    return sorted(i for rectangle in plan for line in rectangle for item in line for i in item)


@pytest.mark.parametrize("cost", [Cost(), Cost(packs=False), Cost(flat=True), Cost(attention=0.0)])
@pytest.mark.parametrize("budget", [50, 700, 2500, 10**6])
def test_every_row_is_dealt_once_and_rectangles_keep_the_budget(cost, budget):
    for seed in range(20):
        lengths = drawn(seed)
        items = shared(range(32), lengths, cost, budget) if cost.packs else single(range(32))
        plan = deal(items, lengths, budget, cost)
        assert rows_of(plan) == list(range(32))
        for rectangle in plan:
            processed, useful = tokens(rectangle, lengths)
            assert processed <= budget or len(rectangle) == 1
            assert useful <= processed
            if not cost.packs:
                assert all(len(line) == 1 for line in rectangle)
            if cost.flat:
                assert len(rectangle) == 1 and (processed <= budget or len(rectangle[0]) == 1)


def test_a_plan_is_a_function_of_the_lengths():
    plans = [deal(single(range(32)), drawn(1), 2000, Cost()) for _ in range(2)]
    assert plans[0] == plans[1]
    again = deal(single(list(reversed(range(32)))), drawn(1), 2000, Cost())
    assert again == plans[0]


def test_more_micro_batches_than_there_are_steps_raise_the_budget():
    lengths, cost = drawn(2), Cost()
    dealt = lambda budget: deal(single(range(32)), lengths, budget, cost)  # noqa: E731
    assert len(dealt(300)) > 8
    plan, budget = fewest(dealt, 300, 8)
    assert len(plan) <= 8 and budget > 300 and rows_of(plan) == list(range(32))
    assert fewest(dealt, 10**6, 8) == (dealt(10**6), 10**6)


def test_balanced_rectangles_are_no_larger_and_no_more():
    for seed in range(20):
        lengths, cost = drawn(seed), Cost()
        dealt = lambda budget: deal(single(range(32)), lengths, budget, cost)  # noqa: B023, E731
        plan = dealt(2500)
        even = balanced(dealt, lengths, 2500, len(plan))
        largest = lambda plan: max(tokens(r, lengths)[0] for r in plan)  # noqa: B023, E731
        assert len(even) <= len(plan) and largest(even) <= largest(plan) and rows_of(even) == list(range(32))


@pytest.mark.parametrize("sharing,least", [(True, 0.95), (False, 0.92)])
def test_the_quickest_plan_wastes_little(sharing, least):
    shares = []
    for seed in range(20):
        lengths, cost = drawn(seed), Cost()
        items = lambda budget: shared(range(32), lengths, cost, budget) if sharing else single(range(32))  # noqa: B023, E731
        dealt = lambda budget: deal(items(budget), lengths, budget, cost)  # noqa: B023, E731
        plan = quickest(dealt, lengths, 2500, len(dealt(2500)), 8, cost)
        assert len(plan) <= 8 and rows_of(plan) == list(range(32))
        processed, useful = map(sum, zip(*(tokens(r, lengths) for r in plan), strict=True))
        shares.append(useful / processed)
    assert sorted(shares)[len(shares) // 2] > least


def test_prompts_are_shared_where_it_pays():
    long = Lengths([256] * 8, [64] * 8, ["p"] * 8)
    [item] = shared(range(8), long, Cost(), 10**6)
    assert sorted(item) == list(range(8)) and long.of(item) == 256 + 8 * 64
    halves = shared(range(8), long, Cost(), 600)  # all eight are too many tokens
    assert [len(item) for item in halves] == [4, 4]
    short = Lengths([8] * 8, [400] * 8, ["p"] * 8)
    assert shared(range(8), short, Cost(), 10**6) == single(range(8))
    others = Lengths([256] * 8, [64] * 8, list(range(8)))
    assert shared(range(8), others, Cost(), 10**6) == single(range(8))


def test_attention_s_share_of_a_layer():
    class Config:
        hidden_size, num_attention_heads, head_dim, intermediate_size = 384, 6, 64, 1024

    # a key costs 4 * 384 operations, the linear layers 8 * 384^2 + 6 * 384 * 1024
    assert attention_cost(Config) == pytest.approx(1536 / (8 * 384**2 + 6 * 384 * 1024))
