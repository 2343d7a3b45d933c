# ruff: noqa: E501  (a table: one row, one line of arithmetic)
"""Golden numbers of the reshaped advantages, and the wrong formulas these numbers must reject."""

from __future__ import annotations

import math

import pytest
import torch

from tests.catalog.test_golden import Golden, answers, each, ratios
from tests.catalog.test_golden import test_golden as assert_golden
from trl_variants import variant
from trl_variants.hooks import advantage_difficulty as difficulty
from trl_variants.hooks import advantage_tokens as by_tokens
from trl_variants.hooks.advantage import Grouped, grouped_normalise, labels_of, mean_by, std_by

E = math.exp
R3 = 3**0.5
NO_KL = {"regularizers": []}


def ones(rewards, **more):
    """One-token answers."""
    return answers(*[1] * len(rewards), rewards=rewards, **more)


def prompts_of(likelihood, rewards):
    """One-token answers of several prompts whose log-probs are the prompts' likelihoods."""
    rows = [(lp, r, g) for g, (lp, group) in enumerate(zip(likelihood, rewards, strict=True)) for r in group]
    return {"logps": [[lp] for lp, _, _ in rows], "rewards": [r for _, r, _ in rows], "group": [g for _, _, g in rows]}


def edit(name, **parameters):
    return {"advantage": {name: parameters}, **NO_KL}


MIXED = prompts_of([-20, -30, -80, -90], [[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1], [1, 1, 0, 0]])
STD_LIKELY, STD_UNLIKELY = (
    0.125**0.5,
    (15 / 8 / 7) ** 0.5,
)  # of 7 ones in 8: 7/8 * 1/8 * 8 / 7; of 3 ones in 8: 3/8 * 5/8 * 8 / 7
SHARED = [0.25 / STD_LIKELY] * 3 + [-0.75 / STD_LIKELY] + [0] * 4 + [-0.25 / STD_UNLIKELY] * 3 + [0.75 / STD_UNLIKELY]
SHARED += [0.5 / STD_UNLIKELY] * 2 + [-0.5 / STD_UNLIKELY] * 2
OWN = [0.5] * 3 + [-1.5] + [0] * 4 + [-0.5] * 3 + [1.5] + [R3 / 2] * 2 + [-R3 / 2] * 2
BATCH_STD = (10 / 16 * 6 / 16 * 16 / 15) ** 0.5  # ten ones in sixteen

SEVEN, ONE = [1] * 7 + [0], [1] + [0] * 7  # std of both: sqrt(7/8 * 1/8 * 8/7) = .353553
STD8 = 0.125**0.5

VARIANTS = ones(
    [1, 1, 0, 0, 0, 0, 0, 1], group=[0] * 4 + [1] * 4, columns={"id": ["p"] * 8, "difficulty": [5.0] * 4 + [8.0] * 4}
)
GLOB = (0.625 / STD_UNLIKELY, -0.375 / STD_UNLIKELY)  # 3 ones in 8: 1.2076, -.7246

CONFIDENCE = [0.3, 0.1, -0.2, 0.0, -0.1, 0.05, -0.05, 0.2]
SURE = ones([1, 1, 0, 0, 0, 0, 0, 1], ref_logps=[[-1.0 - d] for d in CONFIDENCE])
SPREAD = (0.375 * 0.625) ** 0.5

COST = ones([[1, 1], [0, 0], [1, 0], [0, 0]])

