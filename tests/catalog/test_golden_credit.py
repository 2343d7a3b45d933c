# ruff: noqa: E501  (a table: one row, one line of arithmetic)
"""Golden numbers of the credit family, values and gradients, and the wrong readings they rule out."""

from __future__ import annotations

import pytest
import torch

from tests.batches import assert_close, build, by_parts, gradient, inputs, leaves_of, random_parts
from tests.catalog.test_golden import E, Golden, L, answers, log_ratios
from tests.catalog.test_golden import test_golden as check_golden
from trl_variants import Scored, TokenBatch, VariantError, check, variant
from trl_variants.hooks.advantage_credit import Process, moments_by, standardised_by
from trl_variants.hooks.credit_entropy import EntropyBand, EntropyFlow
from trl_variants.hooks.credit_future import FutureKL, LambdaTrace, discounted_future
from trl_variants.hooks.credit_phase import PhaseWeights
from trl_variants.hooks.credit_probability import LowProbabilityFirst, PolarityBoost, ProbabilityWeight

D = torch.float64
NO_KL = {"regularizers": []}


def probabilities(*values) -> dict:
    """On-policy tokens the old policy found that likely."""
    return {"logps": [[L(p) for p in values]], "old_logps": [[L(p) for p in values]]}


H_20 = [0.1, 2, 0.3, 1.5, 0.2, 0.05, 0.6, 0.4, 0.01, 0.7]
# k = ceil(.2 * 10) = 2: tokens 1 and 3. Mean over the selected: each gradient -1/2; over all ten: -1/10
SELECTED = [[0, -0.5, 0, -0.5] + [0] * 6]
A3PO_P = (0.9, 0.05, 0.6, 0.3, 0.99, 0.2, 0.8, 0.7, 0.5, 0.95)
BAND_H = [0.9, 0.1, 0.5, 0.3, 0.7, 0.2, 0.8, 0.4, 0.6, 0.05]
Q = [0.9, 0.49, 0.5, 0.1]

