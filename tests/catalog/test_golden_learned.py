"""Golden numbers of the entries with something learned beside the policy, or read off it; values and gradients."""

from __future__ import annotations

import pytest
import torch

from trl_variants import TokenBatch, VariantError, variant

D = torch.float64

# ---------------------------------------------------------------- VIMPO

GAPS = [[0.5, 0.2, -0.1], [0.1, -0.4, 0.3]]
KL = [[0.05, 0.02, 0.01], [0.03, 0.04, 0.02]]


def implied(gaps=GAPS, kl=KL, **given) -> TokenBatch:
    """lp - lp_ref = gaps, on-policy."""
    given = {"rewards": [1.0, 0.0], **given}
    logps = torch.tensor(gaps, dtype=D, requires_grad=True)
    compared = {"rkl/ref": torch.tensor(kl, dtype=D, requires_grad=True)}
    return TokenBatch.from_tensors(logps, ref_logps=[[0.0] * 3] * 2, divergences=compared, **given)


def test_the_regression_of_vimpo():
    b = implied()
    out = variant("vimpo", credit=[{"implicit_value": {"coef": 0.0}}]).loss(b)
    # z = 5e-4 (gap - KL): sums 2.6e-4 and -4.5e-5 against .5 and -.5; mean of .5 (2.6e-4 - .5)^2, .5 (.5 - 4.5e-5)^2
    assert float(out.loss.detach()) == pytest.approx(0.12492377, abs=1e-8)
    slope, of_kl = torch.autograd.grad(out.loss, [b.logps, b.divergences["rkl/ref"]], allow_unused=True)
    # 5e-4 / 2 times the residual, the same at every token; none through the KL
    assert slope.tolist() == [pytest.approx([-1.24935e-4] * 3, rel=1e-9), pytest.approx([1.2498875e-4] * 3, rel=1e-9)]
    assert of_kl is None


@pytest.mark.parametrize(
    "lam, wanted",
    [
        (0.0, [[1.0824, 0.3099, -0.5197], [-0.0048, -1.4638, 0.5960]]),
        (1.0, [[1.3800, -0.0476, -0.6186], [-0.5552, -0.7773, 0.6186]]),
    ],
)
def test_the_advantage_of_vimpo(lam, wanted):
    b = implied()
    out = variant("vimpo", credit=[{"implicit_value": {"lam": lam, "coef": 1.0}}], regularizers=[]).loss(b)
    assert out.advantage.tolist() == [pytest.approx(row, abs=5e-5) for row in wanted]
    [slope] = torch.autograd.grad(out.loss, b.logps)
    # on-policy: -A / 6 at each token, nothing through z
    assert slope.flatten().tolist() == pytest.approx([-a / 6 for a in sum(wanted, [])], abs=1e-5)


def test_the_raw_advantage_of_vimpo_before_whitening():
    # with an eps far above the variance whitening only centres and divides by sqrt(eps) = 1
    out = variant("vimpo", credit=[{"implicit_value": {"coef": 1.0, "eps": 1.0}}]).loss(implied())
    raw = [[2.6e-4, 3.5e-5, -5.5e-5], [-4.5e-5, -8e-5, 1.4e-4]]
    mean = sum(sum(raw, [])) / 6
    assert out.advantage.tolist() == [pytest.approx([a - mean for a in row], abs=1e-11) for row in raw]


def test_c_a_scales_the_policy_s_term():
    full, tenth = (
        variant("vimpo", credit=[{"implicit_value": {"coef": c}}])
        .loss(implied(old_logps=[[0.1] * 3] * 2))
        .terms["policy"]
        .detach()
        for c in (1.0, 0.1)
    )
    assert float(tenth) == pytest.approx(0.1 * float(full)) != 0.0


def test_a_kl_from_the_sampled_token_would_cancel_the_value():
    out = variant("vimpo").loss(implied(kl=GAPS))
    assert not out.advantage.any()
    assert float(out.terms["implicit_value_regression"].detach()) == pytest.approx(0.125), "nothing left to regress"
    with pytest.raises(VariantError, match="divergence 'rkl/ref'"):
        variant("vimpo").loss(TokenBatch.from_tensors(torch.zeros(1, 2), ref_logps=[[0.0] * 2], rewards=[1.0]))


def test_vimpo_leaves_an_answer_without_a_reward_out_of_the_regression():
    nan = float("nan")
    b = implied(rewards=[nan, nan])
    term = variant("vimpo").loss(b).terms["implicit_value_regression"]
    assert float(term.detach()) == 0.0 and not torch.autograd.grad(term, b.logps)[0].any()


