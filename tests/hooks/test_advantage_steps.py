"""Step rewards: the atlas numbers, a loop reference over ragged steps, and a process reward model that trains."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from tests.trainer import toy
from tests.trainer.forked import run_forked
from tests.trainer.test_invariance import Rollout
from trl_variants import Scored, VariantError
from trl_variants.hooks.advantage_steps import StepRewards
from trl_variants.rewards import ProcessRewardModel
from trl_variants.rewards.process_model import step_ends, token_at
from trl_variants.trainer.token_rewards import summed


def scored(rows, group=None, mask=None) -> Scored:
    """Rows of one value per token, None where no step ends."""
    values = torch.tensor([[x or 0.0 for x in r] for r in rows], dtype=torch.float64)
    steps = torch.tensor([[float(x is not None) for x in r] for r in rows], dtype=torch.float64)
    mask = torch.ones_like(values) if mask is None else torch.tensor(mask, dtype=torch.float64)
    total = values.sum(1)
    total[steps.sum(1) == 0] = math.nan
    return Scored(
        total.unsqueeze(1),
        torch.ones(1, dtype=torch.float64),
        torch.tensor(group or [0] * len(rows)),
        tokens={"mask": mask, "steps": steps},
        token_rewards=values,
        spread=True,
    )


O1, O2 = [None, 1.0, None, 0.0, None, None], [1.0, None, None, 1.0, None, 1.0]


def near(values):
    return pytest.approx(values, abs=6e-5)


def test_the_numbers_of_the_atlas():
    # pool 1,0,1,1,1: mean .8, unbiased std .4472: z = .4472, -1.7889. o1: -1.3416 up to its first end, -1.7889 up to
    # its second, then nothing; o2: 3, 2, 1 times .4472
    got = StepRewards(eps=0.0)(scored([O1, O2])).tolist()
    assert got[0] == near([-1.3416, -1.3416, -1.7889, -1.7889, 0.0, 0.0])
    assert got[1] == near([1.3416, 0.8944, 0.8944, 0.8944, 0.4472, 0.4472])
    biased = StepRewards(eps=0.0, ddof=0)(scored([O1, O2])).tolist()
    assert biased[0] == near([-1.5, -1.5, -2.0, -2.0, 0.0, 0.0])
    assert biased[1] == near([1.5, 1.0, 1.0, 1.0, 0.5, 0.5]), "normalised per answer it would be all 0"
    halved = StepRewards(eps=0.0, ddof=0, per_step=True)(scored([O1, O2])).tolist()
    assert halved[0] == near([-0.75, -0.75, -1.0, -1.0, 0, 0]) and halved[1][0] == near(0.5)


def test_equals_the_loop_reference():
    g = torch.Generator().manual_seed(4)
    rows = [
        [float(torch.rand(1, generator=g)) if torch.rand(1, generator=g) < 0.4 else None for _ in range(9)]
        for _ in range(7)
    ]
    rows[2] = [None] * 9  # no step: unscorable
    mask = (torch.rand(7, 9, generator=g) < 0.8).double().tolist()
    group = [5, 2, 5, 2, 5, 2, 8]
    h = StepRewards()
    got = h(scored(rows, group, mask)).tolist()
    for i, row in enumerate(rows):
        pool = [
            x
            for j, r in enumerate(rows)
            if group[j] == group[i]
            for t, x in enumerate(r)
            if x is not None and mask[j][t]
        ]
        m = sum(pool) / len(pool) if pool else 0.0
        sd = math.sqrt(sum((x - m) ** 2 for x in pool) / (len(pool) - 1)) if len(pool) > 1 else math.inf
        for t in range(9):
            later = [x for k, x in enumerate(row) if k >= t and x is not None and mask[i][k]]
            assert got[i][t] == pytest.approx(sum((x - m) / (sd + h.eps) for x in later) * mask[i][t])


def test_equal_steps_give_nothing():
    assert not StepRewards(eps=0.0)(scored([[0.3, 0.3], [0.3, None]])).any()


def test_lists_with_none():
    ids = [[1, 2], [3, 4], [5]]
    assert summed([[None, 2.0], [None, None], None], ids) == ([2.0, None, None], [[None, 2.0], [None, None], []])
    with pytest.raises(VariantError, match="3 values for a completion of 2 tokens"):
        summed([[None, 1.0, None], [0, 0], [0]], ids)


# ---------------------------------------------------------------- the model


def test_where_steps_end():
    assert step_ends("a b\nc\n\nd", "\n") == [("a b", 4), ("c", 6), ("d", 8)]
    assert step_ends(" \n", "\n") == [] == step_ends("", "\n")
    ids = toy.tokenizer().encode("a b") + [toy.EOS]
    assert [token_at(ids, n, toy.tokenizer()) for n in (1, 2, 3, 4)] == [0, 1, 2, 3]


class Model:
    """Token classification whose label 1 has the logit of the token's id; `seen` keeps what it read."""

    device = torch.device("cpu")

    def __init__(self, outputs=2):
        self.seen, self.outputs = [], outputs

    def __call__(self, input_ids, attention_mask):
        rows = zip(input_ids.tolist(), attention_mask.sum(1).tolist(), strict=True)
        self.seen += [toy.tokenizer().decode(row[:n]) for row, n in rows]
        places = attention_mask.cumsum(1).double()
        logits = torch.stack([torch.zeros_like(places), places], -1)
        return SimpleNamespace(logits=logits[..., -self.outputs :])


