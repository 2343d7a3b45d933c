from __future__ import annotations

import math

import pytest
import torch

from tests.catalog.test_golden import answers, each
from tests.trainer import toy
from trl_variants import TokenBatch, VariantError, variant
from trl_variants.rewards import Preference, PrefixPreferenceReward, fit_preference
from trl_variants.rewards.preference import pairs_of, prefixes_of, steps_of

QUESTIONS = [f"question {i}" for i in range(12)]


def rollouts():
    """Right answers say "good", wrong ones "bad"."""
    rows = [(q, f"{word} {i}\nso", word == "good") for q in QUESTIONS for word in ("good", "bad") for i in range(2)]
    return map(list, zip(*rows, strict=True))


@pytest.fixture(scope="module")
def fitted():
    return fit_preference(*rollouts(), encoder="characters", hidden=16, epochs=150, lr=1e-2)


def test_pairs_are_right_and_wrong_answers_of_one_question():
    assert pairs_of(["p", "q", "p", "q", "p"], [True, True, False, True, True]) == [(0, 2), (4, 2)]
    with pytest.raises(VariantError, match="sample more answers"):
        fit_preference(["p", "p"], ["a", "b"], [True, True], "characters")


def test_it_prefers_what_it_was_fitted_on_and_is_frozen(fitted):
    assert fitted.accuracy == 1.0
    assert fitted("question 99", "good 7", "bad 7") > 0.9
    p, q = fitted("question 99", "good", "bad"), fitted("question 99", "bad", "good")
    assert p + q == pytest.approx(1.0) and not any(x.requires_grad for x in fitted.score.parameters())


def test_fitting_is_seeded_and_leaves_the_random_state_alone(fitted):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again = fit_preference(*rollouts(), encoder="characters", hidden=16, epochs=150, lr=1e-2)
    assert torch.equal(torch.get_rng_state(), before)
    assert again("a", "b", "c") == fitted("a", "b", "c")


def test_steps_are_lines():
    assert steps_of("a\n\nb\n c") == ["a\n\n", "b\n", " c"]
    assert prefixes_of("a\n\nb") == ["", "a\n\n", "a\n\nb"] and prefixes_of("") == [""]
    assert steps_of("\n\na\n \nb\n") == ["\n\na\n \n", "b\n"] and steps_of(" \n") == []


class Written(torch.nn.Module):
    """h of a text is its number of "x"; the parameter gives a dtype."""

    def __init__(self):
        super().__init__()
        self.unit = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, z):
        return z[:, 1:] / z[:, :1] * self.unit


def heights(texts):
    return torch.tensor([[1.0, float(t.count("x"))] for t in texts], dtype=torch.float64)


def test_the_mean_over_steps():
    # heights 0, 1, 1, 3: sigmoid 1, 0, 2 -> .7311, .5, .8808, mean .7039; one step of height 1: .7311
    f = PrefixPreferenceReward(Preference(Written(), heights))
    assert f(["q"] * 3, ["x\ny\nxx", "x", ""]) == pytest.approx([0.7039, 0.7311, 0.0], abs=6e-5)
    assert f(["q"], [[{"role": "assistant", "content": "x"}]]) == pytest.approx([0.7311], abs=6e-5)
    assert PrefixPreferenceReward(f.preference, split=list)(["q"], ["xx"]) == pytest.approx([0.7311], abs=6e-5)
    copies = f(["q"], ["x\n" * 5])[0]
    assert copies == pytest.approx(1 / (1 + math.exp(-1))), "more steps of one kind pay no more"


def test_the_combined_reward():
    # 1 * mean + 5 * final = 5.6, 5.4, .6, .4: mean 3, std sqrt((2.6^2 + 2.4^2) 2 / 3) = 2.8888
    rewards = [[1, 0.6], [1, 0.4], [0, 0.6], [0, 0.4]]
    v = variant("ws-grpo", regularizers=[])
    out = v.loss(TokenBatch.from_tensors(**answers(1, 1, 1, 1, rewards=rewards, reward_weights=[5.0, 1.0])))
    expect = each(0.8999, 0.8307, -0.8307, -0.8999)
    assert out.advantage.tolist() == [pytest.approx(row, abs=1e-4) for row in expect]
    # lam1 = 0 is GRPO: the scale of lam2 drops out, up to eps
    scaled = v.loss(TokenBatch.from_tensors(**answers(1, 1, 1, 1, rewards=rewards, reward_weights=[5.0, 0.0])))
    plain = variant("grpo", regularizers=[]).loss(
        TokenBatch.from_tensors(**answers(1, 1, 1, 1, rewards=rewards, reward_weights=[1.0, 0.0]))
    )
    assert torch.allclose(scaled.advantage, plain.advantage, atol=2e-4)


def test_saved_and_read_again(fitted, tmp_path):
    fitted.save(tmp_path / "f.safetensors")
    again = PrefixPreferenceReward(tmp_path / "f.safetensors").preference
    assert again("q", "good", "bad") == fitted("q", "good", "bad") and again.accuracy == 1.0
    assert Preference.load(tmp_path / "f.safetensors", encoder=lambda t: torch.ones(len(t), 512))("q", "a", "b") == 0.5
    (tmp_path / "g").write_text("no")
    with pytest.raises(VariantError, match="cannot read"):
        Preference.load(tmp_path / "g")
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, str(tmp_path / "h"))
    with pytest.raises(VariantError, match="fit_preference"):
        Preference.load(tmp_path / "h")


def test_fit_freeze_and_train(fitted):
    f = PrefixPreferenceReward(fitted, split=list)
    run = toy.train(
        variant="ws-grpo", rewards=[toy.digits, f], reward_weights=[5.0, 1.0], max_steps=2, num_iterations=1
    )
    assert any(g.norm() > 0 for g in run.gradients)
    assert all(0 < x < 1 for x in run.logged("rewards/prefix_preference_reward/mean"))
