# ruff: noqa: E501  (a table: one row, one line of arithmetic)
"""Golden numbers of the smooth gates and trust regions, and the wrong formulas these numbers must reject."""

from __future__ import annotations

import math

import pytest
import torch

from tests.batches import assert_close, inputs, run
from tests.catalog.test_golden import Golden, answers, each, log_ratios, ratios
from tests.catalog.test_golden import test_golden as assert_golden
from trl_variants import TokenBatch, check, variant
from trl_variants.hooks import clip_answers, clip_gates, clip_trust
from trl_variants.hooks.advantage_truncated import TruncationDropout, repeats
from trl_variants.hooks.ratio import ProductRatio
from trl_variants.hooks.ratio_cumulative import CumulativeRatio

E, L = math.exp, math.log


def sigmoid(x: float) -> float:
    return 1 / (1 + E(-x))


FIVE = [0.5, 1.0, 1.5, 2.0, 4.0]
ROWS = [[r] for r in FIVE]


def logs(*row: float) -> list[list[float]]:
    return [[L(x) for x in row]]


def KL_FORM(delta: float) -> dict:
    return {"clip": {"divergence_mask": {"divergence": "kl", "delta": delta}}}


MIXED = ratios([1.5, 0.8, 1.0], [1.0] * 3) | {"entropy": [[0.8, 0.5, 0.1], [1.0, 0.2, 0.3]]}
ENTROPY_GUIDED = {"clip": {"hybrid": {"mix": "entropy"}}}
THREE = {"logps": logs(0.45, 0.42), "old_logps": logs(0.3, 0.4), "rollout_logps": logs(0.2, 0.5)}
MOVED = {"logps": logs(0.02, 0.8, 0.4, 0.95), "rollout_logps": logs(0.01, 0.6, 0.6, 0.9)}
BALANCE = ratios([1.5, 1.1, 0.5, 0.9, 1.4]) | {"advantage": [[1.0, 1, -1, -1, -1]]}
COV = {"logps": [[-0.1, -3.0, -0.2, -2.0]], "old_logps": [[-0.4, -2.0, -0.5, -2.5]], "advantage": [[1.0, 1, -1, -1]]}
WINNER = ratios([0.5, 3.0, 12.0], *[[1.0, 2.0, 5.0]] * 3) | {"rewards": [1.0, 0, 0, 0], "max_completion_length": 100}

