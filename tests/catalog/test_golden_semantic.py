"""Golden numbers of the methods that compare answers by embeddings; the vectors are written in the texts."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from tests.catalog.test_golden import answers
from trl_variants import TokenBatch, Variant, variant
from trl_variants.hooks.rewards_diversity import semantic_diversity
from trl_variants.hooks.rewards_semantic import DistinctEntropy
from trl_variants.rewards.embeddings import encoder


@encoder("written vectors")
def written(texts):
    return torch.tensor([[float(x) for x in t.split("|")[0].split()] for t in texts], dtype=torch.float64)


COPIES = ["1 0|a", "1 0|b", "0 1|c"]
GRADED = ["1 0", ".8 .6", "0 1"]


def dra(texts, rewards, **more) -> tuple[list[float], Variant, TokenBatch]:
    v = variant("dra-grpo", rewards=[{"semantic_density": {"encoder": "written vectors"} | more}], regularizers=[])
    batch = TokenBatch.from_tensors(**doubles(answers(*[1] * len(texts), rewards=rewards, texts=texts)))
    return v.rewards[0](batch.scored).tolist(), v, batch


def doubles(given):
    return given | {"logps": torch.tensor(given["logps"], dtype=torch.float64)}


def near(values, atol=6e-5):
    return pytest.approx(values, abs=atol)


def test_near_copies_share_one_credit():
    # sums 2, 2, 1: w = .5, .5, 1; mean 2/3, std sqrt((1/36 + 1/36 + 1/9) / 2) = .288675: -.16667 / .288775 = -.5772
    shaped, v, batch = dra(COPIES, [1.0, 1.0, 1.0])
    assert shaped == near([0.5, 0.5, 1.0])
    out = v.loss(batch)
    assert out.advantage.squeeze(1).tolist() == near([-0.5772, -0.5772, 1.1543])
    assert out.loss.item() == near(-sum([-0.5772, -0.5772, 1.1543]) / 3)


def test_cosines_between_0_and_1():
    # sums 1.8, 2.4, 1.6
    assert dra(GRADED, [1.0, 1.0, 1.0])[0] == near([0.5556, 0.4167, 0.625])


def test_negative_rewards_punish_the_distinct_answer_and_warn():
    with pytest.warns(UserWarning, match="give rewards >= 0"):
        assert dra(COPIES, [-1.0, -1.0, -1.0])[0] == near([-0.5, -0.5, -1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dra(COPIES, [0.0, 1.0, 1.0])


def test_opposite_answers_do_not_explode():
    # 1 + cos = 1 - 1 = 0 would be a weight of 1e6
    assert dra(["1 0", "-1 0"], [1.0, 1.0])[0] == near([1.0, 1.0])
    assert dra(["1 0", "-1 0"], [1.0, 1.0], floor=0.5)[0] == near([2.0, 2.0])


def test_an_answer_the_encoder_sees_nothing_in_is_like_no_other():
    assert dra(["0 0", "1 0", "1 0"], [1.0, 1.0, 1.0])[0] == near([1.0, 0.5, 0.5])


def test_unscorable_rows_crowd_nobody():
    shaped, _, _ = dra(["1 0|a", "1 0|b", "1 0|c"], [1.0, None, 1.0])
    assert shaped[::2] == near([0.5, 0.5]) and math.isnan(shaped[1])


def test_semantic_distance():
    z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    assert semantic_diversity(z).tolist() == near([0.75, 0.5, 0.75])
    assert semantic_diversity(z[:1]).tolist() == [0.0]


def dsdr(texts, rewards, logps, **local) -> tuple[Variant, TokenBatch]:
    local = {"encoder": "written vectors", "coef": 1.0, **local}
    v = variant("dsdr", rewards=[], regularizers=[{"distinct_entropy": local}])
    lp = torch.tensor(logps, dtype=torch.float64, requires_grad=True)
    return v, TokenBatch.from_tensors(lp, rewards=rewards, texts=texts)


def test_the_local_term_and_its_gradient():
    # db = .2, .4 and tau 5: e^1, e^2 -> w = .2689, .7311. mean_t(-r lp) = 1.5, .5: J = .4034 + .3655 = .7689.
    # dJ/dlp = -w/2 (1 + lp): 0, .1345; -.1828 twice
    lp = torch.tensor([[-1.0, -2.0], [-0.5, -0.5]], dtype=torch.float64, requires_grad=True)
    w = torch.softmax(5 * torch.tensor([0.2, 0.4], dtype=torch.float64), 0)
    assert w.tolist() == near([0.2689, 0.7311])
    batch = TokenBatch.from_tensors(lp, advantage=[0.0, 0.0], extra={"distinct_weight": w})
    out = variant("dsdr", rewards=[], regularizers=[DistinctEntropy(coef=1.0)]).loss(batch)
    assert -out.loss.item() == near(0.7689)
    out.loss.backward()
    assert (-lp.grad).flatten().tolist() == near([0.0, 0.1345, -0.1828, -0.1828])


def test_weights_are_over_the_right_answers_of_the_whole_group():
    # D_emb = .75, .5, .75 and no formulas: d = .375, .25, .375. The middle answer is wrong: two halves
    v, batch = dsdr(["1 0", "0 1", "-1 0"], [1.0, 0.0, 1.0], [[-1.0]] * 3)
    weight = lambda v, b: v.regularizers[0].attachments(b.scored)["distinct_weight"].tolist()  # noqa: E731
    assert weight(v, batch) == near([0.5, 0.0, 0.5])
    # all right: e^(5 .375) : e^(5 .25) = 1.8682 : 1 -> .3944, .2111
    v, batch = dsdr(["1 0", "0 1", "-1 0"], [1.0, 1.0, 1.0], [[-1.0]] * 3)
    assert weight(v, batch) == near([0.3944, 0.2111, 0.3944])
    for tau, expect in ((0.0, [1 / 3] * 3), (1e4, [0.5, 0.0, 0.5])):
        v, batch = dsdr(["1 0", "0 1", "-1 0"], [1.0, 1.0, 1.0], [[-1.0]] * 3, tau=tau)
        assert weight(v, batch) == near(expect)


def test_no_right_answer_is_no_term():
    v, batch = dsdr(["1 0", "0 1"], [0.0, 0.0], [[-2.0], [-2.0]])
    out = v.loss(batch)
    assert out.loss.item() == 0.0 and not torch.autograd.grad(out.loss, batch.logps)[0].any()


def test_the_global_bonus():
    # D_emb = (1 - 0)/2 = .5, .5; formulas {a} and {} -> 1, 0: d = .75, .25, the first capped at .6; a wrong row earns 0
    spec = {"measure": "semantic_mix", "weight": 0.1, "sigma": 0.6, "encoder": "written vectors"}
    v = variant("dsdr", rewards=[{"diversity_bonus": spec}])
    given = answers(1, 1, 1, rewards=[1.0, 1.0, 0.0], texts=["1 0|$a$", "0 1|", "0 1|"], group=[0, 0, 1])
    shaped = v.rewards[0](TokenBatch.from_tensors(**doubles(given)).scored)
    assert shaped.tolist() == near([1 + 0.1 * 0.6, 1 + 0.1 * 0.25, 0.0])