def test_the_regression_of_vimpo_on_an_advantage_per_token():
    # reward-to-go of R = 1 and 0 on tokens of weight .9: means (.81 + .9 + 1) / 3 and 0
    v = variant("vimpo", advantage={"returns": {"gamma": 0.9}})
    out = v.loss(implied())
    mean = float(out.terms["implicit_value_regression"].detach())
    assert mean == pytest.approx(0.25 * ((2.6e-4 - 2.71 / 3) ** 2 + 4.5e-5**2), rel=1e-9)


# ---------------------------------------------------------------- PRIME

PROCESS = dict(mask=[[1, 1, 0], [1, 1, 1]], process_rewards=[[0.2, 0.4, 9.0], [0.1, 0.1, 0.4]], rewards=[1.0, 0.0])


def answers(**given) -> TokenBatch:
    return TokenBatch.from_tensors(torch.full((2, 3), -1.0, dtype=D, requires_grad=True), **{**PROCESS, **given})


@pytest.mark.parametrize(
    "form, wanted",
    [
        # means .3 and .2: (.2, .4) * 2 - .5 = -.1, .3, summed to the end .2, .3, and +1; (.1, .1, .4) * 2 - .5 and -1
        ("code", [[1.2, 1.3, 0.0], [-1.3, -1.0, -0.7]]),
        # .2 - .2, .4 - .2 and +1; .1 - .3, .1 - .3, .4 - .3 and -1
        ("paper", [[1.2, 1.2, 0.0], [-1.3, -1.1, -0.9]]),
    ],
)
def test_the_advantage_of_prime(form, wanted):
    bare = {"form": form, "normalize": False, "whiten": False}
    v = variant("prime", advantage={"process_and_outcome": bare})
    b = answers()
    out = v.loss(b)
    assert out.advantage.tolist() == [pytest.approx(row) for row in wanted]
    [slope] = torch.autograd.grad(out.loss, b.logps)
    assert slope.flatten().tolist() == pytest.approx([-a / 5 for a in sum(wanted, [])])
    flat = torch.tensor([a for a in sum(wanted, []) if a], dtype=D)
    whitened = variant("prime", advantage={"process_and_outcome": {**bare, "whiten": True}}).loss(answers()).advantage
    assert whitened[whitened != 0].tolist() == pytest.approx(((flat - flat.mean()) / flat.std()).tolist(), rel=1e-6)


def test_the_outcome_alone_of_prime():
    v = variant("prime", advantage={"process_and_outcome": {"whiten": False}})
    alone = v.loss(answers(process_rewards=[[0.0] * 3] * 2)).advantage
    assert alone.tolist() == [[1.0, 1.0, 0.0], [-1.0, -1.0, -1.0]]


def test_the_normalisation_of_prime():
    # q = (.2, -.1, .3) and (-.4, .1): sums to the end .4, .2, .3 and -.3, .1, the largest .4
    raw = dict(mask=[[1, 1, 1], [1, 1, 0]], process_rewards=[[0.2, -0.1, 0.3], [-0.4, 0.1, 0.0]], rewards=[0.6, 0.6])
    v = variant("prime", select=[], advantage={"process_and_outcome": {"form": "paper", "whiten": False}})
    by_hand = v.with_(advantage={"process_and_outcome": {"form": "paper", "whiten": False, "normalize": False}})
    divided = dict(raw, process_rewards=[[0.5, -0.25, 0.75], [-1.0, 0.25, 0.0]])
    got, wanted = v.loss(answers(**raw)).advantage, by_hand.loss(answers(**divided)).advantage
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-8)  # the 1e-6 in the denominator


def test_the_loss_of_prime_s_reward_model():
    from trl_variants.learners.process import outcome_loss

    q = torch.tensor([[0.2, -0.1, 0.3, 7.0]], dtype=D, requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]], dtype=D)
    # sigma(.05 * .4) = .505; -log .505; slope beta (sigma - z) at each token
    loss = outcome_loss(q, mask, torch.tensor([True]), 0.05)
    assert float(loss.detach()) == pytest.approx(0.6832, abs=5e-5)
    [slope] = torch.autograd.grad(loss.sum(), q)
    assert slope[0].tolist() == pytest.approx([0.05 * (0.505 - 1)] * 3 + [0.0], abs=1e-5)
    wrong = outcome_loss(q.detach(), mask, torch.tensor([False]), 0.05)
    assert float(wrong) == pytest.approx(0.7032, abs=5e-5)


