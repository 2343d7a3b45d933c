"""The planner changes what is processed and nothing else: gradients with it are those without, for every method."""

from __future__ import annotations

import pytest

from trl_variants import VariantGRPOTrainer
from trl_variants.trainer import batching, forward

from . import toy
from .forked import run_forked
from .test_invariance import CASES, LIVE, TOLERANCE, Rollout, gradients, scores, worst

PACKED = 1e-5


@pytest.fixture
def tokens_only(monkeypatch):
    """Attention costs nothing, so that rows are packed and prompts shared wherever that saves a token."""
    monkeypatch.setattr(forward, "attention_cost", lambda config: 0.0)
    monkeypatch.setattr(batching, "LEAST_SAVING", 0.0)


class LongPrompts(Rollout):
    """The same completions behind prompts of different lengths, each group with one prompt."""

    def __call__(self, prompts: list, trainer) -> dict:
        out = super().__call__(prompts, trainer)
        ids = [(ids * 12)[: 8 + 3 * len(ids)] for ids in out["prompt_ids"]]
        return {**out, "prompt_ids": ids}


@pytest.mark.parametrize("case", CASES)
def test_gradient_is_the_one_without_the_planner(case):
    with_it = gradients(case, 6, 4, plan_updates=True)
    assert worst(with_it, gradients(case, 6, 4, plan_updates=False), LIVE.get(case, 3)) < TOLERANCE


def run(case: str, rollout: type = LongPrompts, rows: int = 6, accumulation: int = 4, **changes):
    name, hooks = CASES[case]
    return toy.train(
        VariantGRPOTrainer,
        variant=name,
        hooks=hooks,
        rewards=changes.pop("rewards", scores),
        per_device_train_batch_size=rows,
        num_generations=8,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,
        num_iterations=2,
        max_steps=3,
        trainer_arguments={"rollout_func": rollout()},
        **changes,
    )


# not the entropy quantile: first tokens of a prompt's completions have one entropy, and rounding decides which are in
@pytest.mark.parametrize("case", ["dapo", "grpo", "gspo", "cispo", "rloo", "disco", "adaptive-entropy", "correct-nll"])
@pytest.mark.parametrize("shared", ["auto", "none"])
def test_packed_rows_and_shared_prompts_give_the_same_gradient(case, shared, tokens_only):
    rate = {"learning_rate": 2e-6 if case in ("gspo", "adaptive-entropy") else 1e-4}
    with_it = run(case, shared_prompt=shared, **rate)
    without = run(case, plan_updates=False, **rate)
    assert worst(with_it.gradients, without.gradients) < PACKED
    assert min(with_it.logged("plan/useful_share")) > 0.8
    assert without.logged("plan/tokens_processed")[0] == 0.0  # nothing of ours ran


def test_each_layout_is_used(monkeypatch, tokens_only):
    """The comparison above is not one of padded rows with padded rows."""
    seen, stock = [], forward.compact

    def spy(rows, rectangle, pad):
        layout = stock(rows, rectangle, pad)
        seen.append((layout.position_ids is not None, layout.attention_mask is not None))
        return layout

    monkeypatch.setattr(forward, "compact", spy)
    run("dapo", shared_prompt="none")
    assert (True, False) in seen[3:] and (True, True) not in seen[3:]
    seen.clear()
    run("dapo")
    assert (True, True) in seen[3:]


def test_rows_without_signal_are_not_processed():
    def one_live_group(completions, prompts, **_):
        return [float(k % 2) if k < 8 else 1.0 for k in range(len(prompts))]

    out = run("clip-higher", Rollout, rewards=one_live_group)
    generated, trained = out.logged("plan/tokens_generated")[0], out.logged("plan/tokens_with_gradient")[0]
    assert 0 < trained < 0.5 * generated
    assert out.logged("plan/tokens_processed")[0] < generated
    plain = run("clip-higher", Rollout, rewards=one_live_group, plan_updates=False)
    assert worst(out.gradients, plain.gradients) < TOLERANCE
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "terms/policy", "loss"):
        assert out.logged(name) == pytest.approx(plain.logged(name), rel=1e-4, abs=1e-7), name
    assert max(out.logged("clip_ratio/region_mean")) > 0


@pytest.mark.parametrize("case", ["clip-higher", "disco"])
def test_a_window_without_signal_leaves_zero_gradients(case):
    """Adam's momentum goes on, as when every row is processed: gradients are zeros, not missing."""
    out = run(case, Rollout, rewards=lambda completions, **_: [1.0] * len(completions))
    assert all(g.norm() == 0 for g in out.gradients)
    assert out.logged("plan/tokens_processed")[0] > 0
    assert out.logged("plan/tokens_with_gradient")[0] == 0.0


@pytest.mark.parametrize("budget", [16, 40, 1000])
def test_the_token_budget_changes_no_gradient(budget):
    out = run("dapo", Rollout, max_tokens_per_microbatch=budget)
    steps = out.trainer.plan.batches
    assert len(steps) == 4 and (steps[0] is None) == (budget == 1000)
    assert worst(out.gradients, run("dapo", Rollout, plan_updates=False).gradients) < TOLERANCE


def test_a_budget_that_needs_more_micro_steps_warns():
    with pytest.warns(UserWarning, match="max_tokens_per_microbatch=12 gives more than 4 micro-batches"):
        run("dapo", Rollout, max_tokens_per_microbatch=12)


# --- two processes --------------------------------------------------------------------------------


def _one_rank_is_idle(rank: int) -> dict[str, tuple]:
    return {case: _uneven(case, 3) for case in ("clip-higher", "gmpo", "disco", "window-entropy")}


def _uneven(case: str, rows: int, **changes) -> tuple:
    """All rows of the second process are dead: prompt order is the data's, 24 rows of three prompts."""

    def first_group_only(completions, prompts, **_):
        pairs = zip(prompts, completions, strict=True)
        return [toy.digits([c])[0] + 0.1 * (len(c) % 2) if p == "a1" else 0.5 for p, c in pairs]

    out = run(
        case,
        Rollout,
        rows=rows,
        rewards=first_group_only,
        data=toy.dataset(("a1", "bc2", "d")),
        shuffle_dataset=False,
        learning_rate=1e-4,
        **changes,
    )
    names = ("clip_ratio/region_mean", "terms/policy", "ratio/mean", "plan/tokens_with_gradient")
    return out.gradients, {n: out.logged(n) for n in names}


def test_a_process_without_live_rows_stays_in_step():
    toy.model()
    ranks = run_forked(_one_rank_is_idle, ranks=2, timeout=300)
    for case, (wanted, metrics) in _one_rank_is_idle_alone().items():
        for rank in ranks:
            assert worst(rank[case][0], wanted) < TOLERANCE, case
            for name, values in metrics.items():
                assert rank[case][1][name] == pytest.approx(values, rel=1e-3, abs=1e-6), (case, name)


def _one_rank_is_idle_alone() -> dict[str, tuple]:
    return {case: _uneven(case, 6) for case in ("clip-higher", "gmpo", "disco", "window-entropy")}
