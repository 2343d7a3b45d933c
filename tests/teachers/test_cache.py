"""Answers about traces on disk: only rows the policy did not sample, only what is missing is asked."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest
import torch

from tests.teachers.asked import ROWS, by_hand, counted, keep_generations, question, teacher_of
from tests.teachers.stub import Stub
from tests.trainer import toy
from tests.trainer.forked import run_forked
from trl_variants import VariantError
from trl_variants.divergence import Divergence
from trl_variants.teachers.cache import of_weights

pytestmark = pytest.mark.usefixtures("one_row_a_line")

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
MIXED = [0, 1, 1, 0]  # rows 1 and 2 are traces


def built(path, model: str = "llama", **changes):
    spec = {"model": {"path": toy.model_path(model), "cache": str(path)}}
    return toy.build(variant="grpo", teacher=spec, **changes)


def kept(path) -> int:
    with sqlite3.connect(path) as file:
        return file.execute("SELECT COUNT(*) FROM answers").fetchone()[0]


def backbone(trainer):
    return teacher_of(trainer).inner.model.model


def test_a_trace_is_forwarded_once_and_the_policys_rows_every_time(tmp_path):
    path = tmp_path / "deep" / "answers.sqlite"
    trainer, asked = built(path), question(origin=MIXED)
    with counted(backbone(trainer)) as seen:
        first = teacher_of(trainer).answer(asked)
        assert sum(seen) == 4 and kept(path) == 2
        second = teacher_of(trainer).answer(asked)
        assert sum(seen) == 6 and kept(path) == 2
    live = asked.batch["completion_mask"] > 0
    hand = by_hand(toy._loaded("llama"), asked)[0]
    for answer in (first, second):
        torch.testing.assert_close(answer.logps[live], hand[live], **CLOSE)
        assert (answer.said[live] == 1).all()
    assert torch.equal(first.logps[1:3], second.logps[1:3])


def test_another_run_reads_them_at_another_width_and_place(tmp_path):
    path = tmp_path / "answers.sqlite"
    before = teacher_of(built(path)).answer(question(origin=MIXED))
    trainer = built(path)
    again = question([ROWS[2], ("0", "1234"), ROWS[1], ROWS[3]], origin=[1, 0, 1, 0])
    with counted(backbone(trainer)) as seen:
        after = teacher_of(trainer).answer(again)
    assert sum(seen) == 2
    for old, new in ((2, 0), (1, 2)):
        length = int(again.batch["completion_mask"][new].sum())
        assert torch.equal(after.logps[new, :length], before.logps[old, :length])
    live = again.batch["completion_mask"] > 0
    torch.testing.assert_close(after.logps[live], by_hand(toy._loaded("llama"), again)[0][live], **CLOSE)


@pytest.mark.parametrize("changed", ["model", "temperature", "prompt", "completion"])
def test_whatever_the_answer_depends_on_is_in_its_name(tmp_path, changed):
    path = tmp_path / "answers.sqlite"
    teacher_of(built(path)).answer(question(origin=[1] * 4))
    rows = list(ROWS)
    if changed == "prompt":
        rows[1] = ("bc3", rows[1][1])
    if changed == "completion":
        rows[1] = (rows[1][0], "d4f")
    trainer = built(
        path,
        model="qwen3" if changed == "model" else "llama",
        temperature=0.8 if changed == "temperature" else 1.0,
    )
    with counted(backbone(trainer)) as seen:
        teacher_of(trainer).answer(question(rows, origin=[1] * 4))
    assert sum(seen) == (1 if changed in ("prompt", "completion") else 4)


def test_weights_that_were_trained_further_are_others():
    model = toy.model("llama")
    assert of_weights(model) == of_weights(toy.model("llama"))
    model.model.layers[1].mlp.up_proj.weight.data.mul_(1.001)
    assert of_weights(model) != of_weights(toy.model("llama"))


def test_a_row_that_is_partly_the_policys_is_not_kept(tmp_path):
    path = tmp_path / "answers.sqlite"
    trainer, asked = built(path), question(origin=[1] * 4)
    tokens = torch.ones_like(asked.batch["completion_ids"])
    tokens[0, 1] = 0  # continued by the policy
    tokens[1] = 3
    asked.batch["origin"] = tokens
    teacher_of(trainer).answer(asked)
    assert kept(path) == 2


def test_nothing_is_kept_without_traces_and_for_hidden_states(tmp_path):
    path = tmp_path / "answers.sqlite"
    trainer = built(path)
    teacher_of(trainer).answer(question())
    teacher_of(trainer).answer(question(origin=[0, 2, 3, 0]))
    answer = teacher_of(trainer).answer(question(origin=[1] * 4, distribution=True))
    assert answer.hidden is not None and kept(path) == 0


def test_the_silence_at_another_end_is_kept_too(tmp_path):
    path = tmp_path / "answers.sqlite"
    for _ in range(2):
        trainer = built(path)
        inner = teacher_of(trainer).inner
        inner.fit = type(inner.fit)(silent=frozenset({toy.EOS}))
        answer = teacher_of(trainer).answer(question(origin=[1] * 4))
        ids = question().batch["completion_ids"]
        assert torch.equal(answer.said == 0, (ids == toy.EOS) | (question().batch["completion_mask"] == 0))


def test_a_servers_top_entries_are_kept(tmp_path):
    path = tmp_path / "answers.sqlite"
    with Stub(toy.model("llama").eval(), toy.tokenizer()) as server:
        spec = {"server": {"url": server.url, "top_k": 3, "cache": str(path)}}
        teacher = teacher_of(toy.build(variant="grpo", teacher=spec))
        teacher.require((Divergence("fkl", top_k=3),))
        first = teacher.answer(question(origin=[1] * 4, distribution=True))
        assert len(server.bodies) == 4
        second = teacher.answer(question(origin=[1] * 4, distribution=True))
        plain = teacher.answer(question(origin=[1] * 4))  # asked for less: another name, asked again
        assert len(server.bodies) == 8 and kept(path) == 8 and plain.topk is None
    live = question().batch["completion_mask"] > 0
    assert torch.equal(first.logps[live], second.logps[live])
    assert all(torch.equal(a[live], b[live]) for a, b in zip(first.topk, second.topk, strict=True))


def test_two_processes_share_a_file(tmp_path):
    path = tmp_path / "answers.sqlite"
    toy.model_path("llama")

    def ask(rank: int) -> torch.Tensor:
        trainer = built(path)
        return teacher_of(trainer).answer(question(origin=[1] * 4)).logps

    one, two = run_forked(ask, ranks=2)
    assert kept(path) == 4
    torch.testing.assert_close(one, two, **CLOSE)


def test_a_run_with_traces_asks_about_each_once(tmp_path):
    """8 prompts, one trace in each group of 4: two epochs are 4 generations of 16 rows with 4 traces; the second
    epoch's 8 traces are known. 64 - 8 rows are forwarded, 8 answers kept."""
    path = tmp_path / "answers.sqlite"
    seen: list[dict] = []
    with contextlib.ExitStack() as stack:
        counts = []

        def patch(trainer):
            keep_generations(seen)(trainer)
            counts.append(stack.enter_context(counted(backbone(trainer))))

        spec = {"model": {"path": toy.model_path("llama"), "cache": str(path)}}
        toy.train(variant="grpo", hooks={"rollouts": ["traces"]}, teacher=spec, max_steps=16, patch=patch)
    assert [int((g["origin"] == 1).any(1).sum()) for g in seen] == [4] * 4
    assert sum(counts[0]) == 64 - 8 and kept(path) == 8
    for g in seen:
        assert torch.equal(g["teacher_mask"] > 0, g["completion_mask"] > 0)


def test_a_file_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(VariantError, match="the teacher's cache .*folder cannot be used"):
        built(tmp_path / "folder")
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to look like one would " * 40)
    with pytest.raises(VariantError, match="notes.txt cannot be used"):
        built(text)
