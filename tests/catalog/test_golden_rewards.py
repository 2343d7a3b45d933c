# ruff: noqa: E501  (a table: one row, one line of arithmetic)
"""Golden numbers of the reward shapers: shaped rewards, and the advantages and gradients they lead to."""

from __future__ import annotations

import math

import pytest
import torch

from tests.catalog.test_golden import Golden, answers, each
from tests.catalog.test_golden import test_golden as assert_golden
from trl_variants import TokenBatch, variant
from trl_variants.hooks.rewards import KLInReward
from trl_variants.hooks.rewards_diversity import formula_diversity, text_diversity
from trl_variants.hooks.rewards_length import AdaptiveBudget, RelativeLength, SoftOverlong
from trl_variants.hooks.rewards_rank import HistoryRank
from trl_variants.hooks.rewards_target import DifficultyTargetBonus, smallest_target
from trl_variants.objective import score
from trl_variants.records import Run, Scored


def scored(rewards, lengths=None, limit=0, **more) -> Scored:
    """One group in float64, with lengths given as numbers."""
    matrix = torch.tensor(rewards, dtype=torch.float64)
    matrix = matrix.unsqueeze(1) if matrix.dim() == 1 else matrix
    return Scored(
        matrix,
        torch.ones(matrix.shape[1], dtype=torch.float64),
        torch.zeros(len(matrix), dtype=torch.long),
        length=None if lengths is None else torch.tensor(lengths),
        truncated=torch.zeros(len(matrix), dtype=torch.bool),
        run=Run(max_completion_length=limit, group_size=len(matrix)),
        **more,
    )


def shaped(name, given: Scored, states=None, **edits) -> list[float]:
    return score(variant(name, **edits), given, states).reward.tolist()


def near(values, atol=6e-5):
    return pytest.approx(values, abs=atol)


