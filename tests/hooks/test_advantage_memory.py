from __future__ import annotations

import math

import pytest
import torch

from tests.hooks.test_advantage import scored
from trl_variants import VariantError, variant
from trl_variants.hooks.advantage_memory import Constrained, HistoryNorm
from trl_variants.hooks.advantage_risk import LEVELS, MixedRisk
from trl_variants.records import column_numbers
from trl_variants.trainer.memory import HookMemory

NAN = math.nan


def labelled(rewards, labels, **more):
    return scored(rewards, keys={"task": torch.tensor(labels)}, **more)


# ---------------------------------------------------------------- the history of a label

# .2 .4 .6 .8: mean .5, squares .09 + .01 + .01 + .09 = .2, std (.2 / 3)^.5 = .258199
HISTORY = {"7": [4.0, 0.5, 0.2]}
AT_ONCE = HistoryNorm(eps=0.0, warmup_groups=0.0)


def test_a_history_is_used_first_and_updated_afterwards():
    new = labelled([0.9, 0.9, 0.8, 0.8], [7] * 4)
    # .4 / .258199, .3 / .258199
    assert AT_ONCE(new, HISTORY).tolist() == pytest.approx([1.5492, 1.5492, 1.1619, 1.1619], abs=6e-5)
    after = AT_ONCE.update(HISTORY, new)
    # updated first: mean 5.4 / 8 = .675, std .254951
    wrong = AT_ONCE(new, after).tolist()
    assert wrong == pytest.approx([0.8825, 0.8825, 0.4903, 0.4903], abs=6e-5)
    assert HISTORY == {"7": [4.0, 0.5, 0.2]}, "the state it was given is not touched"


def test_the_history_equals_the_statistics_of_all_rewards():
    g = torch.Generator().manual_seed(0)
    h, state, seen = HistoryNorm(), {}, {1: [], 2: []}
    for _ in range(5):
        rewards, labels = torch.rand(7, generator=g), torch.randint(1, 3, (7,), generator=g)
        rewards[0] = NAN
        state = h.update(state, labelled(rewards.tolist(), labels.tolist()))
        for r, label in zip(rewards.tolist(), labels.tolist(), strict=True):
            seen[label] += [] if math.isnan(r) else [r]
    for label, values in seen.items():
        count, mean, squares = state[str(label)]
        values = torch.tensor(values, dtype=torch.float64)
        assert (count, mean) == (len(values), pytest.approx(float(values.mean())))
        assert squares / (count - 1) == pytest.approx(float(values.var()))


def test_decay_forgets_and_capacity_drops_the_longest_unseen():
    h = HistoryNorm(decay=0.5, capacity=2)
    state = h.update({"1": [4.0, 0.0, 1.0]}, labelled([1.0, 1.0], [1, 1]))
    # two remembered rewards of 0 and two of 1: mean .5, squares .5 * 1 + 1^2 * 2 * 2 / 4
    assert state["1"] == pytest.approx([4.0, 0.5, 1.5])
    state = h.update({"1": [4.0, 0.0, 1.0], "2": [1.0, 0.0, 0.0]}, labelled([1.0, 0.0], [1, 3]))
    assert list(state) == ["1", "3"]


def test_a_new_label_warms_up_with_the_group_s_z_score():
    h, run = HistoryNorm(eps=0.0), variant("grpo", advantage={"grouped": {"eps": 0.0}}).advantage
    new = labelled([0.9, 0.5, 0.8, 0.2], [7] * 4)
    new.run = type(new.run)(group_size=4)
    assert torch.equal(h(new, {"7": [7.0, 0.5, 0.2]}), run(new)), "seven rewards, two groups of four are wanted"
    assert not torch.equal(h(new, {"7": [8.0, 0.5, 0.2]}), run(new))
    assert not h(labelled([1.0, 1.0], [7, 7]), {"7": [9.0, 1.0, 0.0]}).any(), "a history without spread, eps 0"


def test_labels_of_text_are_the_same_in_every_generation():
    a, b = column_numbers(["x", "y", "x"]), column_numbers(["y"])
    assert a[0] == a[2] != a[1] == b[0]
    assert column_numbers([3, 1]).tolist() == [3, 1] and column_numbers([3.5, 1]).tolist() == [3.5, 1.0]


