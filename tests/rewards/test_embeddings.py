from __future__ import annotations

import math
import sys

import pytest
import torch

from trl_variants import VariantError, check, variant
from trl_variants.errors import MissingExtra
from trl_variants.rewards import embeddings
from trl_variants.rewards.embeddings import characters, cosines, embed, encoder, load_encoder


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(embeddings, "_REGISTERED", dict(embeddings._REGISTERED))


def test_characters_count_runs_of_characters():
    # "ab": a, b, ab; "ba": b, a, ba -> 2 of 3 shared
    z = embed("characters", ["ab", " AB\n", "ba", "cd", ""])
    same = cosines(z)
    assert same[0].tolist() == pytest.approx([1, 1, 2 / 3, 0, 0])
    assert not z[4].any() and same[4, 4] == 1.0, "an answer is always like itself"


def test_each_distinct_text_is_encoded_once():
    seen = []

    def mine(texts):
        seen.append(list(texts))
        return [[3.0, 4.0]] * len(texts)

    z = embed(mine, ["a", "b", "a"])
    assert seen == [["a", "b"]] and z.tolist() == [[pytest.approx(0.6), pytest.approx(0.8)]] * 3
    assert embed(mine, []).shape[0] == 0 and len(seen) == 1


@pytest.mark.parametrize(
    "wrong, match",
    [
        (lambda t: torch.zeros(1, 2), r"must return \(2, d\)"),
        (lambda t: torch.zeros(2), r"must return \(2, d\)"),
        (lambda t: torch.full((2, 2), math.nan), "not finite"),
    ],
)
def test_what_an_encoder_must_return(wrong, match):
    with pytest.raises(VariantError, match=match):
        embed(wrong, ["a", "b"])


def test_a_name_is_registered_once(registry):
    assert encoder("mine")(characters) is load_encoder("mine")
    with pytest.raises(VariantError, match="exists already"):
        encoder("mine")(lambda texts: torch.zeros(len(texts), 1))


def test_a_missing_package_is_named_before_anything_loads(registry, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    monkeypatch.setattr(embeddings.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"did you mean characters.*\[embeddings\]"):
        load_encoder("character")
    from trl import GRPOConfig

    v = variant("dra-grpo", rewards=[{"semantic_density": {"encoder": "a/b"}}])
    config = GRPOConfig("unused", use_cpu=True, bf16=False)
    found = [f for f in check(v, config) if f.level == "error"]
    assert len(found) == 1 and "'a/b'" in found[0].message and "embeddings" in found[0].hint
    assert not [f for f in check(variant("dra-grpo"), config) if f.level == "error"], (
        "a registered name needs no package"
    )