# (R - mean) / (std + 1e-4), unbiased, of four or five numbers worked out in the comments
GOLDEN = [
    # ------------------------------------------------------------ DAPO: +-1 and the penalty
    # limit 10, cache 2: lengths 10, 9, 8, 3 -> penalties -1, -.5, 0, 0; correct 1,1,0,0 -> 0, .5, -1, -1; mean -.375
    Golden("dapo-overlong", "dapo-overlong", answers(10, 9, 8, 3, rewards=[1, 1, 0, 0]), {"advantage": each(0.375, 0.875, -0.625, -0.625)}, {"advantage": {"grouped": {"std": "none"}}}, atol=1e-6),
    # the gradient carries the penalty: token mean over 30 tokens, -A/30 each
    Golden("dapo-overlong, gradient", "dapo-overlong", answers(10, 9, 8, 3, rewards=[1, 1, 0, 0]),
           {"grad": [[-0.375 / 30] * 10, [-0.875 / 30] * 9 + [0], [0.625 / 30] * 8 + [0] * 2, [0.625 / 30] * 3 + [0] * 7]}, {"advantage": {"grouped": {"std": "none"}}}, atol=1e-6),
    # ------------------------------------------------------------ GLM-4.5V: clip-higher under a sequence mean
    # ratio 1.35, A = 1: clipped at 1.28, no gradient; three tokens at ratio 1, A = -1: -1. loss = -(1.28 - 1) / 2 = -0.14, and
    # the second row's tokens get 1/3 / 2 each (a token mean would give 1/4)
    Golden("glm-4-5v", "glm-4-5v", {"logps": [[-1.0] * 3] * 2, "old_logps": [[-1.0 - math.log(1.35), -1, -1], [-1.0] * 3], "mask": [[1.0, 0, 0], [1.0, 1, 1]], "advantage": [1.0, -1.0]},
           {"loss": -0.14, "grad": [[0, 0, 0], [1 / 6, 1 / 6, 1 / 6]]}),
    # ------------------------------------------------------------ LASER
    # 1.5, 1, -.5, -.5: mean .375, deviations 1.125, .625, -.875, -.875, std sqrt(3.1875 / 3) = 1.030776: A = 1.0913, .6063, -.8488
    Golden("laser, advantages", "laser", answers(2, 6, 2, 6, rewards=[1, 1, 0, 0]) | {"entropy": [[0.0] * 6] * 4}, {"advantage": each(1.0913, 0.6063, -0.8488, -0.8488)},
           {"rewards": [{"outcome_reward": {"wrong": -0.5}}, {"target_length_bonus": {"target": 3}}], "regularizers": []}, atol=6e-5),
    # base alone: .75 / .8661 = .8659
    Golden("laser without the bonus", "laser", answers(2, 6, 2, 6, rewards=[1, 1, 0, 0]) | {"entropy": [[0.0] * 6] * 4}, {"advantage": each(0.8659, 0.8659, -0.8659, -0.8659)},
           {"rewards": [{"outcome_reward": {"wrong": -0.5}}], "regularizers": []}, atol=6e-5),
    # ------------------------------------------------------------ GAPO: a,a,a,b,invalid, L = 4 (a: f = 3/4, b: f = 1/4)
    # R = .5,.5,.5,1,-1: mean .3, deviations .2 x 3, .7, -1.3, std sqrt(2.3 / 4) = .758288; A = .2637, .923, -1.7142
    Golden("gapo", "gapo", answers(1, 1, 1, 1, 1, rewards=[1, 1, 1, 1, 0], texts=["a", "A ", "a.", "b", "no"], columns={"n": [4] * 5}),
           {"advantage": each(0.2637, 0.2637, 0.2637, 0.923, -1.7142)}, {"rewards": [{"answer_frequency": {"column": "n"}}], "regularizers": []}, atol=6e-5),
    # ------------------------------------------------------------ reflection: sum first, normalise after
    # R = 1.3, 1.1, .3, .1: mean .7, deviations .6, .4, -.4, -.6, std sqrt(1.04 / 3) = .588784; without 1e-4: 1.0190, .6794
    Golden("reflection, the sum is normalised", "reflection-reward-grpo", answers(1, 1, 1, 1, rewards=[[1, 0.1, 0.2], [1, 0.1, 0], [0, 0.1, 0.2], [0, 0.1, 0]]),
           {"advantage": each(1.0190, 0.6794, -0.6794, -1.0190)}, {"advantage": {"grouped": {"eps": 0.0}}, "regularizers": []}, atol=6e-5),
    Golden("reflection at 0 is accuracy and format", "reflection-reward-grpo", answers(1, 1, 1, 1, rewards=[[1, 0.1, 0], [1, 0.1, 0], [0, 0.1, 0], [0, 0.1, 0]]),
           {"advantage": each(0.8660, 0.8660, -0.8660, -0.8660)}, {"advantage": {"grouped": {"eps": 0.0}}, "regularizers": []}, atol=6e-5),
    # ------------------------------------------------------------ DeepSeek-R1: the clip of 10 is on the ratio
    # r = 4 with A = 1 is free (a width of .2 would hold it at 1.2); r = 12 is held at 11 without gradient
    Golden("deepseek-r1, clip", "deepseek-r1", {"logps": [[-1.0], [-1.0]], "old_logps": [[-1 - 1.3862943611], [-1 - 2.4849066498]], "advantage": [1.0, 1.0]},
           {"objective": each(4, 11), "grad": each(-2, 0)}, {"regularizers": []}, atol=1e-6),
]  # fmt: skip


@pytest.mark.parametrize("g", GOLDEN, ids=lambda g: g.name)
def test_golden(g):
    assert_golden(g)


# ---------------------------------------------------------------- shaped rewards


def test_soft_overlong_is_capped():
    # (16384 - n) / 4096: 0, -1/4, -1/2, -1, capped, -4095/4096
    given = scored([0.0] * 6, [16384, 17408, 18432, 20480, 21000, 20479], limit=20480)
    got = SoftOverlong()(given).tolist()
    assert got == near([0.0, -0.25, -0.5, -1.0, -1.0, -0.9998])
    uncapped = [(16384 - n) / 4096 for n in (21000,)]
    assert uncapped == near([-1.127], 5e-4) and got[4] != pytest.approx(uncapped[0])


def test_kimi_k1_5_length():
    # lengths 100..500: .5 - (n - 100) / 400 = .5, .25, 0, -.5; wrong answers get min(0, .)
    given = scored([1, 0, 1, 0], [100, 200, 300, 500])
    bonus = RelativeLength(weight=1.0)(given) - given.reward
    assert bonus.tolist() == near([0.5, 0.0, 0.0, -0.5])
    assert bonus.tolist() != near([0.5, 0.25, 0.0, -0.5]), "a wrong answer never gains by being short"
    assert (RelativeLength()(scored([1, 0], [7, 7]))).tolist() == [1.0, 0.0], "equal lengths"
    assert shaped("kimi-k1-5-length", given) == [1, 0, 1, 0], "off in the warm-up"
    assert shaped("kimi-k1-5-length", given.with_(progress=0.5)) == near([1.2, 0, 1, -0.2])


