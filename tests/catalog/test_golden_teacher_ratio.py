# ruff: noqa: E501  (a table: one row, one line of arithmetic)
"""Golden numbers of teachers in the ratio and in the clip of the tokens they wrote, values and gradients."""

from __future__ import annotations

import pytest
import torch

from tests.batches import assert_close, build, gradient, inputs, leaves_of
from tests.catalog.test_golden import E, Golden, L, each
from tests.catalog.test_golden import test_golden as check_golden
from tests.catalog.test_golden_teacher_advantage import F
from trl_variants import Schedule, TokenBatch, VariantError, check, variant
from trl_variants.hooks.clip import PPOClip
from trl_variants.hooks.clip_teacher import OriginShaped

SHAPED = {"clip": {"origin_shaped": {"inner": "ppo"}}}
TRACE = [0.01, 0.1, 0.5, 0.9]  # probabilities of a trace's tokens


def liked(d: float, a: float) -> dict:
    """One on-policy token with d = lp_T - lp."""
    return {"logps": [[-1.0]], "teacher_logps": [[-1.0 + d]], "advantage": [a]}


def traced(*probabilities, **more) -> dict:
    """One row that a teacher wrote."""
    row = [L(p) for p in probabilities]
    return {"logps": [row], "origin": [[1] * len(row)], "advantage": [1.0], **more}


# two rows: a trace with p = .01, .9 and A = .5; the policy's own, lp -.5, -1 against -.6, -1.2, A = -.5. Z = 4 tokens
TINY = {
    "logps": [[L(0.01), L(0.9)], [-0.5, -1.0]],
    "old_logps": [[0.0, 0.0], [-0.6, -1.2]],
    "origin": [[1, 1], [0, 0]],
    "advantage": [0.5, -0.5],
}
# f = 1/11, .9; (.5 (1/11 + .9) - .5 (e^.1 + e^.2)) / 4 = -.166958; slopes .1 p / (p + .1)^2 .5 / 4
TINY_GRADIENT = [[-0.010331, -0.011250], [0.138146, 0.152675]]

