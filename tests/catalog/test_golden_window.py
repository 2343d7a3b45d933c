# ruff: noqa: E501  (a table: one row, one line of arithmetic)
"""Golden numbers of the mismatch corrections, the squared log-ratio family, whole-group losses and filters.

Below the table: the wrong formulas these numbers must reject, and the exact optimum of the mirror-descent problem.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.catalog.test_golden import NO_KL, Golden, answers, each, log_ratios, ratios
from tests.catalog.test_golden import test_golden as assert_golden
from trl_variants import TokenBatch, VariantError, variant
from trl_variants.hooks import clip_contrast, clip_squared, regularizers_group, select_variance
from trl_variants.hooks.aggregate import TokenMean
from trl_variants.hooks.clip import Clipped, PPOClip
from trl_variants.hooks.regularizers import Term

E, L = math.exp, math.log

MISMATCH = {"logps": [[-0.5, -1.0, -2.0]], "rollout_logps": [[-0.7, -1.9, -1.5]], "advantage": [1.0]}
# sampler -1,-1,-2; now -1.2,-1.9,-2.8 (mean drift (.2 + .9 + .8)/3 = .6333) and -1,-1.1,-2.1 (.2/3 = .0667)
DRIFT = {"logps": [[-1.2, -1.9, -2.8], [-1.0, -1.1, -2.1]], "old_logps": [[-1.0, -1.0, -2.0]] * 2}
EXPS = [E(-0.2), E(-0.9), E(-0.8)], [1.0, E(-0.1), E(-0.1)]


def one_token(values, **more):
    """One answer a value, one token each, on-policy."""
    return {"logps": [[v] for v in values], **more}


def labels(right, wrong):
    """Raw correctness and rewards of the right answers, then the wrong ones, of one prompt."""
    c = [True] * right + [False] * wrong
    return {"correct": c, "rewards": [float(x) for x in c]}


SEVEN = {"rewards": [1, 1, 0, 0, 0, 0, 0, 0]}
HINGE = {"regularizers": ["kl_hinge"], "clip": "none", "advantage": "grouped"}
FALLEN = {"regularizers": [{"fallen_tokens": {"coef": 1.0, "threshold": 0.8}}], "clip": "log_linear"}
SANK = log_ratios([-0.5, 0.2, 0.0], [-1.0, -0.1, 0.3])


def surprise(*pairs):
    """Answers of one token with probabilities (p, p_old)."""
    return {
        "logps": [[L(p)] for p, _ in pairs],
        "old_logps": [[L(q)] for _, q in pairs],
        "advantage": [0.0] * len(pairs),
    }


GOLDEN = [
    # ------------------------------------------------------------ TIS, MIS: token ratios e^.2, e^.9, e^-.5
    Golden("tis, truncated at 2", "tis", MISMATCH, {"objective": [[1.221403, 2.0, 0.606531]], "grad": [[-1.221403 / 3, -2 / 3, -0.606531 / 3]]}),
    Golden("tis, same engine", "tis", MISMATCH | {"rollout_logps": [[-0.5, -1.0, -2.0]]}, {"objective": [[1.0] * 3]}),
    Golden("tis, product of the answer", "tis", MISMATCH, {"objective": [[1.822119] * 3]}, {"weight": [{"sampler_correction": {"mode": "sequence_truncate"}}]}),
    # e^(.6/3)
    Golden("tis, geometric mean of the answer", "tis", MISMATCH, {"objective": [[1.221403] * 3]}, {"weight": [{"sampler_correction": {"mode": "geometric_truncate"}}]}),
    # a token the engine could not score has ratio 1: (.2 + 0 - .5)/3 = -.1
    Golden("tis, geometric, an unscored token", "tis", MISMATCH | {"rollout_logps": [[-0.7, math.nan, -1.5]]},
           {"objective": [[E(-0.1)] * 3]}, {"weight": [{"sampler_correction": {"mode": "geometric_truncate"}}]}),
    # the correction never multiplies the KL: .1 (e^-.5 - .5) on each token
    Golden("tis leaves the KL alone", "tis", MISMATCH | {"ref_logps": [[-1.0, -1.5, -2.5]]}, {"terms.kl": 0.0106531}, {"regularizers": [{"kl": {"coef": 0.1}}]}),
    Golden("mis-icepop, [0.5, 5] keeps all", "mis-icepop", MISMATCH, {"objective": [[1.221403, 2.459603, 0.606531]]}),
    # the dropped tokens stay in the divisor: 1.221403 / 3
    Golden("mis-icepop, [0.8, 2]", "mis-icepop", MISMATCH, {"objective": [[1.221403, 0, 0]], "loss": -1.221403 / 3},
           {"weight": [{"sampler_correction": {"mode": "token_mask", "min": 0.8, "max": 2.0}}]}),
    Golden("mis-icepop, no bounds", "mis-icepop", MISMATCH, {"objective": [[1.221403, 2.459603, 0.606531]]},
           {"weight": [{"sampler_correction": {"mode": "token_mask", "min": 0.0, "max": None}}]}),
    Golden("mis-icepop, geometric", "mis-icepop", MISMATCH, {"objective": [[0.0] * 3]},
           {"weight": [{"sampler_correction": {"mode": "geometric_mask", "min": 0.99, "max": 1.01}}]}),
    # ------------------------------------------------------------ OPSM
    # A < 0: row 0 is dropped, row 1 stays; the divisor is still 6. e^-.1 is free of the clip (> .8)
    Golden("opsm, A < 0", "opsm", DRIFT | {"advantage": [-1, -1]},
           {"objective": [[0.0] * 3, [-x for x in EXPS[1]]], "loss": sum(EXPS[1]) / 6, "grad": [[0.0] * 3, [x / 6 for x in EXPS[1]]]}),
    Golden("opsm, A > 0 is never dropped", "opsm", DRIFT | {"advantage": [1, 1]}, {"objective": list(map(list, EXPS))}),
    # the engine's own log-probs count first: from -1,-1.5,-2.5 row 0 has drifted .3
    Golden("opsm, against the engine", "opsm", DRIFT | {"advantage": [-1, -1], "rollout_logps": [[-1.0, -1.5, -2.5]] * 2},
           {"objective": [[-max(x, 0.8) for x in EXPS[0]], [-x for x in EXPS[1]]]}),
    # ------------------------------------------------------------ Kimi k1.5, mirror descent
    # s = .2,-.1,0,.3, r = 1,0,1,0, tau = .5: (r - rbar - tau s)/4 = .1,-.1125,.125,-.1625; J = mean(A s - .25 s^2)
    Golden("kimi-k1-5", "kimi-k1-5", log_ratios([0.2], [-0.1], [0.0], [0.3]) | {"rewards": [1, 0, 1, 0]},
           {"advantage": each(0.5, -0.5, 0.5, -0.5), "grad": each(-0.1, 0.1125, -0.125, 0.1625),
            "loss": -((0.1 - 0.01) + (0.05 - 0.0025) + 0 + (-0.15 - 0.0225)) / 4},
           {"regularizers": [{"squared_log_ratio": {"coef": 0.25}}]}),
    # s is a sum over tokens: d = .1, .3 -> s = .4; A = 1, tau = .1: dJ/dlp = A - tau s = .96 on both tokens
    Golden("kimi-k1-5, two tokens", "kimi-k1-5", log_ratios([0.1, 0.3]) | {"advantage": [1.0]}, {"grad": [[-0.96, -0.96]], "loss": -(0.4 - 0.05 * 0.16)}),
    Golden("kimi-k1-5 on-policy is REINFORCE with a baseline", "kimi-k1-5", answers(1, 3, advantage=[0.5, -0.5]), {"grad": [[-0.25, 0, 0], [0.25] * 3], "loss": 0.0}),
    # tau log mean exp(r / tau): tau = .5: .716890, 10: .512495, .01: 1 - .01 log 2 = .993069
    *[Golden(f"mirror-descent, tau {tau}", "mirror-descent", answers(1, 1, 1, 1, rewards=[1, 0, 1, 0]),
             {"advantage": each(1 - z, -z, 1 - z, -z)}, {"advantage": {"log_partition": {"tau": tau}}})
      for tau, z in [(0.5, 0.7168904), (10.0, 0.5124948), (0.01, 0.9930685)]],
    # the entry's own tau .1: .1 log((e^10 + 1)/2) = 1 - .1 log 2 + 4.5e-6 = .930690; grad -(A - tau s)/4
    Golden("mirror-descent", "mirror-descent", log_ratios([0.2], [-0.1], [0.0], [0.3]) | {"rewards": [1, 0, 1, 0]},
           {"grad": each(-(0.0693098 - 0.02) / 4, (0.9306902 - 0.01) / 4, -0.0693098 / 4, (0.9306902 + 0.03) / 4)}),
    Golden("mirror-descent, a dead group and one alone", "mirror-descent", answers(1, 1, 1, rewards=[0.3, 0.3, 7.0], group=[0, 0, 1]), {"advantage": each(0, 0, 0)}),
    # ------------------------------------------------------------ DRO
    # sequence form: l = .2,-.1,.3,0, A = +-.5, tau = .5: J = .066250, dJ/dl = .1,-.1125,.0875,-.125
    Golden("dro, sequence form", "dro", log_ratios([0.2], [-0.1], [0.3], [0.0]) | {"advantage": [0.5, -0.5, 0.5, -0.5]},
           {"loss": -0.06625, "grad": each(-0.1, 0.1125, -0.0875, 0.125)},
           {"ratio": "product", "aggregate": "sequence_mean", "regularizers": [{"squared_log_ratio": {"coef": 0.25}}]}),
    # token form: d = .1, .3: (A - beta d)/2 = (1 - .01)/2, (1 - .03)/2; no cross terms
    Golden("dro, token form", "dro", log_ratios([0.1, 0.3]) | {"advantage": [1.0]},
           {"grad": [[-0.495, -0.485]], "loss": -((0.1 - 0.05 * 0.01) + (0.3 - 0.05 * 0.09)) / 2}),
    Golden("dro at the old policy", "dro", answers(2, advantage=[0.7]), {"grad": [[-0.35, -0.35]], "loss": 0.0}),
    # ------------------------------------------------------------ Kimi K3: value clip(r) A - .1 log^2 r, gradient r A [inside] - .2 log r
    *[Golden(f"kimi-k3, r {r}, A {a}", "kimi-k3", ratios([r]) | {"advantage": [a]}, {"loss": -value, "grad": [[-slope]], "clipped": [[held]]}, atol=6e-5)
      for r, a, value, slope, held in [(1.5, 1.0, 1.1836, -0.0811, 1), (1.1, 1.0, 1.0991, 1.0809, 0), (0.7, 1.0, 0.7873, 0.0713, 1), (1.5, -1.0, -1.2164, -0.0811, 1)]],
    # tokens of the prompt: (.5 + .6 - .4 - .1 (0 + .1644 + .1272))/3 = .2236
    Golden("kimi-k3, token mean in the prompt", "kimi-k3", {**ratios([1.0, 1.5], [0.7, 1.0]), "mask": [[1.0, 1.0], [1.0, 0.0]], "advantage": [0.5, -0.5]}, {"loss": -0.2236}, atol=6e-5),
    Golden("kimi-k3's data by rows", "kimi-k3", {**ratios([1.0, 1.5], [0.7, 1.0]), "mask": [[1.0, 1.0], [1.0, 0.0]], "advantage": [0.5, -0.5]},
           {"loss": -0.0645}, {"aggregate": "sequence_mean"}, atol=6e-5),
    Golden("kimi-k3, tau 0 at r = 1", "kimi-k3", answers(1, 1, rewards=[1, 0]), {"grad": each(-0.25, 0.25)}, {"regularizers": []}),
    # the sampler's log-probs where it has them: r = e^.5 there and e^.1 against the old policy elsewhere
    Golden("kimi-k3, anchor", "kimi-k3", {"logps": [[-1.0, -1.0]], "old_logps": [[-1.1, -1.1]], "rollout_logps": [[-1.5, math.nan]], "advantage": [1.0]},
           {"ratio": [[E(0.5), E(0.1)]]}),
    # ------------------------------------------------------------ search agent PO: only row 0 has A >= 0; of -.5, .2, 0 only -.5 < log .8
    Golden("search-agent-po, the term", "search-agent-po", SANK | {"advantage": [1, -1]}, {"terms.fallen_tokens": 0.5 / 3, "loss": -(-0.3 + 0.8) / 6 + 0.5 / 3,
           "grad": [[-1 / 6 - 1 / 3, -1 / 6, -1 / 6], [1 / 6] * 3]}, FALLEN),
    Golden("search-agent-po as it is", "search-agent-po", SANK | {"advantage": [1, -1]}, {"terms.fallen_tokens": 0.05 / 3}),
    Golden("search-agent-po, A = 0 counts", "search-agent-po", SANK | {"advantage": [0, 0]}, {"terms.fallen_tokens": 1.5 / 6, "grad": [[-1 / 6, 0, 0], [-1 / 6, 0, 0]]}, FALLEN),
    Golden("search-agent-po is inert on-policy", "search-agent-po", answers(2, advantage=[1.0]), {"terms.fallen_tokens": 0.0, "grad": [[-0.5, -0.5]]}),
    # ------------------------------------------------------------ R1-zero-Div: -r lp and its derivative -r (1 + lp) at (p, p_old); lambda .01, 4 rows
    Golden("r1-zero-div, the term", "r1-zero-div", surprise((0.5, 0.5), (0.2, 0.2), (1 / E(1), 1 / E(1)), (0.3, 0.2)) | {"correct": [True] * 4},
           {"loss": -0.01 * (0.6931472 + 1.6094379 + 1.0 + 1.8059592) / 4, "grad": each(*(-0.01 * x / 4 for x in (-0.3068528, 0.6094379, 0.0, 0.3059592)))}, NO_KL | {"regularizers": ["correct_entropy"]}, atol=1e-8),
    # wrong answers get none and still count: half of it
    Golden("r1-zero-div, right answers only", "r1-zero-div", surprise((0.5, 0.5), (0.2, 0.2)) | {"correct": [False, True]},
           {"terms.correct_entropy": -0.01 * 1.6094379 / 2, "grad": each(0, -0.01 * 0.6094379 / 2)}, {"regularizers": ["correct_entropy"]}, atol=1e-8),
    Golden("r1-zero-div without a right answer is grpo", "r1-zero-div", answers(1, 2, advantage=[1.0, -1.0], correct=[False, False], ref_logps=[[-1.0] * 2] * 2),
           {"terms.correct_entropy": 0.0, "grad": [[-0.5, 0], [0.25, 0.25]]}),
    # ------------------------------------------------------------ zero-variance filter
    # on-policy, prompt 0 has spread: objective = A; of 4 prompts of 2 the others leave the divisor: rows kept 2, A = +-2 -> 0; grad 2/2
    Golden("zero-variance-filter", "zero-variance-filter", answers(*[1] * 8, rewards=[4, 0, 1, 1, 0, 0, 3, 3], group=[0, 0, 1, 1, 2, 2, 3, 3]),
           {"grad": each(-1, 1, 0, 0, 0, 0, 0, 0)}, {"advantage": {"grouped": {"std": "none"}}, **NO_KL}),
    # with the dead groups in the divisor every gradient is 4 times smaller
    Golden("the same without the filter", "zero-variance-filter", answers(*[1] * 8, rewards=[4, 0, 1, 1, 0, 0, 3, 3], group=[0, 0, 1, 1, 2, 2, 3, 3]),
           {"grad": each(-0.25, 0.25, 0, 0, 0, 0, 0, 0)}, {"advantage": {"grouped": {"std": "none"}}, "select": [], **NO_KL}),
    # a dropped group pays no KL: .04 * (e^-.5 - .5) over the 2 rows of the other one
    Golden("zero-variance-filter, the KL", "zero-variance-filter", answers(1, 1, 1, 1, rewards=[1, 1, 1, 0], group=[0, 0, 1, 1], ref_logps=each(-3, -3, -1.5, -1)),
           {"terms.kl": 0.04 * (E(-0.5) - 0.5) / 2}),
    Golden("zero-variance-filter, nothing left", "zero-variance-filter", answers(1, 1, rewards=[1, 1], ref_logps=each(-3, -3)), {"loss": 0.0, "grad": each(0, 0)}),
    # by correctness: both answers of prompt 0 are right, though their rewards differ
    Golden("zero variance of correctness", "zero-variance-filter", answers(1, 1, 1, 1, rewards=[1, 0.6, 1, 0], group=[0, 0, 1, 1]),
           {"grad": each(0, 0, -0.25, 0.25)}, {"select": [{"zero_variance": {"by": "correct"}}], "advantage": {"grouped": {"std": "none"}}, **NO_KL}),
    # ------------------------------------------------------------ CPPO
    # mean .25, unbiased std sqrt(8 * .1875 / 7) = .462910: .75 / .463010 = 1.6198, -.25 / .463010 = -.5399; P = .75: k = 2, the right ones
    Golden("cppo-pruning, two of eight", "cppo-pruning", answers(*[1] * 8, **SEVEN),
           {"advantage": each(1.6198, 1.6198, *[-0.5399] * 6), "grad": each(-0.8099, -0.8099, *[0] * 6)}, {"select": [{"top_advantage": {"rate": 0.75}}], **NO_KL}, atol=6e-5),
    # mean .9625: |A| = 1.2940, .6704, .0468, .9510, 1.2005, 1.0757, .0468, 1.1693: kept 0, 4, 7, 5
    Golden("cppo-pruning, four of eight", "cppo-pruning", answers(*[1] * 8, rewards=[2, 1.5, 1, 0.2, 0, 0.1, 1, 1.9]),
           {"advantage": each(1.2940, 0.6704, 0.0468, -0.9510, -1.2005, -1.0757, 0.0468, 1.1693),
            "grad": each(-1.2940 / 4, 0, 0, 0, 1.2005 / 4, 1.0757 / 4, 0, -1.1693 / 4)}, NO_KL, atol=6e-5),
    Golden("cppo-pruning, rate 0 is grpo", "cppo-pruning", answers(1, 3, rewards=[1, 0]),
           {"grad": [[-0.5 / (2**0.5 + 2e-4), 0, 0], [0.5 / 3 / (2**0.5 + 2e-4)] * 3]}, {"select": [{"top_advantage": {"rate": 0.0}}], **NO_KL}),
    # rate .9 of ten keeps one (10 * .1 is .999.. in floats); mostly right: the rare wrong answer survives. A = -.9/.316228
    Golden("cppo-pruning, one of ten", "cppo-pruning", answers(*[1] * 10, rewards=[1] * 6 + [0] + [1] * 3),
           {"grad": each(*[0] * 6, 0.9 / 0.316328, *[0] * 3)}, {"select": [{"top_advantage": {"rate": 0.9}}], **NO_KL}, atol=6e-5),
    # per question 2 + 1; over the batch the two of largest |A| (.7070 < 1.1546 of 1,0,0's right one; then .7070 at row 0 by order)
    Golden("cppo-pruning within the batch", "cppo-pruning", answers(1, 1, 1, 1, 1, rewards=[1, 0, 1, 0, 0], group=[0, 0, 1, 1, 1]),
           {"grad": each(-0.7070 / 2, 0, -1.1545 / 2, 0, 0)}, {"select": [{"top_advantage": {"rate": 0.6, "within": "batch"}}], **NO_KL}, atol=6e-5),
    # ------------------------------------------------------------ DisCO: one token answers, s = lp; every row carries J_q
    Golden("disco, tau 1", "disco", one_token([-1.0, -0.5, -0.4, -2.0], **labels(1, 3)), {"loss": 0.246527, "grad": each(-1, 0.429498, 0.474668, 0.095834)},
           {"clip": {"group_contrast": {"tau": 1.0}}}),
    Golden("disco, tau 10", "disco", one_token([-1.0, -0.5, -0.4, -2.0], **labels(1, 3)),
           {"loss": 0.059639, "objective": each(*[-0.059639] * 4), "grad": each(-1, 0.348340, 0.351841, 0.299819), "advantage": each(1, -1 / 3, -1 / 3, -1 / 3)}),
    Golden("disco, two right", "disco", one_token([-1.0, -0.6, -0.5, -2.0], **labels(2, 2)), {"loss": -0.421901, "grad": each(-0.5, -0.5, 0.537430, 0.462570)}),
    Golden("disco-b", "disco", one_token([-1.0, -0.6, -0.5, -2.0], **labels(2, 2)), {"loss": -0.45, "grad": each(-0.5, -0.5, 0.5, 0.5)}, {"clip": {"group_contrast": {"tau": None}}}),
    Golden("disco, tau -> inf is disco-b", "disco", one_token([-1.0, -0.6, -0.5, -2.0], **labels(2, 2)), {"grad": each(-0.5, -0.5, 0.5, 0.5)}, {"clip": {"group_contrast": {"tau": 1e7}}}),
    # a score is a mean over tokens: (-1 - 3)/2 = -2 against -1: J = -1; gradient 1/2 per token of the right answer
    Golden("disco, mean of tokens", "disco", {"logps": [[-1.0, -3.0], [-1.0, -9.0]], "mask": [[1.0, 1.0], [1.0, 0.0]], **labels(1, 1)}, {"loss": 1.0, "grad": [[-0.5, -0.5], [1.0, 0.0]]}),
    # ratios 1.2 and .5, unclipped: J = 1.2 - .5, gradients r
    Golden("disco, ratio score", "disco", ratios([1.2], [0.5]) | labels(1, 1), {"loss": -0.7, "grad": each(-1.2, 0.5)},
           {"clip": {"group_contrast": {"score": "likelihood_ratio", "tau": 1.0}}, "regularizers": []}),
    # the second prompt has no wrong answer: its J is 0 and it still counts: half of the first
    Golden("disco, a prompt without wrong answers", "disco", one_token([-1.0, -2.0, -1.0, -1.0], correct=[True, False, True, True], rewards=[1, 0, 1, 1], group=[0, 0, 1, 1]),
           {"loss": -0.5, "grad": each(-0.5, 0.5, 0, 0)}),
    # prompts weigh the same whatever the lengths: J = 1 and 2 -> 1.5
    Golden("disco, mean over prompts", "disco", {"logps": [[-1.0] * 3, [-2.0] * 3, [-1.0] * 3, [-3.0] * 3], "mask": [[1.0] * 3, [1, 0, 0], [1, 0, 0], [1, 0, 0]],
           "correct": [True, False] * 2, "rewards": [1, 0, 1, 0], "group": [0, 0, 1, 1]}, {"loss": -1.5}),
    # K = mean(old - new) = 3e-4: 1000 (3e-4 - 1e-4) = .2 on dK/dlp = -1/2; value 500 * 4e-8
    Golden("disco, the hinge acts", "disco", {"logps": [[-1.0, -1.0]], "old_logps": [[-1.0 + 4e-4, -1.0 + 2e-4]], "advantage": [0.0]}, {"loss": 2e-5, "grad": [[-0.1, -0.1]]}, HINGE, atol=1e-9),
    Golden("disco, the hinge rests", "disco", {"logps": [[-1.0, -1.0]], "old_logps": [[-1.0 + 5e-5, -1.0 + 5e-5]], "advantage": [0.0]}, {"loss": 0.0, "grad": [[0.0, 0.0]]}, HINGE),
    # ------------------------------------------------------------ ConSPO
    Golden("conspo, tau 10", "conspo", one_token([-1.0, -0.4, -0.5, -2.0], **labels(2, 2)), {"loss": 10.642249, "grad": each(-0.330859, -0.324080, 0.351983, 0.302955)}),
    Golden("conspo, tau 1", "conspo", one_token([-1.0, -0.4, -0.5, -2.0], **labels(2, 2)), {"loss": 0.924635, "grad": each(-0.334251, -0.262666, 0.488024, 0.108893)},
           {"clip": {"info_nce": {"tau": 1.0}}}),
    Golden("conspo, tau 1, margin .5", "conspo", one_token([-1.0, -0.4, -0.5, -2.0], **labels(2, 2)), {"loss": 1.251385}, {"clip": {"info_nce": {"tau": 1.0, "margin": 0.5}}}),
    # one pair: tau log sigmoid((s+ - s- - m)/tau): log sigmoid(-.1), gradient sigmoid(.1) = .524979
    Golden("conspo, one pair", "conspo", one_token([-0.4, -0.5], **labels(1, 1)), {"loss": 0.744397, "grad": each(-0.524979, 0.524979)}, {"clip": {"info_nce": {"tau": 1.0, "margin": 0.2}}}),
    # tau -> inf, two wrong: J/tau = -log 3; the mean over 2 right: each 2/3 / 2, each wrong -1/3
    Golden("conspo, no focus at a large tau", "conspo", one_token([-1.0, -0.4, -0.5, -2.0], **labels(2, 2)), {"loss": 1e6 * L(3.0), "grad": each(-1 / 3, -1 / 3, 1 / 3, 1 / 3)},
           {"clip": {"info_nce": {"tau": 1e6}}}),
    # the margin grows over the run: at progress .4 it is .2
    Golden("conspo, the margin grows", "conspo", one_token([-0.4, -0.5], **labels(1, 1), progress=0.4), {"loss": 10 * L(1 + E(0.01)), "grad": each(-0.5025, 0.5025)}, atol=6e-6),
    # a prompt without wrong answers is left out of the mean
    Golden("conspo, a prompt left out", "conspo", one_token([-0.4, -0.5, -1.0, -1.0], correct=[True, False, True, True], rewards=[1, 0, 1, 1], group=[0, 0, 1, 1]), {"loss": 10 * L(1 + E(-0.01)), "grad": each(-0.4975, 0.4975, 0, 0)}, atol=6e-6),
    # ------------------------------------------------------------ ScaleRL: rewards 1,-1 | 1,1: centred +-1, 0, 0; root mean square sqrt(2/4) = .707107
    # A = +-1.414 (eps 1e-4); the dead prompt leaves the count: 3 tokens of prompt 0; w = min(r, 5), r = e^.5 and e^2 (held at 5) against the sampler
    Golden("scalerl", "scalerl", {"logps": [[-1.0, -1.0], [-1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]], "rollout_logps": [[-1.5, -3.0], [-1.0, 0], [-1, 0], [-1, 0]],
                                  "mask": [[1.0, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], "rewards": [1, -1, 1, 1], "group": [0, 0, 1, 1]},
           {"advantage": each(1.414214, -1.414214, 0, 0), "grad": [[-E(0.5) * 1.414214 / 3, -5 * 1.414214 / 3], [1.414214 / 3, 0], [0, 0], [0, 0]]}, atol=3e-3),
    Golden("scalerl, equal rewards", "scalerl", answers(1, 1, rewards=[1, 1]), {"loss": 0.0, "grad": each(0, 0)}),
]  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN, ids=[g.name for g in GOLDEN])
def test_golden(case):
    assert_golden(case)


def test_names_are_unique():
    assert len({g.name for g in GOLDEN}) == len(GOLDEN)


# ---------------------------------------------------------------- what these numbers must reject


def by_selected_tokens(self, batch):
    log_ratio = batch.logps - batch.anchor
    fallen = batch.mask * (batch.advantage >= 0) * (log_ratio.detach() <= math.log(self.threshold))
    return Term(-log_ratio, self.coef, TokenMean(), mask=fallen)


def detached_ratio(self, batch):
    r = (batch.logps - batch.anchor).exp().detach()
    return Term(r * batch.logps * batch.correct.unsqueeze(1), self.coef)


def per_token_square(self, batch):
    return Term((batch.logps - batch.anchor) ** 2, self.coef)


def on_kept_rows(self, scored):
    kept = select_top(self, scored)
    return kept.with_(in_baseline=kept.keep)


select_top = select_variance.TopAdvantage.__call__

MUTANTS = [
    # atlas: "averaging over selected tokens gives -0.5"
    ("search-agent-po, the term", regularizers_group.FallenTokens, by_selected_tokens),
    # atlas: "r detached would always have derivative -r and only push down"
    ("r1-zero-div, the term", regularizers_group.CorrectEntropy, detached_ratio),
    # "token and sequence forms differ by the cross terms"
    ("kimi-k1-5, two tokens", regularizers_group.SquaredLogRatio, per_token_square),
    # "recomputing A on the kept gives 0"
    ("cppo-pruning, two of eight", select_variance.TopAdvantage, on_kept_rows),
    # "adding PPO's min restores gradients outside the interval"
    ("kimi-k3, r 0.7, A 1.0", clip_squared.RatioClamp, lambda s, lr, a, b: PPOClip(1 - s.low, s.high - 1)(lr, a, b)),
    ("kimi-k3, r 1.5, A -1.0", clip_squared.RatioClamp, lambda s, lr, a, b: PPOClip(1 - s.low, s.high - 1)(lr, a, b)),
    # an importance ratio where there is none
    ("kimi-k1-5", clip_squared.LogLinear, lambda s, lr, a, b: Clipped(lr.exp() * a)),
]


@pytest.mark.parametrize("name, where, broken", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_the_numbers_reject_a_wrong_formula(monkeypatch, name, where, broken):
    [case] = [g for g in GOLDEN if g.name == name]
    monkeypatch.setattr(where, "__call__", broken)
    with pytest.raises(AssertionError):
        assert_golden(case)


def test_a_soft_maximum_without_its_mean_has_another_value_and_the_same_gradient(monkeypatch):
    # the seed's form: tau logsumexp alone is larger by tau log|N| = 10 log 3
    [case] = [g for g in GOLDEN if g.name == "disco, tau 10"]
    plain = clip_contrast.log_sum_exp
    monkeypatch.setattr(clip_contrast, "log_sum_exp", lambda s, rows: plain(s, rows) + rows.sum(1).log())
    logps = torch.tensor(case.given["logps"], dtype=torch.float64, requires_grad=True)
    loss = variant("disco").loss(TokenBatch.from_tensors(**{**case.given, "logps": logps}))
    assert float(loss.loss.detach()) == pytest.approx(case.expect["loss"] + 10 * L(3), abs=1e-6)
    grad = torch.autograd.grad(loss.loss, logps)[0]
    assert grad.flatten().tolist() == pytest.approx([x for [x] in case.expect["grad"]], abs=1e-6)


def test_the_optimum_of_the_regularised_problem_is_where_the_residual_vanishes():
    # pi_old = (.5, .3, .2), r = (1, 0, 0), tau = .5: pi* ~ pi_old e^(r/tau) = (.880797, .071522, .047681), tau log Z = .716890;
    # there r - tau log Z - tau log(pi*/pi_old) = 0 for every answer: the expected gradient over pi_old is 0
    old = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reward = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    best = old * (reward / 0.5).exp()
    z = best.sum()
    best = best / z
    assert best.tolist() == pytest.approx([0.880797, 0.071522, 0.047681], abs=6e-7)
    assert float(0.5 * z.log()) == pytest.approx(0.716890, abs=6e-7)
    v = variant("mirror-descent", regularizers=[{"squared_log_ratio": {"coef": 0.25}}])

    def gradients(advantage):
        logps = best.log().unsqueeze(1).requires_grad_()
        batch = TokenBatch.from_tensors(logps, old_logps=old.log().unsqueeze(1), advantage=advantage)
        return torch.autograd.grad(v.loss(batch).loss, logps)[0].flatten()

    assert gradients(reward - 0.5 * z.log()).tolist() == pytest.approx([0.0] * 3, abs=1e-12)
    assert gradients(reward - (old * reward).sum()).abs().max() > 0.05, "the mean reward is not tau log Z"


def test_an_empty_answer_is_neither_right_nor_wrong():
    # the wrong answer has no token in the loss: nothing to compare with
    batch = TokenBatch.from_tensors([[-1.0], [-2.0]], mask=[[1.0], [0.0]], **labels(1, 1))
    loss = variant("disco").loss(batch)
    assert float(loss.terms["policy"]) == 0.0


def test_every_part_of_scalerl_is_on():
    v = variant("scalerl")
    parts = {
        "select": "zero-variance-filter",
        "advantage": "batch-std-advantage",
        "aggregate": "prompt-mean-aggregation",
        "clip": "cispo",
    }
    for seam, name in parts.items():
        assert getattr(v, seam) == getattr(variant(name), seam)


def test_masked_share_is_reported():
    batch = TokenBatch.from_tensors(**MISMATCH)
    edits = {"weight": [{"sampler_correction": {"mode": "token_mask", "min": 0.8, "max": 2.0}}]}
    assert variant("mis-icepop", **edits).loss(batch).metrics["weight/sampler_correction_zeros"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("bounds", [(1.0, 1.2), (0.2, 0.9)])
def test_a_clamp_that_masks_on_policy_tokens_is_refused(bounds):
    with pytest.raises(VariantError, match="low < 1 < high"):
        clip_squared.RatioClamp(*bounds)