GOLDEN = [
    # ------------------------------------------------------------ Durian
    # bins {-20, -30} and {-80, -90} at the median: std over all rewards of the bin, mean of the prompt; an all-right prompt stays 0
    Golden("durian, the shared part", "durian", MIXED, {"advantage": each(*SHARED), "grad": each(*(-a / 16 for a in SHARED))},
           edit("difficulty_shared_std", w_own=0.0, w_shared=1.0, bins=2, eps=0.0)),
    # .3 * .5 + .7 * .7071 = .6450; -.3 * 1.5 - .7 * 2.1213 = -1.9349
    Golden("durian, mixed", "durian", MIXED, {"advantage": each(*(0.3 * a + 0.7 * b for a, b in zip(OWN, SHARED, strict=True)))},
           edit("difficulty_shared_std", w_own=0.3, w_shared=0.7, bins=2, eps=0.0)),
    # the entry on four prompts: 12 bins wanted, at least two prompts a bin: the same two bins, weights .6 and .4
    Golden("durian, few prompts", "durian", MIXED, {"advantage": each(*(0.6 * a + 0.4 * b for a, b in zip(OWN, SHARED, strict=True)))}, NO_KL, atol=6e-4),
    Golden("durian, a bin a prompt is GRPO", "durian", MIXED, {"advantage": each(*OWN)}, edit("difficulty_shared_std", bins=4, min_prompts=1, eps=0.0)),
    # one bin: group mean, batch std
    Golden("durian, one bin", "durian", MIXED, {"advantage": each(*(s / BATCH_STD for s in [0.25] * 3 + [-0.75] + [0] * 4 + [-0.25] * 3 + [0.75] + [0.5] * 2 + [-0.5] * 2))},
           edit("difficulty_shared_std", w_own=0.0, w_shared=1.0, bins=1, eps=0.0)),
    # ------------------------------------------------------------ P-GRPO: without a history, the group's z-score (histories: test_advantage_memory)
    # R = .9, .9, .8, .8: .05 / sqrt(.01 / 3) = .8660
    Golden("p-grpo-personalized, the first generation", "p-grpo-personalized", ones([0.9, 0.9, 0.8, 0.8], columns={"task": ["a"] * 4}),
           {"advantage": each(R3 / 2, R3 / 2, -R3 / 2, -R3 / 2)}, edit("history_norm", eps=0.0)),
    # ------------------------------------------------------------ F-GRPO: z = .3536, -2.4749; (1/8)^.5 = .3536
    Golden("f-grpo, seven right", "f-grpo", ones(SEVEN), {"advantage": each(*[0.125] * 7, -0.875), "grad": each(*[-0.125 / 8] * 7, 0.875 / 8)}, edit("focal", eps=0.0)),
    Golden("f-grpo, gamma 1", "f-grpo", ones(SEVEN), {"advantage": each(*[STD8 / 8] * 7, -STD8 * 7 / 8)}, edit("focal", eps=0.0, gamma=1.0)),
    # z = 2.4749, -.3536; (7/8)^.5 = .9354
    Golden("f-grpo, one right", "f-grpo", ones(ONE), {"advantage": each(2.315032, *[-0.330719] * 7)}, edit("focal", eps=0.0)),
    Golden("f-grpo, gamma 0 is GRPO", "f-grpo", ones(SEVEN), {"advantage": each(*[STD8] * 7, -7 * STD8)}, edit("focal", eps=0.0, gamma=0.0)),
    # the rate is that of `correct`: rewards 1.2 and .2 have the z-scores of 1 and 0
    Golden("f-grpo, shaped rewards", "f-grpo", ones([1.2] * 7 + [0.2], correct=[True] * 7 + [False]), {"advantage": each(*[0.125] * 7, -0.875)}, edit("focal", eps=0.0)),
    # ------------------------------------------------------------ A-GRAE
    # om = .5; p = .25: .25/.5 + .25/.8660 = .788675, z = 1.5, -.5; p = .75: the same weight, z = .5, -1.5; positives times .5
    Golden("a-grae", "a-grae", ones([1, 0, 0, 0, 1, 1, 1, 0], group=[0] * 4 + [1] * 4),
           {"advantage": each(0.591506, -0.394338, -0.394338, -0.394338, 0.197169, 0.197169, 0.197169, -1.183013), "grad": each(*(x / 8 for x in (-0.591506, 0.394338, 0.394338, 0.394338, -0.197169, -0.197169, -0.197169, 1.183013)))}, atol=3e-6),
    # om = .25: .125/.5 + .375/.8660 = .683013; 1.5 * .683013 * .25 and -.5 * .683013
    Golden("a-grae, a weak policy", "a-grae", ones([1, 0, 0, 0] * 2, group=[0] * 4 + [1] * 4), {"advantage": each(*[0.256130, -0.341506, -0.341506, -0.341506] * 2)}, atol=3e-6),
    # om / alpha = 1: nothing is damped
    Golden("a-grae, alpha .5", "a-grae", ones([1, 0, 0, 0, 1, 1, 1, 0], group=[0] * 4 + [1] * 4),
           {"advantage": each(1.183013, -0.394338, -0.394338, -0.394338, 0.394338, 0.394338, 0.394338, -1.183013)}, edit("asymmetric", eps=0.0, alpha=0.5)),
    # p = 1 is 0, whatever the shaped rewards; p = .5: z = +-.7071, weight (om/2 + (1-om)/2) / .7071: +-.5; om = 4/6 over all rows
    Golden("a-grae, solved prompts", "a-grae", ones([1, 0.8, 0.9, 1, 1, 0], group=[0, 0, 1, 1, 2, 2], correct=[1, 1, 1, 0, 1, 0]),
           {"advantage": each(0, 0, -0.5, 0.5 * 4 / 6, 0.5 * 4 / 6, -0.5)}, edit("asymmetric", eps=0.0)),
    # ------------------------------------------------------------ AgentRL: a = 1 on 2 tokens, -1 on 6: mean -.5, var (2 * 2.25 + 6 * .25) / 8 = .75
    Golden("agentrl-task-norm", "agentrl-task-norm", answers(2, 6, rewards=[1, -1], columns={"task": ["a", "a"]}),
           {"advantage": each(R3, -1 / R3), "grad": [[-R3 / 8] * 2 + [0] * 4, [1 / R3 / 8] * 6]}, edit("task_whitened", std="none", eps_task=0.0)),
    # unbiased: var 6 / 7
    Golden("agentrl-task-norm, unbiased", "agentrl-task-norm", answers(2, 6, rewards=[1, -1], columns={"task": ["a", "a"]}),
           {"advantage": each(1.5 / (6 / 7) ** 0.5, -0.5 / (6 / 7) ** 0.5)}, edit("task_whitened", std="none", eps_task=0.0, ddof_task=1)),
    # equal lengths: each task ends at +-1, whatever its scale (.1 and 10)
    Golden("agentrl-task-norm, two scales", "agentrl-task-norm", answers(3, 3, 3, 3, rewards=[0.2, 0.0, 20.0, 0.0], group=[0, 0, 1, 1], columns={"task": ["a", "a", "b", "b"]}),
           {"advantage": each(1, -1, 1, -1)}, edit("task_whitened", std="none", eps_task=0.0)),
    Golden("agentrl-task-norm, a task without spread", "agentrl-task-norm", answers(2, 3, 1, 2, rewards=[0.7, 0.7, 1, 0], group=[0, 0, 1, 1], columns={"task": ["a", "a", "b", "b"]}),
           {"advantage": each(0, 0, 2**0.5, -(2**-0.5))}, edit("task_whitened", std="none", eps_task=0.0)),
    # ------------------------------------------------------------ NoRD: Dr. GRPO keeps the spread, GRPO makes both +-.8660
    Golden("nord", "nord", ones([0.9, 0.1, 0.9, 0.1, 0.82, 0.78, 0.82, 0.78], group=[0] * 4 + [1] * 4), {"advantage": each(*[0.4, -0.4] * 2, *[0.02, -0.02] * 2)}),
    Golden("nord, with the std", "nord", ones([0.9, 0.1, 0.9, 0.1, 0.82, 0.78, 0.82, 0.78], group=[0] * 4 + [1] * 4), {"advantage": each(*[R3 / 2, -R3 / 2] * 4)}, edit("grouped", eps=0.0)),
    # ------------------------------------------------------------ Resonate: squares around .45 sum to .78: std (.78 / 8)^.5 = .312250
    Golden("resonate", "resonate", ones([0.9, 0.8, 0.7, 0.6, 0.1, 0.2, 0.1, 0.2], group=[0] * 4 + [1] * 4),
           {"advantage": each(*(d / (0.0975**0.5 + 1e-4) for d in (0.15, 0.05, -0.05, -0.15, -0.05, 0.05, -0.05, 0.05))), "grad": each(*(-d / (0.0975**0.5 + 1e-4) / 8 for d in (0.15, 0.05, -0.05, -0.15, -0.05, 0.05, -0.05, 0.05)))}, NO_KL),
    # one reward of 1 among 40 rows: population std (39/1600)^.5 = .156125, .975 / .156225 = 6.24 is held at 5
    Golden("resonate, the clamp", "resonate", ones([1.0] + [0.0] * 39), {"advantage": each(5.0, *[-0.025 / ((39 / 1600) ** 0.5 + 1e-4)] * 39)}, NO_KL),
    # ------------------------------------------------------------ RiskPO, first generation: quantiles of the bundle's own scores
    # S = 0, 1, 2, 3, 5 of one question a bundle: q_.2 = .8, q_.8 = 3.4. S = 0: 1.5 * -.8/.2 = -6 / 2.5; S = 5: (4.2 - 1.6)/.6 = 4.3333 / 2.5
    Golden("riskpo, own quantiles", "riskpo", ones([0, 1, 2, 3, 5]),
           {"advantage": each(*(v / 1.923538 for v in (-2.4, 0.2 / 1.5, 1.2 / 1.5, 2.2 / 1.5, 2.6 / 1.5)))}, edit("mixed_risk", bundle=1, share="uniform"), atol=2e-5),
    # ------------------------------------------------------------ Laguna: 1 - 0; 0 - 900/1000
    Golden("laguna", "laguna", answers(9, 1, 1, rewards=[1, 0, 0]), {"advantage": each(1, -0.9, -0.9), "grad": [[-1 / 11] * 9, [0.9 / 11] + [0] * 8, [0.9 / 11] + [0] * 8]}),
    # 1 - 1/3; 1 - 9/11; 0 - 10/10
    Golden("laguna, two right", "laguna", answers(9, 1, 2, rewards=[1, 1, 0]), {"advantage": each(2 / 3, 2 / 11, -1)}),
    # 1 - 4/9; -5/7; -5/8; 1 - 1/6
    Golden("laguna, four answers", "laguna", answers(1, 3, 2, 4, rewards=[1, 0, 0, 1]), {"advantage": each(5 / 9, -5 / 7, -5 / 8, 5 / 6)}),
    Golden("laguna, equal lengths", "laguna", answers(4, 4, 4, rewards=[1, 0, 0]), {"advantage": each(1, -0.5, -0.5)}),
    # the weight is capped at 5 and keeps its gradient: -min(r, 5) A / 2
    Golden("laguna, the loose cap", "laguna", ratios([4.0], [9.0]) | {"advantage": [1, 1]}, {"grad": each(-2.0, -2.5)}),
    # ------------------------------------------------------------ RCC: cov = .6/8 - .375 * .3/8 = .0609375, b = .375 + .121875 = .496875
    Golden("rcc", "rcc", SURE, {"advantage": each(*(((1 if r else 0) - 0.496875) / (SPREAD + 1e-6) for r in SURE["rewards"])),
                                "grad": each(*(-((1 if r else 0) - 0.496875) / (SPREAD + 1e-6) / 8 for r in SURE["rewards"]))}),
    # a constant confidence: the population z-score, sqrt(n-/n+) and -sqrt(n+/n-)
    Golden("rcc, constant confidence", "rcc", ones([1, 1] + [0] * 6, ref_logps=[[-1.7]] * 8), {"advantage": each(*[R3] * 2, *[-1 / R3] * 6)}, edit("reward_confidence", eps=0.0)),
    Golden("rcc, seven right", "rcc", ones(SEVEN, ref_logps=[[-0.4]] * 8), {"advantage": each(*[7**-0.5] * 7, -(7**0.5))}, edit("reward_confidence", eps=0.0)),
    # ------------------------------------------------------------ DIVA-GRPO: e^-.15 = .8607 where dD sign(z) < 0, e^.15 = 1.1618 where > 0
    Golden("diva-grpo, without batch z", "diva-grpo", VARIANTS,
           {"advantage": each(*[R3 / 2 + E(-0.15) * GLOB[0]] * 2, *[-R3 / 2 + E(0.15) * GLOB[1]] * 2, *[-0.5 + E(-0.15) * GLOB[1]] * 3, 1.5 + E(0.15) * GLOB[0])},
           edit("local_global", batch_z=False, eps=0.0)),
    Golden("diva-grpo", "diva-grpo", VARIANTS, {"advantage": each(1.9748, 1.9748, -1.7772, -1.7772, -1.1637, -1.1637, -1.1637, 3.0232)}, atol=6e-5),
    # no variants: both parts are the group's z-score
    Golden("diva-grpo, no variants", "diva-grpo", ones([1, 0, 0, 0], columns={"id": ["p"] * 4, "difficulty": [3.0] * 4}), {"advantage": each(3, -1, -1, -1)}, edit("local_global", batch_z=False, eps=0.0, k=0.0)),
    # rewards .1, 0, 0, 0 are all below .15: the local part is damped to a tenth, and so is the global one when the other variant fails too
    Golden("diva-grpo, a variant that fails", "diva-grpo", ones([0.1, 0, 0, 0], columns={"id": ["p"] * 4, "difficulty": [3.0] * 4}), {"advantage": each(0.3, -0.1, -0.1, -0.1)}, edit("local_global", batch_z=False, eps=0.0)),
    # ------------------------------------------------------------ Constrained GRPO: z(R) = +-.8660, z(C) = 1.5, -.5; lambda = .5
    Golden("constrained-grpo", "constrained-grpo", COST, {"advantage": each(R3 / 2 - 0.75, -R3 / 2 + 0.25, R3 / 2 + 0.25, -R3 / 2 + 0.25),
                                                          "grad": each(*(-x / 4 for x in (R3 / 2 - 0.75, -R3 / 2 + 0.25, R3 / 2 + 0.25, -R3 / 2 + 0.25)))},
           edit("constrained", costs="functions", eps=0.0)),
    # C = 0,0,1,1, lambda = 2: .8660 (R - 2 C), each +-1
    Golden("constrained-grpo, lambda 2", "constrained-grpo", ones([[1, 0], [0, 0], [1, 1], [0, 1]]), {"advantage": each(1.5 * R3, R3 / 2, -R3 / 2, -1.5 * R3)},
           edit("constrained", costs="functions", start=2.0, eps=0.0)),
    # the entry: an answer that hit the limit costs; C = 1,0,0,0 as above
    Golden("constrained-grpo, truncated answers", "constrained-grpo", ones([1, 0, 1, 0], truncated=[True, False, False, False]),
           {"advantage": each(R3 / 2 - 0.75, -R3 / 2 + 0.25, R3 / 2 + 0.25, -R3 / 2 + 0.25)}, NO_KL, atol=6e-6),
    # a cost that all answers have pulls nowhere
    Golden("constrained-grpo, a cost without spread", "constrained-grpo", ones([[1, 1], [0, 1]]), {"advantage": each(2**-0.5, -(2**-0.5))}, edit("constrained", costs="functions", eps=0.0)),
]  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN, ids=[g.name for g in GOLDEN])
def test_golden(case):
    assert_golden(case)