GOLDEN = [
    # ------------------------------------------------------------ SAPO gates: gradient -f'(r) r / 5 rows
    # tau = 1: f' = [.9400, 1, .9400, .7864, .1807] = 4 s (1 - s) at x = r - 1; value 4 s(x)
    Golden("sapo-gates, sigmoid", "sapo-gates", ratios(*ROWS) | {"advantage": [1.0] * 5},
           {"objective": each(*(4 * sigmoid(r - 1) for r in FIVE)), "grad": each(*(-f * r / 5 for f, r in zip([0.940015, 1, 0.940015, 0.786448, 0.180707], FIVE, strict=True)))},
           {"clip": {"smooth_gate": {"gate": "sigmoid"}}}),
    # f' = exp(-x^2): [.7788, 1, .7788, .3679, .0001]; value sqrt(pi)/2 erf(x), 0 at r = 1
    Golden("sapo-gates, erf", "sapo-gates", ratios(*ROWS) | {"advantage": [1.0] * 5},
           {"objective": each(*(math.pi**0.5 / 2 * math.erf(r - 1) for r in FIVE)), "grad": each(*(-f * r / 5 for f, r in zip([0.778801, 1, 0.778801, 0.367879, 0.000123], FIVE, strict=True)))}),
    # f' = 1/(1 + x^2): 1/1.25, 1, 1/1.25, 1/2, 1/10
    Golden("sapo-gates, arctan", "sapo-gates", ratios(*ROWS) | {"advantage": [1.0] * 5},
           {"grad": each(*(-f * r / 5 for f, r in zip([0.8, 1, 0.8, 0.5, 0.1], FIVE, strict=True)))}, {"clip": {"smooth_gate": {"gate": "arctan"}}}),
    # f' = 1/(1 + |x|)^2: 1/2.25, 1, 1/2.25, 1/4, 1/16
    Golden("sapo-gates, softsign", "sapo-gates", ratios(*ROWS) | {"advantage": [1.0] * 5},
           {"grad": each(*(-f * r / 5 for f, r in zip([4 / 9, 1, 4 / 9, 0.25, 0.0625], FIVE, strict=True)))}, {"clip": {"smooth_gate": {"gate": "softsign"}}}),
    # A < 0 takes tau 1.05: f' at r = 2 is exp(-1.1025)
    Golden("sapo-gates, the sharper side", "sapo-gates", ratios([2.0]) | {"advantage": [-1.0]}, {"grad": [[2 * E(-1.1025)]]}),
    # tau -> 0 is r A up to a constant: gradient r
    Golden("sapo-gates, wide open", "sapo-gates", ratios(*ROWS) | {"advantage": [1.0] * 5},
           {"grad": each(*(-r / 5 for r in FIVE))}, {"clip": {"smooth_gate": {"gate": "arctan", "tau_pos": 1e-5}}}),
    # ------------------------------------------------------------ GIPO: w = exp(-(log r / .5)^2 / 2)
    # r = .5, 1, 1.2, 2, 5: w = [.382546, 1, .935679, .382546, .005625]; w r; gradient w r / 5 (w detached)
    Golden("gipo, sigma .5", "gipo", ratios([0.5], [1.0], [1.2], [2.0], [5.0]) | {"advantage": [1, 1, 1, 1, -1]},
           {"objective": each(0.191273, 1, 1.122815, 0.765092, -0.028124),
            "grad": each(-0.191273 / 5, -0.2, -1.122815 / 5, -0.765092 / 5, 0.028124 / 5)}),
    # sigma = 1: 2 * .786450, 5 * .273858
    Golden("gipo, sigma 1", "gipo", ratios([2.0], [5.0]) | {"advantage": [1, 1]}, {"objective": each(1.572900, 1.369290)},
           {"clip": {"gaussian_weight": {"sigma": 1.0}}}, atol=6e-6),
    # ------------------------------------------------------------ SSPO
    # ratios 1, 2, 5: atan of the logs 0, .606, 1.015: W = exp(mean) = 1.716550; weights 1/(1 + l^2) = 1, .675469, .278529
    Golden("sspo", "sspo", ratios([1.0, 2.0, 5.0]) | {"advantage": [1.0]},
           {"loss": -1.716550, "grad": [[-1.716550 / 3 * w for w in (1, 0.675469, 0.278529)]]}),
    # reciprocal: 3.485524 * .286901 = 1; both signs of A are damped alike
    Golden("sspo, one token", "sspo", ratios([20.0], [0.05], [20.0]) | {"advantage": [1, 1, -1]}, {"objective": each(3.485524, 0.286901, -3.485524)}),
    # the bounds of W: exp(+-pi/2) = 4.810477, .207880
    Golden("sspo, far away", "sspo", log_ratios([1e8], [-1e8]) | {"advantage": [1, 1]}, {"objective": each(4.810477, 0.207880)}),
    # ------------------------------------------------------------ MHPO
    # r = 1, 1.2, .5, 2, e^5, e^-5: weights and d weight / d logp; 1/6 of the loss each
    Golden("mhpo", "mhpo", log_ratios([0.0], [L(1.2)], [L(0.5)], [L(2.0)], [5.0], [-5.0]) | {"advantage": [1.0] * 6},
           {"objective": each(0.2651, 0.3353, 0.0669, 0.4802, 0.4580, 0.0023),
            "grad": each(*(-w / 6 for w in (0.2651, 0.3303, 0.0544, 0.3907, 0.0023, 0.0000)))}, atol=6e-5),
    # no test of the sign of A
    Golden("mhpo, A < 0", "mhpo", ratios([2.0]) | {"advantage": [-1.0]}, {"objective": [[-0.4802]], "grad": [[0.3907]]}, atol=6e-5),
    # k = 0 makes each hazard term 1: weight e^-2 r once c is large
    Golden("mhpo, no shape and no squash", "mhpo", ratios([2.0]) | {"advantage": [1.0]}, {"objective": [[2 * E(-2.0)]]},
           {"clip": {"hazard": {"c": 1e4, "k_pos": 0.0, "k_neg": 0.0}}}),
    # ------------------------------------------------------------ DHPO
    # r = 1.5, .8, 1, s = (1.5 * .8)^(1/3) = 1.062659; w = .8, .5, .1 (entropies; the second answer has H = 1 and A = 0).
    # m = w r + (1-w) s = 1.412532, .931329, 1.056393; m~ = .8 * 1.28 + .2 * 1.0004 = 1.22408, .9002, 1.00036
    Golden("dhpo, A > 0", "dhpo", MIXED | {"advantage": [1.0, 0.0]}, {"objective": [[1.22408, 0.9002, 1.00036], [0] * 3], "loss": -1.041547 / 2}, ENTROPY_GUIDED),
    # A < 0 takes m: gradient w r + (1-w) s of the own token, / 3 / 2 rows; through the mean in s it would be .588917, .322250, .222250
    Golden("dhpo, A < 0", "dhpo", MIXED | {"advantage": [-1.0, 0.0]},
           {"objective": [[-1.412532, -0.931329, -1.056393], [0] * 3], "loss": 1.133418 / 2, "grad": [[0.470844 / 2, 0.310443 / 2, 0.352131 / 2], [0] * 3]}, ENTROPY_GUIDED),
    # w = 1/2: m = (r + s) / 2 = 1.281330, .931329, 1.031329; all free for A < 0
    Golden("dhpo, averaged", "dhpo", ratios([1.5, 0.8, 1.0]) | {"advantage": [-1.0]},
           {"objective": [[-(1.5 + 1.062659) / 2, -(0.8 + 1.062659) / 2, -(1 + 1.062659) / 2]]}),
    # ------------------------------------------------------------ CTPO
    # l = .03, .03, -.02, .1: c = .03, .06, .04, .14; upper widths .05 sqrt(1..4) = .05, .0707, .0866, .1: the last is held at e^.1
    Golden("ctpo, A > 0", "ctpo", log_ratios([0.03, 0.03, -0.02, 0.1]) | {"advantage": [1.0]},
           {"ratio": [[1.030455, 1.061837, 1.040811, 1.150274]], "objective": [[1.030455, 1.061837, 1.040811, 1.105171]], "loss": -1.059568,
            "grad": [[-0.257614, -0.265459, -0.260203, 0.0]], "clipped": [[0, 0, 0, 1]]}),
    # A < 0: the dual clip at e^.1 takes the last token's gradient; without it -1.150274 and .287568
    Golden("ctpo, A < 0", "ctpo", log_ratios([0.03, 0.03, -0.02, 0.1]) | {"advantage": [-1.0]},
           {"objective": [[-1.030455, -1.061837, -1.040811, -1.105171]], "grad": [[0.257614, 0.265459, 0.260203, 0.0]], "clipped": [[0, 0, 0, 1]]}),
    Golden("ctpo, no dual clip", "ctpo", log_ratios([0.03, 0.03, -0.02, 0.1]) | {"advantage": [-1.0]},
           {"objective": [[-1.030455, -1.061837, -1.040811, -1.150274]], "grad": [[0.257614, 0.265459, 0.260203, 0.287568]]}, {"clip": {"widening": {"dual": None}}}),
    # tool tokens between: c keeps .06, and the last token is the third: .04 - .0866 < 0
    Golden("ctpo, tool tokens", "ctpo", log_ratios([0.03, 0.03, 9.0, 9.0, -0.02]) | {"mask": [[1.0, 1, 0, 0, 1]], "advantage": [1.0]},
           {"ratio": [[E(0.03), E(0.06), E(0.06), E(0.06), E(0.04)]], "grad": [[-E(0.03) / 3, -E(0.06) / 3, 0, 0, -E(0.04) / 3]]}),
    # c = .03, .06, .06, .06, .16 and the third policy token: .16 is held at .05 sqrt 3 = .086603 (by column it would be .1118)
    Golden("ctpo, tool tokens have no position", "ctpo", log_ratios([0.03, 0.03, 9.0, 9.0, 0.1]) | {"mask": [[1.0, 1, 0, 0, 1]], "advantage": [1.0]},
           {"loss": -(E(0.03) + E(0.06) + E(0.05 * 3**0.5)) / 3}),
    # ------------------------------------------------------------ TIC-GRPO
    # 1.1^5 = 1.610510 is held at 1.28, .9^5 = .590490; T = 100, two answers: (.0128 - .0059049) / 2. A geometric mean gives 1.1 and .9
    Golden("tic-grpo", "tic-grpo", ratios([1.1] * 5, [0.9] * 5) | {"advantage": [1, -1], "max_completion_length": 100},
           {"ratio": each(1.610510, 0.590490), "objective": each(1.28, -0.590490), "loss": -(0.0128 - 0.0059049) / 2,
            "grad": [[0.0] * 5, [0.0059049 / 2] * 5], "clipped": each(1, 0)}),
    # the cap holds for A < 0 too: -1.28 without gradient, where PPO's min gives -1.61051 with one
    Golden("tic-grpo, A < 0", "tic-grpo", ratios([1.1] * 5) | {"advantage": [-1], "max_completion_length": 100},
           {"objective": [[-1.28]], "grad": [[0.0] * 5], "clipped": [[1]]}),
    Golden("tic-grpo's data under ppo", "tic-grpo", ratios([1.1] * 5) | {"advantage": [-1], "max_completion_length": 100},
           {"objective": [[-1.610510]], "grad": [[0.01610510] * 5]}, {"clip": {"ppo": {"eps_high": 0.28}}}),
    # ------------------------------------------------------------ decoupled PPO
    # behaviour .2, .5, proximal .3, .4, current .45, .42: u = 1.5, .8, rho = 1.5, 1.05: 1.5 * 1.2, .8 * 1.05; gradient u rho / 2
    Golden("decoupled-ppo", "decoupled-ppo", THREE | {"advantage": [1.0]}, {"objective": [[1.8, 0.84]], "grad": [[0.0, -0.42]]}),
    Golden("decoupled-ppo, clip-higher", "decoupled-ppo", THREE | {"advantage": [1.0]}, {"objective": [[1.92, 0.84]]}, {"clip": {"ppo": {"eps_high": 0.28}}}),
    # behaviour = proximal: u = 1, PPO: 2.25 and .84 held at 1.2 and free
    Golden("decoupled-ppo, one old policy", "decoupled-ppo", THREE | {"advantage": [1.0], "old_logps": THREE["rollout_logps"]}, {"objective": [[1.2, 0.84]]}),
    # proximal = current: rho = 1 and the gradient is u A: 2.25 / 2, .84 / 2
    Golden("decoupled-ppo, refreshed every step", "decoupled-ppo", THREE | {"advantage": [1.0], "old_logps": THREE["logps"]}, {"grad": [[-1.125, -0.42]]}),
    # ------------------------------------------------------------ DPPO
    # mu = .01, .6, .6, .9, p = .02, .8, .4, .95: p - mu = .01, .2, -.2, .05; A > 0 masks token 1. r = 2, 4/3, 2/3, 1.0556, / 4:
    # the rare token keeps its gradient at ratio 2, where PPO (.2) masks it
    Golden("dppo, A > 0", "dppo", MOVED | {"advantage": [1.0]}, {"grad": [[-0.5, 0, -1 / 6, -0.2638889]], "clipped": [[0, 1, 0, 0]]}),
    Golden("dppo, A < 0", "dppo", MOVED | {"advantage": [-1.0]}, {"grad": [[0.5, 1 / 3, 0, 0.2638889]], "clipped": [[0, 0, 1, 0]]}),
    Golden("dppo's data under ppo", "dppo", MOVED | {"advantage": [1.0]}, {"clipped": [[1, 1, 0, 0]]}, {"clip": "ppo"}),
    # binary KL .003119, .104649, .081093, .020654 against .05: the same masks
    Golden("dppo, kl, A > 0", "dppo", MOVED | {"advantage": [1.0]}, {"clipped": [[0, 1, 0, 0]]}, KL_FORM(0.05)),
    Golden("dppo, kl, A < 0", "dppo", MOVED | {"advantage": [-1.0]}, {"clipped": [[0, 0, 1, 0]]}, KL_FORM(0.05)),
    # the numbers themselves, one step inside and outside
    *[Golden(f"dppo, kl {delta}, A = {a}", "dppo", MOVED | {"advantage": [a]}, {"clipped": [clipped]}, KL_FORM(delta))
      for delta, a, clipped in [(0.104648, 1.0, [0, 1, 0, 0]), (0.104650, 1.0, [0, 0, 0, 0]), (0.081092, -1.0, [0, 0, 1, 0]), (0.081094, -1.0, [0, 0, 0, 0]),
                                (0.020653, 1.0, [0, 1, 0, 1]), (0.003118, 1.0, [1, 1, 0, 1])]],
    # r = 2 truncated at 1.5: .375
    Golden("dppo, truncated", "dppo", MOVED | {"advantage": [1.0]}, {"grad": [[-0.375, 0, -1 / 6, -0.2638889]]}, {"clip": {"divergence_mask": {"cap": 1.5}}}),
    # ------------------------------------------------------------ TOPR
    # rho = 3, .4, 2.5, A = 1, -1, -1: w A = 1, -.4, -1; log pi = -1; gradient of the mean of three
    Golden("topr", "topr", ratios([3.0], [0.4], [2.5]) | {"advantage": [1, -1, -1]}, {"objective": each(-1, 0.4, 1), "grad": each(-1 / 3, 0.4 / 3, 1 / 3)}),
    # an unlikely success keeps its full weight
    Golden("topr, an unlikely success", "topr", ratios([0.5]) | {"advantage": [1]}, {"objective": [[-1]], "grad": [[-1.0]]}),
    # the answer is one action: ratios .5 * .8 = .4, log pi = -2, every token has gradient w A
    Golden("topr, two tokens", "topr", ratios([0.5, 0.8]) | {"advantage": [-1]}, {"objective": [[0.8]], "grad": [[0.4, 0.4]]}),
    # ------------------------------------------------------------ BAPO (the search has its own tests below)
    # rho0 = 0 and fixed bounds: asymmetric PPO with a dual clip: 1.28, .5, -.8, -1.4, -3 (r = 4)
    Golden("bapo, nothing to balance", "bapo", ratios([1.5, 0.5, 0.5, 1.4, 4.0]) | {"advantage": [[1.0, 1, -1, -1, -1]]},
           {"objective": [[1.28, 0.5, -0.8, -1.4, -3.0]], "grad": [[0, -0.1, 0, 0.28, 0]], "clipped": [[1, 0, 1, 0, 1]]},
           {"clip": {"balanced": {"rho0": 0.0, "c_low_min": 0.8, "c_high_min": 1.28}}}),
    # r = 1.5, 1.1, .5, .9, 1.4: active share at rho0 = .5 stops at (.6, 1.5): 1.5, 1.1, -.6, -.9, -1.4
    Golden("bapo, balanced", "bapo", BALANCE, {"objective": [[1.5, 1.1, -0.6, -0.9, -1.4]], "grad": [[-0.3, -0.22, 0, 0.18, 0.28]]},
           {"clip": {"balanced": {"rho0": 0.5, "c_low_max": 0.8, "c_high_max": 2.0, "step_low": 0.05}}}),
    # ------------------------------------------------------------ Clip-Cov and KL-Cov
    # A = 1, 1, -1, -1, lp = -.1, -3, -.2, -2: means 0, -1.325; cov = 1.225, -1.675, -1.125, .675: only token 0 is in (1, 5) and is drawn
    Golden("clip-cov", "clip-cov", COV | {"old_logps": None}, {"objective": [[0, 1, -1, -1]], "grad": [[0, -0.25, 0.25, 0.25]]}),
    # a candidate that PPO clips already is none: r = e^.8 = 2.2 > 2
    Golden("clip-cov, clipped already", "clip-cov", COV | {"old_logps": [[-0.9, -3.0, -0.2, -2.0]]}, {"objective": [[2, 1, -1, -1]], "grad": [[0, -0.25, 0.25, 0.25]]}),
    # r = e^.3, e^-1, e^.3, e^.5; token 0 pays |.3|: J = (1.349859 + .367879 - 1.349859 - 1.648721 - .3)/4 = -1.580842/4 = -.395210 (the
    # atlas prints -.395193); dJ/dlp_0 = (1.349859 - 1)/4
    Golden("kl-cov", "kl-cov", COV, {"loss": 0.395210, "grad": [[-0.087465, -0.091970, 0.337465, 0.412180]], "terms.kl_cov": 0.075},
           {"regularizers": [{"kl_cov": {"share": 0.25}}]}),
    Golden("kl-cov's data without it", "kl-cov", COV, {"grad": [[-0.337465, -0.091970, 0.337465, 0.412180]]}, {"regularizers": []}),
    # on-policy |0| has no gradient
    Golden("kl-cov, on-policy", "kl-cov", COV | {"old_logps": None}, {"grad": [[-0.25, -0.25, 0.25, 0.25]]}),
    # ------------------------------------------------------------ StableDRL
    # log rho = 0, 1, -1, 4: w = 1, 1.2, .8, 1.2, sum 4.2: .2381, .2857, .1905, .2857; times A = 1, -1, .5, -.5 is the gradient
    Golden("stabledrl", "stabledrl", log_ratios([0.0], [1.0], [-1.0], [4.0]) | {"advantage": [1, -1, 0.5, -0.5]},
           {"grad": each(-1 / 4.2, 1.2 / 4.2, -0.4 / 4.2, 0.6 / 4.2), "objective": each(-4 / 4.2, 4.8 / 4.2, -1.6 / 4.2, 2.4 / 4.2)}),
    # the authors' rule, a cap at 5: 1, e, e^-1, 5, sum 9.086161: .1101, .2992, .0405, .5503
    Golden("stabledrl, the authors' cap", "stabledrl", log_ratios([0.0], [1.0], [-1.0], [4.0]) | {"advantage": [1, -1, 0.5, -0.5]},
           {"grad": each(-0.110057, 0.299168, -0.020244, 0.275143)}, {"clip": {"self_normalised": {"eps_low": 1.0, "eps_high": 4.0}}}, atol=2e-6),
    # on-policy 1/G: REINFORCE; two groups are averaged
    Golden("stabledrl, on-policy", "stabledrl", answers(1, 1, 1, 1, advantage=[1, -1, 0.5, -0.5]), {"grad": each(-0.25, 0.25, -0.125, 0.125)}),
    Golden("stabledrl, two groups", "stabledrl", log_ratios([0.0], [1.0], [-1.0], [4.0]) | {"advantage": [1, -1, 0.5, -0.5], "group": [0, 0, 1, 1]},
           {"grad": each(-1 / 2.2 / 2, 1.2 / 2.2 / 2, -0.4 / 2 / 2, 0.6 / 2 / 2)}),
    # PPO's min on the same answers reaches -.5 e^4
    Golden("stabledrl's data under ppo", "stabledrl", log_ratios([0.0], [1.0], [-1.0], [4.0]) | {"advantage": [1, -1, 0.5, -0.5]},
           {"objective": each(1, -E(1), 0.5 * E(-1), -27.2991)}, {"clip": "ppo"}, atol=6e-5),
    # ------------------------------------------------------------ MicroCoder-GRPO
    # R = 1, 0, 1, 0: +-.5 / .57745 = +-.8659; rows 0 and 1 are truncated, all draws pass: the correct one loses its signal, or the wrong one
    *[Golden(f"microcoder-grpo, {criterion}", "microcoder-grpo", answers(1, 1, 1, 1, rewards=[1, 0, 1, 0], truncated=[True, True, False, False]),
             {"advantage": each(*(a * 0.5 / (3**-0.5 + 1e-4) for a in signs)), "loss": 0.25 * 0.5 / (3**-0.5 + 1e-4) * -sum(signs)},
             {"advantage": {"truncation_dropout": {"rho": rho, "criterion": criterion}}})
      for criterion, rho, signs in [("non_incorrect", 1.0, [0, -1, 1, -1]), ("incorrect", 1.0, [1, 0, 1, -1])]],
    Golden("microcoder-grpo, rho 0", "microcoder-grpo", answers(1, 1, 1, 1, rewards=[1, 0, 1, 0], truncated=[True, True, False, False]),
           {"advantage": each(*(a * 0.5 / (3**-0.5 + 1e-4) for a in (1, -1, 1, -1)))}, {"advantage": {"truncation_dropout": {"rho": 0.0}}}),
    # ------------------------------------------------------------ WAPO
    # R = 1, 0, 0, 0: A = .75 for the winner; ratios .5, 3, 12 -> .375, 2.25, 7.5; G = 4, L = 100: 10.125 / 400. Losers: nothing
    Golden("wapo", "wapo", WINNER, {"advantage": each(0.75, -0.25, -0.25, -0.25), "loss": -0.0253125, "grad": [[-0.375 / 400, -2.25 / 400, 0], *[[0] * 3] * 3]}),
    # a group without a winner does not count: the same again
    Golden("wapo, a group without a winner", "wapo", {k: v if k == "max_completion_length" else v * 2 for k, v in WINNER.items()} | {"rewards": [1.0, 0, 0, 0, 0.1, 0.1, 0.1, 0.1], "group": [0] * 4 + [1] * 4},
           {"loss": -0.0253125}),
    # two winners' groups are averaged
    Golden("wapo, two groups", "wapo", {k: v if k == "max_completion_length" else v * 2 for k, v in WINNER.items()} | {"rewards": [1.0, 0, 0, 0, 1.0, 0, 0, 0], "group": [0] * 4 + [1] * 4},
           {"loss": -0.0253125}),
    # over kept tokens: 10.125 / 3
    Golden("wapo, over kept tokens", "wapo", WINNER, {"loss": -3.375}, {"aggregate": "token_mean"}),
]  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN, ids=[g.name for g in GOLDEN])
def test_golden(case):
    assert_golden(case)


