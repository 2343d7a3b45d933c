from __future__ import annotations

import pytest
import torch
import yaml

from trl_variants import Schedule, TokenBatch, VariantError, variant
from trl_variants.hooks.clip import PPOClip
from trl_variants.schedule import SHAPES, at, parse


@pytest.mark.parametrize(
    "schedule, values",
    [
        (Schedule(1.0, 3.0), {0.0: 1.0, 0.25: 1.5, 1.0: 3.0}),
        (Schedule(1.0, 3.0, begin=0.2, until=0.6), {0.0: 1.0, 0.2: 1.0, 0.4: 2.0, 0.6: 3.0, 1.0: 3.0}),
        # cosine: half way at half time; at a quarter (1 - cos(pi/4)) / 2 = .146447
        (Schedule(0.0, 1.0, shape="cosine"), {0.0: 0.0, 0.25: 0.146447, 0.5: 0.5, 1.0: 1.0}),
        (Schedule(5.0, 1.0, until=0.5, shape="step"), {0.0: 5.0, 0.499: 5.0, 0.5: 1.0, 1.0: 1.0}),
        (Schedule(5.0, 1.0, begin=0.5, until=0.5), {0.0: 5.0, 0.499: 5.0, 0.5: 1.0}),
    ],
)
def test_values(schedule, values):
    for progress, wanted in values.items():
        assert schedule(progress) == pytest.approx(wanted, abs=6e-7)


@pytest.mark.parametrize("shape", SHAPES)
def test_ends_are_exact_and_progress_outside_is_held(shape):
    s = Schedule(0.3, 0.1, 0.25, 0.75, shape)
    assert (s(-1.0), s(0.0), s(0.25), s(0.75), s(2.0)) == (0.3, 0.3, 0.3, 0.1, 0.1)


def test_at_replaces_only_what_moves():
    still, moving = PPOClip(), PPOClip(eps_high=Schedule(0.2, 0.4))
    assert at(still, 0.5) is still
    assert (at(moving, 0.5).eps_low, at(moving, 0.5).eps_high) == pytest.approx((0.2, 0.3))
    assert moving.eps_high == Schedule(0.2, 0.4)
    assert at("no hook", 0.5) == "no hook" and at(PPOClip, 0.5) is PPOClip


def test_a_scheduled_clip_moves_the_loss():
    # r = 2 held at 1 + eps_high: 1.2 at the start, 1.5 half way, 1.8 at the end
    v = variant("dapo", clip={"ppo": {"eps_high": {"schedule": {"start": 0.2, "end": 0.8}}}})
    for progress, held in ((0.0, 1.2), (0.5, 1.5), (1.0, 1.8)):
        batch = TokenBatch.from_tensors(
            [[0.0]], [[-torch.tensor(2.0).log().item()]], advantage=[1.0], progress=progress
        )
        assert float(v.loss(batch).loss) == pytest.approx(-held)


def test_a_schedule_moves_advantages_rewards_and_regularizers_too():
    ramp = {"schedule": {"start": 0.0, "end": 2.0}}
    v = variant(
        "dr-grpo",
        rewards=[{"kl_in_reward": {"coef": ramp}}],
        regularizers=[{"kl": {"coef": ramp, "estimator": "k2"}}],
    )
    for progress, coef in ((0.0, 0.0), (0.5, 1.0)):
        batch = TokenBatch.from_tensors(
            [[-1.0], [-1.0]], ref_logps=[[-1.5], [-1.0]], rewards=[1.0, 1.0], progress=progress
        )
        loss = v.loss(batch)
        # rewards 1 - coef * .5 and 1: advantages -+coef / 4; KL: coef * .125 on one of two tokens of length 1
        assert loss.advantage.squeeze(1).tolist() == pytest.approx([-coef / 4, coef / 4])
        assert float(loss.terms["kl"]) == pytest.approx(coef * 0.125 / 2)


def test_yaml_form():
    text = "{schedule: {start: 0.2, end: 0.4, until: 0.5, shape: cosine}}"
    assert parse(yaml.safe_load(text)) == Schedule(0.2, 0.4, until=0.5, shape="cosine")
    assert parse({"start": 1}) == {"start": 1} and parse(0.3) == 0.3
    v = variant("dapo", clip=PPOClip(eps_high=Schedule(0.2, 0.4, shape="step")))
    assert variant(yaml.safe_load(yaml.safe_dump(v.to_mapping()))) == v
    assert "Schedule(start=0.2" in v.describe()


@pytest.mark.parametrize(
    "body, message",
    [
        ({"start": 0.1}, "a schedule takes start, end, begin, until and shape"),
        ({"start": 0.1, "end": 0.2, "steps": 5}, "a schedule takes start, end, begin, until and shape"),
        (0.3, "a schedule takes start, end, begin, until and shape, got 0.3"),
        (
            {"start": 0.1, "end": 0.2, "shape": "cosin"},
            r"unknown schedule shape 'cosin' \(did you mean cosine\?\)",
        ),
        ({"start": 0.1, "end": 0.2, "begin": 0.9, "until": 0.1}, "0 <= begin <= until <= 1, got 0.9 and 0.1"),
        ({"start": -0.1, "end": 0.2}, "ppo.eps_low must be >= 0.0, got -0.1"),
        ({"start": 0.1, "end": "wide"}, "ppo.eps_low must be float, got 'wide'"),
    ],
)
def test_wrong_schedules(body, message):
    with pytest.raises(VariantError, match=message):
        variant("dapo", clip={"ppo": {"eps_low": {"schedule": body}}})