GOLDEN = [
    # ------------------------------------------------------------ RLAD
    # r = exp(-d / 2): d = -1 gives e^.5 = 1.648721, d = 1 e^-.5 = .606531; A > 0 clips above 1.2, A < 0 below .8
    Golden(
        "rlad, disliked and good: clipped",
        "rlad",
        liked(-1, 1.0),
        {"ratio": [[E(0.5)]], "objective": [[1.2]], "grad": [[0]]},
    ),
    Golden(
        "rlad, liked and good",
        "rlad",
        liked(1, 1.0),
        {"ratio": [[E(-0.5)]], "objective": [[0.606531]], "grad": [[-0.606531]]},
    ),
    Golden("rlad, liked and bad: clipped", "rlad", liked(1, -1.0), {"objective": [[-0.8]], "grad": [[0]]}),
    Golden("rlad, disliked and bad", "rlad", liked(-1, -1.0), {"objective": [[-1.648721]], "grad": [[1.648721]]}),
    # .5 (lp - old) + .5 (lp - lp_T): -.1, .5, -1; -.15, .5
    Golden(
        "rlad on F",
        "rlad",
        F,
        {
            "ratio": [[0.904837, 1.648721, 0.367879], [0.860708, 1.648721, 1]],
            "loss": 0.215238,
            "grad": [[-0.150806, 0, -0.061313], [0.215177, 0.412180, 0]],
        },
    ),
    # clamp 1 binds where lp - lp_T is -1.2 (third token: exp(.5 (-.8) - .5)) and 1.5 (last: exp(.5 (-.5) + .5)); there
    # only the alpha half of the ratio moves
    Golden(
        "rlad, clamped",
        "rlad",
        F,
        {"loss": 0.117616, "grad": [[-0.150806, 0, -0.033881], [0.215177, 0.160503, 0]]},
        {"ratio": {"teacher_mixture": {"clamp": 1.0}}},
    ),
    Golden("rlad, alpha 1 is GRPO", "rlad", F, {"loss": 0.024250}, {"ratio": {"teacher_mixture": {"alpha": 1.0}}}),
    # alpha 0 is measured from the teacher: d = 1 gives e^-1, not the 1 that the body's naming would give
    Golden(
        "rlad, alpha 0 is the teacher",
        "rlad",
        liked(1, 1.0),
        {"ratio": [[E(-1)]]},
        {"ratio": {"teacher_mixture": {"alpha": 0.0}}},
    ),
    # where the teacher is silent the ratio is the plain one: 1
    Golden(
        "rlad, a silent token", "rlad", liked(-9, 1.0) | {"teacher_mask": [[0.0]]}, {"ratio": [[1]], "grad": [[-1]]}
    ),
    # ------------------------------------------------------------ a trace's tokens
    # f = p / (p + .1) and df/dlp = .1 p / (p + .1)^2, largest at p = .1; the identity would give p itself
    Golden(
        "luffy's shaping",
        "dapo",
        traced(*TRACE),
        {"objective": [[0.090909, 0.5, 0.833333, 0.9]], "grad": [[-g / 4 for g in (0.082645, 0.25, 0.138889, 0.09)]]},
        SHAPED,
    ),
    Golden("a trace and an own row", "dapo", TINY, {"loss": 0.166958, "grad": TINY_GRADIENT}, SHAPED),
    # the shipped form: no clip on either, sums over 8192; Z = rows * 8192 here, so twice that
    Golden(
        "the shipped form",
        "dr-grpo",
        TINY | {"max_completion_length": 8192},
        {"loss": 8.15225e-05 / 2},
        {"clip": "origin_shaped"},
        atol=1e-10,
    ),
    # old log-probs of a trace mean nothing: with -9 there nothing changes, and no clip range applies
    Golden(
        "a trace's old log-probs are not read",
        "dapo",
        TINY | {"old_logps": [[-9.0, 5.0], [-0.6, -1.2]]},
        {"loss": 0.166958, "grad": TINY_GRADIENT},
        SHAPED,
    ),
    # a wrong trace, A = -1: pushed down just the same, no clip: -f
    Golden(
        "a wrong trace",
        "dapo",
        traced(0.5) | {"advantage": [-1.0]},
        {"objective": [[-0.833333]], "grad": [[0.138889]]},
        SHAPED,
    ),
    # replayed rows (origin 2) and prefixes (3) are the inner clip's
    Golden(
        "other origins",
        "dapo",
        {"logps": [[-1.0], [-1.0]], "old_logps": [[-2.0], [-2.0]], "origin": [[2], [3]], "advantage": [1.0, 1.0]},
        {"objective": each(1.28, 1.28), "grad": each(0, 0)},
        {"clip": {"origin_shaped": {"inner": {"ppo": {"eps_high": 0.28}}}}},
    ),
    # ------------------------------------------------------------ gap 1: u = pi / pi_T where the trace brings pi_T
    # log u = .5, -.3, 1.2: e^.5 = 1.648721, e^-.3 = .740818, e^1.2 = 3.32 cut at 2; gradient -w / 3
    Golden(
        "gap 1, truncated",
        "grpo",
        {"logps": [[-1.0, -1, -1]], "rollout_logps": [[-1.5, -0.7, -2.2]], "origin": [[1, 1, 1]], "advantage": [1.0]},
        {"objective": [[-1.648721, -0.740818, -2.0]], "grad": [[-1.648721 / 3, -0.740818 / 3, -2 / 3]]},
        {"clip": {"origin_shaped": {"inner": "ppo", "form": "truncated", "behaviour": "known"}}, "regularizers": []},
    ),
    # exp(mean) = e^(1.4 / 3) = 1.594670, d/dlp a third of it
    Golden(
        "gap 1, sequence",
        "grpo",
        {"logps": [[-1.0, -1, -1]], "rollout_logps": [[-1.5, -0.7, -2.2]], "origin": [[1, 1, 1]], "advantage": [1.0]},
        {"objective": [[1.594670] * 3], "grad": [[-1.594670 / 3] * 3]},
        {"clip": {"origin_shaped": {"inner": "ppo", "form": "sequence", "behaviour": "known"}}, "regularizers": []},
    ),
    # e^1.4 = 4.0552
    Golden(
        "gap 1, product",
        "grpo",
        {"logps": [[-1.0, -1, -1]], "rollout_logps": [[-1.5, -0.7, -2.2]], "origin": [[1, 1, 1]], "advantage": [1.0]},
        {"objective": [[E(1.4)] * 3], "grad": [[-E(1.4)] * 3]},
        {"clip": {"origin_shaped": {"inner": "ppo", "form": "product", "behaviour": "known"}}, "regularizers": []},
    ),
    # a trace without log-probs: pi_T is taken as 1, u = p = e^-1: f = e^-1 / (e^-1 + .1)
    Golden(
        "gap 1, unknown behaviour",
        "grpo",
        {"logps": [[-1.0]], "rollout_logps": [[float("nan")]], "origin": [[1]], "advantage": [1.0]},
        {"objective": [[E(-1) / (E(-1) + 0.1)]]},
        {"clip": {"origin_shaped": {"inner": "ppo", "behaviour": "known"}}, "regularizers": []},
    ),
]