GOLDEN = [
    # ------------------------------------------------------------ HighEnt
    Golden("highent, mean over the selected", "highent", answers(10, advantage=[1.0], entropy=[H_20]), {"loss": -1.0, "grad": SELECTED}),
    Golden("highent, TRL's denominator", "highent", answers(10, advantage=[1.0], entropy=[H_20]),
           {"loss": -0.2, "grad": [[x / 5 for x in SELECTED[0]]]}, {"weight": ["entropy_quantile"]}),
    *[Golden(f"highent, rho 1 is DAPO, {d}", "highent", answers(10, advantage=[1.0], entropy=[H_20]),
             {"loss": -1.0, "grad": [[-0.1] * 10]}, {"weight": [{"entropy_quantile": {"keep": 1.0, "denominator": d}}]})
      for d in ("all", "selected")],
    # max(1, ceil(.2 * 3)) = 1 token
    Golden("highent, at least one token", "highent", answers(3, advantage=[2.0], entropy=[[0.1, 0.3, 0.2]]),
           {"loss": -2.0, "grad": [[0, -2.0, 0]]}),
    # a KL beside it is on all tokens: .1 k2 over d = 1, 1: .1 * .5, slope .1 * 1 / 2 on both, and -1 on token 1 alone
    Golden("highent, a KL stays on all tokens", "highent",
           {"logps": [[-1.0, -1.0]], "ref_logps": [[-2.0, -2.0]], "entropy": [[0.1, 0.2]], "advantage": [1.0]},
           {"loss": -1.0 + 0.05, "grad": [[0.05, -1.0 + 0.05]]}, {"regularizers": [{"kl": {"coef": 0.1, "estimator": "k2"}}]}),
    # ------------------------------------------------------------ AR-Lopti
    # alpha .3: weights .3 q + .7 = .97, .76, .85, times -2; gradient -A_t / 3, none through q
    Golden("advantage reweighting", "lopti-ar", probabilities(0.9, 0.2, 0.5) | {"advantage": [-2.0]},
           {"advantage": [[-1.94, -1.52, -1.7]], "grad": [[1.94 / 3, 1.52 / 3, 1.7 / 3]]},
           {"credit": [{"probability_weight": {"alpha": 0.3}}], **NO_KL}),
    # q is the OLD policy's: .5 gives .85 although the token is at .25 now; gradient r A_t / 1, r = .5, A < 0: held at .8 without it
    Golden("advantage reweighting by the old policy", "lopti-ar",
           {"logps": [[L(0.25)], [L(0.5)]], "old_logps": [[L(0.5)], [L(0.5)]], "advantage": [-1.0, -1.0]},
           {"advantage": [[-0.85], [-0.85]], "grad": [[0], [0.85 / 2]]},
           {"credit": [{"probability_weight": {"alpha": 0.3}}], **NO_KL}),
    # alpha 0 and no Lopti: plain GRPO
    Golden("advantage reweighting off", "lopti-ar", probabilities(0.9, 0.2, 0.5) | {"advantage": [-2.0]},
           {"advantage": [[-2.0] * 3], "grad": [[2 / 3] * 3]}, {"credit": [{"probability_weight": {"alpha": 0.0}}], **NO_KL}),
    # eta .5, q = .9, .49, .5, .1: pass 0 trains tokens 2 and 4, pass 1 tokens 1 and 3 (.5 is high); both divide by 4 tokens
    Golden("lopti, first pass", "lopti", probabilities(*Q) | {"advantage": [1.0]},
           {"advantage": [[0, 1, 0, 1]], "grad": [[0, -0.25, 0, -0.25]]}, {"credit": [{"low_probability_first": {"eta": 0.5}}], **NO_KL}),
    Golden("lopti, second pass", "lopti", probabilities(*Q) | {"advantage": [1.0], "iteration": 1},
           {"advantage": [[1, 0, 1, 0]], "grad": [[-0.25, 0, -0.25, 0]]}, {"credit": [{"low_probability_first": {"eta": 0.5}}], **NO_KL}),
    # .97, .7 + .3 .49 = .847, .85, .73 on the tokens of the pass
    Golden("lopti-ar, both", "lopti-ar", probabilities(*Q) | {"advantage": [1.0]}, {"advantage": [[0, 0.847, 0, 0.73]]}, NO_KL),
    # split and weight come from the OLD policy: the current one finds token 2 likely (.8) and it still is in pass 0.
    # ratio .8 / .4 = 2 against 1.24 and A < 0: free, gradient +2 / 2
    Golden("lopti splits by the old policy", "lopti",
           {"logps": [[L(0.9), L(0.8)]], "old_logps": [[L(0.9), L(0.4)]], "advantage": [-1.0]},
           {"advantage": [[0, -1]], "grad": [[0, 1.0]]}, {"credit": [{"low_probability_first": {"eta": 0.5}}], **NO_KL}),
    # KL of the pass: d = 1 on both tokens, k2 slope .1 * 1 / 2 on the token of the pass alone; the halves add up to .1 * .5
    *[Golden(f"lopti, the KL of pass {i}", "lopti",
             {"logps": [[L(0.9), L(0.2)]], "ref_logps": [[L(0.9) - 1, L(0.2) - 1]], "advantage": [0.0], "iteration": i},
             {"loss": 0.025, "grad": [slope]}, {"regularizers": [{"kl_of_pass": {"coef": 0.1, "estimator": "k2"}}]})
      for i, slope in enumerate([[0, 0.05], [0.05, 0]])],
    # dual clip: r = e^3 = 20.1 with A = -1 is floored at -10 without gradient
    Golden("lopti, dual clip at 10", "lopti", log_ratios([3.0], lp=-1.0) | {"advantage": [-1.0]}, {"objective": [[-10.0]], "grad": [[0.0]]}, NO_KL),
    # ------------------------------------------------------------ GTPO
    # right: H = 3,1 / 1,3,2 -> 1 + .1 * 2 * 3/4 = 1.15, 1.05 / 1.05, 1.15, 1 + .1 * 1 = 1.1 (one alive: share 1)
    # wrong: 1/H = .25,1 / 1,.25 -> -1 - .1 * 2 * .25/1.25 = -1.04, -1.16 / -1.16, -1.04
    Golden("gtpo, token rewards", "gtpo",
           answers(2, 3, 2, 2, rewards=[1, 1, 0, 0], entropy=[[3, 1, 0], [1, 3, 2], [4, 1, 0], [1, 4, 0]]),
           {"advantage": [[1.15, 1.05, 0], [1.05, 1.15, 1.1], [-1.04, -1.16, 0], [-1.16, -1.04, 0]]},
           {"advantage": {"entropy_share": {"norm": "none"}}}),
    # right: mean 1.1, population variance (4 * .0025) / 5 = .002: .05 / sqrt(.002 + 1e-8) = 1.1180; wrong: mean -1.1, +-.06 / .06 = 1
    # unbiased std would give +-1.0 on the right. A confident token of a right answer is NEGATIVE
    Golden("gtpo, advantage and gradient", "gtpo",
           answers(2, 3, 2, 2, rewards=[1, 1, 0, 0], entropy=[[3, 1, 0], [1, 3, 2], [4, 1, 0], [1, 4, 0]]),
           {"advantage": [[1.118031, -1.118031, 0], [-1.118031, 1.118031, 0], [1 - 1.4e-6, -1 + 1.4e-6, 0], [-1 + 1.4e-6, 1 - 1.4e-6, 0]],
            "grad": [[-1.118031 / 9, 1.118031 / 9, 0], [1.118031 / 9, -1.118031 / 9, 0], [-1 / 9, 1 / 9, 0], [1 / 9, -1 / 9, 0]]},
           atol=2e-6),
    # a2 = 0: constant inside each kind, so A = 0: not GRPO
    Golden("gtpo, a2 = 0 is no signal", "gtpo", answers(2, 3, rewards=[1, 0], entropy=[[3, 1, 0], [1, 3, 2]]),
           {"advantage": [[0] * 3] * 2, "loss": 0.0}, {"advantage": {"entropy_share": {"a2": 0.0}}}),
    # ------------------------------------------------------------ GRPO-lambda
    # lam .9, four tokens: .729, .81, .9, 1; gradient -A_t / 4
    Golden("lambda trace, terminal", "grpo-lambda", answers(4, advantage=[1.0]),
           {"advantage": [[0.729, 0.81, 0.9, 1.0]], "grad": [[-0.729 / 4, -0.81 / 4, -0.9 / 4, -0.25]]},
           {"credit": [{"lambda_trace": {"lam": 0.9}}], **NO_KL}),
    # sums 1 + .9 + .81 + .729 = 3.439, 2.71, 1.9, 1
    Golden("lambda trace, every token", "grpo-lambda", answers(4, advantage=[1.0]), {"advantage": [[3.439, 2.71, 1.9, 1.0]]},
           {"credit": [{"lambda_trace": {"lam": 0.9, "reading": "every"}}], **NO_KL}),
    Golden("lambda 1, terminal is GRPO", "grpo-lambda", answers(4, advantage=[1.0]), {"advantage": [[1.0] * 4]},
           {"credit": [{"lambda_trace": {"lam": 1.0}}], **NO_KL}),
    Golden("lambda 1, every token counts what follows", "grpo-lambda", answers(4, advantage=[1.0]), {"advantage": [[4, 3, 2, 1]]},
           {"credit": [{"lambda_trace": {"lam": 1.0, "reading": "every"}}], **NO_KL}),
    # the distance is to the row's own last token: .9, 1
    Golden("lambda trace of a short row", "grpo-lambda", answers(4, 2, advantage=[0.0, 1.0]), {"advantage": [[0] * 4, [0.9, 1, 0, 0]]},
           {"credit": [{"lambda_trace": {"lam": 0.9}}], **NO_KL}),
    Golden("lambda trace, floored advantage", "grpo-lambda", answers(2, advantage=[-1.0]), {"advantage": [[-0.09, -0.1]]},
           {"credit": [{"lambda_trace": {"lam": 0.9, "floor": -0.1}}], **NO_KL}),
    # ------------------------------------------------------------ A3PO
    # step 50: m = 2 - .25 = 1.75; k = 2. Right: lowest p .05 and .2 (tokens 1, 5) 1.2 * 1.75 = 2.1. Wrong: .99, .95 (4, 9): -1.4
    Golden("a3po, a right answer", "a3po", probabilities(*A3PO_P) | {"advantage": [1.2], "correct": [True], "step": 50},
           {"advantage": [[1.2, 2.1, 1.2, 1.2, 1.2, 2.1, 1.2, 1.2, 1.2, 1.2]],
            "grad": [[-0.12, -0.21, -0.12, -0.12, -0.12, -0.21, -0.12, -0.12, -0.12, -0.12]]}),
    Golden("a3po, a wrong answer", "a3po", probabilities(*A3PO_P) | {"advantage": [-0.8], "correct": [False], "step": 50},
           {"advantage": [[-0.8, -0.8, -0.8, -0.8, -1.4, -0.8, -0.8, -0.8, -0.8, -1.4]]}),
    # the verifier's word, not the sign: a right answer with A < 0 boosts its unlikely tokens
    Golden("a3po, right with a negative advantage", "a3po", probabilities(0.9, 0.1) | {"advantage": [-1.0], "correct": [True]},
           {"advantage": [[-1.0, -2.0]]}),
    # ------------------------------------------------------------ FIPO
    # F = .261334, .164866, .219571, .02: f = 1.2, 1.179236, 1.2, 1.020201; ratio e^d <= 1.28, so gradient -f r / 4
    Golden("fipo, factors and gradient", "fipo", log_ratios([0.10, -0.05, 0.20, 0.02]) | {"advantage": [1.0]},
           {"advantage": [[1.2, 1.179236, 1.2, 1.020201]],
            "grad": [[-1.2 * E(0.1) / 4, -1.179236 * E(-0.05) / 4, -1.2 * E(0.2) / 4, -1.020201 * E(0.02) / 4]]}),
    # ratio 12 > 10 adds nothing to the earlier F: all F < 0, f = 1; without the filter F_0 = 2.1495 would give 1.2.
    # the token itself stays in the loss (A < 0: free up to the floor, r = 12 -> -10); r > 4 and A < 0 only holds f in [.8, 1]
    Golden("fipo, an extreme token is filtered", "fipo", log_ratios([0.10, -0.05, L(12), -0.3]) | {"advantage": [1.0]},
           {"advantage": [[1.0] * 4]}),
    Golden("fipo, [0.8, 1.2]", "fipo", log_ratios([0.10, -0.05, L(12), -0.3]) | {"advantage": [1.0]},
           {"advantage": [[0.8, 0.8, 0.8, 0.8]]}, {"credit": [{"future_kl": {"low": 0.8}}]}),
    Golden("fipo, on-policy is DAPO", "fipo", answers(3, advantage=[1.0]), {"advantage": [[1.0] * 3], "grad": [[-1 / 3] * 3]}),
    # A < 0, r = 5 > 4: F = log 5 gives 1.2, held at 1; with A > 0 it stays 1.2
    Golden("fipo, the negative safeguard", "fipo", log_ratios([L(5)], [L(5)]) | {"advantage": [-1.0, 1.0]}, {"advantage": [[-1.0], [1.2]]}),
    # ------------------------------------------------------------ ERPO
    # eta 0: the token-standardised advantage, not A. Lengths 1 and 3, A = +-a: mean (1 - 3) a / 4 = -a/2, std a sqrt(3)/2
    Golden("erpo, eta 0 weights by length", "erpo",
           answers(1, 3, rewards=[1, 0], ref_logps=[[-1.1] * 3, [-0.9] * 3], entropy=[[1.0] * 3] * 2),
           {"advantage": [[3**0.5, 0, 0], [-(3**-0.5)] * 3]},
           {"advantage": {"entropy_gated": {"eta": 0.0, "eps": 0.0, "eps_token": 0.0}}, **NO_KL}),
    # ------------------------------------------------------------ OPEFO
    # two tokens, A = 1, p = .5 and .5, H = 1.693147 and .193147: lp + H = 1 and -.5; dH = -.25, +.125.
    # P = .125, N = .25, l = 1/3: the raising token 4/3, the lowering 2/3: flows 1/6 each. J = A lp: gradient -A_t / 2
    Golden("opefo balances the flows", "opefo",
           {"logps": [[L(0.5), L(0.5)]], "entropy": [[1 - L(0.5), -0.5 - L(0.5)]], "advantage": [1.0]},
           {"advantage": [[2 / 3, 4 / 3]], "grad": [[-1 / 3, -2 / 3]]}),
    # nothing raises entropy: the formula has l = (N - 0) / N = 1 and (1 - l) A = 0 everywhere; guarded, l = 0
    Golden("opefo, one side only", "opefo", {"logps": [[L(0.5)]], "entropy": [[2.0]], "advantage": [1.0]},
           {"advantage": [[1.0]], "grad": [[-1.0]]}),
    # ------------------------------------------------------------ EG-GRPO
    # T = 10: low is H < sorted[2] = .2 -> .1, .05; high is H > sorted[5] = .5 -> .9, .7, .8, .6 (four, not five)
    # A = 1: bonus .3 h = .27, .21, .24, .18 under the cap .3; A = -.5: the cap .3 * .5 = .15 binds
    Golden("eg-grpo, the code's rule", "eg-grpo", answers(10, 10, advantage=[1.0, -0.5], entropy=[BAND_H] * 2),
           {"advantage": [[1.27, 0, 1, 1, 1.21, 1, 1.24, 1, 1.18, 0], [-0.35, 0, -0.5, -0.5, -0.35, -0.5, -0.35, -0.5, -0.35, 0]],
            "grad": [[-a / 20 for a in (1.27, 0, 1, 1, 1.21, 1, 1.24, 1, 1.18, 0)],
                     [-a / 20 for a in (-0.35, 0, -0.5, -0.5, -0.35, -0.5, -0.35, -0.5, -0.35, 0)]]}, NO_KL),
    # paper: taken (1 + .5) * 2/10 = .3, room 2 * (.9 + .7 + .8 + .6) / 10 = .6: l = .5
    Golden("eg-grpo, the paper's rule", "eg-grpo", answers(10, 10, advantage=[1.0, -0.5], entropy=[BAND_H] * 2),
           {"advantage": [[1.45, 0, 1, 1, 1.35, 1, 1.4, 1, 1.3, 0], [-0.05, 0, -0.5, -0.5, -0.15, -0.5, -0.1, -0.5, -0.2, 0]]},
           {"credit": [{"entropy_band": {"form": "paper"}}], **NO_KL}),
    Golden("eg-grpo, no cut and no bonus is GRPO", "eg-grpo", answers(10, advantage=[1.0], entropy=[BAND_H]),
           {"advantage": [[1.0] * 10]}, {"credit": [{"entropy_band": {"low": 0.0, "coef": 0.0}}], **NO_KL}),
    # H / log 8: .6 nats is .288539; bonus .3 * .288539 on the token above sorted[1] = .3
    Golden("eg-grpo, entropy over log of the vocabulary", "eg-grpo", answers(3, advantage=[1.0], entropy=[[0.2, 0.3, 0.6]]),
           {"advantage": [[1.0, 1.0, 1 + 0.3 * 0.6 / L(8)]]}, {"credit": [{"entropy_band": {"vocabulary": 8}}], **NO_KL}),
    # the KL stays on a token without reward term: .01 (1 - e^-1) / 2 on token 0 (low: H < sorted[1]) with low .5
    Golden("eg-grpo, the KL is not masked", "eg-grpo",
           {"logps": [[-1.0, -1.0]], "ref_logps": [[-2.0, -2.0]], "entropy": [[0.1, 0.2]], "advantage": [1.0]},
           {"grad": [[0.005 * (1 - E(-1)), 0.005 * (1 - E(-1)) - 0.5]]}, {"credit": [{"entropy_band": {"low": 0.5}}]}),
    # a row without advantage (dead group, no score) gets no bonus (ours): taken 1/2, room .6/2 in row 0 alone, l = 5/3, bonus 1
    Golden("eg-grpo, no bonus without advantage", "eg-grpo", answers(2, 2, advantage=[1.0, 0.0], entropy=[[0.1, 0.6]] * 2),
           {"advantage": [[0, 2], [0, 0]]}, {"credit": [{"entropy_band": {"form": "paper", "low": 0.5, "high_from": 0.0}}], **NO_KL}),
    # ------------------------------------------------------------ HT-GRPO, the part
    # weights 2, 1 on three and three tokens, mean 1.5: 4/3 and 2/3
    Golden("phase weights, rescaled", "ht-grpo", answers(6, advantage=[1.0]),
           {"advantage": [[4 / 3] * 3 + [2 / 3] * 3], "grad": [[-4 / 18] * 3 + [-2 / 18] * 3]}, NO_KL),
    Golden("phase weights, raw", "ht-grpo", answers(6, advantage=[1.0]), {"advantage": [[2.0] * 3 + [1.0] * 3]},
           {"credit": [{"phase_weights": {"rescale": False}}], **NO_KL}),
    Golden("phase weights, equal weights are GRPO", "ht-grpo", answers(6, 3, advantage=[1.0, -1.0]),
           {"advantage": [[1.0] * 6, [-1.0] * 3 + [0] * 3]}, {"credit": [{"phase_weights": {"weights": [3.0, 3.0, 3.0]}}], **NO_KL}),
    # ids from a tensor: 0, 5 (past the last weight: the last)
    Golden("phase weights by turn", "ht-grpo", answers(2, advantage=[1.0], turn=[[0, 5]]), {"advantage": [[2.0, 1.0]]},
           {"credit": [{"phase_weights": {"by": "turn", "rescale": False}}], **NO_KL}),
    # ------------------------------------------------------------ Unified GRPO, text part
    # one segment per answer is outcome GRPO: z = (1 - .5) / (.70711 + 1e-4)
    Golden("process, one segment is GRPO", "unified-interleaved-grpo", answers(2, 1, rewards=[1, 0]),
           {"advantage": [[0.5 / (0.5**0.5 + 1e-4)] * 2, [-0.5 / (0.5**0.5 + 1e-4), 0]]}, NO_KL),
]  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN, ids=[g.name for g in GOLDEN])
def test_golden_credit(case):
    check_golden(case)


