"""Golden numbers of the methods with trajectories from elsewhere, and the wrong formulas they must reject."""

from __future__ import annotations

import math

import pytest
import torch

from trl_variants import Scored, TokenBatch, VariantError, variant
from trl_variants.divergence import divergence
from trl_variants.hooks.advantage_traces import PrefixBaseline, StudentHistory
from trl_variants.hooks.credit_prefix import PrefixEntropy
from trl_variants.hooks.rollouts_dynamic import DynamicSampling
from trl_variants.hooks.rollouts_traces import PrefixSplice

L = math.log


def close(got, wanted, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=torch.float64), torch.as_tensor(wanted, dtype=torch.float64), rtol=0, atol=tolerance
    )


def numbers(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# ---------------------------------------------------------------- luffy

# a trace with p = (.01, .9), A = .5; own tokens lp = (-.5, -1), lp_old = (-.6, -1.2), A = -.5
LUFFY = {
    "old_logps": numbers([0.0, 0.0], [-0.6, -1.2]),
    "origin": torch.tensor([[1, 1], [0, 0]]),
    "advantage": torch.tensor([0.5, -0.5], dtype=torch.float64),
    "max_completion_length": 2,
}


def luffy(**edits):
    logps = numbers([L(0.01), L(0.9)], [-0.5, -1.0]).requires_grad_()
    loss = variant("luffy", regularizers=[], **edits).loss(TokenBatch.from_tensors(logps=logps, **LUFFY))
    return -loss.loss.detach(), -torch.autograd.grad(loss.loss, logps)[0]


def test_luffy_objective_and_gradient():
    # Z = 2 rows * 2 tokens. off: .5/4 (.01/.11 + .9/1.0) = .125 (.090909 + .9) = .123864
    # on: -.5/4 (e^.1 + e^.2) = -.125 (1.105171 + 1.221403) = -.290822; A < 0: PPO's min lets 1.2214 through
    # d off = .125 gamma p / (p + gamma)^2 = .125 (.082645, .09); d on = -.125 (1.105171, 1.221403)
    for clip in ({"origin_shaped": {"inner": "ppo"}}, {"origin_shaped": {}}):
        value, gradient = luffy(clip=clip)
        close(value, -0.166958)
        close(gradient, [[0.010331, 0.011250], [-0.138146, -0.152675]])


def test_luffy_by_the_response_length_of_the_script():
    # sum / 8192: -.667832 / 8192 = -8.15225e-05
    value, _ = luffy(aggregate={"constant": {"length": 4096}})
    close(value, -8.15225e-05, 1e-10)


def test_a_generic_ratio_on_the_trace_is_not_luffy():
    # with rho = pi / pi_old and lp_old = 0 ("teacher probability 1") the rare token has factor p = .01, gradient .01 A
    _, gradient = luffy(clip="none")
    close(gradient[0], [0.125 * 0.01, 0.125 * 0.9])
    with pytest.raises(AssertionError):
        close(gradient[0], [0.010331, 0.011250])


def test_luffy_baseline_is_the_mixed_group_s():
    # seven wrong answers and a right trace: mean 1/8, A = -.125 each and +.875; over own rows alone it would be 0 and 1
    scored = Scored(numbers(*[[0.0]] * 7, [1.0]), torch.ones(1).double(), torch.zeros(8, dtype=torch.long))
    close(variant("luffy").advantage(scored), [-0.125] * 7 + [0.875])


# ---------------------------------------------------------------- prefix-rft


def test_prefix_share_falls_by_a_cosine():
    # low = .95 (1 + cos(pi s/100)) / 2
    low = PrefixSplice(high=0.95, end=0.0).low
    close([low(s / 100) for s in (0, 25, 50, 75, 100)], [0.95, 0.810876, 0.475, 0.139124, 0.0])


def test_prefix_length_is_floored_and_leaves_a_token_out():
    length = PrefixSplice(min_tokens=0).length
    # floor(.95 10) = 9, floor(.39 10) = 3 (rounding would give 4), q = 1 leaves the last token out, q = 0 gives nothing
    assert [length(10, q) for q in (0.95, 0.39, 1.0, 0.0)] == [9, 3, 9, 0]
    assert PrefixSplice(min_tokens=4).length(10, 0.1) == 4 and PrefixSplice(min_tokens=40).length(10, 0.1) == 9
    assert length(1, 0.9) == 0, "nothing is left of a demonstration of one token"


def hybrid_group(*origins: list[int]) -> Scored:
    rows = 7 + len(origins)
    origin = torch.tensor([[0, 0, 0]] * 7 + [list(o) for o in origins])
    return Scored(
        numbers([1.0], *[[0.0]] * 6, *[[1.0]] * len(origins)),
        torch.ones(1).double(),
        torch.zeros(rows, dtype=torch.long),
        tokens={"mask": torch.ones(rows, 3).double(), "origin": origin},
    )


def test_prefix_advantages():
    # own rewards 1, 0 x 6: mean 1/7. own .857143 / -.142857; prefix 1 - 1/7; what follows 1
    advantage = PrefixBaseline()(hybrid_group([3, 3, 0]))
    close(advantage[0], [0.857143] * 3)
    close(advantage[1:7], [[-0.142857] * 3] * 6)
    close(advantage[7], [0.857143, 0.857143, 1.0])
    # one baseline over all eight rows would give 1 - 2/8 = .75; the authors' second estimator 0 and -1/7
    for wrong in ([0.75] * 3, [-0.142857, -0.142857, 0.0]):
        with pytest.raises(AssertionError):
            close(advantage[7], wrong)


def test_two_hybrid_rows_share_their_demonstration():
    # (1 - 1/7) / 2 on the prefix of each
    advantage = PrefixBaseline()(hybrid_group([3, 3, 0], [3, 0, 0]))
    close(advantage[7:], [[0.428571, 0.428571, 1.0], [0.428571, 1.0, 1.0]])


def test_without_a_prefix_it_is_the_group_mean():
    scored = hybrid_group([0, 0, 0])
    close(PrefixBaseline()(scored)[:, 0], variant("dr-grpo").advantage(scored))


def test_prefix_tokens_of_low_entropy_lose_their_advantage():
    # five prefix tokens .1 .2 .3 .4 .5 over two rows; keep .4: the floor(.6 5) = 3 lowest get 0
    batch = TokenBatch.from_tensors(
        logps=numbers([-1.0] * 4, [-1.0] * 4),
        entropy=numbers([0.1, 0.5, 0.3, 0.01], [0.4, 0.2, 0.02, 0.03]),
        origin=torch.tensor([[3, 3, 3, 0], [3, 3, 0, 0]]),
    )
    kept = PrefixEntropy(keep=0.4)(numbers([2.0], [3.0]), batch)
    close(kept, [[0, 2.0, 0, 2.0], [3.0, 0, 3.0, 3.0]])


# ---------------------------------------------------------------- hdpo


def test_hdpo_divergence():
    # teacher (.6, .3, .06, .04), student (.2, .3, .1, .4), the teacher's two renormalised to (2/3, 1/3, 0, 0):
    # .066714 on the two ids and .5 ln2/2 on the student's other half; the paper's ln2 without the half would be .413288
    spec = variant("hdpo").regularizers[0].divergences[0]
    two = type(spec)(**{**vars(spec), "top_k": 2})
    student = numbers([0.2, 0.3, 0.1, 0.4]).log()
    value = float(divergence(student, numbers([0.6, 0.3, 0.06, 0.04]).log(), two))
    assert value == pytest.approx(0.066714 + 0.5 * math.log(2) / 2, abs=1e-6)
    assert value != pytest.approx(0.413288, abs=1e-3)


def hdpo(coef: float, compared: float = 0.3):
    """Three failed rows of one cliff group, and a hinted answer in the place of a fourth; a mixed group."""
    term = {"teacher_kl": {"coef": coef, "divergence": "jsd", "estimator": "exact", "top_k": 64, "rest": "student",
                           "written_by": "other", "normaliser": "gated", "own_token_mean": True}}  # fmt: skip
    v = variant("hdpo", regularizers=[term])
    logps = torch.full((8, 3), -1.0, dtype=torch.float64, requires_grad=True)
    shown = torch.full((8, 3), compared, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(8, 3).double()
    mask[3, 2] = 0
    origin = torch.zeros(8, 3, dtype=torch.long)
    origin[3] = 1
    batch = TokenBatch.from_tensors(
        logps=logps, mask=mask, origin=origin, group=[0] * 4 + [1] * 4, rewards=[0, 0, 0, 1.0, 1, 0, 0, 0],
        teacher_logps=torch.full((8, 3), -1.0), divergences={v.regularizers[0].divergences[0].key: shown},
    )  # fmt: skip
    batch.scored.in_baseline = torch.arange(8) != 3  # as the rollouts hook says
    loss = v.loss(batch)
    return loss, torch.autograd.grad(loss.loss, [logps, shown])


def test_hdpo_learns_from_the_hinted_row_by_divergence_alone():
    loss, (policy, shown) = hdpo(0.01)
    # cliff group: all own rows 0, leave-one-out 0; the hinted row is in no baseline and has no advantage
    assert not loss.advantage[:4].any() and not policy[:4].any() and policy[4:].any()
    # mean over the two tokens of kept hinted answers: .01 / 2 each
    close(shown, [[0] * 3] * 3 + [[0.005, 0.005, 0]] + [[0] * 3] * 4)
    close(loss.terms["teacher_kl"], 0.01 * 0.3)


def test_hdpo_without_its_term_is_the_policy_term():
    with_term, (policy, _) = hdpo(0.01)
    without, (alone, _) = hdpo(0.0)
    close(without.loss, with_term.terms["policy"])
    close(policy, alone)


# ---------------------------------------------------------------- gap 1


def traced(rewards: list[float], origin: list[int], keys: str = "x") -> Scored:
    return Scored(
        numbers(*[[r] for r in rewards]),
        torch.ones(1).double(),
        torch.zeros(len(rewards), dtype=torch.long),
        origin=torch.tensor(origin),
        prompt_key=[keys] * len(rewards),
    )


def test_gap1_history_teaches_where_the_group_mean_is_silent():
    # all four rows the teacher's and right: R - p = 1 - .25; the group mean would give 0
    scored = traced([1.0] * 4, [1] * 4)
    close(StudentHistory()(scored, state={"x": 0.25}), [0.75] * 4)
    close(variant("grpo").advantage(scored), [0.0] * 4)


def test_gap1_history_follows_the_student_alone():
    # own rows right 1 of 2: p = .9 * .25 + .1 * .5 = .275; the teacher's two right rows do not count
    hook = StudentHistory(rate=0.1)
    close(hook.update({"x": 0.25}, traced([1, 0, 1, 1], [0, 0, 1, 1]))["x"], 0.275)
    assert hook.update({"x": 0.25}, traced([1, 1], [1, 1])) == {"x": 0.25}
    two = StudentHistory(capacity=1).update({"x": 0.25}, traced([1, 0], [0, 0], keys="y"))
    assert list(two) == ["y"], "the prompt not tried for longest goes"


def test_gap1_with_the_dial_at_zero_is_grpo():
    scored = traced([1.0, 0.0, 0.0, 1.0, 1.0], [0] * 5)
    gap1, grpo = variant("gap1-ta-substitution-endpoint"), variant("grpo")
    close(gap1.advantage(scored, state={"x": 0.9}), grpo.advantage(scored), 0)
    given = {"logps": numbers([-0.5, -1.0], [-0.7, -1.5]), "old_logps": numbers([-0.6, -1.2], [-0.7, -1.0]),
             "ref_logps": numbers([-0.5, -0.9], [-0.6, -1.0]), "advantage": [1.0, -1.0]}  # fmt: skip
    for origin in (None, torch.zeros(2, 2, dtype=torch.long)):
        losses = [v.loss(TokenBatch.from_tensors(**given, origin=origin)).loss for v in (gap1, grpo)]
        close(*losses, 0)


def test_gap1_token_weights_and_the_sequence_form():
    # log u = (.5, -.3, 1.2): sg[min(u, 2)] = (1.648721, .740818, 2); exp(mean) = e^(1.4/3) = 1.594670
    given = {"rollout_logps": numbers([-1.5, -0.7, -2.2]), "origin": torch.ones(1, 3, dtype=torch.long),
             "advantage": [1.0], "ref_logps": numbers([-1.0] * 3)}  # fmt: skip
    weights = {}
    for form in ("truncated", "sequence"):
        logps = numbers([-1.0, -1.0, -1.0]).requires_grad_()
        clip = {"origin_shaped": {"form": form, "behaviour": "known", "cap": 2.0}}
        v = variant("gap1-ta-substitution-endpoint", clip=clip, aggregate="sequence_sum", regularizers=[])
        loss = v.loss(TokenBatch.from_tensors(logps=logps, **given)).loss
        weights[form] = -torch.autograd.grad(loss, logps)[0]
    close(weights["truncated"], [[1.648721, 0.740818, 2.0]])
    close(weights["sequence"], [[1.594670] * 3])  # every token stands for the row: 3 * 1.594670 / 3


def test_effective_sample_size_of_the_full_product():
    # student (.6, .4), teacher (.9, .1): E_T[u^2] = .36/.9 + .16/.1 = 2, 1/2 a token, 2^-20 for twenty
    per_token = 1 / (0.6**2 / 0.9 + 0.4**2 / 0.1)
    assert per_token == pytest.approx(0.5) and per_token**20 == pytest.approx(9.536743e-07)


# ---------------------------------------------------------------- dapo


def of_four(*rewards, shaped=None) -> Scored:
    columns = [list(rewards)] if shaped is None else [list(rewards), list(shaped)]
    matrix = torch.tensor(columns, dtype=torch.float64).T
    return Scored(matrix, torch.ones(len(columns)).double(), torch.arange(len(rewards)) // 4)


def test_dapo_keeps_groups_that_are_neither_all_right_nor_all_wrong():
    # 0, 1, 3, 4 of 4 right
    scored = of_four(0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1)
    assert DynamicSampling().keeps(scored)[::4].tolist() == [False, True, True, False]


def test_dapo_filters_on_correctness_and_not_on_the_shaped_reward():
    # all right, a length penalty -.5, -.25, 0, 0 spreads the reward .5 .75 1 1: std .239357, and advantages
    scored = of_four(1, 1, 1, 1, shaped=[-0.5, -0.25, 0, 0])
    close(variant("dapo").advantage(scored), [-1.305, -0.261, 0.783, 0.783], 1e-3)
    assert not DynamicSampling().keeps(scored).any()
    assert DynamicSampling(by="reward").keeps(scored).all(), "the filter by score keeps it"


def test_a_row_nobody_could_score_makes_no_group_mixed():
    scored = of_four(math.nan, 1, 1, 1)
    assert not DynamicSampling().keeps(scored).any()


def test_prefix_and_trace_parameters_are_checked():
    for hook in (
        {"prefix_splice": {"high": 1.5}},
        {"traces": {"share": -0.1}},
        {"dynamic_sampling": {"max_rounds": 0}},
    ):
        with pytest.raises(VariantError):
            variant("grpo", rollouts=[hook])


def test_clip_higher_is_dapo_without_its_sampling():
    # ratios 1.25, 1.35 | .75 at .2/.28, advantages 1, 1, -1: 1.25 + 1.28 - .8 over three tokens
    given = {"logps": numbers([-1.0], [-1.0], [-1.0]), "advantage": [1.0, 1.0, -1.0],
             "old_logps": numbers([-1 - L(1.25)], [-1 - L(1.35)], [-1 - L(0.75)])}  # fmt: skip
    plain, whole = variant("clip-higher"), variant("dapo")
    close(plain.loss(TokenBatch.from_tensors(**given)).loss, -(1.25 + 1.28 - 0.8) / 3)
    assert [h.hook_name for h in whole.rollouts] == ["dynamic_sampling"] and not plain.rollouts
    assert whole.with_(rollouts=[]).to_mapping() == {**plain.to_mapping(), "name": "dapo"}


def test_prefix_rft_surrogate():
    # hybrid row: A = 6/7 on a kept prefix token and 1 after it; its prefix token of low entropy gets 0. own row: -1/7,
    # ratio e^2 > 3: dual clip 3 * -1/7. token mean over four tokens, no entropy bonus
    batch = TokenBatch.from_tensors(
        logps=numbers([-1.0, -1.0, -1.0], [-1.0, 0, 0]),
        old_logps=numbers([-1.0, -1.0, -1.0], [-3.0, 0, 0]),
        mask=[[1, 1, 1], [1, 0, 0]],
        entropy=numbers([0.1, 0.9, 0.05], [0.2, 0, 0]),
        origin=torch.tensor([[3, 3, 0], [0, 0, 0]]),
        advantage=numbers([6 / 7, 6 / 7, 1.0], [-1 / 7, -1 / 7, -1 / 7]),
    )
    loss = variant("prefix-rft", regularizers=[], credit=[{"prefix_entropy": {"keep": 0.5}}]).loss(batch)
    close(loss.advantage[0], [0.0, 6 / 7, 1.0])
    close(loss.loss, -(0 + 6 / 7 + 1 - 3 / 7) / 4)
