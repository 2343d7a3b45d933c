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


def test_the_regression_of_vimpo_wants_one_outcome_per_answer():
    with pytest.raises(VariantError, match="one advantage per answer"):
        variant("vimpo", advantage="token_whitened").loss(implied())