def one_row(*values, **more) -> TokenBatch:
    return TokenBatch.from_tensors(torch.tensor([values], dtype=D), **more)


# ---------------------------------------------------------------- Lopti


def test_two_passes_train_every_token_once():
    given = inputs(3)
    a = torch.randn(len(given["mask"]), 1, dtype=D, generator=torch.Generator().manual_seed(0))
    passes = [LowProbabilityFirst(0.5)(a, build(given, iteration=i)) for i in range(4)]
    assert_close(passes[0] + passes[1], a.expand_as(passes[0]))
    assert_close(passes[2], passes[0])
    assert passes[0].any() and passes[1].any()


def test_lopti_is_not_advantage_reweighting():
    batch = one_row(*(L(q) for q in Q))
    assert ProbabilityWeight(0.3)(torch.ones(1, 1, dtype=D), batch).min() > 0.7 - 1e-12  # AR silences no token


@pytest.mark.parametrize("i", [0, 1])
def test_lopti_s_second_pass_ignores_the_split(i):
    v, given = variant("lopti"), inputs(3)
    whole = build(given, iteration=i)
    loss = v.loss(whole)
    total, grads = by_parts(v, given | {"iteration": i}, random_parts(len(given["mask"]), 4, 1))
    assert_close(total, loss.loss)
    assert_close(grads, gradient(loss.loss, leaves_of(whole)))
    kept = (loss.advantage != 0) & (given["mask"] > 0)
    assert not (kept & ((given["old_logps"].exp() < 0.4) != (i == 0))).any()