def test_effort_budget_scores_failures_below_wrong_answers():
    # budget 1.5 * 1000: 1600 and 2000 are over it -> -1, 1, 0, -1; minus the mean -1/4
    given = scored([1, 1, 0, 0], [1600, 1400, 800, 2000], columns={"base": [1000] * 4})
    edit = lambda **more: {"rewards": [{"effort_budget": {"tau": 1.5, "column": "base", **more}}]}  # noqa: E731
    mean_only = lambda r: [x - sum(r) / len(r) for x in r]  # noqa: E731
    k3 = shaped("kimi-k3-effort-budget", given, **edit())
    assert k3 == [-1, 1, 0, -1] and mean_only(k3) == near([-0.75, 1.25, 0.25, -0.75])
    assert mean_only(shaped("kimi-k3-effort-budget", given, **edit(failure=0.0))) == near([-0.25, 0.75, -0.25, -0.25])
    assert shaped("kimi-k3-effort-budget", given, **edit(tau=1e9)) == [1, 1, 0, 0]


def test_laser_and_its_exploring_form():
    given = scored([1, 1, 0, 0], [900, 1500, 800, 3000], texts={"completions": ["a"] * 4})
    base = {"outcome_reward": {"wrong": -0.5}}
    edit = lambda **more: {"rewards": [base, {"target_length_bonus": {"target": 1024, **more}}]}  # noqa: E731
    assert shaped("laser", given, **edit()) == [1.5, 1.0, -0.5, -0.5]
    assert shaped("laser", given, **edit(explore=True)) == [1.5, 1.0, -0.5, 0.0]
    bad_format = scored([1, 1, 0, -1], [900, 1500, 800, 3000], texts={"completions": ["a"] * 4})
    assert shaped("laser", bad_format, **edit(explore=True))[3] == -1.0


def test_laser_d_targets():
    lengths = [500.0, 900, 1000, 1100, 1500, 2000, 2500, 3000, 4000, 6000]
    target = lambda n: smallest_target(lengths, n, 1024, 1024, 16384, 9999)  # noqa: E731
    # 1024 holds 3 of 10: int(.3 * 5) = 1; 2048 holds 6: int(.6 * 2) = 1; only 6144 holds all: int(1.0 * 1) = 1
    assert [target(5), target(2), target(1)] == [1024, 2048, 6144]
    assert smallest_target([], 5, 1024, 1024, 16384, 777) == 777, "an empty bucket"


def test_dast():
    # p = 2/8, L_r = 1000: L_b = 250 + .75 * 4096 = 3322; right 800: -.5 (800/3322 - 1) + .5 = .8796, ...
    h = AdaptiveBudget()
    lengths = [800, 1200, 800, 4096, 100, 100, 100, 100]
    got = h(scored([1, 1, 0, 0, 0, 0, 0, 0], lengths, limit=4096)).tolist()
    assert [got[0], got[2], got[3]] == near([0.8796, -0.7833, -0.1])
    # right answers of 4096 and 9000 at the same budget: the mean of the right ones stays 1000 with one more short one
    x = (4096 - 3322) / 3322
    assert max(-0.5 * x + 0.5, 0.1) == near(0.3835) and max(-0.5 * (9000 - 3322) / 3322 + 0.5, 0.1) == 0.1
    # nothing solved: L_b = L_max (x = -1/2 -> .9 * -.5 - .1); everything: L_b = L_r (x = -.2, .2)
    assert h(scored([0, 0], [2048, 4096], limit=4096)).tolist() == near([-0.55, -0.1])
    assert h(scored([1, 1], [800, 1200], limit=4096)).tolist() == near([0.6, 0.4])


