# ruff: noqa: E501  (a table: one row, one line of arithmetic)
"""Golden numbers of other baselines and scales, entropy and KL terms, and the wrong formulas they must reject."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

from tests.catalog.test_golden import NO_KL, Golden, answers, each, ratios
from tests.catalog.test_golden import test_golden as assert_golden
from trl_variants import Scored, TokenBatch, VariantError, check, variant
from trl_variants.hooks import (
    advantage_baselines,
    advantage_history,
    advantage_otb,
    advantage_virtual,
    aggregate_groups,
    clip_probability,
    regularizers_kl,
)
from trl_variants.hooks.advantage_history import merged
from trl_variants.report.group_size import best_group_size
from trl_variants.trainer.memory import HookMemory

E, L = math.exp, math.log


def groups_of(size: int, *rewards, **more) -> dict:
    """One-token answers in groups of `size`."""
    return answers(*[1] * len(rewards), rewards=list(rewards), group=[i // size for i in range(len(rewards))], **more)


def squares(*probabilities) -> list[list[float]]:
    return [[L(p) for p in row] for row in probabilities]


ROOT3 = 3**0.5
GPG_DATA = groups_of(4, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0)
SCALERL = groups_of(4, 1, -1, -1, -1, 1, 1, 1, -1)
OPO_DATA = answers(100, 300, 200, 400, rewards=[1, 0, 1, 0])
OTB_DATA = {"logps": squares([0.9, 0.5, 0.2], [0.6, 0.8, 0.5]), "sum_sq_probs": [[0.82, 0.4, 0.3], [0.5, 0.66, 0.0]],
            "mask": [[1.0, 1, 1], [1, 1, 0]], "rewards": [1, 0]}  # fmt: skip
# lengths [[10, 30, 20, 40], [5, 5, 10, 20]]
PROMPTS = answers(10, 30, 20, 40, 5, 5, 10, 20, group=[0] * 4 + [1] * 4,
                  advantage=[ROOT3, -1 / ROOT3, -1 / ROOT3, -1 / ROOT3, 1 / ROOT3, 1 / ROOT3, 1 / ROOT3, -ROOT3])  # fmt: skip


def first_tokens(*weights, lengths=(10, 30, 20, 40, 5, 5, 10, 20)) -> list[list[float]]:
    return [[w] * n + [0.0] * (40 - n) for w, n in zip(weights, lengths, strict=True)]


GOLDEN = [
    # ------------------------------------------------------------ REINFORCE
    # b = .5: A = .5, .5 | -.5; J = (sum of tokens) / 2 rows: gradient A/2 = .25, .25, -.25; values of A lp: (-.25 - .5 + 1)/2 = .125
    Golden("reinforce, gradient", "reinforce", {"logps": [[-0.5, -1.0], [-2.0, 0.0]], "mask": [[1.0, 1], [1, 0]], "rewards": [1, 0]},
           {"grad": [[-0.25, -0.25], [0.25, 0.0]], "advantage": [[0.5, 0.5], [-0.5, 0.0]]}, {"advantage": {"returns": {"baseline": 0.5}}}),
    # the same tokens averaged: 1/3 instead of 1/2
    Golden("reinforce, token mean is another scale", "reinforce", {"logps": [[-0.5, -1.0], [-2.0, 0.0]], "mask": [[1.0, 1], [1, 0]], "rewards": [1, 0]},
           {"grad": [[-0.5 / 3, -0.5 / 3], [0.5 / 3, 0.0]]}, {"advantage": {"returns": {"baseline": 0.5}}, "aggregate": "token_mean"}),
    Golden("reinforce as it stands", "reinforce", answers(3, 1, rewards=[1, 0]), {"advantage": [[1, 1, 1], [0, 0, 0]], "grad": [[-0.5] * 3, [0, 0, 0]]}),
    # a terminal score, gamma = .9: .81, .9, 1
    Golden("reinforce, discounted", "reinforce", answers(3, rewards=[1]), {"advantage": [[0.81, 0.9, 1.0]]}, {"advantage": {"returns": {"gamma": 0.9}}}),
    # ------------------------------------------------------------ GPG
    # B = 12, M = 8: alpha = 3; 3 (1 - .25) = 2.25, 3 (0 - .25) = -.75
    Golden("gpg", "gpg", GPG_DATA, {"advantage": each(2.25, -0.75, -0.75, -0.75, *[0] * 8), "grad": each(*(-x / 12 for x in (2.25, -0.75, -0.75, -0.75, *[0] * 8)))}),
    # every group has spread: alpha = 1
    Golden("gpg, all groups live", "gpg", groups_of(2, 1, 0, 0, 1), {"advantage": each(0.5, -0.5, -0.5, 0.5)}),
    Golden("gpg, no group live", "gpg", groups_of(2, 1, 1, 0, 0), {"advantage": each(0, 0, 0, 0), "loss": 0.0}),
    # F = std: .75 / (.5 + 1e-4) * 3
    Golden("gpg, divided by the group's std", "gpg", GPG_DATA, {"advantage": each(2.25 / 0.5001, *[-0.75 / 0.5001] * 3, *[0] * 8)}, {"advantage": {"live_rescaled": {"std": "group"}}}),
    # ------------------------------------------------------------ OPO
    # b = (100 + 200) / 1000 = .3: .7, -.3, .7, -.3 (the plain mean is .5)
    Golden("opo", "opo", OPO_DATA, {"advantage": each(0.7, -0.3, 0.7, -0.3)}),
    # equal lengths: the plain mean; gradient A / 4 tokens
    Golden("opo, equal lengths", "opo", answers(2, 2, rewards=[1, 0]), {"advantage": each(0.5, -0.5), "grad": [[-0.125] * 2, [0.125] * 2]}),
    # tool tokens are no length: |y| = 1, 2: b = 1/3
    Golden("opo, tool tokens", "opo", {"logps": [[-1.0] * 3] * 2, "mask": [[1.0, 0, 0], [1, 0, 1]], "rewards": [1, 0]}, {"advantage": each(2 / 3, -1 / 3)}),
    # ------------------------------------------------------------ OTB
    # w = 1 - 2p + s: .02, .4, .9 | .3, .06; W = .02, .42, 1.32 | .3, .36; B = .02/.32 = .0625, .42/.78 = .538462, tail 0
    Golden("otb", "otb", OTB_DATA, {"advantage": [[0.9375, 0.461538, 1.0], [-0.0625, -0.538462, 0.0]], "grad": [[-0.9375 / 5, -0.461538 / 5, -0.2], [0.0625 / 5, 0.538462 / 5, 0]]}),
    # without the rule for the tail the longest answer is its own baseline there
    Golden("otb, tail kept", "otb", OTB_DATA, {"advantage": [[0.9375, 0.461538, 0.0], [-0.0625, -0.538462, 0.0]]}, {"advantage": {"optimal_token_baseline": {"zero_tail": False}}}),
    # all w equal, equal lengths: the group mean at every step
    Golden("otb, equal weights", "otb", {"logps": squares([0.5] * 2, [0.5] * 2, [0.5] * 2), "sum_sq_probs": [[0.4] * 2] * 3, "rewards": [1, 0, 0]},
           {"advantage": [[2 / 3] * 2, [-1 / 3] * 2, [-1 / 3] * 2]}),
    # a tool token takes no step: row 0 has its second step at t = 2
    Golden("otb, tool tokens take no step", "otb",
           {"logps": squares([0.9, 0.1, 0.5], [0.6, 0.8, 0.5]), "sum_sq_probs": [[0.82, 0.9, 0.4], [0.5, 0.66, 0.0]], "mask": [[1.0, 0, 1], [1, 1, 0]], "rewards": [1, 0]},
           {"advantage": [[0.9375, 0.0, 0.461538], [-0.0625, -0.538462, 0.0]]}),
    # ------------------------------------------------------------ batch std of centred rewards
    # c = 1.5, -.5 x 3 | .5 x 3, -1.5: mean square (2.25 + .75) / 4 = .75, sigma .866025
    Golden("batch std", "batch-std-advantage", SCALERL,
           {"advantage": each(ROOT3, *[-1 / ROOT3] * 3, *[1 / ROOT3] * 3, -ROOT3)}, {"advantage": {"batch_scaled": {"eps": 0.0}}}),
    # n - 1: sqrt(6 / 7) = .925820
    Golden("batch std, unbiased", "batch-std-advantage", SCALERL,
           {"advantage": each(*(c / 0.925820 for c in (1.5, -0.5, -0.5, -0.5, 0.5, 0.5, 0.5, -1.5)))}, {"advantage": {"batch_scaled": {"eps": 0.0, "ddof": 1}}}, atol=2e-6),
    # the raw rewards' std (TRL): sqrt(8 / 7) = 1.069045
    Golden("batch std of raw rewards", "batch-std-advantage", SCALERL,
           {"advantage": each(*(c / 1.069045 for c in (1.5, -0.5, -0.5, -0.5, 0.5, 0.5, 0.5, -1.5)))}, {"advantage": {"grouped": {"std": "batch", "eps": 0.0}}}, atol=2e-6),
    Golden("batch std, no spread", "batch-std-advantage", groups_of(2, 1, 1, 0, 0), {"advantage": each(0, 0, 0, 0)}, {"advantage": {"batch_scaled": {"eps": 0.0}}}),
    # the moving average starts with the first generation's mean square
    Golden("moving batch std, first generation", "batch-std-advantage", SCALERL,
           {"advantage": each(ROOT3, *[-1 / ROOT3] * 3, *[1 / ROOT3] * 3, -ROOT3)}, {"advantage": {"ema_scaled": {"eps": 0.0}}}),
    # ------------------------------------------------------------ prompt mean
    # 1.732051 / (2 * 100) = .008660, ..., .57735 / (2 * 40) = .007217; J = -.461880
    Golden("prompt mean", "prompt-mean-aggregation", PROMPTS,
           {"loss": 0.461880, "grad": first_tokens(-0.00866025, *[0.00288675] * 3, *[-0.00721688] * 3, 0.02165064)}),
    # (-57.735 + 17.3205 - ...)/140 = -.412393; by answers 0
    Golden("prompt mean's data by tokens", "prompt-mean-aggregation", PROMPTS, {"loss": 0.412393}, {"aggregate": "token_mean"}),
    Golden("prompt mean's data by answers", "prompt-mean-aggregation", PROMPTS, {"loss": 0.0}, {"aggregate": "sequence_mean"}),
    Golden("prompt mean, one prompt", "prompt-mean-aggregation", answers(2, 8, advantage=[1.0, -1.0]), {"loss": 0.6}),
    # ------------------------------------------------------------ entropy
    # - .001 (1.029653 + 1.386294) / 2
    Golden("entropy bonus as it stands", "entropy-bonus", answers(1, 1, advantage=[0, 0], entropy=[[1.029653], [1.386294]]), {"loss": -0.001 * 1.2079735}, atol=1e-9),
    # H = .15 < .2 raises the coefficient to 1e-4 and applies it at once; H = .25 applies none
    Golden("adaptive entropy, below", "adaptive-entropy", answers(1, 1, advantage=[0, 0], entropy=[[0.1], [0.2]]), {"loss": -1e-4 * 0.15}, atol=1e-12),
    Golden("adaptive entropy, above", "adaptive-entropy", answers(1, 1, advantage=[0, 0], entropy=[[0.2], [0.3]]), {"loss": 0.0}),
    # ------------------------------------------------------------ KL
    # pi = .3, ref = .5, old = .4: k3 = e^(ln 5/3) - ln 5/3 - 1 = .155841; r = .75: .75 k3 = .116881, slope r ln(3/5) = -.383119
    Golden("unbiased kl", "unbiased-kl", {"logps": [[L(0.3)]], "ref_logps": [[L(0.5)]], "old_logps": [[L(0.4)]], "advantage": [0.0]},
           {"loss": 0.04 * 0.116881, "grad": [[0.04 * -0.383119]]}),
    # with the ratio detached .75 (1 - 5/3) = -.5; without it 1 - 5/3
    Golden("unbiased kl, detached is another gradient", "unbiased-kl", {"logps": [[L(0.3)]], "ref_logps": [[L(0.5)]], "old_logps": [[L(0.4)]], "advantage": [0.0]},
           {"loss": 0.116881, "grad": [[-0.5]]}, {"regularizers": [{"kl": {"coef": 1.0, "weight": "detached"}}]}),
    Golden("unbiased kl, no ratio", "unbiased-kl", {"logps": [[L(0.3)]], "ref_logps": [[L(0.5)]], "old_logps": [[L(0.4)]], "advantage": [0.0]},
           {"loss": 0.155841, "grad": [[-2 / 3]]}, {"regularizers": [{"kl": {"coef": 1.0}}]}),
    Golden("unbiased kl, k2", "unbiased-kl", {"logps": [[L(0.3)]], "ref_logps": [[L(0.5)]], "old_logps": [[L(0.4)]], "advantage": [0.0]},
           {"grad": [[-0.510826]]}, {"regularizers": [{"kl": {"coef": 1.0, "estimator": "k2"}}]}),
    # d = ln 1.5: value k3 = 2/3 - 1 + .405465 = .072132, slope d = .405465
    Golden("straight-through k3", "kl-estimators", {"logps": [[L(0.3)]], "ref_logps": [[L(0.2)]], "advantage": [0.0]}, {"loss": 0.04 * 0.0721318, "grad": [[0.04 * 0.405465]]}),
    # w = 1.2 detached: 1.2 * value, slope 1.2 d = .486558 (atlas .4866); capped at 1.1: 1.1 d
    *[Golden(f"straight-through {value}, detached, cap {cap}", "kl-estimators",
             {"logps": [[L(0.3)]], "ref_logps": [[L(0.2)]], "old_logps": [[L(0.25)]], "advantage": [0.0]},
             {"loss": w * number, "grad": [[w * L(1.5)]]},
             {"regularizers": [{"kl_straight_through": {"coef": 1.0, "value": value, "weight": "detached", "cap": cap}}]})
      for value, number in (("k1", L(1.5)), ("k2", L(1.5) ** 2 / 2), ("k3", 2 / 3 - 1 + L(1.5))) for cap, w in ((None, 1.2), (1.1, 1.1))],
    # a drifted token, lp = -30 against -1: verl clamps the value at 10 and has no gradient left; ours keeps d = -29
    Golden("straight-through, far away", "kl-estimators", {"logps": [[-30.0]], "ref_logps": [[-1.0]], "old_logps": [[-30.0]], "advantage": [0.0]},
           {"grad": [[-29.0]]}, {"regularizers": [{"kl_straight_through": {"coef": 1.0}}]}),
    # fp32-lm-head: GRPO's own numbers, .04 (e^-.5 - .5)
    Golden("fp32 head", "fp32-lm-head", {"logps": [[-1.0]], "ref_logps": [[-1.5]], "advantage": [0.0]}, {"loss": 0.04 * 0.106531}),
    # ------------------------------------------------------------ NGRPO
    # 8 wrong and a virtual 1: mean 1/9, unbiased std 1/3: -.3333
    Golden("ngrpo, all wrong", "ngrpo", groups_of(8, *[0] * 8), {"advantage": each(*[-1 / 3] * 8), "grad": each(*[1 / 24] * 8)}, atol=2e-6),
    Golden("ngrpo, half right", "ngrpo", groups_of(8, *[1] * 4, *[0] * 4), {"advantage": each(*[0.8433] * 4, *[-1.0541] * 4)}, atol=6e-5),
    Golden("ngrpo, one right", "ngrpo", groups_of(8, 1, *[0] * 7), {"advantage": each(1.7638, *[-0.5040] * 7)}, atol=6e-5),
    # all right: A = 0, and out of the token count: group 1 alone counts
    Golden("ngrpo, all right leaves the loss", "ngrpo", groups_of(2, 1, 1, 0, 0), {"advantage": each(0, 0, -1 / ROOT3, -1 / ROOT3),
           "grad": each(0, 0, 1 / ROOT3 / 2, 1 / ROOT3 / 2)}, atol=2e-6),
    # the clip: 1.23 inside 1.24, 1.3 held at 1.24, .8 with A < 0 held at .84
    Golden("ngrpo, its clip", "ngrpo", ratios([1.23], [1.3], [0.8]) | {"advantage": [1, 1, -1]}, {"objective": each(1.23, 1.24, -0.84)}),
    # ------------------------------------------------------------ AGPO
    # objectives -.3, 0, 0, .1 of four groups: losses .3, 0, 0, -.1: over effective answers .1, over all .05
    Golden("agpo, over effective groups", "agpo", groups_of(2, 1, 0, 1, 1, 0, 0, 1, 0, old_logps=[[-1 - L(r)] for r in (0.55, 1.0, 1, 1, 1, 1, 1.1, 1)]),
           {"loss": -(0.55 - 1 + 1.1 - 1) * 0.5 / (0.5**0.5 + 1e-4) / 4}, NO_KL),
    Golden("agpo's data over all", "agpo", groups_of(2, 1, 0, 1, 1, 0, 0, 1, 0, old_logps=[[-1 - L(r)] for r in (0.55, 1.0, 1, 1, 1, 1, 1.1, 1)]),
           {"loss": -(0.55 - 1 + 1.1 - 1) * 0.5 / (0.5**0.5 + 1e-4) / 8}, {"select": [], "aggregate": "sequence_mean", **NO_KL}),
    # a dead group pays no KL either: only group 0's token
    Golden("agpo, dead groups pay no KL", "agpo", groups_of(2, 1, 0, 1, 1, ref_logps=[[-1.5], [-1.0], [-1.5], [-1.5]]), {"loss": 0.04 * 0.106531 / 2}),
    # loss clip: a negative loss is 0 without gradient, a positive one is kept
    Golden("agpo, loss clip, negative", "agpo", answers(1, advantage=[0.05]), {"loss": 0.0, "grad": [[0.0]]}, {"aggregate": "floored_sequence_mean", **NO_KL}),
    Golden("agpo, loss clip, positive", "agpo", answers(1, advantage=[-0.1]), {"loss": 0.1, "grad": [[0.1]]}, {"aggregate": "floored_sequence_mean", **NO_KL}),
    # its KL counts: -.001 + .04 * .106531 > 0
    Golden("agpo, loss clip, KL included", "agpo", answers(1, advantage=[0.001], ref_logps=[[-1.5]]), {"loss": 0.04 * 0.106531 - 0.001}, {"aggregate": "floored_sequence_mean"}),
    # ------------------------------------------------------------ GDPO (more in test_golden.py)
    Golden("gdpo, two rewards", "gdpo", groups_of(4, *[[0, 0], [1, 0], [1, 1], [1, 2]]), {"advantage": each(-1.3085, -0.1624, 0.4362, 1.0348)}, NO_KL, atol=6e-5),
    # ------------------------------------------------------------ DCPO
    # first visit: A = (R - .5) / .57735 = +-.8660
    Golden("dcpo, first visit", "dcpo", groups_of(4, 1, 1, 0, 0, prompt_key=["q"] * 4), {"advantage": each(0.8660, 0.8660, -0.8660, -0.8660)}, atol=6e-5),
    # prompt mean of the sum over answers of the token mean: two prompts, (1 + 1 - 1) / 2 = .5; token mean (2 + 1 - 3) / 6 = 0
    Golden("dcpo, sum over answers", "dcpo", answers(2, 1, 3, advantage=[1.0, 1.0, -1.0], group=[0, 0, 1]),
           {"loss": -0.5, "grad": [[-0.25, -0.25, 0], [-0.5, 0, 0], [1 / 6] * 3]}),
    # q = .5: high 1.3062; q = .1: 2; held there without gradient, and A < 0 at .5 from below
    Golden("dcpo, bounds", "dcpo", {"logps": [[L(0.5 * 1.4)], [L(0.1 * 1.9)], [L(0.1 * 2.5)], [L(0.9 * 0.7)]], "old_logps": [[L(0.5)], [L(0.1)], [L(0.1)], [L(0.9)]], "advantage": [1, 1, 1, -1], "group": [0, 1, 2, 3]},
           {"objective": each(1.3062258, 1.9, 2.0, -0.768742), "grad": each(0, -1.9 / 4, 0, 0), "clipped": each(1, 0, 1, 1)}, atol=2e-6),
    # dual clip: r = 20, A = -1 is held at -10
    Golden("dcpo, dual clip", "dcpo", {"logps": [[L(0.2)]], "old_logps": [[L(0.01)]], "advantage": [-1]}, {"objective": each(-10.0), "grad": each(0.0)}),
    # ------------------------------------------------------------ pass@k
    # 1 - .4 = .6; over std .472582: 1.269619
    Golden("winner's lead", "passk-grpo", groups_of(4, 1, 0, 0.4, 0), {"advantage": each(1.269619, 0, 0, 0)}, NO_KL, atol=2e-6),
    Golden("winner's lead, not divided", "passk-grpo", groups_of(4, 1, 0, 0.4, 0), {"advantage": each(0.6, 0, 0, 0)}, {"advantage": {"winner_lead": {"by_std": False}}, **NO_KL}),
    Golden("two winners", "passk-grpo", groups_of(4, 1, 1, 0, 0), {"advantage": each(0, 0, 0, 0)}, NO_KL),
    # n = 8, 6 wrong, k = 4: Rbar = 1 - 15/70, sigma .410326; .214286/.410326 = .522233, (.214286 - 10/35)/.410326 = -.174078
    Golden("pass@4", "passk-analytic", groups_of(8, 1, 1, *[0] * 6, correct=[True] * 2 + [False] * 6), {"advantage": each(*[0.522233] * 2, *[-0.174078] * 6)}, {"advantage": {"pass_at_k": {"k": 4}}, **NO_KL}),
    # k = 1 is GRPO with the population std: (1 - .25)/.4330 = sqrt 3
    Golden("pass@1", "passk-analytic", groups_of(4, 1, 0, 0, 0, correct=[True, False, False, False]), {"advantage": each(ROOT3, *[-1 / ROOT3] * 3)}, {"advantage": {"pass_at_k": {"k": 1}}, **NO_KL}),
    # fewer wrong than k: every subset holds a right one
    Golden("pass@k, too few wrong", "passk-analytic", groups_of(4, 1, 1, 1, 0, correct=[True] * 3 + [False]), {"advantage": each(0, 0, 0, 0)}, NO_KL),
    # n = 4, 2 wrong, k = 2: Rbar = 5/6, sigma = sqrt(5)/6: (1/6)/.372678 = .447214; (1/6 - 1/3) the same, negative
    Golden("pass@2 as it stands", "passk-analytic", groups_of(4, 1, 1, 0, 0, correct=[True, True, False, False]), {"advantage": each(0.447214, 0.447214, -0.447214, -0.447214)}, NO_KL),
    # ------------------------------------------------------------ the U-statistic: leave-one-out, no std
    Golden("u-statistic", "grpo-ustat", groups_of(3, 1, 0, 1), {"advantage": each(0.5, -1.0, 0.5)}, {"rewards": []}),
]  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN, ids=[g.name for g in GOLDEN])
def test_golden(case):
    assert_golden(case)


# ---------------------------------------------------------------- wrong versions the numbers reject


def _alpha_of_nonzero_rewards(self, scored):  # verl's count: 12 / 5 = 2.4 instead of 3
    alpha = scored.valid.sum() / (scored.reward != 0).sum()
    mean = advantage_baselines.mean_by(scored.group, scored.reward, scored.valid)
    return alpha * (scored.reward - mean)


def _plain_mean(self, scored):
    return scored.reward - scored.reward.mean()


def _per_token_weight(self, scored):  # w instead of its cumulative sum
    mask, reward = scored.need("mask"), scored.reward.unsqueeze(1)
    w = (1 - 2 * scored.need("old_logps").exp() + scored.need("sum_sq_probs")) * mask
    return (reward - (w * reward).sum(0) / w.sum(0).clamp(min=1e-8)) * mask


def _lagging(self, batch, state):  # TRL's: the coefficient of the step before
    return regularizers_kl.Term(-batch.entropy, state["coef"], regularizers_kl.TokenMean())


def _no_straight_through(self, batch):
    return regularizers_kl.Term(regularizers_kl.kl_estimate(batch.logps - batch.ref_logps, self.value), self.coef)


def _biased_std(self, scored):
    everyone = torch.cat([scored.reward, torch.ones(1, dtype=scored.reward.dtype)])
    return (scored.reward - everyone.mean()) / (everyone.std(unbiased=False) + 1e-6)


def _per_micro_batch_mean(self, x, batch):  # the authors' code: a token mean
    return (x * batch.mask).sum() / batch.mask.sum()


def _fixed_bounds(self, q):
    return torch.full_like(q, 1 - 0.16), torch.full_like(q, 1 + 0.2)


WRONG = [
    ("gpg", advantage_baselines.LiveRescaled, "__call__", _alpha_of_nonzero_rewards),
    ("opo", advantage_baselines.LengthWeighted, "__call__", _plain_mean),
    ("otb", advantage_otb.OptimalTokenBaseline, "__call__", _per_token_weight),
    ("batch std", advantage_baselines, "std_by", lambda labels, x, valid, ddof: x.std(unbiased=True).expand_as(x)),
    ("adaptive entropy, below", regularizers_kl.EntropyController, "__call__", _lagging),
    ("straight-through k3", regularizers_kl.StraightThroughKL, "__call__", _no_straight_through),
    ("ngrpo, all wrong", advantage_virtual.VirtualBest, "__call__", _biased_std),
    ("dcpo, sum over answers", aggregate_groups.PromptSum, "__call__", _per_micro_batch_mean),
    ("dcpo, bounds", clip_probability.ProbabilityBounds, "bounds", _fixed_bounds),
    ("agpo, loss clip, negative", aggregate_groups.FlooredSequenceMean, "bound", lambda self, loss: loss),
]


@pytest.mark.parametrize("name, where, what, wrong", WRONG, ids=[w[0] for w in WRONG])
def test_the_golden_number_rejects_a_wrong_version(monkeypatch, name, where, what, wrong):
    [case] = [g for g in GOLDEN if g.name == name]
    monkeypatch.setattr(where, what, wrong)
    with pytest.raises(AssertionError):
        assert_golden(case)


# ---------------------------------------------------------------- sequences of generations


def generation(rewards, key="q", **more) -> Scored:
    rewards = torch.tensor(rewards, dtype=torch.float64).unsqueeze(1)
    return Scored(rewards=rewards, weights=torch.ones(1), group=torch.zeros(len(rewards), dtype=torch.long),
                  prompt_key=[key] * len(rewards), **more)  # fmt: skip


def test_token_rewards_to_go():
    # .1, -.2, 1: .9, .8, 1; gamma = .9: 1, -.2 + .9, .1 + .9 * .7
    token_rewards = torch.tensor([[0.1, -0.2, 1.0]], dtype=torch.float64)
    scored = generation([0.9], tokens={"mask": torch.ones(1, 3)}, token_rewards=token_rewards)
    assert advantage_baselines.Returns()(scored)[0].tolist() == pytest.approx([0.9, 0.8, 1.0])
    assert advantage_baselines.Returns(gamma=0.9)(scored)[0].tolist() == pytest.approx([0.73, 0.7, 1.0])


def test_running_mean_never_sees_the_rewards_it_is_subtracted_from():
    h = advantage_baselines.RunningMean()
    state, seen = h.init(), []
    for rewards in ([1.0, 0.0], [1.0, 1.0], [0.0, 0.0]):
        now = generation(rewards)
        seen.append(h(now, state).tolist())
        state = h.update(state, now)
    # means of what came before: 0, 1/2, 3/4
    assert seen == [[1.0, 0.0], [0.5, 0.5], [-0.75, -0.75]] and state == {"mean": 0.5, "count": 6}
    empty = generation([math.nan, math.nan])
    assert h.update(state, empty) == state and h(empty, state).tolist() == [0.0, 0.0]


def test_moving_batch_std():
    # mean c^2: .25 (sigma .5), then .9 * .25 + .1 * 1 = .325
    h = advantage_baselines.EMAScaled(rate=0.1, eps=0.0)
    state = h.init()
    assert h(generation([1.0, 0.0]), state).tolist() == pytest.approx([1.0, -1.0])
    state = h.update(state, generation([1.0, 0.0]))
    assert h(generation([2.0, 0.0]), state).tolist() == pytest.approx([1 / 0.325**0.5, -1 / 0.325**0.5])
    assert h.update(state, generation([2.0, 0.0])) == {"second_moment": pytest.approx(0.325)}
    assert h.update(state, generation([math.nan])) == state


def test_dcpo_follows_a_prompt_over_three_visits():
    # step 1 [1,1,0,0]; step 2 [1,0,0,0]: mu .375, sd .5543, A = 1.3137, -.5882; step 3 all 0: mu .25, sd .4859, A_tot/3 = -.1715
    h = advantage_history.SmoothStandardized()
    state, got = h.init(), []
    for rewards in ([1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0] * 4):
        now = generation(rewards)
        got.append(h(now, state).tolist())
        before, state = dict(state), h.update(state, now)
        assert before != state and h(now, before).tolist() == got[-1], "a call moves nothing"
    assert got[0] == pytest.approx([0.8660] * 2 + [-0.8660] * 2, abs=6e-5)
    assert got[1] == pytest.approx([1.3137] + [-0.5882] * 3, abs=6e-5)
    assert got[2] == pytest.approx([-0.1715] * 4, abs=6e-5), "the signed minimum would give -.3430"
    assert state["q"] == [3.0, pytest.approx(0.25), pytest.approx(0.4859, abs=6e-5)]
    # the merged statistics are those of all twelve answers up to the unbiased divisors
    assert merged(merged([1.0, 0.5, 0.57735], (0.25, 0.5)), (0.0, 0.0))[1] == pytest.approx(0.25)


def test_dcpo_forgets_the_prompt_unseen_for_longest():
    h = advantage_history.SmoothStandardized(capacity=2)
    state = h.init()
    for key in ("a", "b", "a", "c"):
        state = h.update(state, generation([1.0, 0.0], key))
    assert list(state) == ["a", "c"] and state["a"][0] == 2.0
    with pytest.raises(VariantError, match="`prompt_key`"):
        h(Scored(rewards=torch.ones(2, 1), weights=torch.ones(1), group=torch.zeros(2, dtype=torch.long)), state)


@pytest.mark.parametrize(
    "q, low, high",
    [(0.9, 0.7687, 1.1872), (0.64, 0.5, 1.25), (0.5, 0.5, 1.3062), (0.1, 0.5, 2.0), (0.01, 0.5, 5.0), (1e-4, 0.5, 10)],
)
def test_dcpo_bounds(q, low, high):
    got = clip_probability.ProbabilityBounds().bounds(torch.tensor([q], dtype=torch.float64))
    assert [float(x) for x in got] == pytest.approx([low, high], abs=6e-5)


def test_entropy_controller_numbers():
    # H = .15, .15, .25, .1: coef 1e-4, 2e-4, 1e-4, 2e-4; applied 1e-4, 2e-4, 0, 2e-4, in the step itself
    h = regularizers_kl.EntropyController()
    state, applied, trail = h.init(), [], []
    for entropy in (0.15, 0.15, 0.25, 0.1):
        batch = TokenBatch.from_tensors(torch.zeros(1, 2, dtype=torch.float64), entropy=[[entropy, entropy]])
        applied.append(h(batch, state).coefficient)
        state = h.update(state, {"entropy": entropy})
        trail.append(state["coef"])
    assert trail == pytest.approx([1e-4, 2e-4, 1e-4, 2e-4], abs=1e-12)
    assert applied == pytest.approx([1e-4, 2e-4, 0.0, 2e-4], abs=1e-12)
    for _ in range(60):
        state = h.update(state, {"entropy": 0.0})
    assert state == {"coef": 0.005}, "it stays at its maximum"


@pytest.mark.parametrize(
    "v",
    [variant("dcpo"), variant("adaptive-entropy"), variant("gpg", advantage="running_mean"),
     variant("gpg", advantage="ema_scaled")],
    ids=["dcpo", "entropy", "running mean", "moving std"],
)  # fmt: skip
def test_memory_survives_a_checkpoint(v):
    memory = HookMemory(v, seed=0)
    for rewards, key in (([1.0, 0.0], "a"), ([0.0, 0.0], "b")):
        memory.update("generation", generation(rewards, key))
        memory.update("step", {"regularizers.0": {"entropy": 0.1}})
    plain, tensors = memory.state_dict()
    back = HookMemory(v, seed=0)
    assert back.states != memory.states
    back.load_state_dict(json.loads(json.dumps(plain)), tensors)
    assert back.states == memory.states
    assert [list(s) for s in back.states.values()] == [list(s) for s in memory.states.values()], "in the same order"


def test_a_length_weighted_baseline_refuses_token_penalties():
    found = check(variant("opo", rewards=[{"kl_in_reward": {"level": "token"}}]))
    assert any(f.level == "error" and "per-token KL" in f.message for f in found)
    assert check(variant("reinforce", rewards=[{"kl_in_reward": {"level": "token"}}])) == []


# ---------------------------------------------------------------- exact expectations


def expected_kl_gradient(z, ref, old, hook):
    """sum_y old_y d term(y) / d z, exactly, over a three-token vocabulary."""
    logits = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    logps, q, o = logits.log_softmax(0), *(torch.tensor(x, dtype=torch.float64).log_softmax(0) for x in (ref, old))
    v = variant("grpo", regularizers=[hook])
    total = 0.0
    for y in range(3):
        one = TokenBatch.from_tensors(logps[y : y + 1], old_logps=o[y : y + 1], ref_logps=q[y : y + 1], advantage=[0.0])
        total = total + float(o[y].exp()) * v.loss(one).loss
    return torch.autograd.grad(total, logits)[0].tolist()


Z, REF, OLD = (0.2, -0.3, 0.5), (0.0, 0.4, -0.2), (0.1, 0.1, 0.1)


def test_the_live_ratio_makes_k3_unbiased_off_policy():
    live = expected_kl_gradient(Z, REF, OLD, {"kl": {"coef": 1.0, "weight": "live"}})
    assert live == pytest.approx([-0.014765, -0.193599, 0.208364], abs=6e-7)
    plain = expected_kl_gradient(Z, REF, Z, {"kl": {"coef": 1.0}})
    assert plain == pytest.approx([0.036186, -0.245467, 0.209281], abs=6e-7), "that of KL(ref || pi)"
    detached = expected_kl_gradient(Z, REF, OLD, {"kl": {"coef": 1.0, "weight": "detached"}})
    assert detached != pytest.approx(live, abs=1e-3), "detaching the ratio breaks the identity"


@pytest.mark.parametrize("value", ["k1", "k2", "k3"])
def test_straight_through_descends_what_its_gradient_says(value):
    h = {"kl_straight_through": {"coef": 1.0, "value": value, "weight": "detached"}}
    assert expected_kl_gradient(Z, REF, OLD, h) == pytest.approx([-0.014765, -0.193599, 0.208364], abs=6e-7)
    h = {"kl_straight_through": {"coef": 1.0, "value": value, "gradient": "k3"}}
    assert expected_kl_gradient(Z, REF, Z, h) == pytest.approx([0.036186, -0.245467, 0.209281], abs=6e-7)


def test_fp32_head_removes_rounding_of_the_logits():
    torch.manual_seed(0)
    hidden, head = torch.randn(4, 1024), torch.randn(5000, 1024) * 0.05
    hidden, head = hidden.bfloat16(), head.bfloat16()
    rounded = (hidden @ head.T).float().log_softmax(-1)
    exact = (hidden.float() @ head.float().T).log_softmax(-1)
    apart = (rounded - exact).abs()
    assert float(apart.max()) == pytest.approx(0.0157, abs=4e-3) and float(apart.mean()) == pytest.approx(
        0.0018, abs=4e-4
    )


def test_pass_at_k_equals_the_average_over_all_subsets():
    for n, right, k in itertools.product((5, 8), (1, 2, 3), (1, 2, 4)):
        value = [float(min(s) < right) for s in itertools.combinations(range(n), k)]
        mean = sum(value) / len(value)
        sd = math.sqrt(mean * (1 - mean))
        wanted = []
        for i in range(n):
            own = [x for x, s in zip(value, itertools.combinations(range(n), k), strict=True) if i in s]
            wanted.append((sum(own) / len(own) - mean) / sd if sd else 0.0)
        correct = torch.arange(n) < right
        got = advantage_virtual.PassAtK(k)(generation([float(c) for c in correct], correct=correct))
        assert got.tolist() == pytest.approx(wanted, abs=1e-12)


def test_the_group_gradient_is_a_u_statistic():
    # scores (1,0), (0,1), (1,1), Z = 1, 0, 1: both forms (.3333, -.1667); with the full mean 2/3 of it
    score = torch.tensor([[1.0, 0], [0, 1], [1, 1]], dtype=torch.float64)
    z = [1.0, 0.0, 1.0]
    loo = variant("grpo-ustat").advantage(generation(z))
    by_rows = (loo.unsqueeze(1) * score).mean(0)
    pairs = [(score[i] - score[j]) * (z[i] - z[j]) / 2 for i, j in itertools.combinations(range(3), 2)]
    assert by_rows.tolist() == pytest.approx([1 / 3, -1 / 6])
    assert torch.stack(pairs).mean(0).tolist() == pytest.approx([1 / 3, -1 / 6])
    full = variant("dr-grpo").advantage(generation(z))
    assert (full.unsqueeze(1) * score).mean(0).tolist() == pytest.approx([2 / 9, -1 / 9])


def test_best_group_size():
    # c1 = .002, c3 = 2: sqrt(1000) = 31.6228; the integer minimiser of c1 G + c3 / G is 32
    assert best_group_size(0.002, 2.0) == pytest.approx(31.6228, abs=6e-5)
    assert min(range(2, 200), key=lambda g: 0.002 * g + 2 / g) == 32
    with pytest.raises(VariantError, match="positive"):
        best_group_size(0.0, 2.0)