# ---------------------------------------------------------------- wrong versions


def bin_mean(self, scored):
    labels = self.bin_of(scored) + 1
    return (scored.reward - mean_by(labels, scored.reward, scored.valid)) / std_by(
        labels, scored.reward, scored.valid, 1
    )


def only_positives(self, scored):
    a = Grouped.__call__(self, scored)
    return torch.where(a > 0, a * (1 - difficulty.success_rate(scored)) ** self.gamma, a)


def rate_of_rewards(self, scored):
    return (
        Grouped.__call__(self, scored)
        * (1 - mean_by(labels_of(scored, "group"), scored.reward, scored.valid)).clamp(min=0) ** self.gamma
    )


def released_a_grae(self, scored):
    p, om = difficulty.success_rate(scored), scored.correct.double().mean()
    a = Grouped.__call__(self, scored) * (om / 2 / p.sqrt() + (1 - om) / 2 / (1 - p.sqrt()))
    return torch.where(a > 0, a * (om / self.alpha).clamp(max=1.0), a)


def per_trajectory(self, scored):
    a = Grouped.__call__(self, scored)
    return grouped_normalise(a, scored.valid, scored, self.task, self.task, 0, 0.0, "zero")


def unweighted(self, scored):
    return scored.reward * 1.5 - scored.reward.sum() / 2