def test_lopti_refuses_a_run_without_its_passes():
    from trl import GRPOConfig

    make = lambda **c: GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **c)  # noqa: E731
    levels = lambda c: [f.level for f in check(variant("lopti"), c) if "passes" in f.message]  # noqa: E731
    assert levels(make(num_iterations=1)) == levels(make(num_iterations=3)) == ["error"]
    assert levels(make(num_iterations=2)) == levels(make(num_iterations=4)) == []
    # eight micro-steps an update over generations of four: both passes in one optimizer step
    assert levels(make(num_iterations=2, steps_per_generation=4, gradient_accumulation_steps=8)) == ["error"]


# ---------------------------------------------------------------- A3PO


def test_a3po_multiplier_by_step():
    # max(2 - .005 step, 1) on the one token of the row
    for step, wanted in [(0, 2.0), (1, 1.995), (100, 1.5), (199, 1.005), (200, 1.0), (300, 1.0)]:
        batch = one_row(-1.0, step=step, correct=[True])
        assert float(PolarityBoost()(torch.ones(1, 1, dtype=D), batch)) == pytest.approx(wanted)


# ---------------------------------------------------------------- FIPO, lambda


def naive_future(d, counted, gamma):
    return [sum(gamma ** (k - t) * d[k] * counted[k] for k in range(t, len(d))) for t in range(len(d))]