# ---------------------------------------------------------------- what a table cannot hold


def loss_of(v, **given):
    given["logps"] = torch.as_tensor(given["logps"], dtype=torch.float64).requires_grad_()
    batch = TokenBatch.from_tensors(**given)
    loss = v.loss(batch)
    return loss, torch.autograd.grad(loss.loss, batch.logps)[0]


@pytest.mark.parametrize(
    "t, low, high", [(1, 0.975310, 1.051271), (100, 0.778801, 1.648721), (5000, 0.170714, 34.313330)]
)
def test_ctpo_bounds_widen_with_the_position(t, low, high):
    # exp(-.025 sqrt t), exp(.05 sqrt t); the printed 1 -/+ exp(-eps sqrt t) would be .024690, 1.951229 at t = 1
    for first, a, wanted in ((10.0, 1.0, high), (-10.0, -1.0, -low)):
        old = torch.zeros(1, t, dtype=torch.float64)
        old[0, 0] = -first
        loss, _ = loss_of(variant("ctpo"), logps=torch.zeros(1, t), old_logps=old, advantage=[a])
        assert float(loss.objective[0, -1]) == pytest.approx(wanted, abs=1e-5)


def test_dhpo_holds_grpo_and_gspo_token_at_its_ends():
    given = inputs(5)
    rewards = {"advantage": None}
    for w, like in ((1.0, variant("dapo", aggregate="sequence_mean")), (0.0, variant("gspo-token"))):
        got = run(variant("dhpo", clip={"hybrid": {"w": w}}), given | rewards)
        wanted = run(like, given | rewards)
        assert_close(got[0].loss, wanted[0].loss, "loss")
        assert_close(got[1], wanted[1], "gradient")