# ---------------------------------------------------------------- multipliers

COST = Constrained(costs="functions", limits=[0.1], rate=0.1)


def test_dual_ascent():
    # .5 + .1 (.25 - .1) = .515; 2 + .1 (.5 - .2) = 2.03; never below 0
    one_of_four = scored([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    assert COST.update({"lambda": [0.5]}, one_of_four)["lambda"] == pytest.approx([0.515])
    half = scored([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    h = Constrained(costs="functions", limits=[0.2], rate=0.1)
    assert h.update({"lambda": [2.0]}, half)["lambda"] == pytest.approx([2.03])
    none = scored([[1.0, 0.0], [0.0, 0.0]])
    assert COST.update({"lambda": [0.005]}, none)["lambda"] == [0.0]
    assert COST.update({"lambda": [0.5]}, scored([[1.0, NAN], [0.0, NAN]]))["lambda"] == [0.5], "a cost no row has"
    assert COST.report({"lambda": [0.5]}) == {"constrained/lambda_0": 0.5}


def test_costs_leave_the_reward_and_shaping_stays_in_it():
    shaped = scored([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    shaped = shaped.with_(reward=shaped.reward + torch.tensor([0.0, 0.0, 4.0, 0.0]))
    # R = 1, 0, 5, 0: the reward the shaping left, without the cost
    a = Constrained(costs="functions", eps=0.0)(shaped, {"lambda": [0.0]})
    r = torch.tensor([1.0, 0.0, 5.0, 0.0], dtype=torch.float64)
    assert a.tolist() == pytest.approx(((r - r.mean()) / r.std()).tolist())


def test_summing_before_the_norm_is_another_method():
    # lambda = 5, R - 5 C = -4, 0, 1, 0: the scalarised advantages; ours keeps .8660 per unit of R
    s = scored([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    wrong = [-1.4657, 0.3382, 0.7892, 0.3382]
    got = Constrained(costs="functions", eps=0.0)(s, {"lambda": [5.0]})
    assert got.tolist() != pytest.approx(wrong, abs=0.1)
    assert float(got[2] - got[3]) == pytest.approx(3**0.5)


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"limits": []}, "limits must be numbers, one per cost"),
        ({"limits": ["a"]}, "limits must be numbers, one per cost"),
        ({"limits": [0.1, 0.2]}, "'truncated' is one cost and takes one limit"),
    ],
)
def test_wrong_limits(parameters, message):
    with pytest.raises(VariantError, match=message):
        Constrained(**parameters)


def test_costs_without_a_reward_are_refused():
    with pytest.raises(VariantError, match="last 1 reward functions as costs: of 1 none is left as reward"):
        COST(scored([1.0, 0.0]), {"lambda": [0.5]})
    with pytest.raises(VariantError, match="`truncated`"):
        Constrained()(scored([1.0, 0.0]), {"lambda": [0.5]})


# ---------------------------------------------------------------- bundles

TRACKED = {"quantiles": [0.0] * 3 + [1.0] + [2.0] * 11 + [3.0] * 4}  # q_.2 = 1, q_.8 = 3
PLAIN = MixedRisk(bundle=1, share="uniform")
SCORES = [0.0, 1.0, 2.0, 3.0, 5.0]
BEFORE_STD = [-3.0, 0.0, 2 / 3, 4 / 3, 4 / 3]
STD = 3.7**0.5  # mean 2.2, squares 4.84 + 1.44 + .04 + .64 + 7.84 = 14.8, over 4


def test_mixed_value_at_risk():
    # S = 0: 1.5 * -1/.2 = -7.5, over 2.5; S = 2: (1 - 0)/.6 / 2.5 = .6667; S = 3, 5: (2 - 0)/.6, (4 - 2)/.6
    got = PLAIN(scored(SCORES), TRACKED)
    assert got.tolist() == pytest.approx([x / STD for x in BEFORE_STD], abs=2e-5)
    assert got.tolist() == pytest.approx([-1.5596, 0.0, 0.3466, 0.6932, 0.6932], abs=6e-5)
    natural = MixedRisk(bundle=1, share="uniform", natural_baseline=True)(scored(SCORES), TRACKED)
    assert natural.tolist() == pytest.approx([-2.2528, -0.6932, -0.3466, 0.0, 0.0], abs=6e-5), "none is positive"


def test_a_bundle_s_advantage_is_shared_by_who_earned_it():
    # three questions, R - mean at k = 0: .5, -.25, .1, sum .35. The bundle's value -.6: -.8571, .4286, -.1714
    rewards = [0.5, -0.5, -0.25, 0.25, 0.1, -0.1]
    s = scored(rewards, group=[0, 0, 1, 1, 2, 2])
    h = MixedRisk(bundle=3)
    b = h.bundles(s)
    assert b.score.tolist() == pytest.approx([0.35, -0.35]) and b.questions.tolist() == [3.0] * 6
    got = h._shared(torch.full((6,), -0.6, dtype=torch.float64), b, s)
    assert got[[0, 2, 4]].tolist() == pytest.approx([-0.8571, 0.4286, -0.1714], abs=6e-5)
    flat = scored([0.5, -0.5, -0.5, 0.5], group=[0, 0, 1, 1])
    got = h._shared(torch.full((4,), -0.6, dtype=torch.float64), h.bundles(flat), flat)
    assert got.tolist() == [-0.3] * 4, "deviations that cancel: in equal shares"
    by_std = MixedRisk(bundle=3, share="std")._shared(torch.full((6,), -0.6, dtype=torch.float64), b, s)
    assert by_std.tolist() == pytest.approx(
        [-0.6 / x for x in (0.5**0.5,) * 2 + (0.125**0.5,) * 2 + (0.02**0.5,) * 2], rel=1e-4
    )


def test_bundles_of_ragged_questions():
    # the second question has one answer: at k = 1 it adds its mean, 4; the third is a bundle of its own
    s = scored([1.0, 4.0, NAN, 2.0, 7.0], group=[0, 1, 1, 0, 2])
    b = MixedRisk(bundle=2).bundles(s)
    assert b.score.tolist() == [5.0, 6.0, 7.0] and b.bundle.tolist() == [0, 0, 1]
    assert b.pair[[0, 1, 3, 4]].tolist() == [0, 0, 1, 2]


def test_quantiles_follow_the_scores():
    # one of five below q_.2 = 1: 1 + .1 (.2 - .2); three of five below q_.8 = 3: 3 + .1 (.8 - .6) = 3.02
    new = PLAIN.update(TRACKED, scored([0.0, 1.0, 2.0, 3.0, 5.0]))["quantiles"]
    assert new[3] == pytest.approx(1.0) and new[15] == pytest.approx(3.02) and len(new) == len(LEVELS) == 19
    first = PLAIN.update(PLAIN.init(), scored(SCORES))["quantiles"]
    assert first[3] == pytest.approx(0.8) and first[9] == pytest.approx(2.0), "the batch's own quantiles"
    assert PLAIN.update(TRACKED, scored([NAN, NAN])) == TRACKED


def test_the_first_generation_uses_each_bundle_s_own_quantiles():
    s = scored([0.0, 1.0, 100.0, 101.0], group=[0, 0, 1, 1])
    got = PLAIN(s, PLAIN.init())
    assert got[:2].tolist() == pytest.approx(got[2:].tolist())


# ---------------------------------------------------------------- saved and resumed


@pytest.mark.parametrize("name", ["p-grpo-personalized", "constrained-grpo", "riskpo"])
def test_memory_survives_a_checkpoint(name):
    v = variant(name)
    memory = HookMemory(v, seed=0)
    truncated = torch.tensor([True, False, False, False])
    s = labelled([0.9, 0.1, 0.8, 0.0], [7] * 4, truncated=truncated)
    memory.update("generation", s)
    assert memory.states["advantage"] != v.advantage.init(), "a generation leaves a trace"
    other = HookMemory(v, seed=0)
    other.load_state_dict(*memory.state_dict())
    assert other.states == memory.states
    assert torch.equal(v.advantage(s, other.states["advantage"]), v.advantage(s, memory.states["advantage"]))
