"""Embeddings in the trainer: own rows once, whole groups wherever their rows lie, one error for all processes."""

from __future__ import annotations

import pytest
import torch

from tests.trainer import toy
from tests.trainer.forked import run_forked
from tests.trainer.test_invariance import Rollout, scores
from trl_variants import VariantError, VariantGRPOTrainer, variant
from trl_variants.rewards import embeddings
from trl_variants.rewards.embeddings import MINILM, characters

DRA = variant("dra-grpo", regularizers=[])
DSDR = variant("dsdr", regularizers=[{"distinct_entropy": {"coef": 0.1}}])


def run(v, rows=8, **more):
    """Two optimizer steps on 16 rows each; groups of 8 straddle processes that hold 4 rows a micro-batch."""
    one_group = dict(num_generations=8, num_iterations=1, max_steps=2, learning_rate=1e-2)
    return toy.train(
        VariantGRPOTrainer,
        variant=v,
        dtype=torch.float64,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        rewards=scores,
        trainer_arguments={"rollout_func": Rollout()},
        **(one_group | more),
    )


@pytest.mark.parametrize("v", [DRA, DSDR], ids=["dra", "dsdr"])
def test_groups_that_straddle_processes_are_whole(v):
    # 8 rows a step: one group of 8, four rows of it on each of two processes. A density over the rows of one process
    # would be that of half a group
    alone = run(v)
    [one, two] = run_forked(lambda rank: run(v, rows=4).gradients, ranks=2)
    for a, b, whole in zip(one, two, alone.gradients, strict=True):
        assert toy.apart(a, whole) < 1e-6 and toy.apart(b, whole) < 1e-6


def test_encoded_once_and_only_where_a_hook_reads_it(monkeypatch):
    calls = []

    def counted(texts):
        calls.append(len(texts))
        return characters(texts)

    monkeypatch.setitem(embeddings._REGISTERED, MINILM, counted)
    run(DSDR, num_iterations=2, max_steps=4)  # two hooks, two generations, two updates on each
    assert len(calls) == 2
    run(variant("diver"))
    assert len(calls) == 2


def broken(texts):
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0:
        return characters(texts)
    raise RuntimeError("no model today")


def test_a_failing_encoder_stops_every_process(monkeypatch):
    monkeypatch.setitem(embeddings._REGISTERED, MINILM, broken)
    with pytest.raises(VariantError, match="encoder .* failed: no model today"):
        run(DRA)

    def caught(rank):
        with pytest.raises(VariantError, match="process 1: the sentence encoder .* failed: no model today"):
            run(DRA, rows=4)
        return "stopped"

    assert run_forked(caught, ranks=2) == ["stopped"] * 2
