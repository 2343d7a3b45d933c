"""Exact divergences: in chunks as from whole logits, value and gradient, never a tensor of rows x tokens x entries."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.teachers.asked import keep_generations
from tests.trainer import toy
from trl_variants import divergence as module
from trl_variants import hook
from trl_variants.divergence import Divergence, divergence, divergence_topk, in_chunks
from trl_variants.hooks.regularizers import Term
from trl_variants.trainer.head import Head

KINDS = [
    Divergence("rkl"),
    Divergence("fkl"),
    Divergence("jsd", beta=0.3),
    Divergence("rkl", top_k=3, support="student"),
    Divergence("fkl", top_k=3, rest="renormalize"),
    Divergence("jsd", top_k=3, rest="student"),
    Divergence("fkl", entry_cap=0.05),
]


@hook("regularizers", "test_pull_together")
@dataclass(frozen=True)
class PullTogether:
    """coef * RKL(pi || pi_T), exact."""

    coef: float = 1.0
    needs = frozenset({"distribution", "teacher_logps"})
    divergences = (Divergence("rkl"),)
    math = "+ {coef} RKL"

    def __call__(self, batch) -> Term:
        return Term(batch.divergence(self.divergences[0]), self.coef)


def heads(n=700, width=8, entries=11):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    own, other = Head(draw(entries, width), None, 0.8), Head(draw(entries, width), draw(entries), 0.8)
    return own, other, draw(n, width).requires_grad_(), draw(n, width)


@pytest.mark.parametrize("spec", KINDS, ids=lambda s: s.key)
def test_chunks_equal_the_whole_in_value_and_gradient(spec):
    own, other, mine, theirs = heads()
    own.weight.requires_grad_()
    pick = torch.randn(len(mine), generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def gradients(value):
        return torch.autograd.grad((value * pick).sum(), (mine, own.weight))

    whole = divergence(own(mine), other(theirs), spec)
    parts = in_chunks(lambda h, t: divergence(own(h), other(t), spec), mine, theirs, size=64)
    torch.testing.assert_close(parts, whole, atol=1e-12, rtol=1e-12)
    for a, b in zip(gradients(parts), gradients(whole), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
        assert b.abs().sum() > 0


def test_top_k_support_of_the_atlas():
    """Student (.6,.3,.1), teacher (.06,.03,.91), its own top 2: renormalised both are (2/3, 1/3), RKL 0; with a tail
    .6 ln(.6/.06) + .3 ln(.3/.03) + .1 ln(.1/.91) = .9 ln 10 - .1 ln 9.1 = 2.072327 - 0.220827 = 1.851499.
    Teacher (.5,.3,.2), student (.6,.35,.05), the teacher's top 2: .5 ln(.5/.6) + .3 ln(.3/.35) = -0.137406, negative:
    no divergence; with a tail + .2 ln(.2/.05) = 0.139853."""
    student, teacher = torch.tensor([[0.6, 0.3, 0.1]]).double().log(), torch.tensor([[0.06, 0.03, 0.91]]).double().log()
    tail = Divergence("rkl", top_k=2, support="student")
    assert divergence(student, teacher, tail).item() == pytest.approx(1.851499, abs=1e-6)
    blind = Divergence("rkl", top_k=2, support="student", rest="renormalize")
    assert divergence(student, teacher, blind).item() == pytest.approx(0.0, abs=1e-12)
    teacher, student = torch.tensor([[0.5, 0.3, 0.2]]).double().log(), torch.tensor([[0.6, 0.35, 0.05]]).double().log()
    spec = Divergence("fkl", top_k=2)
    assert divergence(student, teacher, spec).item() == pytest.approx(0.139853, abs=1e-6)
    ids = torch.tensor([[0, 1]])
    assert divergence_topk(student, ids, teacher[:, :2], spec).item() == pytest.approx(0.139853, abs=1e-6)


class Largest(TorchDispatchMode):
    """The largest last dimension of vocabulary size seen, times its rows."""

    def __init__(self, entries: int):
        super().__init__()
        self.entries, self.rows = entries, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(x, torch.Tensor) and x.dim() and x.shape[-1] == self.entries:
                self.rows = max(self.rows, x.numel() // self.entries)
        return out


@pytest.mark.parametrize("spec", KINDS, ids=lambda s: s.key)
def test_logits_exist_for_one_chunk_at_a_time(spec):
    """700 positions of 101 entries in chunks of 64: never more than 65 x 101, forward, backward and saved."""
    own, other, mine, theirs = heads(entries=101)
    own.weight.requires_grad_()
    saved = []

    def keep(x):
        saved.append(x.numel() if x.dim() and x.shape[-1] == 101 else 0)
        return x

    with Largest(101) as seen:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            value = in_chunks(lambda h, t: divergence(own(h), other(t), spec), mine, theirs, size=64)
        value.sum().backward()
    assert 0 < seen.rows <= 64
    assert sum(saved) == 0  # what a chunk computes is computed again, not kept


def test_a_run_never_holds_rows_x_tokens_x_entries(monkeypatch):
    """4 rows of up to 6 tokens in chunks of 5: the heads of a whole run, its backward too, see 5 positions at once."""
    monkeypatch.setattr(module.in_chunks, "__kwdefaults__", {"size": 5})
    positions = []
    call = Head.__call__

    def noted(self, hidden):
        positions.append(hidden.shape[:-1].numel())
        return call(self, hidden)

    monkeypatch.setattr(Head, "__call__", noted)
    out = toy.train(
        variant="dapo",
        hooks={"regularizers": [{"test_pull_together": {}}]},
        teacher={"model": {"path": toy.model_path("llama")}},
        max_steps=2,
    )
    # both models' heads at every token of the two steps, and the policy's and the teacher's again in the backward
    assert max(positions) == 5 and sum(positions) % 4 == 0 and sum(positions) > 4 * 5
    assert all(g.norm() > 0 for g in out.gradients)


def test_the_runs_divergence_is_the_one_of_whole_logits():
    """divergence/rkl/teacher of the first step, recomputed from both models' whole logits."""
    seen: list[dict] = []
    out = toy.train(
        variant="dapo",
        hooks={"regularizers": [{"test_pull_together": {"coef": 0.0}}]},
        teacher={"model": {"path": toy.model_path("llama")}},
        max_steps=1,
        gradient_accumulation_steps=4,
        patch=keep_generations(seen),
    )
    [batch] = seen
    mask = batch["completion_mask"]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], mask], 1)
    width = mask.shape[1]
    with torch.no_grad():
        p, q = (
            toy.model(kind).eval()(input_ids=ids, attention_mask=attention).logits[:, -width - 1 : -1].log_softmax(-1)
            for kind in ("qwen3", "llama")
        )
    values = (p.exp() * (p - q)).sum(-1)
    total, count = float((values * mask).sum()), int(mask.sum())
    assert out.logged("divergence/rkl/teacher")[0] == pytest.approx(total / count, rel=1e-4)