def prm(model, **more):
    return ProcessRewardModel(model, toy.tokenizer(), toy.tokenizer(), separator=" ", **more)


def test_values_stand_on_the_tokens_that_end_a_step():
    model = Model(outputs=1)
    ids = [toy.tokenizer().encode("ab cd e") + [toy.EOS], toy.tokenizer().encode("a"), [toy.EOS]]
    got = prm(model, batch_size=2)(["12", "3", "4"], None, ids)
    # "12" + "ab " ends at place 5, "cd " at 8, "e " at 10; the policy's own tokens 2, 5 and 6
    assert got[0] == [None, None, 5.0, None, None, 8.0, 10.0, None]
    assert got[1] == [3.0] and got[2] == [None]
    assert model.seen == ["12ab cd e ", "3a ", "4"]
    assert prm(Model())(["12"], None, ids[:1])[0][2] == pytest.approx(1 / (1 + math.exp(-5)))


def test_steps_that_are_cut_away_have_no_value():
    ids = [toy.tokenizer().encode("ab cd")]
    assert prm(Model(1), max_length=3)(["12"], None, ids)[0] == [None, None, None, None, 3.0]


def test_wrong_arguments_are_named():
    with pytest.raises(VariantError, match="separator"):
        ProcessRewardModel(Model(), toy.tokenizer(), toy.tokenizer(), separator="")
    with pytest.raises(VariantError, match="token ids"):
        prm(Model())(["1"], ["a"])


def test_it_trains_with_process_supervision_beside_an_outcome_reward():
    run = toy.train(variant="grpo-ps", rewards=[toy.digits, prm(Model())], max_steps=2, num_iterations=1)
    assert len(run.gradients) == 2 and all(torch.isfinite(g).all() and g.norm() > 0 for g in run.gradients)
    plain = toy.train(variant="grpo", rewards=[toy.digits, prm(Model())], max_steps=1, num_iterations=1)
    assert toy.apart(run.gradients[0], plain.gradients[0]) > 1e-3


def test_groups_of_steps_may_straddle_processes():
    def gradients(rows: int) -> list[torch.Tensor]:
        shape = dict(gradient_accumulation_steps=1, steps_per_generation=1, num_iterations=1, num_generations=8)
        out = toy.train(
            variant="grpo-ps",
            rewards=[prm(Model())],
            dtype=torch.float64,
            per_device_train_batch_size=rows,
            trainer_arguments={"rollout_func": Rollout()},
            max_steps=2,
            **shape,
        )
        return out.gradients

    for rank in run_forked(lambda rank: gradients(4), ranks=2):
        for mine, whole in zip(rank, gradients(8), strict=True):
            assert toy.apart(mine, whole) < 1e-6