def test_prime_drops_prompts_that_are_too_easy_or_too_hard():
    right = [1.0] * 4 + [0.0] * 4 + [1.0, 0.0, 0.0, 0.0]
    b = TokenBatch.from_tensors(
        torch.full((12, 2), -1.0, dtype=D, requires_grad=True),
        rewards=right,
        group=[0] * 4 + [1] * 4 + [2] * 4,
        process_rewards=torch.linspace(-1, 1, 24, dtype=D).view(12, 2),
    )
    out = variant("prime").loss(b)
    assert not out.advantage[:8].any() and out.advantage[8:].abs().min() > 1e-3
    assert float(out.advantage[8:].sum()) == pytest.approx(0.0, abs=1e-9), "whitened over what is kept"


# ---------------------------------------------------------------- CLIPO

RIGHT = torch.tensor([True, True, False, False])


def unit(third: list[float]) -> torch.Tensor:
    return torch.tensor([[1.0, 0.0], [0.8, 0.6], third, [-1.0, 0.0]], dtype=D, requires_grad=True)


@pytest.mark.parametrize(
    "third, losses, bonus",
    [
        # s = z.z / .05: anchor 0 16 against 0 and -20, anchor 1 16 against 12 and -16
        ([0.0, 1.0], [1.1254e-7, 0.018150], [-2.25e-8, -0.003630]),
        # anchor 0 16 against 12 and -20; anchor 1 16 against 19.2: nearer to a wrong answer, -.648 held at -.5
        ([0.6, 0.8], [0.018150, 3.239953], [-0.003630, -0.5]),
    ],
)
def test_the_contrast_of_clipo(third, losses, bonus):
    from trl_variants.hooks.learners_contrast import contrast

    anchors, positive = torch.tensor([0, 1]), torch.tensor([1, 0])
    found = contrast(unit(third), anchors, RIGHT, positive, 0.05, "infonce")
    assert found.tolist() == pytest.approx(losses, rel=1e-4)
    for form in ("supcon_in", "supcon_out", "soft_nn"):  # with one other right answer all four are the same
        assert contrast(unit(third), anchors, RIGHT, positive, 0.05, form).tolist() == pytest.approx(losses, rel=1e-4)
    b = TokenBatch.from_tensors(
        torch.full((4, 1), -1.0, dtype=D),
        rewards=[1.0, 1.0, 0.0, 0.0],
        ref_logps=[[-1.0]] * 4,
        columns={"contrastive_loss": [*found.tolist(), 2.0, float("nan")]},
    )
    reward = variant("clipo").rewards[0](b.scored)
    assert (reward - b.scored.reward).tolist() == pytest.approx([*bonus, 0.0, 0.0], rel=1e-3, abs=1e-9)
    group = reward - reward.mean()
    assert variant("clipo").loss(b).advantage.squeeze(1).tolist() == pytest.approx(
        (group / (reward.std() + 1e-4)).tolist()
    )


def test_the_forms_of_the_contrast_and_their_gradient():
    """Three right answers and a wrong one, by loops; the gradient by differences."""
    from math import exp, log

    from trl_variants.hooks.learners_contrast import FORMS, contrast

    z = torch.nn.functional.normalize(torch.tensor([[1.0, 0.2], [0.8, 0.6], [0.9, -0.4], [-0.3, 1.0]], dtype=D), dim=1)
    right, tau = torch.tensor([True, True, True, False]), 0.3
    s = [[sum(a * b for a, b in zip(x, y, strict=True)) / tau for y in z.tolist()] for x in z.tolist()]
    everyone = log(sum(exp(s[0][a]) for a in (1, 2, 3)))
    wanted = {
        "infonce": everyone - s[0][2],
        "supcon_in": everyone - log((exp(s[0][1]) + exp(s[0][2])) / 2),
        "supcon_out": everyone - (s[0][1] + s[0][2]) / 2,
        "soft_nn": everyone - log(exp(s[0][1]) + exp(s[0][2])),
    }
    assert wanted.keys() == set(FORMS)
    for form, value in wanted.items():
        of = lambda x, form=form: contrast(x, torch.tensor([0]), right, torch.tensor([2]), tau, form)  # noqa: E731
        assert float(of(z)) == pytest.approx(value)
        assert torch.autograd.gradcheck(of, (z.clone().requires_grad_(),))


def test_clipo_without_its_head_says_what_is_missing():
    with pytest.raises(VariantError, match="`contrastive_loss`.*contrastive_head"):
        variant("clipo").loss(TokenBatch.from_tensors(torch.zeros(1, 1), ref_logps=[[0.0]], rewards=[1.0]))