def test_future_sums_of_the_atlas():
    gamma = FutureKL().gamma
    assert gamma == pytest.approx(0.978572, abs=5e-7)
    ones = torch.ones(1, 4, dtype=D)
    got = discounted_future(torch.tensor([[0.10, -0.05, 0.20, 0.02]], dtype=D), ones, gamma)
    assert got[0].tolist() == pytest.approx([0.261334, 0.164866, 0.219571, 0.02], abs=6e-7)
    unfiltered = torch.tensor([[0.10, -0.05, L(12), -0.3]], dtype=D)
    assert float(discounted_future(unfiltered, ones, gamma)[0, 0]) == pytest.approx(2.149501, abs=6e-7)
    filtered = torch.where(unfiltered <= L(10), unfiltered, 0.0)
    wanted = [-0.230054, -0.337281, -0.293572, -0.3]
    assert discounted_future(filtered, ones, gamma)[0].tolist() == pytest.approx(wanted, abs=6e-7)


@pytest.mark.parametrize("width", [1, 2, 3, 8, 13])
def test_the_doubling_scan_equals_the_sum(width):
    g = torch.Generator().manual_seed(width)
    x = torch.randn(3, width, generator=g, dtype=D)
    mask = (torch.rand(3, width, generator=g) < 0.7).to(D)
    got = discounted_future(x.masked_fill(mask == 0, torch.nan), mask, 0.8)
    for i in range(3):
        here = mask[i].nonzero().squeeze(1).tolist()
        wanted = naive_future(x[i, here].tolist(), [1] * len(here), 0.8)
        assert got[i, here].tolist() == pytest.approx(wanted)
    assert not got[mask == 0].any()


