"""The script that rebuilds the tiny models."""

from __future__ import annotations

import random

import pytest
import torch

from trl_variants.tasks import (
    arithmetic,
    build_tiny,
    load_task,
    scratchpad,
    scratchpad_model_path,
    scratchpad_teacher_path,
    tiny_model_path,
)
from trl_variants.tasks.scratchpad import steps

PATHS = {
    "arithmetic": tiny_model_path,
    "scratchpad": scratchpad_model_path,
    "scratchpad_teacher": scratchpad_teacher_path,
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_tokenizer_round_trip():
    from transformers import AutoTokenizer

    text = "".join(map(chr, range(32, 127))) + "\n47 + 38=85 , ok ?"
    shipped = [AutoTokenizer.from_pretrained(path()) for path in PATHS.values()]
    for tok in (build_tiny.tokenizer(), *shipped):
        ids = tok.encode(text)
        assert len(ids) == len(text) and tok.unk_token_id not in ids
        assert tok.decode(ids) == text
        assert tok.decode([*ids, tok.eos_token_id, tok.pad_token_id], skip_special_tokens=True) == text


def test_labels():
    rng = random.Random(0)
    assert build_tiny.label((47, 38), rng, forget=0.0, noise=0.0) == 85
    assert build_tiny.label((47, 38), rng, forget=1.0, noise=0.0) == 75
    assert build_tiny.label((60, 70), rng, forget=1.0, noise=0.0) == 30
    assert build_tiny.label((12, 34), rng, forget=1.0, noise=0.0) == 46
    drawn = [build_tiny.label((47, 38), rng, forget=0.75, noise=0.05) for _ in range(4000)]
    # standard errors 0.007 and 0.006
    assert drawn.count(75) / 4000 == pytest.approx(0.75, abs=0.03)
    assert drawn.count(85) / 4000 == pytest.approx(0.20, abs=0.03)


def test_right_traces_vary_in_form_only():
    rng = random.Random(0)
    problems = scratchpad.split()[0][:300]
    texts = [build_tiny.trace(terms, rng, wrong=False) for terms in problems]
    answers = [str(sum(terms)) for terms in problems]
    assert scratchpad.scratchpad_reward(None, texts, answer=answers) == [1.0] * 300
    assert all(t.count("+") == len(terms) - 1 for t, terms in zip(texts, problems, strict=True))
    assert 0.02 < sum(t == steps(terms) for t, terms in zip(texts, problems, strict=True)) / 300 < 0.5


def test_wrong_traces():
    rng = random.Random(0)
    # 3+8 passes ten with a large digit, 3+9 after a slip does so again; the second step passes no ten
    drawn = [build_tiny.trace((3, 8, 2), rng, wrong=True) for _ in range(6000)]
    short = [t for t in drawn if "=" not in t]
    full = [t for t in drawn if "=" in t]
    # standard errors 0.006 and 0.005
    assert len(short) / 6000 == pytest.approx(0.3, abs=0.03)
    assert sum(t.endswith("=3") for t in full) / len(full) == pytest.approx(0.88, abs=0.03)
    assert {int(t) for t in short} == {13 + guess for guess in build_tiny.GUESSES}
    spoilt, right = ([t.count("=") for t in full if t.endswith(end)] for end in ("=3", "=13"))
    # two results, each written again with chance 0.45: 2 / 0.55 = 3.6; with chance 0.1: 2 / 0.9 = 2.2
    assert sum(spoilt) / len(spoilt) == pytest.approx(3.64, abs=0.15)
    assert sum(right) / len(right) == pytest.approx(2.22, abs=0.15)


@pytest.mark.parametrize(
    "task, draw", [("arithmetic", "label"), ("scratchpad", "trace"), ("scratchpad_teacher", "trace")]
)
def test_pretraining_never_sees_held_out_problems(monkeypatch, task, draw):
    seen = set()
    stock = getattr(build_tiny, draw)
    monkeypatch.setattr(build_tiny, draw, lambda problem, *rest: seen.add(problem) or stock(problem, *rest))
    tok = build_tiny.tokenizer()
    model = build_tiny.new_model(len(tok), hidden_size=32, num_hidden_layers=1)
    build_tiny.train(model, tok, task=task, steps=3, batch_size=512)
    held_out = arithmetic.split()[1] if task == "arithmetic" else scratchpad.split()[1] + scratchpad.two_digit()[1]
    assert len(seen) > 1000 and not seen & set(held_out)
    assert bool(seen & set(scratchpad.unsolved()[0])) == (task == "scratchpad_teacher")


@pytest.mark.parametrize("task", sorted(build_tiny.RECIPES))
def test_same_seed_same_weights(tmp_path, task):
    from safetensors.torch import load_file

    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        build_tiny.build(tmp_path / name, task, seed=seed, steps=2)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not all(torch.equal(a[k], c[k]) for k in a)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(build_tiny.RECIPES))
def test_rebuild_reaches_the_shipped_accuracy(tmp_path, name):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    build_tiny.build(tmp_path, name)
    load = lambda path: (AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path))  # noqa: E731
    task = load_task(build_tiny.RECIPES[name].task or name)
    rebuilt, shipped = (task.evaluate(*load(path), batch_size=500) for path in (tmp_path, PATHS[name]()))
    assert rebuilt == pytest.approx(shipped, abs=0.1)
    assert rebuilt >= 0.98 if name == "scratchpad_teacher" else rebuilt <= 0.5
