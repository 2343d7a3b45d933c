from __future__ import annotations

import pytest
import torch

from tests.trainer import toy
from trl_variants import VariantError
from trl_variants.rewards import PerspectiveCoverage, PerspectiveUniqueness, tag_layout_reward
from trl_variants.rewards.perspectives import (
    coverage_score,
    matches,
    perspectives,
    unique_share,
    uniqueness_score,
    without_prompt_words,
)


def test_matching_is_one_to_one():
    # .9 takes row 0 and column 0, .75 row 2 and column 1; row 1's .88 has lost its column. Row-wise maxima would be 3
    s = torch.tensor([[0.9, 0.85, 0.2], [0.88, 0.3, 0.1], [0.2, 0.75, 0.6]])
    assert matches(s) == [(0, 0), (2, 1)] and coverage_score(2 / 3) == 4
    assert s[0, 0] == pytest.approx(0.9), "the input is not written to"
    assert matches(torch.zeros(0, 3)) == [] and matches(torch.tensor([[0.75]])) == [(0, 0)]


def test_buckets():
    assert [coverage_score(x) for x in (0, 0.1, 1 / 3, 0.5, 2 / 3, 0.8, 1)] == [0, 1, 2, 3, 4, 5, 5]
    assert [uniqueness_score(x) for x in (1, 0.9, 0.8, 0.75, 0.6, 0.0)] == [1, 0.75, 0.4, 0.4, 0, 0]


def test_a_near_copy_judges_nobody():
    s = torch.zeros(4, 4)
    s[0, 1] = s[1, 0] = 0.8
    s[1, 2] = s[2, 1] = 0.79
    assert unique_share(s) == 0.75 and uniqueness_score(0.75) == 0.4
    assert unique_share(torch.ones(1, 1)) == 1.0 == unique_share(torch.ones(0, 0))


def test_parts_begin_at_the_phrase():
    text = "Views. From the perspective of law, yes. In the Perspective of art, no."
    assert perspectives(text) == ["From the perspective of law, yes.", "In the Perspective of art, no."]
    assert perspectives(" one view ") == ["one view"] and perspectives(" ") == []


def test_words_of_the_prompt_cover_nothing():
    assert without_prompt_words("The Tax is fair to all", "Is a tax good?") == "The [MASK] is fair to all"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("<core perspectives>a</core perspectives>\n<summary>b</summary>", 0.0),
        ("<core perspectives>a</core perspectives>", -0.2),
        ("<core perspectives> </core perspectives><summary>b</summary>", -0.2),
        ("x<core perspectives>a</core perspectives><summary>b</summary>", -0.2),
    ],
)
def test_layout(text, expected):
    assert tag_layout_reward(None, [text]) == [expected]


def known_words(texts):
    """How often each of six words occurs."""
    return torch.tensor([[float(t.count(w)) for w in ("law", "binds", "art", "bores", "MASK", "zzz")] for t in texts])


def test_the_rewards_of_whole_answers():
    law, art = "From the perspective of law it binds.", "In the perspective of art it bores."
    core = lambda *parts: f"<core perspectives>{' '.join(parts)}</core perspectives><summary>s</summary>"  # noqa: E731
    answers = [core(law, art), core(law, law), law + art, core("From the perspective of zzz.")]
    given = dict(perspectives=[[law, art], f"{law} {art}", [law, art], [law, art]])
    cover = PerspectiveCoverage(known_words)
    assert cover(["q"] * 4, answers, **given)[:3] == [5.0, 3.0, 5.0]
    assert cover(["q"] * 4, answers, **given)[3] == 0.0
    assert PerspectiveUniqueness(known_words)(["q"] * 2, answers[:2]) == [1.0, 0.0]
    assert cover([f"Does law bind? Art bore? {law}"], [core(law)], perspectives=[[law]]) == [0.0], (
        "the prompt's own words"
    )
    assert cover(["q"], [core(law)], perspectives=[[]]) == [None]
    with pytest.raises(VariantError, match="perspectives"):
        cover(["q"], [law])
    with pytest.raises(VariantError, match="cosine"):
        PerspectiveUniqueness("characters", threshold=2.0)


def test_it_trains_op_grpo():
    data = toy.dataset(perspectives=[[p] for p in toy.PROMPTS])
    rewards = [PerspectiveCoverage("characters", threshold=0.2), PerspectiveUniqueness("characters"), tag_layout_reward]
    run = toy.train(variant="op-grpo", rewards=rewards, data=data, max_steps=2, num_iterations=1)
    assert any(g.norm() > 0 for g in run.gradients) and run.logged("rewards/perspective_coverage_reward/mean")