def test_an_off_policy_factor_moves_only_values():
    # f is detached: with A = 1 and d = (.1, .2) inside the clip the gradient is -f r / 2, not that of f r
    v, new = variant("fipo"), torch.tensor([[-1.0, -1.0]], dtype=D, requires_grad=True)
    loss = v.loss(TokenBatch.from_tensors(new, old_logps=[[-1.05, -1.02]], advantage=[1.0]))
    f = [E(0.05 + 0.02 * FutureKL().gamma), E(0.02)]
    wanted = [-f[0] * E(0.05) / 2, -f[1] * E(0.02) / 2]
    assert torch.autograd.grad(loss.loss, new)[0][0].tolist() == pytest.approx(wanted)
    live = -(f[0] * E(0.05) * 2) / 2  # what a factor with gradient would give token 0
    assert wanted[0] != pytest.approx(live)


def test_the_trace_identity():
    # delta = .3,-.2,.5,.1, g = 1,2,3,4, lambda .9: sum_t A_t^GAE g_t = sum_t delta_t sum_{l<=t} .9^(t-l) g_l = 3.4299
    delta, g = [0.3, -0.2, 0.5, 0.1], [1.0, 2.0, 3.0, 4.0]
    gae = naive_future(delta, [1] * 4, 0.9)
    trace = [sum(0.9 ** (t - k) * g[k] for k in range(t + 1)) for t in range(4)]
    left, right = (sum(a * b for a, b in zip(x, y, strict=True)) for x, y in ((gae, g), (delta, trace)))
    assert left == pytest.approx(right) == pytest.approx(3.4299)
    # with delta = A at every token the GAE is the reading "every"
    every = LambdaTrace(lam=0.9, reading="every")(torch.ones(1, 1, dtype=D), one_row(-1.0, -1.0, -1.0, -1.0))
    assert every[0].tolist() == pytest.approx(naive_future([1.0] * 4, [1] * 4, 0.9))


# ---------------------------------------------------------------- OPEFO