@pytest.mark.parametrize("row", GOLDEN, ids=[g.name for g in GOLDEN])
def test_golden(row):
    check_golden(row)


def test_shaping_by_the_ratio_would_be_another_method():
    # the sibling folder's f(exp(lp - lp_old)) is .5 / .6 at ratio .5, whatever p; here p = .01 gives 1 / 11
    batch = TokenBatch.from_tensors([[L(0.01)]], old_logps=[[L(0.02)]], origin=[[1]], advantage=[1.0])
    got = float(variant("dapo", **SHAPED).loss(batch).objective.detach())
    assert got == pytest.approx(1 / 11) and got != pytest.approx(0.5 / 0.6, abs=0.1)


def test_effective_sample_size_of_a_trace():
    # u = 2/3 with probability .9 and 4 with .1 under the teacher: E u = 1, E u^2 = 2, ESS per token 1/2
    ratio = [0.6 / 0.9] * 9 + [0.4 / 0.1]
    batch = TokenBatch.from_tensors(
        [[L(0.5)] * 10], rollout_logps=[[L(0.5) - L(u) for u in ratio]], origin=[[1] * 10], advantage=[1.0]
    )
    v = variant("grpo", clip={"origin_shaped": {"form": "truncated", "behaviour": "known"}}, regularizers=[])
    metrics = v.loss(batch).metrics
    assert metrics["origin/teacher_ess"] == pytest.approx(0.5)
    assert metrics["origin/teacher_truncated"] == pytest.approx(0.1)


def test_the_mixed_baseline_gives_failed_rollouts_a_gradient():
    # 7 failures and one right trace, no std: -.125 each, .875 for the trace
    batch = TokenBatch.from_tensors(torch.full((8, 1), -1.0), rewards=[0.0] * 7 + [1.0], origin=[[0]] * 7 + [[1]])
    v = variant("dr-grpo", clip="origin_shaped")
    assert v.loss(batch).advantage.flatten().tolist() == pytest.approx([-0.125] * 7 + [0.875])


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "gmpo", "sapo", "cispo", "vespo", "luspo"])
def test_without_traces_every_clip_is_as_it_was(name):
    v = variant(name)
    given = inputs(5) | {"origin": None}
    plain, shaped = (w.loss(build(given)) for w in (v, v.with_(clip={"origin_shaped": {"inner": v.clip}})))
    assert_close(shaped.loss, plain.loss)
    # and on traces the two differ, only there
    batch = build(inputs(5))
    loss = v.with_(clip={"origin_shaped": {"inner": v.clip}}, weight=[]).loss(batch)
    own = v.with_(weight=[]).loss(build(inputs(5)))
    apart = (loss.objective != own.objective.expand_as(loss.objective)) & (batch.mask > 0)
    assert apart.any() and bool((batch.origin[apart] == 1).all())
    assert gradient(loss.loss, leaves_of(batch))["logps"].abs().max() > 0


def test_a_schedule_inside_the_inner_clip_moves():
    moving = variant("dapo", clip={"origin_shaped": {"inner": {"ppo": {"eps_high": Schedule(0.2, 0.4)}}}})
    batch = TokenBatch.from_tensors([[-1.0]], old_logps=[[-2.0]], advantage=[1.0], origin=[[0]], progress=0.5)
    assert float(moving.loss(batch).objective.detach()) == pytest.approx(1.3)


def test_checks_look_at_the_inner_clip():
    found = check(variant("grpo", clip={"origin_shaped": {"inner": {"ppo": {"eps_low": 3e-4, "eps_high": 4e-4}}}}))
    assert any("sequence-ratio range" in str(f) for f in found)
    assert not check(variant("grpo", clip={"origin_shaped": {"inner": "ppo"}}))


def test_no_advantage_wants_something_else_to_learn_from():
    assert any("nothing is learned" in str(f) for f in check(variant("grpo", advantage="none", regularizers=[])))
    for edit in ({"credit": ["teacher_advantage"], "regularizers": []}, {"regularizers": ["kl"]}):
        assert not check(variant("grpo", advantage="none", **edit))


def test_clips_of_token_ratios_take_the_mixture():
    assert not [f for f in check(variant("rlad", clip="geometric_mean")) if f.level == "error"]
    assert [f for f in check(variant("rlad", clip="geometric_mean", ratio="product")) if f.level == "error"]


def test_a_clip_is_wrapped_once():
    with pytest.raises(VariantError, match="origin_shaped"):
        OriginShaped(inner=OriginShaped(inner=PPOClip()))
    with pytest.raises(VariantError, match="unknown clip hook"):
        OriginShaped(inner="pp")