# P / N at (c_low, c_high) on r = 1.5, 1.1, .5, .9, 1.4, A = 1, 1, -1, -1, -1; share = x / (1 + x)
SURROGATE = {
    (0.6, 1.2): 0.7931,
    (0.7, 1.2): 0.7667,
    (0.8, 1.2): 0.7419,
    (0.95, 1.2): 0.6970,
    (0.6, 1.3): 0.8276,
    (0.6, 1.5): 0.8966,
}
ACTIVE = {(0.6, 1.2): 0.3235, (0.7, 1.2): 0.3235, (0.8, 1.2): 0.3235, (0.95, 1.2): 0.4400, (0.6, 1.5): 0.5306}
PAPER = {(0.6, 1.2): 0.4164, (0.8, 1.2): 0.4133}
SHARES = [("surrogate", at, x / (1 + x)) for at, x in SURROGATE.items()]
SHARES += [("active", at, x) for at, x in ACTIVE.items()] + [("paper", at, x) for at, x in PAPER.items()]


@pytest.mark.parametrize("measure, at, wanted", SHARES)
def test_bapo_share_of_positive_tokens(measure, at, wanted):
    low, high = at
    fixed = {
        "rho0": 1.0,
        "c_low_min": low,
        "c_low_max": low,
        "c_high_min": high,
        "c_high_max": high,
        "measure": measure,
    }
    # the sampler's probabilities matter to "paper" only; logps keep the ratios
    q = torch.tensor([[0.2, 0.8, 0.1, 0.9, 0.5]], dtype=torch.float64).log()
    given = {"old_logps": q, "logps": q + torch.tensor([[1.5, 1.1, 0.5, 0.9, 1.4]], dtype=torch.float64).log()}
    loss, _ = loss_of(variant("bapo", clip={"balanced": fixed}), **given, advantage=BALANCE["advantage"])
    assert loss.metrics["bapo/positive_share"] == pytest.approx(wanted, abs=6e-5)