def both_changes(p: list[float], a: int) -> tuple[float, float, float]:
    """The published estimate, the exact first-order change of entropy and a finite difference, of a logit step."""
    q = torch.tensor(p, dtype=D)
    entropy = -(q * q.log()).sum()
    step = torch.eye(len(p), dtype=D)[a] - q
    moved = (q.log() + 1e-6 * step).softmax(0)
    published = -((1 - q[a]) ** 2) * (q[a].log() + entropy)
    exact = -(q * (q.log() + entropy) * step).sum()
    return float(published), float(exact), float((-(moved * moved.log()).sum() - entropy) / 1e-6)


def test_opefo_s_estimate_is_the_published_one_and_not_the_exact_change():
    assert both_changes([0.05, 0.07, 0.38, 0.5], 2) == pytest.approx((-0.031754, 0.057050, 0.057050), abs=2e-6)
    for a, published, exact in ((0, -0.040063, -0.140793), (1, 0.516876, 0.332332), (2, 1.215621, 0.320885)):
        assert both_changes([0.7, 0.2, 0.1], a)[:2] == pytest.approx((published, exact), abs=2e-6)
    # tokens with the first three flows: the hook's own signs are those of the estimate
    p = torch.tensor([0.7, 0.2, 0.1], dtype=D)
    entropy = float(-(p * p.log()).sum())
    a = EntropyFlow()(torch.ones(1, 1, dtype=D), one_row(*p.log().tolist(), entropy=[[entropy] * 3]))
    up, down = 0.516876 + 1.215621, 0.040063
    balance = (down - up) / (down + up)
    assert a[0].tolist() == pytest.approx([1 - balance, 1 + balance, 1 + balance], abs=1e-5)


def test_opefo_s_flows_balance():
    # dH = .3,-.8,.1,-.2 by p = .5 (so (1-p)^2 = .25), lp + H = -dH / .25: P = .4, N = 1, l = .428571, both sides .571429
    flows = [0.3, -0.8, 0.1, -0.2]
    batch = one_row(*[L(0.5)] * 4, entropy=[[-x / 0.25 - L(0.5) for x in flows]])
    a = EntropyFlow()(torch.ones(1, 1, dtype=D), batch)[0].tolist()
    assert a == pytest.approx([1.428571, 0.571429, 1.428571, 0.571429], abs=6e-7)
    assert 0.3 * a[0] + 0.1 * a[2] == pytest.approx(0.8 * a[1] + 0.2 * a[3]) == pytest.approx(0.571429, abs=6e-7)


# ---------------------------------------------------------------- ERPO


def test_erpo_s_bucket_scores_of_the_atlas():
    # mean .125, population std .192029: (.2 - .125) / .192029 = .390567, ...
    s = torch.tensor([[0.2, -0.1], [0.0, 0.4]], dtype=D)
    inside, one = torch.ones(2, 2, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.long)
    z = standardised_by(one, s, inside, 0.0)
    assert_close(z, [[0.390567, -1.171700], [-0.650945, 1.432078]], atol=6e-7)
    gated = torch.tensor([[1, 0.2], [0.5, 0.8]], dtype=D) * torch.tensor([[1.0], [-1.0]], dtype=D) * z
    assert_close(gated, [[0.390567, -0.234340], [0.325472, -1.145662]], atol=6e-7)


def test_erpo_whole():
    # ungated, one bucket: B = sgn(A) z = .390567,-1.1717 / .650945,-1.432078; Psi = B / std(B); C = +-.707107 + Psi; z of C
    z = torch.tensor([[0.390567, -1.171700], [-0.650945, 1.432078]], dtype=D)
    b = z * torch.tensor([[1.0], [-1.0]], dtype=D)
    psi = b / b.std(unbiased=False)
    c = torch.tensor([[0.5**0.5], [-(0.5**0.5)]], dtype=D) + psi
    wanted = (c - c.mean()) / c.std(unbiased=False)
    exact = {"eta": 1.0, "target_std": 1.0, "buckets": 1, "gate": "none", "eps": 0.0, "eps_token": 0.0}
    v = variant("erpo", advantage={"entropy_gated": exact}, regularizers=[])
    new = torch.full((2, 2), -1.0, dtype=D, requires_grad=True)
    ref = [[-1.2, -0.9], [-1.0, -1.4]]
    loss = v.loss(TokenBatch.from_tensors(new, ref_logps=ref, rewards=[1.0, 0.0]))
    assert_close(loss.advantage, wanted, atol=1e-5)
    assert_close(torch.autograd.grad(loss.loss, new)[0], -wanted / 4, atol=1e-5)
    # a bucket per token: a lone score has no spread and nothing is added to the standardised A
    lone = variant("erpo", advantage={"entropy_gated": exact | {"buckets": 2, "eps_token": 1e-4}}, regularizers=[])
    one = TokenBatch.from_tensors(new[:, :1], ref_logps=[[-1.2], [-1.0]], rewards=[1.0, 0.0], group=[0, 1])
    assert not lone.loss(one).advantage.any(), "groups of one have no signal"


