"""Terms towards a teacher in a run: what is asked, what a weight of 0 costs, and the exact KL to the reference."""

from __future__ import annotations

import pytest
import torch

from trl_variants import VariantGRPOTrainer, variant

from . import toy


def run(v, **changes) -> toy.Outcome:
    return toy.train(VariantGRPOTrainer, variant=v, dtype=torch.float64, **{"max_steps": 5, **changes})


def test_a_term_of_weight_0_is_the_same_run_bit_for_bit():
    host = variant("kdrl", regularizers=[])
    plain = run(host, plan_updates=False)  # the planner would leave out rows that a term acts on
    for fields in ({}, {"estimator": "ratio"}, {"divergence": "jsd", "estimator": "exact"}):
        other = run(host.with_(regularizers=[{"teacher_kl": {"coef": 0.0, **fields}}]), plan_updates=False)
        assert torch.equal(other.change, plain.change)
        assert other.logged("teacher/kl") and not plain.logged("teacher/kl"), "logged at weight 0 too"
    assert float(plain.change.norm()) > 0


@pytest.mark.parametrize("gate", ["wrong", "right", "all_fail"])
def test_only_the_rows_of_the_gate_are_asked(gate, monkeypatch):
    from trl_variants.teachers.local import Local

    asked, answer = [], Local.answer

    def counted(self, question):
        asked.append(question.index.tolist())
        right = question.scored.correct[question.index]
        groups = [question.scored.group == question.scored.group[i] for i in question.index.tolist()]
        fits = {
            "wrong": not right.any(),
            "right": bool(right.all()),
            "all_fail": not any(question.scored.correct[g].any() for g in groups),
        }
        assert fits[gate]
        return answer(self, question)

    monkeypatch.setattr(Local, "answer", counted)
    v = variant("kdrl", regularizers=[{"teacher_kl": {"row_gate": gate}}])
    outcome = run(v, rewards=lambda completions, **_: [float("1" in c) for c in completions], max_steps=8)
    shares = outcome.logged("teacher/rows")
    assert 0 < sum(shares) < len(shares), "some rows are asked about, and not all"
    assert sum(len(i) for i in asked) == round(sum(shares) * 16)


def test_the_exact_kl_to_the_reference_is_zero_at_first_and_holds_the_policy():
    v = variant("grpo", regularizers=[{"kl": {"coef": 50.0, "estimator": "exact"}}])
    held, free = run(v), run(variant("grpo", regularizers=[{"kl": {"coef": 0.0, "estimator": "exact"}}]))
    assert held.logged("kl")[0] == pytest.approx(0.0, abs=1e-12)
    assert held.logged("kl")[-1] > 0
    assert held.logged("kl")[-1] < free.logged("kl")[-1]
    sampled = run(variant("grpo", regularizers=[{"kl": {"coef": 50.0, "estimator": "k2"}}]))
    assert toy.apart(sampled.change, held.change) > 1e-3, "one is an expectation, the other a sample"
