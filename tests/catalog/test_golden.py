# ruff: noqa: E501  (a table: one row, one line of arithmetic)
"""Numbers worked out by hand or taken from the method atlas, through `Variant.loss`. Data first, one test at the end.

A row of data: what is computed (`variant` and edits), on what (`given`), and what must come out (`expect`, keys of
`Loss`, plus `grad`: dloss/dlogps, `terms.NAME`, `ratio`). The comment above each shows the arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from trl_variants import TokenBatch, variant

E = math.exp
L = math.log


@dataclass
class Golden:
    name: str
    variant: Any
    given: dict[str, Any]
    expect: dict[str, Any]
    edits: dict[str, Any] = field(default_factory=dict)
    atol: float = 6e-7


def ratios(*rows, lp=-1.0) -> dict[str, Any]:
    """logps and old_logps with the given ratios."""
    new = [[lp] * len(r) for r in rows]
    return {"logps": new, "old_logps": [[lp - L(x) for x in r] for r in rows]}


def log_ratios(*rows, lp=-1.0) -> dict[str, Any]:
    return {"logps": [[lp] * len(r) for r in rows], "old_logps": [[lp - x for x in r] for r in rows]}


def answers(*lengths, **more) -> dict[str, Any]:
    """On-policy answers of the given lengths."""
    width = max(lengths)
    mask = [[1.0] * n + [0.0] * (width - n) for n in lengths]
    return {"logps": [[-1.0] * width for _ in lengths], "mask": mask, **more}


def each(*values) -> list[list[float]]:
    return [[v] for v in values]


NO_KL = {"regularizers": []}
MEAN_OF_TOKENS = {"advantage": "grouped", "aggregate": "token_mean"}

GOLDEN = [
    # ------------------------------------------------------------ GRPO
    # R = 1,0,0,0: mean 1/4; population std sqrt((9/16 + 3/16) / 4) = sqrt(3)/4; 0.75 / 0.4330 = sqrt 3, -0.25 / 0.4330 = -1/sqrt 3
    Golden("grpo advantage, population std", "grpo", answers(1, 1, 1, 1, rewards=[1, 0, 0, 0]),
           {"advantage": each(3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5))},
           {"advantage": {"grouped": {"ddof": 0, "eps": 0.0}}, **NO_KL}),
    # unbiased std sqrt(0.75 / 3) = 0.5: 0.75 / 0.5001 = 1.4997, -0.25 / 0.5001 = -0.4999
    Golden("grpo advantage, unbiased std", "grpo", answers(1, 1, 1, 1, rewards=[1, 0, 0, 0]),
           {"advantage": each(0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001)}, NO_KL),
    # R = 1,0: std sqrt(0.5) = 0.70711 unbiased, 0.5 population; 0.5 / 0.70721 = 0.7070, 0.5 / 0.5001 = 0.9998
    Golden("grpo, two answers, unbiased", "grpo", answers(1, 1, rewards=[1, 0]),
           {"advantage": each(0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4))}, NO_KL),
    Golden("grpo, two answers, population", "grpo", answers(1, 1, rewards=[1, 0]),
           {"advantage": each(0.5 / 0.5001, -0.5 / 0.5001)}, {"advantage": {"grouped": {"ddof": 0}}, **NO_KL}),
    # on-policy, |y| = 1 with A = 1 and |y| = 3 with A = -1: rows (1 - 1) / 2 = 0, tokens (1 - 3) / 4 = -0.5.
    # gradient of the loss by rows: -A / |y| / 2 per token
    Golden("grpo, rows count the same", "grpo", answers(1, 3, advantage=[1.0, -1.0]),
           {"loss": 0.0, "grad": [[-0.5, 0, 0], [1 / 6, 1 / 6, 1 / 6]]}, NO_KL),
    Golden("grpo, tokens count the same", "grpo", answers(1, 3, advantage=[1.0, -1.0]),
           {"loss": 0.5, "grad": [[-0.25, 0, 0], [0.25, 0.25, 0.25]]}, {"aggregate": "token_mean", **NO_KL}),
    # beta = 0.04, d = lp - lp_ref = 0.5: k3 = e^-0.5 - 1 + 0.5 = 0.106531, times 0.04 = 0.004261; 0.04 (1 - e^-0.5) = 0.015739
    Golden("grpo, the KL term", "grpo", {"logps": [[-1.0]], "ref_logps": [[-1.5]], "advantage": [0.0]},
           {"loss": 0.04 * (E(-0.5) - 0.5), "grad": [[0.015739]], "terms.kl": 0.004261}),
    # an all-equal group: A = 0 and the KL is still paid
    Golden("grpo, a dead group pays the KL", "grpo", answers(1, 1, rewards=[1, 1], ref_logps=[[-1.5], [-1.0]]),
           {"advantage": each(0, 0), "loss": 0.004261 / 2, "grad": [[0.015739 / 2], [0.0]]}),
    # r = 1.5 with A = 1 is held at 1.2 without gradient; r = 0.5 with A = 1 and r = 1.5 with A = -1 are free
    Golden("grpo, the clip and its pessimism", "grpo", ratios([1.5], [0.5], [1.5], [0.5]) | {"advantage": [1, 1, -1, -1]},
           {"objective": each(1.2, 0.5, -1.5, -0.8), "grad": each(0, -0.5 / 4, 1.5 / 4, 0), "clipped": each(1, 0, 0, 1)}, NO_KL),
    # ------------------------------------------------------------ Dr. GRPO
    # A = R - mean = 3/4, -1/4 x 3
    Golden("dr-grpo advantage", "dr-grpo", answers(1, 1, 1, 1, rewards=[1, 0, 0, 0]), {"advantage": each(0.75, -0.25, -0.25, -0.25)}),
    # lengths 2,4,8,2, L = 10: (2*.75 - 4*.25 - 8*.25 - 2*.25) / (4*10) = -2 / 40 = -0.05; token mean -2 / 16; rows (3 - 3)/16 = 0
    Golden("dr-grpo, constant divisor", "dr-grpo", answers(2, 4, 8, 2, rewards=[1, 0, 0, 0], max_completion_length=10),
           {"loss": 0.05, "grad": [[-0.75 / 40] * 2 + [0] * 6, [0.25 / 40] * 4 + [0] * 4, [0.25 / 40] * 8, [0.25 / 40] * 2 + [0] * 6]}),
    Golden("dr-grpo's advantage by rows", "dr-grpo", answers(2, 4, 8, 2, rewards=[1, 0, 0, 0]), {"loss": 0.0}, {"aggregate": "sequence_mean"}),
    Golden("dr-grpo's advantage by tokens", "dr-grpo", answers(2, 4, 8, 2, rewards=[1, 0, 0, 0]), {"loss": 0.125}, {"aggregate": "token_mean"}),
    # leave-one-out is that times G / (G - 1) = 4/3
    Golden("dr-grpo times 4/3 is leave-one-out", "rloo", answers(1, 1, 1, 1, rewards=[1, 0, 0, 0]),
           {"advantage": each(1, -1 / 3, -1 / 3, -1 / 3)}, {"rewards": []}),
    Golden("dr-grpo, a group of one", "dr-grpo", answers(3, rewards=[1.0]), {"advantage": each(0.0), "loss": 0.0, "grad": [[0.0] * 3]}),
    # ------------------------------------------------------------ DAPO
    # 1.25 is inside 1.28; 1.35 is held at 1.28; 0.75 with A = -1 is held at 0.8
    Golden("dapo, clip-higher", "dapo", ratios([1.25], [1.35], [0.75]) | {"advantage": [1, 1, -1]},
           {"objective": each(1.25, 1.28, -0.8), "grad": each(-1.25 / 3, 0, 0), "clipped": each(0, 1, 1)}),
    Golden("dapo with a symmetric clip", "dapo", ratios([1.25], [1.35], [0.75]) | {"advantage": [1, 1, -1]},
           {"objective": each(1.2, 1.2, -0.8)}, {"clip": "ppo"}),
    # |y| = 2, A = 1 and |y| = 8, A = -1: (2 - 8) / 10 = -0.6; by rows 0
    Golden("dapo, token mean", "dapo", answers(2, 8, advantage=[1.0, -1.0]), {"loss": 0.6}),
    Golden("dapo by rows", "dapo", answers(2, 8, advantage=[1.0, -1.0]), {"loss": 0.0}, {"aggregate": "sequence_mean"}),
    # as printed: per prompt. The same two answers to two prompts: (2/2 - 8/8) / 2 = 0; to one prompt (2 - 8)/10
    Golden("dapo per prompt, two prompts", "dapo", answers(2, 8, advantage=[1.0, -1.0], group=[0, 1]), {"loss": 0.0}, {"aggregate": "prompt_mean"}),
    Golden("dapo per prompt, one prompt", "dapo", answers(2, 8, advantage=[1.0, -1.0]), {"loss": 0.6}, {"aggregate": "prompt_mean"}),
    # an all-correct group with shaped rewards: mean 0.8125, deviations -.3125, -.0625, .1875, .1875, squares sum .171875,
    # std sqrt(.171875 / 3) = 0.239357; -.3125 / .239457 = -1.305
    Golden("dapo, shaped rewards of an all-correct group", "dapo", answers(1, 1, 1, 1, rewards=[0.5, 0.75, 1, 1]),
           {"advantage": each(-1.305, -0.261, 0.783, 0.783)}, atol=6e-4),
    # overlong filtering: the truncated answer stays in the baseline (A = +-0.7070) and leaves the loss and its count
    Golden("dapo, truncated rows out of the loss", "dapo", answers(2, 3, rewards=[1, 0], truncated=[False, True]),
           {"loss": -0.5 / (0.5**0.5 + 1e-4), "grad": [[-0.25 / (0.5**0.5 + 1e-4)] * 2 + [0.0], [0.0] * 3]}, {"select": ["mask_truncated"]}),
    # bnpo on one micro-batch is the token mean
    Golden("bnpo, one micro-batch", "bnpo", answers(2, 8, advantage=[1.0, -1.0]), {"loss": 0.6}),
    # ------------------------------------------------------------ GSPO and GSPO-token
    # log-ratios .3, -.1, .1: mean .1, s = e^.1 = 1.1052 (product e^.3 = 1.3499); ds/dlp = s / 3 = 0.3684
    Golden("gspo, ratio and gradient", "gspo", log_ratios([0.3, -0.1, 0.1]) | {"advantage": [1.0]},
           {"ratio": [[E(0.1)]], "loss": -E(0.1), "grad": [[-E(0.1) / 3] * 3]}, {"clip": "none"}),
    Golden("gspo's log-ratios under grpo", "grpo", log_ratios([0.3, -0.1, 0.1]) | {"advantage": [1.0]},
           {"grad": [[-E(0.3) / 3, -E(-0.1) / 3, -E(0.1) / 3]]}, {"clip": "none", **NO_KL}),
    # (s, A) = (1.001, 1) is held at 1.0004, (.999, -1) at .9997, (.999, 1) is free; gradient s / |y| / 3 rows
    Golden("gspo, its narrow clip", "gspo", ratios([1.001], [0.999], [0.999]) | {"advantage": [1, -1, 1]},
           {"objective": each(1.0004, -0.9997, 0.999), "grad": each(0, 0, -0.333), "clipped": each(1, 1, 0)}),
    # a drift of 0.01 per token: s = 1.0101 at any length
    Golden("gspo, 10 tokens", "gspo", log_ratios([0.01] * 10) | {"advantage": [1.0]}, {"ratio": [[E(0.01)]]}),
    Golden("gspo, 1000 tokens", "gspo", log_ratios([0.01] * 1000) | {"advantage": [1.0]}, {"ratio": [[E(0.01)]]}),
    Golden("product, 10 tokens", "rloo", log_ratios([0.01] * 10) | {"advantage": [1.0]}, {"ratio": [[E(0.1)]]}),
    Golden("product, 1000 tokens", "rloo", log_ratios([0.01] * 1000) | {"advantage": [1.0]}, {"ratio": [[E(10.0)]]}),
    # the token form: value s everywhere, gradient of (1/3) sum s_t = s / 3, the same as gspo
    Golden("gspo-token, one advantage", "gspo-token", log_ratios([0.3, -0.1, 0.1]) | {"advantage": [1.0]},
           {"ratio": [[E(0.1)] * 3], "loss": -E(0.1), "grad": [[-E(0.1) / 3] * 3]}, {"clip": "none"}),
    Golden("gspo-token, token advantages", "gspo-token", log_ratios([0.3, -0.1, 0.1]) | {"advantage": [[1.0, 0.0, -1.0]]},
           {"grad": [[-E(0.1) / 3, 0.0, E(0.1) / 3]], "loss": 0.0}, {"clip": "none"}),
    # s = 1.1052 is outside 4e-4: the positive token is held at 1.0004 without gradient, the negative one is free
    Golden("gspo-token, the clip splits by token sign", "gspo-token", log_ratios([0.3, -0.1, 0.1]) | {"advantage": [[1.0, 0.0, -1.0]]},
           {"objective": [[1.0004, 0.0, -E(0.1)]], "grad": [[0.0, 0.0, E(0.1) / 3]]}),
    # ------------------------------------------------------------ LUSPO
    # s = 1.001 (|y| = 2) and 1.004 (|y| = 10) held at 1.0025: (2 * 1.001 + 10 * 1.0025) / 2 = 6.0135; gspo 1.00175
    Golden("luspo", "luspo", {"logps": [[-1.0] * 10] * 2, "old_logps": [[-1.0 - L(1.001)] * 10, [-1.0 - L(1.004)] * 10],
                              "mask": [[1.0] * 2 + [0.0] * 8, [1.0] * 10], "advantage": [1, 1]},
           {"loss": -6.0135, "grad": [[-1.001 / 2] * 2 + [0.0] * 8, [0.0] * 10]}),
    Golden("luspo's data under gspo's mean", "luspo", {"logps": [[-1.0] * 10] * 2, "old_logps": [[-1.0 - L(1.001)] * 10, [-1.0 - L(1.004)] * 10],
                                                       "mask": [[1.0] * 2 + [0.0] * 8, [1.0] * 10], "advantage": [1, 1]},
           {"loss": -1.00175}, {"aggregate": "sequence_mean"}),
    # ------------------------------------------------------------ GMPO
    # ratios 1, 2, 5 with A = 1, cap 1.5: (1 * 1.5 * 1.5)^(1/3) = 1.310371; width 0.4: e^(0.8/3) = 1.305605; unclipped 10^(1/3)
    Golden("gmpo, cap 1.5", "gmpo", ratios([1.0, 2.0, 5.0]) | {"advantage": [1.0]}, {"loss": -1.310371}, {"clip": {"geometric_mean": {"eps_high": L(1.5)}}}),
    Golden("gmpo, width 0.4", "gmpo", ratios([1.0, 2.0, 5.0]) | {"advantage": [1.0]}, {"loss": -E(0.8 / 3)}),
    Golden("gmpo's data under gspo", "gspo", ratios([1.0, 2.0, 5.0]) | {"advantage": [1.0]}, {"loss": -2.154435}, {"clip": "none"}),
    # (1 + 1.5 + 1.5) / 3
    Golden("gmpo's data under grpo", "grpo", ratios([1.0, 2.0, 5.0]) | {"advantage": [1.0]}, {"loss": -4 / 3}, {"clip": {"ppo": {"eps_high": 0.5}}, **NO_KL}),
    # ratios .5, 1, 3: A = 1 caps 3 at e^.4: (.5 e^.4)^(1/3) = .906907, gradient .906907 / 3 = .3023, 0 for the capped token;
    # A = -1 floors .5 at e^-.4: (3 e^-.4)^(1/3) = 1.262218
    Golden("gmpo, one-sided for A > 0", "gmpo", ratios([0.5, 1.0, 3.0]) | {"advantage": [1.0]},
           {"loss": -0.906907, "grad": [[-0.906907 / 3, -0.906907 / 3, 0.0]], "clipped": [[0, 0, 1]]}),
    Golden("gmpo, one-sided for A < 0", "gmpo", ratios([0.5, 1.0, 3.0]) | {"advantage": [-1.0]},
           {"loss": 1.262218, "grad": [[0.0, 1.262218 / 3, 1.262218 / 3]], "clipped": [[1, 0, 0]]}),
    Golden("gmpo's second row under gspo", "gspo", ratios([0.5, 1.0, 3.0]) | {"advantage": [1.0]}, {"loss": -1.144714}, {"clip": "none"}),
    # the author's eps 1e-8: R = 1,0: 0.5 / 0.70711 = 0.7071068
    Golden("gmpo, its advantage", "gmpo", answers(1, 1, rewards=[1, 0]), {"advantage": each(0.5**0.5, -(0.5**0.5))}),
    # ------------------------------------------------------------ CISPO
    # r = e^.5, e^-1, e^2; w = 1.648721, .367879, 5; J = (-1.648721 - 2*.367879 + 5*.5) / 3 = .038507
    Golden("cispo, cap 5", "cispo", {"logps": [[-1.0], [-2.0], [-0.5]], "old_logps": [[-1.5], [-1.0], [-2.5]], "advantage": [1, 1, -1]},
           {"loss": -0.038507, "grad": each(-0.549574, -0.122626, 1.666667), "clipped": each(0, 0, 0)}),
    Golden("cispo, [0, 1.2]", "cispo", {"logps": [[-1.0], [-2.0], [-0.5]], "old_logps": [[-1.5], [-1.0], [-2.5]], "advantage": [1, 1, -1]},
           {"grad": each(-0.4, -0.122626, 0.4)}, {"clip": {"cispo": {"cap": 1.2, "floor": 0.0}}}),
    # TRL with epsilon_high unset: every weight is 0.2
    Golden("cispo, cap 0.2", "cispo", {"logps": [[-1.0], [-2.0], [-0.5]], "old_logps": [[-1.5], [-1.0], [-2.5]], "advantage": [1, 1, -1]},
           {"grad": each(-0.2 / 3, -0.2 / 3, 0.2 / 3)}, {"clip": {"cispo": {"cap": 0.2}}}),
    # PPO on the same data: the first token is clipped away, the third keeps r = 7.389: 7.389056 / 3
    Golden("cispo's data under ppo", "cispo", {"logps": [[-1.0], [-2.0], [-0.5]], "old_logps": [[-1.5], [-1.0], [-2.5]], "advantage": [1, 1, -1]},
           {"grad": each(0, -0.122626, 2.463019)}, {"clip": "ppo"}),
    # ------------------------------------------------------------ SAPO
    # f(r; tau) = 4/tau sigmoid(tau (r-1)): f(1;1) = 2, f(1;1.05) = 1.9048, f(2;1) = 4 * .731059 = 2.9242, f(.5;1.05) = 1.4159
    Golden("sapo, values", "sapo", ratios([1.0], [1.0], [2.0], [0.5]) | {"advantage": [1, -1, 1, -1]},
           {"objective": each(2.0, -1.9048, 2.9242, -1.4159)}, atol=6e-5),
    # w = 4 p (1-p): at r = 2: .7864 (tau 1), .7681 (tau 1.05); at r = .5: .9400, .9341. d/dlp = w r A, a row is 1/6 of the loss
    Golden("sapo, gradients", "sapo", ratios([1.0], [2.0], [0.5], [2.0], [0.5], [1.0]) | {"advantage": [1, 1, 1, -1, -1, -1]},
           {"grad": each(-1 / 6, -1.5729 / 6, -0.9400 / 12, 1.5362 / 6, 0.9341 / 12, 1 / 6)}, atol=2e-5),
    # ------------------------------------------------------------ VESPO
    # W = .1, .5, 2/3, 1, 1.5, 2, 5 as one-token answers at lp = -1: objective = phi A lp, phi = W^2 e^(3(1-W)) and W^3 e^(2(1-W))
    Golden("vespo, A > 0", "vespo", ratios([0.1], [0.5], [2 / 3], [1.0], [1.5], [2.0], [5.0]) | {"advantage": [1.0] * 7},
           {"objective": each(-0.1488, -1.12042, -1.20813, -1, -0.50204, -0.19915, -0.00015)}, atol=6e-6),
    Golden("vespo, A < 0", "vespo", ratios([0.1], [0.5], [1.0], [1.5], [2.0], [5.0]) | {"advantage": [-1.0] * 6},
           {"objective": each(0.00605, 0.33979, 1, 1.24159, 1.08268, 0.04193)}, atol=6e-6),
    # log-ratios .1, -.3, .05: W = e^-.15 = .860708, phi+ = .860708^2 e^(3*.139292) = 1.125105, phi- = .860708^3 e^(2*.139292) = .842471
    Golden("vespo, product of a row", "vespo", log_ratios([0.1, -0.3, 0.05], [0.1, -0.3, 0.05]) | {"advantage": [1.0, -1.0]},
           {"objective": [[-1.125105] * 3, [0.842471] * 3], "grad": [[-1.125105 / 6] * 3, [0.842471 / 6] * 3]}),
    # ------------------------------------------------------------ RLOO
    # R = 1, 0, .5, .5: 1 - (0 + .5 + .5)/3 = 2/3; 0 - 2/3; .5 - .5 = 0
    Golden("rloo advantage", "rloo", answers(1, 1, 1, 1, rewards=[1, 0, 0.5, 0.5]), {"advantage": each(2 / 3, -2 / 3, 0, 0)}, {"rewards": []}),
    # a missing score leaves the sum and the count: 1 - (0 + .5)/2, 0 - 1.5/2, .5 - .5
    Golden("rloo, a missing score", "rloo", answers(1, 1, 1, 1, rewards=[1, 0, 0.5, math.nan]), {"advantage": each(0.75, -0.75, 0, 0)}, {"rewards": []}),
    # log-ratios .1 x 3: W = e^.3 = 1.349859, held at 1.2: 1.2 * 2/3 = 0.8, no gradient
    Golden("rloo, the product ratio is clipped", "rloo", log_ratios([0.1] * 3) | {"advantage": [2 / 3]},
           {"ratio": [[1.349859]], "loss": -0.8, "grad": [[0.0] * 3], "clipped": [[1]]}),
    # on-policy: the gradient is that of A sum_t lp, averaged over answers
    Golden("rloo, on-policy is REINFORCE", "rloo", answers(1, 3, advantage=[2 / 3, -2 / 3]), {"grad": [[-1 / 3, 0, 0], [1 / 3] * 3]}),
    # the KL in the reward: R - .05 sum_t (lp_old - lp_ref) = 1 - .05 * (.2 - .5 + .4) = .995 and 0 - .05 * 3 * .2 = -.03;
    # leave-one-out: +-1.025
    Golden("rloo, KL in the reward", "rloo", {"logps": [[-1.0] * 3] * 2, "ref_logps": [[-1.2, -0.5, -1.4], [-1.2] * 3], "rewards": [1, 0]},
           {"advantage": each(1.025, -1.025)}),
    # ------------------------------------------------------------ REINFORCE++
    # |y| = 3 with R = 1 and |y| = 2 with R = -1: mean 1/5; population variance (3 * .64 + 2 * 1.44) / 5 = .96;
    # .8 / .979796 = .8165, -1.2 / .979796 = -1.2247; unbiased variance 1.2: .7303, -1.0954
    Golden("reinforce++, population std", "reinforce-pp", answers(3, 2, rewards=[1, -1]),
           {"advantage": [[0.8 / 0.96**0.5] * 3, [-1.2 / 0.96**0.5] * 2 + [0.0]]}, {"rewards": []}),
    Golden("reinforce++, unbiased std", "reinforce-pp", answers(3, 2, rewards=[1, -1]),
           {"advantage": [[0.8 / 1.2**0.5] * 3, [-1.2 / 1.2**0.5] * 2 + [0.0]]}, {"rewards": [], "advantage": {"token_whitened": {"ddof": 1}}}),
    # k1 = .2, -.5, .4, beta = .01, R = 1: returns .999, 1.001, .996; mean 2.996 / 3; whitening shifts and scales them
    Golden("reinforce++, reward-to-go", "reinforce-pp", {"logps": [[-1.0] * 3], "ref_logps": [[-1.2, -0.5, -1.4]], "rewards": [1.0]},
           {"advantage": [[(x - 2.996 / 3) / (sum((y - 2.996 / 3) ** 2 for y in (0.999, 1.001, 0.996)) / 3) ** 0.5 for x in (0.999, 1.001, 0.996)]]}),
    # with gamma = 0.5 and no KL: .25, .5, 1; only divided: var of (.25, .5, 1) = .0972222
    Golden("reinforce++, discounted and not shifted", "reinforce-pp", {"logps": [[-1.0] * 3], "rewards": [1.0]},
           {"advantage": [[0.25 / 0.0972222**0.5, 0.5 / 0.0972222**0.5, 1 / 0.0972222**0.5]]},
           {"rewards": [], "advantage": {"token_whitened": {"gamma": 0.5, "shift_mean": False}}}, atol=2e-6),
    # group A: R = 1, 0 with |y| = 1, 3; group B: R = 1, 1 with |y| = 2, 2. c = .5, -.5, 0, 0; tokens 8, mean (.5 - 1.5)/8 = -.125;
    # variance (.25 + .75)/8 - .015625 = .109375; (.5 + .125)/.330719 = 1.8898, -.375/.330719 = -1.1339, .125/.330719 = .378
    Golden("reinforce++-baseline, population", "reinforce-pp-baseline", answers(1, 3, 2, 2, rewards=[1, 0, 1, 1], group=[0, 0, 1, 1]),
           {"advantage": [[1.8898, 0, 0], [-1.1339] * 3, [0.378] * 2 + [0], [0.378] * 2 + [0]]}, NO_KL, atol=6e-5),
    # unbiased: variance .875 / 7 = .125: .625/.353553 = 1.7678, -1.0607, .3536
    Golden("reinforce++-baseline, unbiased", "reinforce-pp-baseline", answers(1, 3, 2, 2, rewards=[1, 0, 1, 1], group=[0, 0, 1, 1]),
           {"advantage": [[1.7678, 0, 0], [-1.0607] * 3, [0.3536] * 2 + [0], [0.3536] * 2 + [0]]},
           {"advantage": {"token_whitened": {"center": "group", "ddof": 1}}, **NO_KL}, atol=6e-5),
    # not shifted, a dead group keeps zero: .5 / .330719, -.5 / .330719, 0
    Golden("reinforce++-baseline, only divided", "reinforce-pp-baseline", answers(1, 3, 2, 2, rewards=[1, 0, 1, 1], group=[0, 0, 1, 1]),
           {"advantage": [[0.5 / 0.109375**0.5, 0, 0], [-0.5 / 0.109375**0.5] * 3, [0] * 3, [0] * 3]},
           {"advantage": {"token_whitened": {"center": "group", "shift_mean": False}}, **NO_KL}),
    # equal lengths: the token mean of c is 0 and whitening only divides: c = +-.5, std .5
    Golden("reinforce++-baseline, equal lengths", "reinforce-pp-baseline", answers(2, 2, rewards=[1, 0]), {"advantage": [[1, 1], [-1, -1]]}, NO_KL),
    # its own KL: .01 * token mean of d^2/2: d = .5 on one of 3 tokens: .01 * .125 / 3, gradient .01 * .5 / 3
    Golden("reinforce++-baseline, k2", "reinforce-pp-baseline", answers(1, 2, advantage=[0, 0], ref_logps=[[-1.5, 0], [-1, -1]]),
           {"loss": 0.01 * 0.125 / 3, "grad": [[0.01 * 0.5 / 3, 0], [0, 0]]}, {"aggregate": "sequence_mean"}),
    # ------------------------------------------------------------ two-sided and dual clip
    # delta = 4: r = 5, A = -1 is -4 (no gradient), r = 2: -2, r = .5: -.8, r = 5, A = 1: 1.2
    Golden("two-sided clip", "two-sided-clip", ratios([5.0], [2.0], [0.5], [5.0]) | {"advantage": [-1, -1, -1, 1]},
           {"objective": each(-4, -2, -0.8, 1.2), "grad": each(0, 0.5, 0, 0)}, NO_KL),
    # c = 3: -3 instead
    Golden("dual clip", "dual-clip", ratios([5.0], [2.0], [0.5], [5.0]) | {"advantage": [-1, -1, -1, 1]},
           {"objective": each(-3, -2, -0.8, 1.2), "grad": each(0, 0.5, 0, 0)}),
    Golden("neither", "dual-clip", ratios([5.0], [2.0], [0.5], [5.0]) | {"advantage": [-1, -1, -1, 1]},
           {"objective": each(-5, -2, -0.8, 1.2), "grad": each(1.25, 0.5, 0, 0)}, {"clip": "ppo"}),
    # its KL: .001 (e^-.5 - .5)
    Golden("two-sided clip, KL", "two-sided-clip", {"logps": [[-1.0]], "ref_logps": [[-1.5]], "advantage": [0.0]}, {"loss": 0.001 * 0.106531}),
    # ------------------------------------------------------------ GDPO (advantage normalize_each)
    # a = 0,0,1,1 and b = 0,1,0,1: each z = +-.5 / .57745 = +-.8659; sums -1.7318, 0, 0, 1.7318; batch std 1.41401: +-1.2247
    Golden("gdpo, symmetric", "grpo", answers(1, 1, 1, 1, rewards=[[0, 0], [0, 1], [1, 0], [1, 1]]),
           {"advantage": each(-1.2247, 0, 0, 1.2247)}, {"advantage": "normalize_each", **NO_KL}, atol=6e-5),
    Golden("gdpo's data, summed first", "grpo", answers(1, 1, 1, 1, rewards=[[0, 0], [0, 1], [1, 0], [1, 1]]),
           {"advantage": each(-1.2246, 0, 0, 1.2246)}, NO_KL, atol=6e-5),
    Golden("gdpo, not symmetric", "grpo", answers(1, 1, 1, 1, rewards=[[0, 0], [1, 0], [1, 1], [1, 2]]),
           {"advantage": each(-1.3085, -0.1624, 0.4362, 1.0348)}, {"advantage": "normalize_each", **NO_KL}, atol=6e-5),
    Golden("gdpo's second data, summed first", "grpo", answers(1, 1, 1, 1, rewards=[[0, 0], [1, 0], [1, 1], [1, 2]]),
           {"advantage": each(-1.1618, -0.3873, 0.3873, 1.1618)}, NO_KL, atol=6e-5),
    # two groups of two: GRPO cannot tell (1,1) against (0,0) from (1,0) against (0,0); GDPO can
    Golden("gdpo, two groups", "grpo", answers(1, 1, 1, 1, rewards=[[1, 1], [0, 0], [1, 0], [0, 0]], group=[0, 0, 1, 1]),
           {"advantage": each(1.0954, -1.0954, 0.5477, -0.5477)}, {"advantage": "normalize_each", **NO_KL}, atol=1e-4),
    Golden("gdpo's two groups under grpo", "grpo", answers(1, 1, 1, 1, rewards=[[1, 1], [0, 0], [1, 0], [0, 0]], group=[0, 0, 1, 1]),
           {"advantage": each(0.7071, -0.7071, 0.7071, -0.7071)}, NO_KL, atol=2e-4),
    # ------------------------------------------------------------ TIS, MIS, OPSM
    # trainer -.5, -1, -2, sampler -.7, -1.9, -1.5: token ratios e^.2, e^.9, e^-.5; product e^.6 = 1.822119
    *[Golden(f"sampler correction, {mode} {low} {high}", "dapo",
             {"logps": [[-0.5, -1.0, -2.0]], "rollout_logps": [[-0.7, -1.9, -1.5]], "advantage": [1.0]},
             {"objective": [weights], "loss": -sum(weights) / 3, "grad": [[-w / 3 for w in weights]]},
             {"weight": [{"sampler_correction": {"mode": mode, "min": low, "max": high}}]})
      for mode, low, high, weights in [
          ("token_truncate", None, 2.0, [1.221403, 2.0, 0.606531]),
          ("token_truncate", 0.8, None, [1.221403, 2.459603, 0.8]),
          ("token_mask", 0.5, 5.0, [1.221403, 2.459603, 0.606531]),
          ("token_mask", 0.8, 2.0, [1.221403, 0.0, 0.0]),
          ("token_mask", 0.0, None, [1.221403, 2.459603, 0.606531]),
          ("sequence_truncate", None, 3.0, [1.822119] * 3),
          ("sequence_truncate", None, 1.5, [1.5] * 3),
          ("sequence_mask", None, 3.0, [1.822119] * 3),
          ("sequence_mask", None, 1.5, [0.0] * 3),
      ]],
    Golden("same engine, same weights", "dapo", {"logps": [[-0.5, -1.0]], "rollout_logps": [[-0.5, -1.0]], "advantage": [1.0]},
           {"objective": [[1.0, 1.0]]}, {"weight": ["sampler_correction"]}),
    # sampler -1,-1,-2 against -1.2,-1.9,-2.8: (.2 + .9 + .8)/3 = .6333 > .5; against -1,-1.1,-2.1: .0667. Rows 0 and 1 have A < 0,
    # rows 2 and 3 the same with A > 0. Ratios to old = the sampler's; only row 0 is dropped
    Golden("off-policy sequence mask", "grpo",
           {"logps": [[-1.2, -1.9, -2.8], [-1.0, -1.1, -2.1]] * 2, "old_logps": [[-1.0, -1.0, -2.0]] * 4, "advantage": [-1, -1, 1, 1]},
           {"objective": [[0.0] * 3, [-1.0, -E(-0.1), -E(-0.1)], [E(-0.2), E(-0.9), E(-0.8)], [1.0, E(-0.1), E(-0.1)]]},
           {"weight": [{"off_policy_mask": {"threshold": 0.5}}], "clip": "none", **NO_KL}),
    # ------------------------------------------------------------ top-entropy tokens
    # the two highest of ten (threshold .86), all objectives 1: over all tokens 2 / 10
    Golden("top-entropy tokens over all tokens", "dapo",
           {"logps": [[-1.0] * 10], "entropy": [[0.1, 2, 0.3, 1.5, 0.2, 0.05, 0.6, 0.4, 0.01, 0.7]], "advantage": [1.0]},
           {"loss": -0.2, "grad": [[0, -0.1, 0, -0.1, 0, 0, 0, 0, 0, 0]]}, {"weight": [{"entropy_quantile": {"keep": 0.2}}]}),
    Golden("keeping everything is dapo", "dapo",
           {"logps": [[-1.0] * 10], "entropy": [[0.1, 2, 0.3, 1.5, 0.2, 0.05, 0.6, 0.4, 0.01, 0.7]], "advantage": [1.0]},
           {"loss": -1.0}, {"weight": [{"entropy_quantile": {"keep": 1.0}}]}),
    # ------------------------------------------------------------ KL estimators, entropy bonus
    # d = .5 and -.5: k1 = d, k2 = d^2/2 = .125, k3 = e^-d - 1 + d = .106531, .148721; derivatives 1, d, 1 - e^-d
    *[Golden(f"{name} at d = {d}", "reinforce-pp", {"logps": [[-1.0]], "ref_logps": [[-1.0 - d]], "advantage": [0.0]},
             {"loss": value, "grad": [[slope]]},
             {"regularizers": [{"kl": {"coef": 1.0, "estimator": name}}], "rewards": []})
      for name, d, value, slope in [("k2", 0.5, 0.125, 0.5), ("k2", -0.5, 0.125, -0.5),
                                    ("k3", 0.5, 0.106531, 0.393469), ("k3", -0.5, 0.148721, -0.648721)]],
    # pi = .3, ref = .2, pi_old = .25: w = 1.2, d = ln 1.5. live w k3: w d = .4866 (atlas); detached w k3: w (1 - 2/3) = .4;
    # detached w k2: w d; live w k1: w (d + 1) = 1.6866
    *[Golden(f"{weight} {name}", "reinforce-pp", {"logps": [[L(0.3)]], "ref_logps": [[L(0.2)]], "old_logps": [[L(0.25)]], "advantage": [0.0]},
             {"loss": value, "grad": [[slope]]},
             {"regularizers": [{"kl": {"coef": 1.0, "estimator": name, "weight": weight}}], "rewards": []})
      for name, weight, value, slope in [
          ("k3", "live", 1.2 * (2 / 3 - 1 + L(1.5)), 1.2 * L(1.5)), ("k3", "detached", 1.2 * (2 / 3 - 1 + L(1.5)), 0.4),
          ("k2", "detached", 1.2 * L(1.5) ** 2 / 2, 1.2 * L(1.5)), ("k1", "live", 1.2 * L(1.5), 1.2 * (L(1.5) + 1))]],
    # - coef * mean H: -.1 * (1.029653 + 1.386294) / 2
    Golden("entropy bonus", "dapo", answers(1, 1, advantage=[0, 0], entropy=[[1.029653], [1.386294]]),
           {"loss": -0.1 * (1.029653 + 1.386294) / 2}, {"regularizers": [{"entropy_bonus": {"coef": 0.1}}]}),
    # NLL of the correct answer alone: .1 * (1 + 2) / 2
    Golden("nll of correct answers", "dapo", {"logps": [[-1.0, -2.0], [-3.0, -4.0]], "advantage": [0, 0], "correct": [True, False]},
           {"loss": 0.15, "grad": [[-0.05, -0.05], [0, 0]]}, {"regularizers": [{"nll": {"coef": 0.1}}]}),
]  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN, ids=[g.name for g in GOLDEN])
def test_golden(case):
    given = dict(case.given)
    given["logps"] = torch.tensor(given["logps"], dtype=torch.float64, requires_grad=True)
    batch = TokenBatch.from_tensors(**given)
    loss = variant(case.variant, **case.edits).loss(batch)
    for what, wanted in case.expect.items():
        if what == "grad":
            got = torch.autograd.grad(loss.loss, batch.logps)[0]
        elif what.startswith("terms."):
            got = loss.terms[what.removeprefix("terms.")]
        else:
            got = loss.log_ratio.exp() if what == "ratio" else getattr(loss, what)
        wanted = torch.tensor(wanted, dtype=torch.float64)
        got = got.detach().double()
        if what == "objective" and got.shape != wanted.shape:  # a per-row value stands for each of its tokens
            got = got.expand_as(wanted)
        if what == "advantage":
            got, wanted = (x * batch.mask if x.shape[1] > 1 else x for x in (got, wanted))
        assert got.shape == wanted.shape, what
        torch.testing.assert_close(got, wanted, rtol=2e-6, atol=case.atol, msg=lambda m, what=what: f"{what}: {m}")


def test_names_are_unique():
    assert len({g.name for g in GOLDEN}) == len(GOLDEN)


def test_catalog_methods_all_have_a_golden_number():
    from trl_variants import variants

    tables = "".join(path.read_text() for path in Path(__file__).parent.glob("test_golden*.py"))
    # an inert entry is its host's loss; the numbers of its reward functions are in tests/rewards
    assert [v.name for v in variants if f'"{v.name}"' not in tables and not v.about.inert] == []


# ---------------------------------------------------------------- exact expectations over a three-token softmax


PI, REF = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)
REVERSE, FORWARD = (0.3207, -0.0825, -0.2382), (0.3, 0.0, -0.3)


@pytest.mark.parametrize("estimator, wanted, value", [("k2", REVERSE, 0.2939), ("k3", FORWARD, 0.2749)])
def test_expected_gradient_of_a_kl_loss(estimator, wanted, value):
    # E over y ~ pi of d k(lp_y)/d logits, exactly: one row per token, weighted pi_y (detached). grad of reverse KL:
    # pi_j (log(pi_j / ref_j) - KL); of forward KL: pi_j - ref_j
    logits = torch.tensor([math.log(p) for p in PI], dtype=torch.float64, requires_grad=True)
    logps = logits.log_softmax(0)
    v = variant("dapo", regularizers=[{"kl": {"coef": 1.0, "estimator": estimator}}])
    total = 0.0
    for y in range(3):
        one = TokenBatch.from_tensors(logps[y : y + 1], ref_logps=[math.log(REF[y])], advantage=[0.0])
        total = total + PI[y] * v.loss(one).loss
    grad = torch.autograd.grad(total, logits)[0]
    assert grad.tolist() == pytest.approx(wanted, abs=6e-5)
    assert float(total.detach()) == pytest.approx(value, abs=6e-5)


def test_expected_gradient_of_k1_in_the_reward_is_the_reverse_kl():
    # REINFORCE with R_y = -k1_y: E[R grad lp] = -grad reverse KL; as a loss the sign is +
    logits = torch.tensor([math.log(p) for p in PI], dtype=torch.float64, requires_grad=True)
    logps = logits.log_softmax(0)
    v = variant(
        "rloo",
        rewards=[{"kl_in_reward": {"coef": 1.0}}],
        advantage={"grouped": {"mean": "none", "std": "none"}},
    )
    total = 0.0
    for y in range(3):
        one = TokenBatch.from_tensors(logps[y : y + 1], ref_logps=[math.log(REF[y])], rewards=[0.0])
        total = total + PI[y] * v.loss(one).loss
    assert torch.autograd.grad(total, logits)[0].tolist() == pytest.approx(REVERSE, abs=6e-5)


def test_entropy_of_a_uniform_distribution_pulls_nowhere():
    # H(.5,.3,.2) = 1.029653; H of the uniform over 4 = log 4 = 1.386294 and its gradient is 0
    def entropy_loss(probabilities):
        logits = torch.tensor([math.log(p) for p in probabilities], dtype=torch.float64, requires_grad=True)
        logp = logits.log_softmax(0)
        h = -(logp.exp() * logp).sum().reshape(1, 1)
        batch = TokenBatch.from_tensors(logp[:1].reshape(1, 1), advantage=[0.0], entropy=h)
        loss = variant("dapo", regularizers=[{"entropy_bonus": {"coef": 1.0}}]).loss(batch).loss
        return float(loss.detach()), torch.autograd.grad(loss, logits)[0]

    value, grad = entropy_loss(PI)
    assert value == pytest.approx(-1.029653, abs=6e-7)
    # dH/dz_j = -p_j (log p_j + H): the loss pulls the likeliest logit down
    assert grad.tolist() == pytest.approx([p * (math.log(p) + 1.029653) for p in PI], abs=1e-6)
    value, grad = entropy_loss([0.25] * 4)
    assert value == pytest.approx(-1.386294, abs=6e-7)
    assert grad.tolist() == pytest.approx([0.0] * 4, abs=1e-12)


def test_dual_clip_is_the_two_sided_clip_with_delta_equal_to_c():
    r = torch.linspace(0.1, 9.0, 200, dtype=torch.float64)
    values = {}
    for name, bound in (("delta", {"delta": 4.0}), ("floor", {"floor": 4.0})):
        logps = torch.zeros(200, 1, dtype=torch.float64, requires_grad=True)
        for sign in (1.0, -1.0):
            batch = TokenBatch.from_tensors(logps, old_logps=-r.log()[:, None], advantage=torch.full((200,), sign))
            loss = variant("dapo", clip={"ppo": bound}).loss(batch)
            values[name, sign] = loss.objective.detach(), torch.autograd.grad(loss.loss, logps)[0]
    for sign in (1.0, -1.0):
        for a, b in zip(values["delta", sign], values["floor", sign], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert values["floor", -1.0][0].min() == -4.0