def unbiased(self, scored):
    return grouped_normalise(scored.reward, scored.valid, scored, "group", "group", 1, 0.0, "zero")


WRONG = [
    ("durian, the shared part", difficulty.DifficultySharedStd, bin_mean),
    ("f-grpo, seven right", difficulty.Focal, only_positives),
    ("f-grpo, shaped rewards", difficulty.Focal, rate_of_rewards),
    ("a-grae", difficulty.Asymmetric, released_a_grae),
    ("agentrl-task-norm", by_tokens.TaskWhitened, per_trajectory),
    ("laguna", by_tokens.LengthWeightedLeaveOneOut, unweighted),
    ("rcc", by_tokens.RewardConfidence, unbiased),
    ("rcc, constant confidence", by_tokens.RewardConfidence, unbiased),
    ("resonate, the clamp", by_tokens.Clamped, Grouped.__call__),
]


@pytest.mark.parametrize("name, where, broken", WRONG, ids=[f"{w[0]}: {w[2].__name__}" for w in WRONG])
def test_the_numbers_reject(monkeypatch, name, where, broken):
    [case] = [g for g in GOLDEN if g.name == name]
    monkeypatch.setattr(where, "__call__", broken)
    with pytest.raises(AssertionError, match="advantage"):
        assert_golden(case)