def test_moments_ignore_what_is_outside():
    x = torch.tensor([[1.0, 3.0, 1e9]], dtype=D)
    mean, variance = moments_by(torch.zeros(1, 3, dtype=torch.long), x, torch.tensor([[True, True, False]]))
    assert float(mean[0, 0]) == 2.0 and float(variance[0, 0]) == 1.0


# ---------------------------------------------------------------- process rewards

SEGMENTS = torch.tensor([[0.2, 0.9], [0.6, 0.1], [0.4, 0.5], [0.8, 0.3]], dtype=D)
SEVEN = 7  # a token that ends a segment


def segmented(rewards=SEGMENTS, ids=None, mask=None, weights=(1.0, 1.0), **more) -> Scored:
    ids = torch.tensor([[3, SEVEN, 4, 5]] * len(rewards)) if ids is None else torch.tensor(ids)
    mask = torch.ones(ids.shape, dtype=D) if mask is None else torch.tensor(mask, dtype=D)
    group = torch.zeros(len(rewards), dtype=torch.long)
    return Scored(
        rewards=rewards, weights=torch.tensor(weights), group=group, tokens={"mask": mask, "ids": ids}, **more
    )


def test_process_pools_the_segments_of_the_group():
    # all eight rewards: mean .475, unbiased std .281577: z = -.9766, 1.5094 / .4439, -1.3318 / ...; row 0: .5327 then 1.5094
    got = Process(delimiters=[SEVEN], eps=0.0)(segmented())
    pool = SEGMENTS.flatten()
    z = (SEGMENTS - pool.mean()) / pool.std()
    wanted = [[-0.9766, 1.5094], [0.4439, -1.3318], [-0.2664, 0.0888], [1.1542, -0.6215]]
    assert_close(z, wanted, atol=6e-5)
    assert_close(got, torch.stack([z.sum(1), z.sum(1), z[:, 1], z[:, 1]], 1))
    assert got[0].tolist() == pytest.approx([0.5327, 0.5327, 1.5094, 1.5094], abs=1e-4)
    # a normalisation per position would give row 0 (.2 - .5) / .2582 = -1.1619 in segment 1
    per_position = (SEGMENTS - SEGMENTS.mean(0)) / SEGMENTS.std(0)
    assert abs(float(got[0, 0]) - float(per_position.sum(1)[0])) > 0.1
    assert_close(Process(delimiters=[SEVEN], eps=0.0, per_segment=True)(segmented()), got / 2)


def test_process_segments_of_unequal_answers():
    nan = float("nan")
    rewards = torch.tensor([[1.0, 0.0], [0.0, nan], [nan, nan]], dtype=D)
    ids = [[3, SEVEN, 4, SEVEN, 5], [3, 4, 5, -1, -1], [3, SEVEN, 4, 5, 6]]
    mask = [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    got = Process(delimiters=[SEVEN], ddof=0, eps=0.0)(segmented(rewards, ids, mask))
    # pool 1, 0, 0: mean 1/3, std sqrt(2)/3: z = sqrt 2, -1/sqrt 2, -1/sqrt 2
    up, down = 2**0.5, -(0.5**0.5)
    # row 0 has three segments and two rewards: what follows the second end gets 0. Row 1: one segment. Row 2: no score
    assert_close(got, [[up + down, up + down, down, down, 0], [down, down, down, 0, 0], [0.0] * 5])
    # a function beyond the last segment scores that one: no delimiter, both rewards on the whole answer
    assert_close(Process(ddof=0, eps=0.0)(segmented(rewards, ids, mask))[0], [up + down] * 5)
    alone = Process(delimiters=[SEVEN])(segmented(torch.tensor([[0.7, nan]], dtype=D)))
    assert not alone.any(), "one reward in the group has no baseline"


def test_parameters_are_checked():
    with pytest.raises(VariantError, match="token ids"):
        Process(delimiters=["</think>"])
    with pytest.raises(VariantError, match="numbers >= 0"):
        PhaseWeights(weights=[1.0, -1.0])
    with pytest.raises(VariantError, match="numbers >= 0"):
        PhaseWeights(weights=[])
    with pytest.raises(VariantError, match="future_kl.low 2.0 is above high 1.2"):
        FutureKL(low=2.0)


def test_the_band_sees_only_the_row_s_own_tokens():
    # n = 2 valid of 4: low is H < sorted[int(.4)] = the smallest -> none; high is H > sorted[1] -> none
    batch = one_row(-1.0, -1.0, -1.0, -1.0, mask=[[1.0, 0.0, 1.0, 0.0]], entropy=[[0.3, 9.0, 0.1, -9.0]])
    got = EntropyBand()(torch.ones(1, 1, dtype=D), batch)
    assert (got * batch.mask).tolist() == [[1.0, 0.0, 1.0, 0.0]]