def test_ui_r1_length_bonus():
    # p = 3/4, L_r = 80, L_max = 160: L_b = 100; .75, .5, .55, and wrong min(.9 * .6 - .1, -.1)
    given = scored([3, 3, 3, 2], [50, 100, 90, 160])
    assert shaped("ui-r1-length", given) == near([3.75, 3.5, 3.55, 1.9])
    # a wrong answer of 50 at a budget of 100: .9 * -.5 - .1 = -.55. p = 1/2, L_r = 80, L_max = 120
    assert shaped("ui-r1-length", scored([3, 2, 3, 2], [80, 50, 80, 120]))[1] == near(2 - 0.55)


def test_gapo_pays_rare_answers_more_than_one():
    given = lambda texts: scored([1] * len(texts), [1] * len(texts), texts={"completions": texts}, columns={"n": [4] * len(texts)})  # noqa: E731, E501  # fmt: skip
    edit = {"rewards": [{"answer_frequency": {"column": "n"}}]}
    assert shaped("gapo", given(["a"] * 3), **edit) == near([0.25] * 3)  # f = 1: 1 - (1 - 1/4)
    rare = shaped("gapo", given(["a"] * 9 + ["b"]), **edit)[-1]
    assert rare == near(1.15) and rare != near(1 - abs(0.1 - 0.25)), "signed, not absolute"
    # a list of valid answers decides validity and L
    listed = scored([0, 0], [1, 1], texts={"completions": ["Red", "blue"]}, columns={"n": [["red", "green"]] * 2})
    assert shaped("gapo", listed, **edit) == near([0.5, -1.0])


def test_diver():
    sets = [frozenset("ab"), frozenset("bc"), frozenset()]
    assert formula_diversity(sets) == [0.5, 0.5, 0.0]
    matrix = [[1, 0.5, 0.1], [0.3, 1, 0.2], [0.1, 0.4, 1]]
    assert text_diversity(matrix, symmetric=False) == near([0.7, 0.75, 0.75])
    assert text_diversity(matrix) == near([0.75, 0.65, 0.8])
    # the potential's steps sum to last - first = .35, whatever the path
    potential = [0, 0.2, 0.5, 0.35]
    steps = [b - a for a, b in zip(potential, potential[1:], strict=False)]
    assert steps == near([0.2, 0.3, -0.15]) and sum(steps) == near(0.35)
    # |own| / |all| = 3/4 (one formula shared with the wrong answer), 0 and 1: capped at .5 and paid to right answers only
    texts = ["$a$ $b$ $c$ $d$", "$e$ $f$ $d$", "$g$"]
    given = scored([1, 1, 0], [1] * 3, texts={"completions": texts})
    got = shaped("diver", given, rewards=[{"diversity_bonus": {"sigma": 0.5}}])
    assert got == near([1.0005, 1.0005, 0.0], 1e-9)
    assert shaped("diver", given.with_(progress=1.0)) == [1, 1, 0], "decayed"


def test_dr_seg_ranks():
    history = [0, 0.2, 0.4, 0.4, 0.6, 0.8, 0.9, 1]
    state = {"rewards.0": {"history": {"0": history}}}
    x = [-0.1, 0, 0.4, 0.5, 1]
    assert shaped("dr-seg", scored(x), state) == near([0.0, 0.1, 0.5, 0.5, 1.0])
    exact = {"rewards": [{"history_rank": {"decimals": 6}}]}
    assert shaped("dr-seg", scored(x), state, **exact) == near([0, 0.125, 0.5, 0.5, 1.0])
    # binary: 0 -> 6/8 = .75 -> .8, 1 -> 1.0
    binary = {"rewards.0": {"history": {"0": [0.0] * 6 + [1.0] * 2}}}
    assert shaped("dr-seg", scored([0, 1]), binary) == near([0.8, 1.0])
    # ranked against what was there before: inserting first would give 5/8 of {0 x 6, .5, 1} + ...
    h = HistoryRank(zeros=2, decimals=6)
    given = scored([1.0, 1.0])
    assert h(given, h.init()).tolist() == [1.0, 1.0]
    after = h.update(h.init(), given)
    assert after["history"]["0"] == [0.0, 0.0, 1.0, 1.0]
    assert h(scored([0.0, 1.0]), after).tolist() == [0.5, 1.0]


def test_thinkprune_zeroes_what_is_not_finished():
    # L = 2000 in the last stage of a limit of 4000
    given = scored([1, 1, 0], [1999, 2001, 500], limit=4000).with_(progress=0.9)
    assert shaped("thinkprune", given) == [1.0, 0.0, 0.0]
    assert shaped("thinkprune", given.with_(progress=0.0)) == [1.0, 1.0, 0.0]
    cut = given.with_(truncated=torch.tensor([True, False, False]), progress=0.0)
    assert shaped("thinkprune", cut) == [0.0, 1.0, 0.0], "truncated at the limit"