def test_released_a_grae_is_what_the_atlas_says(monkeypatch):
    monkeypatch.setattr(difficulty.Asymmetric, "__call__", released_a_grae)
    values = [0.75, -0.5, -0.5, -0.5, 0.5387, 0.5387, 0.5387, -3.2321]
    assert_golden(
        Golden(
            "released",
            "a-grae",
            ones([1, 0, 0, 0, 1, 1, 1, 0], group=[0] * 4 + [1] * 4),
            {"advantage": each(*values)},
            atol=6e-5,
        )
    )


# ---------------------------------------------------------------- claims


def test_rcc_s_baseline_is_close_to_the_variance_minimising_one():
    # E[w^2 R] / E[w^2] with w = e^delta: 4.535347 / 9.034406 = .502008; first order .496875; the plain mean .375
    r, d = torch.tensor(SURE["rewards"], dtype=torch.float64), torch.tensor(CONFIDENCE, dtype=torch.float64)
    exact = float(((2 * d).exp() * r).mean() / (2 * d).exp().mean())
    first_order = float(r.mean() + 2 * ((r - r.mean()) * (d - d.mean())).mean())
    assert (exact, first_order) == pytest.approx((0.502008, 0.496875), abs=6e-7)
    assert abs(first_order - exact) < 0.05 * abs(float(r.mean()) - exact)


