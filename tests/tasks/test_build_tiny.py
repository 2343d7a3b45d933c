"""The script that rebuilds the tiny model."""

from __future__ import annotations

import random

import pytest
import torch

from trl_variants.tasks import build_tiny, load_task, tiny_model_path
from trl_variants.tasks.arithmetic import split


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_tokenizer_round_trip():
    from transformers import AutoTokenizer

    text = "".join(map(chr, range(32, 127))) + "\n47 + 38=85 , ok ?"
    for tok in (build_tiny.tokenizer(), AutoTokenizer.from_pretrained(tiny_model_path())):
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


def test_pretraining_never_sees_held_out_problems(monkeypatch):
    seen = set()
    label = build_tiny.label
    monkeypatch.setattr(build_tiny, "label", lambda pair, *rest: seen.add(pair) or label(pair, *rest))
    tok = build_tiny.tokenizer()
    build_tiny.train(build_tiny.new_model(len(tok)), tok, steps=3, batch_size=512)
    assert len(seen) > 1000 and not seen & set(split()[1])


def test_same_seed_same_weights(tmp_path):
    from safetensors.torch import load_file

    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        build_tiny.build(tmp_path / name, seed=seed, steps=2)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not all(torch.equal(a[k], c[k]) for k in a)


@pytest.mark.slow
def test_rebuild_reaches_the_shipped_accuracy(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    build_tiny.build(tmp_path)
    model, tok = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    task = load_task("arithmetic")
    rebuilt = task.evaluate(model, tok, batch_size=500)
    assert rebuilt == pytest.approx(task.evaluate(*task.load_model(), batch_size=500), abs=0.1)
    assert rebuilt <= 0.5
