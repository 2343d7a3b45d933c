"""GAE by hand, by TRL 1.12's own lines, and on masks, truncation and rows that have nothing to do with each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.batches import assert_close, build, inputs
from tests.reference.trl_ppo_1_12 import LOSS, SETTINGS
from tests.reference.trl_ppo_1_12 import inputs as trl_inputs
from trl_variants import Run, Scored, TokenBatch, VariantError, variant
from trl_variants.hooks.advantage_gae import GAE, gae, length_adaptive, whitened
from trl_variants.hooks.rewards import KLInReward
from trl_variants.hooks.rewards_ppo import AdaptiveKLInReward, MissingEOSPenalty, ZeroTruncated
from trl_variants.learners.critic import value_loss

D = torch.float64
TRL = json.loads((Path(__file__).parents[1] / "reference" / "trl_ppo_1_12.json").read_text())


def T(x) -> torch.Tensor:
    return torch.tensor(x, dtype=D)


def scored(rewards, values, mask=None, truncated=None, bootstrap=None, **changes) -> Scored:
    """One reward per row on its last token."""
    values = T(values)
    mask = torch.ones_like(values) if mask is None else T(mask)
    rows = len(values)
    return Scored(
        rewards=T(rewards).unsqueeze(1),
        weights=torch.ones(1, dtype=D),
        group=torch.arange(rows),
        truncated=torch.zeros(rows, dtype=torch.bool) if truncated is None else torch.tensor(truncated),
        tokens={"mask": mask, "values": values, **changes.pop("tokens", {})},
        bootstrap=None if bootstrap is None else T(bootstrap),
        **changes,
    )


RAW = GAE(whiten=False)


# ---------------------------------------------------------------- numbers by hand


@pytest.mark.parametrize(
    "lam, wanted",
    [
        # d = [.5 - .2, .6 - .5, 1 - .6] = [.3, .1, .4]; A_2 = .4, A_1 = .1 + .95 * .4, A_0 = .3 + .95 * .48
        (0.95, [0.756, 0.48, 0.4]),
        (1.0, [0.8, 0.5, 0.4]),
        (0.0, [0.3, 0.1, 0.4]),
    ],
)
def test_three_tokens(lam, wanted):
    record = scored([1.0], [[0.2, 0.5, 0.6]])
    rule = replace(RAW, lam=lam)
    assert rule(record)[0].tolist() == pytest.approx(wanted)
    targets, counted = rule.value_targets(record)
    assert targets[0].tolist() == pytest.approx([a + v for a, v in zip(wanted, [0.2, 0.5, 0.6], strict=True)])
    assert counted.tolist() == [[1.0, 1.0, 1.0]]


def test_a_tool_token_is_skipped_and_later_rewards_flow_over_it():
    record = scored([1.0], [[0.2, 9.9, 0.5, 0.6]], mask=[[1, 0, 1, 1]])
    # one that does not skip gives [1.2032, -8.944, .48, .4]
    assert RAW(record)[0].tolist() == pytest.approx([0.756, 0.0, 0.48, 0.4])
    not_skipped = gae(T([[0.0, 0, 0, 1]]), T([[0.2, 9.9, 0.5, 0.6]]), T([[1.0] * 4]), T([0.0]), 1.0, 0.95)
    assert not_skipped[0].tolist() == pytest.approx([1.2032, -8.944, 0.48, 0.4], abs=1e-4)


def test_truncation_bootstraps_and_termination_does_not():
    cut = scored([0.0], [[0.2, 0.5, 0.6]], truncated=[True], bootstrap=[0.7])
    # d = [.3, .1, .7 - .6]
    assert RAW(cut)[0].tolist() == pytest.approx([0.48525, 0.195, 0.1])
    ended = scored([0.0], [[0.2, 0.5, 0.6]], truncated=[False], bootstrap=[0.7])
    assert RAW(ended)[0].tolist() == pytest.approx([0.3 + 0.95 * (0.1 - 0.95 * 0.6), 0.1 - 0.95 * 0.6, -0.6])
    assert_close(replace(RAW, bootstrap=False)(cut), RAW(ended), "as if it had ended")


def test_whitening_by_both_variances():
    record = scored([1.0], [[0.2, 0.5, 0.6]])
    assert GAE()(record)[0].tolist() == pytest.approx([1.1279, -0.3498, -0.7781], abs=1e-4)
    assert GAE(ddof=0)(record)[0].tolist() == pytest.approx([1.3814, -0.4284, -0.953], abs=1e-4)
    assert_close(GAE().value_targets(record)[0], RAW.value_targets(record)[0], "targets are taken before whitening")


def test_lambda_that_grows_with_length():
    lengths = T([100.0, 1000.0, 8000.0, 20.0, 10.0, 0.0])
    assert length_adaptive(lengths, 0.05).tolist() == pytest.approx([0.8, 0.98, 0.9975, 0.0, 0.0, 0.0])
    assert float(sum(0.98**t for t in range(1000))) == pytest.approx(50.0, abs=1e-3)  # alpha l
    # length 3 at alpha .5: lambda = 1 - 1 / 1.5 = 1/3: A_2 = .4, A_1 = .1 + .4 / 3, A_0 = .3 + A_1 / 3
    record = scored([1.0, 0.0], [[0.2, 0.5, 0.6], [0.1, 0.0, 0.0]], mask=[[1, 1, 1], [1, 0, 0]])
    a1 = 0.1 + 0.4 / 3
    adaptive = replace(RAW, length_alpha=0.5)
    assert adaptive(record)[0].tolist() == pytest.approx([0.3 + a1 / 3, a1, 0.4])
    # the critic's own lambda is another one: the whole return
    assert adaptive.value_targets(record, lam=1.0)[0].tolist() == [
        pytest.approx([1.0, 1.0, 1.0]),
        pytest.approx([0.0] * 3),
    ]


def test_the_kl_penalty_stays_on_its_token():
    tokens = {"old_logps": T([[-1.0, -2.0, -0.5]]), "ref_logps": T([[-1.2, -1.5, -0.9]])}
    record = KLInReward(coef=0.1, level="token")(scored([1.0], [[0.0] * 3], tokens=tokens))
    assert record.token_rewards[0].tolist() == pytest.approx([-0.02, 0.05, 0.96])
    # values 0 and lambda 1: reward-to-go
    assert replace(RAW, lam=1.0)(record)[0].tolist() == pytest.approx([0.99, 1.01, 0.96])
    k3 = KLInReward(coef=0.1, level="token", estimator="k3")(scored([1.0], [[0.0] * 3], tokens=tokens))
    # k3 of d = .2: exp(-.2) - 1 + .2 = .0187308
    assert float(k3.token_rewards[0, 0]) == pytest.approx(-0.1 * 0.01873075)


def test_rewards_are_whitened_with_their_mean_kept():
    record = scored([3.0], [[0.0, 0.0]])
    # 0 and 3: mean 1.5, unbiased variance 4.5; (x - 1.5) / sqrt(4.5) + 1.5
    got = replace(RAW, whiten_rewards=True, lam=0.0).unrolled(record)[0]
    assert got[0].tolist() == pytest.approx([1.5 - 1.5 / 4.5**0.5, 1.5 + 1.5 / 4.5**0.5])


def test_a_held_kl_moves_its_coefficient():
    def record(kl: float, rows: int = 256):
        tokens = {"old_logps": torch.full((rows, 2), kl / 2, dtype=D), "ref_logps": torch.zeros(rows, 2, dtype=D)}
        return scored([0.0] * rows, [[0.0, 0.0]] * rows, tokens=tokens)

    h = AdaptiveKLInReward(coef=0.1, target=6.0, horizon=10000.0)
    assert h.update(h.init(), record(9.0))["coef"] == pytest.approx(0.1 * 1.00512)
    assert h.update(h.init(), record(3.0))["coef"] == pytest.approx(0.1 * 0.99488)
    # 10 % above: not clipped
    assert h.update(h.init(), record(6.6))["coef"] == pytest.approx(0.1 * (1 + 0.1 * 256 / 10000))
    assert h(record(9.0, 2), {"coef": 0.5}).reward.tolist() == pytest.approx([-4.5, -4.5])


def test_rewards_of_unfinished_answers():
    record = scored([1.0, 1.0, float("nan")], [[0.0]] * 3, truncated=[False, True, True])
    penalised = MissingEOSPenalty(penalty=0.4)(record)
    assert penalised.reward[:2].tolist() == pytest.approx([1.0, 0.6]) and torch.isnan(penalised.reward[2])
    assert ZeroTruncated()(record)[:2].tolist() == [1.0, 0.0] and torch.isnan(ZeroTruncated()(record)[2])
    spread = MissingEOSPenalty(penalty=0.4)(record.with_(token_rewards=T([[1.0], [1.0], [0.0]])))
    assert spread.token_rewards[:2, 0].tolist() == pytest.approx([1.0, 0.6])


# ---------------------------------------------------------------- rows, padding, missing facts


def test_rows_and_padding_do_not_touch_each_other():
    g = torch.Generator().manual_seed(4)
    values, score = torch.randn(3, 5, generator=g, dtype=D), torch.randn(3, generator=g, dtype=D)
    mask = T([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 1, 0]])
    cut = [True, False, True]
    whole = RAW(scored(score.tolist(), values.tolist(), mask.tolist(), cut, [0.3, 5.0, -0.4]))
    for i in range(3):
        alone = RAW(
            scored(
                [float(score[i])], values[i : i + 1].tolist(), mask[i : i + 1].tolist(), [cut[i]], [[0.3, 5.0, -0.4][i]]
            )
        )
        assert_close(alone[0], whole[i], f"row {i}")
    wide = lambda x, fill: torch.nn.functional.pad(x, (0, 2), value=fill)  # noqa: E731
    padded = scored(score.tolist(), wide(values, 77.0).tolist(), wide(mask, 0.0).tolist(), cut, [0.3, 5.0, -0.4])
    assert_close(RAW(padded)[:, :5], whole, "padding")
    assert not whole[mask == 0].any()


def test_an_unscorable_row_is_out_of_everything():
    rows = dict(values=[[0.2, 0.5], [0.9, -0.4]], truncated=[False, False])
    with_nan, alone = scored([1.0, float("nan")], **rows), scored([1.0], [[0.2, 0.5]])
    assert_close(GAE()(with_nan)[0], GAE()(alone)[0], "whitening")
    assert not GAE()(with_nan)[1].any() and not GAE().value_targets(with_nan)[1][1].any()


def test_a_row_out_of_the_baseline_teaches_the_critic_and_nothing_else():
    rows = dict(values=[[0.2, 0.5], [0.9, -0.4]], truncated=[False, False])
    record = scored([1.0, 0.0], **rows)
    record = replace(record, in_baseline=torch.tensor([True, False]), keep=torch.tensor([True, False]))
    assert_close(GAE()(record)[0], GAE()(scored([1.0], [[0.2, 0.5]]))[0], "whitening")
    assert not GAE()(record)[1].any()
    targets, counted = GAE(lam=1.0).value_targets(record)
    assert counted.tolist() == [[1, 1], [1, 1]] and targets[1].tolist() == pytest.approx([0.0, 0.0])


def test_what_is_missing_is_named():
    with pytest.raises(VariantError, match="`bootstrap` per row.*gae.bootstrap: false"):
        RAW(scored([1.0], [[0.1]], truncated=[True]))
    with pytest.raises(VariantError, match="`values`"):
        RAW(replace(scored([1.0], [[0.1]]), tokens={"mask": T([[1.0]])}))
    batch = TokenBatch.from_tensors(
        torch.zeros(1, 2), rewards=[1.0], truncated=[True], values=[[0.1, 0.2]], bootstrap=[0.5]
    )
    assert variant("ppo", advantage={"gae": {"whiten": False}}).loss(batch).advantage[0].tolist() == pytest.approx(
        # d = [.2 - .1, 1 + .5 - .2]
        [0.1 + 0.95 * 1.3, 1.3]
    )


def test_one_token_in_all_is_no_division_by_zero():
    assert GAE()(scored([1.0], [[0.3]])).tolist() == [[0.0]]
    assert not whitened(torch.ones(1, 2), torch.zeros(1, 2), 1, 1e-8).any()


# ---------------------------------------------------------------- TRL 1.12's PPOTrainer


@pytest.mark.parametrize("name", SETTINGS)
def test_rewards_advantages_returns_and_losses_are_those_of_trl_1_12(name):
    settings, golden, x = SETTINGS[name], TRL[name], trl_inputs()
    lengths = x["sequence_lengths"] + 1
    position = torch.arange(6)
    mask = (position < lengths[:, None]).to(D)
    end = lengths.clamp(max=5)  # the state after the last token, where the row is below the limit
    values = x["values"] * mask
    record = Scored(
        rewards=x["scores"].unsqueeze(1),
        weights=torch.ones(1, dtype=D),
        group=torch.arange(4),
        length=lengths,
        truncated=lengths == 6,
        tokens={"mask": mask, "values": values, "old_logps": x["logprobs"], "ref_logps": x["ref_logprobs"]},
        bootstrap=x["values"].gather(1, end[:, None]).squeeze(1),
        run=Run(max_completion_length=6),
    )
    record = KLInReward(settings["kl_coef"], "token", settings["kl_estimator"])(record)
    rule = GAE(
        settings["gamma"],
        settings["lam"],
        bootstrap=False,
        score_after_end=True,
        whiten_rewards=settings["whiten_rewards"],
    )
    advantage = rule(record)
    assert_close(advantage, golden["advantages"], "advantages")
    targets, counted = rule.value_targets(record)
    counts = (position <= lengths[:, None]).to(D)  # TRL's ~padding_mask_p1
    assert torch.equal(counted[:, :6], counts)
    assert_close(targets[:, :6], T(golden["returns"]) * counts, "returns")

    new = x["new_logprobs"].clone().requires_grad_()
    batch = TokenBatch.from_tensors(new, old_logps=x["logprobs"], mask=mask, advantage=advantage)
    loss = variant("ppo", clip={"ppo": {"eps_low": LOSS["cliprange"], "eps_high": LOSS["cliprange"]}}).loss(batch)
    assert float(loss.loss) == pytest.approx(golden["pg_loss"], rel=1e-10)
    [policy_gradient] = torch.autograd.grad(loss.loss, new)
    assert_close(policy_gradient, golden["policy_gradient"], "policy gradient")
    assert loss.metrics["clip_ratio/region_mean"] == pytest.approx(golden["pg_clipfrac"])

    predicted = (x["vpred"] * counts).requires_grad_()
    squares, clipped = value_loss(predicted, x["values"] * counts, targets[:, :6], LOSS["cliprange_value"])
    value = (squares * counts).sum() / counts.sum()
    assert float(value) == pytest.approx(golden["vf_loss"], rel=1e-10)
    assert float((clipped * counts).sum() / counts.sum()) == pytest.approx(golden["vf_clipfrac"])
    [value_gradient] = torch.autograd.grad(LOSS["vf_coef"] * value, predicted)
    assert_close(value_gradient, golden["value_gradient"], "value gradient")
    assert float(loss.loss) + LOSS["vf_coef"] * float(value) == pytest.approx(golden["loss"], rel=1e-10)


def test_the_end_state_moves_nothing_where_rewards_came_per_token():
    per_token = T([[0.5, 0.25, 0.0]])
    record = scored([0.75], [[0.0] * 3], mask=[[1, 1, 0]], bootstrap=[0.4], run=Run(max_completion_length=3))
    record = record.with_(token_rewards=per_token, spread=True)
    rewards_to_go = replace(RAW, lam=1.0, bootstrap=False, score_after_end=True)
    assert rewards_to_go(record)[0].tolist() == pytest.approx([0.75, 0.25, 0.0])
    targets, counted = rewards_to_go.value_targets(record)
    assert targets[0].tolist() == pytest.approx([0.75, 0.25, 0.0, 0.0]) and counted[0].tolist() == [1, 1, 1, 0]


def test_a_gradient_reaches_the_policy_and_not_the_values():
    given = inputs(3)
    batch = build(given, values=given["values"].clone().requires_grad_())
    out = variant("rlhf-ppo").loss(batch)
    assert not out.advantage.requires_grad