def test_f_grpo_s_chance_of_missing_the_rare_answers():
    # mu = .5, tau = .05, N = 2: .95^2 - .45^2 - .5^2 = .4500; it rises, then falls
    wanted = [0.4500, 0.7110, 0.6578, 0.4401, 0.1937, 0.0375]
    assert [difficulty.tail_miss(n, 0.5, 0.05) for n in (2, 4, 8, 16, 32, 64)] == pytest.approx(wanted, abs=6e-5)


def test_laguna_s_weighted_identity():
    # sum_i w_i (W - w_i) A_i = 0
    from trl_variants import TokenBatch

    lengths = [3, 7, 2, 5]
    given = answers(*lengths, rewards=[1.0, 0.3, 0.0, 0.6])
    a = (
        variant("laguna")
        .loss(TokenBatch.from_tensors(**{**given, "logps": torch.tensor(given["logps"], dtype=torch.float64)}))
        .advantage
    )
    assert float(sum(w * (17 - w) * a[i, 0] for i, w in enumerate(lengths))) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("lam1", [1.0, 10.0])
def test_one_multiplier_leaves_the_weight_of_the_other_costs_alone(lam1):
    # R = 1,0,1,0, C1 = 0,0,1,1, C2 = 0,1,1,0, an orthogonal design: the coefficient of C2 is A's mean over C2 = 1 minus over
    # C2 = 0. Per source: lambda2 / std(C2) = 1 / .57735 = 1.7321. Summed first: 1.0000 at lambda1 = 1, .1715 at 10
    from trl_variants import Scored
    from trl_variants.hooks.advantage_memory import Constrained

    matrix = torch.tensor([[1, 0, 0], [0, 0, 1], [1, 1, 1], [0, 1, 0]], dtype=torch.float64)
    scored = Scored(rewards=matrix, weights=torch.ones(3), group=torch.zeros(4, dtype=torch.long))
    of_c2 = lambda a: float(a[1:3].sum() - a[0] - a[3]) / 2  # noqa: E731
    h = Constrained(limits=[0.1, 0.1], costs="functions", eps=0.0)
    assert -of_c2(h(scored, {"lambda": [lam1, 1.0]})) == pytest.approx(3**0.5, abs=1e-9)
    summed = matrix[:, 0] - lam1 * matrix[:, 1] - matrix[:, 2]
    first = (summed - summed.mean()) / summed.std()
    assert -of_c2(first) == pytest.approx({1.0: 1.0, 10.0: 0.1715}[lam1], abs=6e-5)