@pytest.mark.parametrize(
    "measure, rho0, first, wanted",
    [("surrogate", 0.45, "high", (0.6, 1.3)), ("surrogate", 0.45, "low", (0.8, 1.45)), ("active", 0.5, "high", (0.6, 1.5)),
     ("active", 0.99, "high", (0.8, 2.0))],  # out of reach: both maxima
)  # fmt: skip
def test_bapo_search(measure, rho0, first, wanted):
    ranges = {
        "c_low_min": 0.6,
        "c_low_max": 0.8,
        "c_high_min": 1.2,
        "c_high_max": 2.0,
        "step_low": 0.05,
        "step_high": 0.05,
    }
    v = variant("bapo", clip={"balanced": ranges | {"rho0": rho0, "first": first, "measure": measure}})
    loss, _ = loss_of(v, **BALANCE)
    assert (loss.metrics["bapo/c_low"], loss.metrics["bapo/c_high"]) == pytest.approx(wanted)


def many_tokens(count: int) -> dict:
    g = torch.Generator().manual_seed(0)
    logps = -3 * torch.rand(100, count // 100, generator=g, dtype=torch.float64) - 0.01
    sign = torch.where(torch.rand(100, count // 100, generator=g) < 0.5, 2.0, -2.0).double()
    return {"logps": logps, "advantage": sign, "old_logps": logps - 0.01}


def test_clip_cov_cuts_a_share_of_the_tokens():
    # int(2e-4 * 10000) = 2 of the candidates; fewer than 5000 tokens still lose one
    for count, cut in ((10000, 2), (4000, 1)):
        loss, grad = loss_of(variant("clip-cov"), **many_tokens(count))
        assert int((grad == 0).sum()) == cut and loss.metrics["clip_cov/candidates"] > 0.1


@pytest.mark.parametrize("share, penalised", [(0.002, 20), (0.0002, 2), (0.2, 2000)])
def test_kl_cov_share_is_a_fraction(share, penalised):
    # the authors' 0.2 and 0.02 percent of 10000 tokens, and SkyRL's fraction 0.2
    loss, _ = loss_of(variant("kl-cov", regularizers=[{"kl_cov": {"share": share}}]), **many_tokens(10000))
    assert float(loss.terms["kl_cov"]) == pytest.approx(0.01 * penalised / 10000)


def test_microcoder_repetition():
    ids = torch.full((4, 450), -1)
    ids[0, :400] = torch.tensor([1, 2] * 200)
    ids[1, :400] = torch.arange(400)
    ids[2, :255] = 7  # one token short of twice 128
    ids[3, :256] = 7
    assert repeats(ids, 128).tolist() == [True, False, False, True]


def test_microcoder_keeps_the_signal_of_a_truncated_answer_that_repeats():
    batch = TokenBatch.from_tensors(**answers(1, 1, 1, 1, rewards=[1, 0, 1, 0], truncated=[True] * 4))
    ids = torch.arange(16).view(4, 4)
    ids[0, 2:] = ids[0, :2]
    batch.scored.tokens["ids"] = ids
    h = TruncationDropout(rho=1.0, m=2)
    found = h(batch.scored, torch.Generator().manual_seed(0))
    assert (found != 0).tolist() == [True, True, False, True]  # row 2 is correct, truncated and does not repeat


def test_microcoder_draws_with_probability_rho():
    rewards = torch.arange(4000.0) % 2
    given = {"logps": torch.zeros(4000, 1), "rewards": rewards, "truncated": torch.ones(4000, dtype=torch.bool)}
    scored = TokenBatch.from_tensors(**given).scored
    rng = torch.Generator().manual_seed(1)
    first, second = (TruncationDropout(rho=0.3)(scored, rng) == 0 for _ in range(2))
    assert abs(float(first[rewards == 1].float().mean()) - 0.3) < 0.04 and not first[rewards == 0].any()
    assert (first != second).any(), "every generation draws anew"


def test_sampler_anchor_is_the_engine_where_it_spoke_and_the_old_policy_elsewhere():
    given = {"logps": [[-1.0, -1.0]], "old_logps": [[-1.5, -1.5]], "advantage": [1.0]}
    v = variant("wapo", select=[])
    assert loss_of(v, **given)[0].log_ratio.tolist() == [[0.5, 0.5]]
    assert loss_of(v, **given, rollout_logps=[[-1.25, float("nan")]])[0].log_ratio.tolist() == [[0.25, 0.5]]


@pytest.mark.parametrize("name", ["dppo", "topr", "wapo"])
def test_a_ratio_against_the_sampler_is_not_corrected_again(name):
    found = check(variant(name, weight=["sampler_correction"]))
    assert [f.level for f in found] == ["error"] and "corrects the sampler again" in found[0].message


# ---------------------------------------------------------------- wrong formulas


def _gipo_live(self, lr, a, b):  # the gradient goes through the weight: (1 - log r / sigma^2) times as large
    return torch.exp(-0.5 * (lr / self.sigma) ** 2) * lr.exp() * a


def _gipo_in_r(self, lr, a, b):  # a Gaussian in r - 1: .135335 at r = 2
    return torch.exp(-0.5 * ((lr.exp() - 1) / self.sigma) ** 2).detach() * lr.exp() * a


def _mhpo_live(self, lr, a, b):  # hazard not detached: .3866, .1695 at r = 1, 2 instead of .2651, .3907
    psi = self.c * torch.tanh(lr / self.c)
    s = torch.nn.functional.softplus
    zeta = (s(psi) / self.lambda_pos) ** self.k_pos + (s(-psi) / self.lambda_neg) ** self.k_neg
    return torch.exp(psi - zeta) * a


def _sspo_with_advantage_inside(self, lr, a, b):  # f(rho A): only right where A = 1
    return torch.exp((torch.atan(lr * a) * b.mask).sum(-1, keepdim=True) / b.mask.sum(-1, keepdim=True)) * a


def _ctpo_printed(self, lr, a, b):  # bounds 1 -/+ exp(-eps sqrt t)
    width = b.mask.cumsum(-1).clamp(min=1) ** self.power
    r = lr.exp()
    held = torch.minimum(torch.maximum(r, 1 - (-self.eps_low * width).exp()), 1 + (-self.eps_high * width).exp())
    return torch.min(r * a, held * a)


def _ctpo_live_sum(self, b):  # earlier tokens get the sum of all later terms: 1.070843, .813230, .547771, .287568
    return ((b.logps - b.anchor) * b.mask).cumsum(-1)


def _dhpo_clips_the_mixture(self, lr, a, b):
    s = (lr.detach() * b.mask).sum(-1, keepdim=True) / b.mask.sum(-1, keepdim=True) + lr - lr.detach()
    w = b.entropy.detach() / b.entropy.max().detach()
    m = w * lr.exp() + (1 - w) * s.exp()
    return torch.min(m * a, m.clamp(1 - self.eps_low, 1 + self.eps_high) * a)


def _dhpo_live_mean(self, lr, a, b):  # through the mean in s: .588917, .322250, .222250
    s = (lr * b.mask).sum(-1, keepdim=True) / b.mask.sum(-1, keepdim=True)
    w = b.entropy.detach() / b.entropy.max().detach()
    m = w * lr.exp() + (1 - w) * s.exp()
    held = w * lr.exp().clamp(0.8, 1.28) + (1 - w) * s.exp().clamp(1 - 3e-4, 1 + 4e-4)
    return torch.min(m * a, held * a)


def _cap_by_ppo_s_min(self, lr, a, b):
    return torch.min(lr.exp() * a, lr.exp().clamp(max=1 + self.eps_high) * a)


def _cap_at_eps(self, lr, a, b):  # 9 read as the cap itself
    return lr.exp().clamp(max=self.eps_high) * a


def _geometric_mean(self, b):
    return ((b.logps - b.anchor) * b.mask).sum(-1, keepdim=True) / b.mask.sum(-1, keepdim=True)


def _mask_by_ratio(self, lr, a, b):
    r = lr.exp()
    kept = torch.where(a > 0, r <= 1.2, r >= 0.8)
    return r.detach().clamp(max=self.cap) * kept * a * b.logps


def _taper_everything(self, lr, a, b):
    return lr.exp().clamp(max=1).detach() * a * (b.logps * b.mask).sum(-1, keepdim=True)


def _live_weights(self, lr, a, b):
    w = lr.exp().clamp(1 - self.eps_low, 1 + self.eps_high)
    return len(w) * w / w.sum() * a * (b.logps * b.mask).sum(-1, keepdim=True)


def _ratio_instead_of_score(self, lr, a, b):  # zero gradient where the weight is clipped
    w = lr.exp().clamp(1 - self.eps_low, 1 + self.eps_high)
    return len(w) * w / w.sum().detach() * a


WRONG = [
    ("ctpo, A > 0", clip_trust.WideningClip, _ctpo_printed),
    ("ctpo, no dual clip", CumulativeRatio, _ctpo_live_sum),
    ("dhpo, A > 0", clip_trust.HybridClip, _dhpo_clips_the_mixture),
    ("dhpo, A < 0", clip_trust.HybridClip, _dhpo_live_mean),
    ("tic-grpo, A < 0", clip_trust.UpperCap, _cap_by_ppo_s_min),
    ("tic-grpo", ProductRatio, _geometric_mean),
    ("wapo", clip_trust.UpperCap, _cap_at_eps),
    ("dppo, A > 0", clip_trust.DivergenceMask, _mask_by_ratio),
    ("topr, an unlikely success", clip_answers.Tapered, _taper_everything),
    ("stabledrl", clip_answers.SelfNormalised, _live_weights),
    ("stabledrl", clip_answers.SelfNormalised, _ratio_instead_of_score),
    ("gipo, sigma .5", clip_gates.GaussianWeight, _gipo_live),
    ("gipo, sigma .5", clip_gates.GaussianWeight, _gipo_in_r),
    ("mhpo", clip_gates.Hazard, _mhpo_live),
    ("sspo, one token", clip_gates.SoftSequence, _sspo_with_advantage_inside),
]


@pytest.mark.parametrize("name, hook, broken", WRONG, ids=[w[2].__name__.strip("_") for w in WRONG])
def test_the_numbers_reject_a_wrong_formula(monkeypatch, name, hook, broken):
    [case] = [g for g in GOLDEN if g.name == name]
    monkeypatch.setattr(hook, "__call__", broken)
    with pytest.raises(AssertionError):
        assert_golden(case)