def test_s2r_penalty_inside_the_reward():
    # coef .05: R - b = 1 with a k1 sum of .2 -> .99; -1 with -.1 -> -.995
    tokens = {
        "mask": torch.ones(2, 2),
        "old_logps": torch.full((2, 2), -1.0),
        "ref_logps": torch.tensor([[-1.1, -1.1], [-0.9, -1.0]]),
    }
    given = scored([1.0, -1.0], tokens=tokens)
    assert KLInReward(0.05)(given).reward.tolist() == near([0.99, -0.995])


# ---------------------------------------------------------------- memory


def test_laser_d_moves_its_targets_every_so_many_steps():
    h = DifficultyTargetBonus(every=20, monitor=2, lower_share=0.125, step_share=0.125)
    # limit 800, G = 3: 3 of 3 right = easy, expected int(2) = 2: 200 holds 2 of 3, int(2/3 * 2) = 1
    easy = scored([1, 1, 1], [150, 190, 700], limit=800)
    state = h.update(h.init(), easy)
    assert state["targets"]["easy"] == 200 and state["refreshed"] == 0
    assert state["targets"]["hard"] == 700, "an empty bucket takes the longest answer"
    longer = scored([1, 1, 1], [390, 395, 700], limit=800)
    for step in (4, 19):
        state = h.update(state, longer.with_(step=step))
        assert state["targets"]["easy"] == 200
    assert len(state["seen"]) == 2, "bounded by the prompts watched"
    state = h.update(state, longer.with_(step=20))
    assert state["targets"]["easy"] == 400 and state["refreshed"] == 20
    assert h(longer, state).tolist() == [1.5, 1.5, 1.0]


def test_effort_budget_remembers_the_first_visit_and_is_bounded():
    h = variant("kimi-k3-effort-budget", rewards=[{"effort_budget": {"tau": 1.0, "capacity": 2}}]).rewards[0]
    first = scored([1, 1], [4, 8], prompt_key=["p", "p"])
    assert h(first, h.init()).tolist() == [1.0, -1.0]  # b0 = 6, this very group's
    state = h.update(h.init(), first)
    later = scored([1, 1], [40, 60], prompt_key=["p", "p"])
    assert h(later, state).tolist() == [-1.0, -1.0]
    assert h.update(state, later) == {"b0": {"p": 6.0}}
    for key in "qr":
        state = h.update(state, scored([1], [3], prompt_key=[key]))
    assert list(state["b0"]) == ["q", "r"]


def test_a_missing_column_is_named():
    from trl_variants import VariantError

    with pytest.raises(VariantError, match="'base'"):
        shaped("grpo", scored([1.0], [3]), rewards=[{"effort_budget": {"column": "base"}}])
    text = scored([1.0], [3], columns={"base": ["many"]})
    with pytest.raises(VariantError, match="'many'"):
        shaped("grpo", text, rewards=[{"effort_budget": {"column": "base"}}])


def test_unscorable_rows_stay_unscorable():
    nan = float("nan")
    for name in ("dapo-overlong", "dast", "thinkprune", "laser", "laser-d", "gapo", "diver", "dr-seg", "ui-r1-length"):
        given = scored([1.0, nan, 0.0], [3, 9, 2], limit=10, texts={"completions": ["$a$", "$b$", "$c$"]})
        got = shaped(name, given)
        assert got[1] != got[1] and all(x == x for x in (got[0], got[2])), name
        # and no other row notices it
        without = scored([1.0, 0.0], [3, 2], limit=10, texts={"completions": ["$a$", "$c$"]})
        without = without.with_(run=Run(max_completion_length=10, group_size=3))
        assert [got[0], got[2]] == near(shaped(name, without), 1e-12), name


def test_the_record_given_is_not_changed():
    batch = TokenBatch.from_tensors([[-1.0, -1.0]] * 2, rewards=[1.0, 0.0])
    before = batch.scored.reward.clone()
    score(variant("dast"), batch.scored)
    assert torch.equal(batch.scored.reward, before) and batch.scored.correct.tolist() == [True, False]
