"""No entry is its host under another name: every seam it changes moves the weights, or the entry says why not."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from trl_variants import Variant, VariantGRPOTrainer, check, variant, variants

from . import toy
from .test_invariance import Rollout, scores

# a dual clip at 10 acts only where the policy runs away
RATES = dict.fromkeys(("highent", "lopti-ar", "lopti", "fipo"), 1e-1)
# what makes a method's rule act: a group that fails as a whole is rare where half of the digits are enough
SETTINGS = {"hdpo": {"correct_above": 0.95}}
# what acts from the second generation on, or on rows that the first one does not have
LATER = {
    "rlhf-ppo",
    "remax",
    "p-grpo-personalized",
    "dapo",
    "rloo",
    "reinforce-pp",
    "two-sided-clip",
    "dual-clip",
    "lopti-ar",
    "lopti",
    "fipo",
    "ngrpo",
    "agpo",
    "glm-4-5v",
    "kimi-k1-5-length",
    "luspo",
    "kimi-k1-5",
    "rlsd",
    "hdpo",
    "topr",
    "stabledrl",
    "zero-variance-filter",
    "conspo",
    "scalerl",
    "dsdr",
}
MOVED = 1e-6  # relative, in float64, where rounding leaves about 1e-12
CHANGED = [v for v in variants if v.about and v.about.host != v.name]


@functools.cache
def change(v: Variant, rows: int = 12, generations: int = 1) -> torch.Tensor:
    """Weight change over generations of four updates each, at a rate that leaves every clip range."""
    return toy.train(
        VariantGRPOTrainer,
        variant=v,
        dtype=torch.float64,
        rewards=scores,
        num_generations=8,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        steps_per_generation=2,
        num_iterations=2,
        max_steps=4 * generations,
        learning_rate=RATES.get(v.name, 1e-2),
        trainer_arguments={"rollout_func": Rollout()},
        **SETTINGS.get(v.name, {}),
    ).change


def _reads_it(v: Variant) -> bool:
    """Whether a hook of this variant reads what a learner would have given."""
    given = {"values", "process_rewards"} & v.needs
    return bool(given or any(h.reads for _, h in v.hooks()))


@pytest.mark.parametrize("v", CHANGED, ids=[v.name for v in CHANGED])
def test_every_changed_seam_is_live(v):
    host = variant(v.about.host)
    seams = v.changed_seams
    if v.about.inert:
        assert toy.apart(change(v, 12, 3), change(host, 12, 3)) < MOVED, (
            f"not inert after all, although: {v.about.inert}"
        )
        return
    assert seams, f"{v.name} is {host.name} under another name and does not say why (About.inert)"
    rows = 16 if v.whole_groups else 12  # two windows of whole groups of 8, or windows that cut them
    generations = 3 if v.name in LATER else 1
    for seam in seams:
        reverted = v.with_(**{seam: getattr(host, seam)})
        if any(f.level == "error" for f in check(reverted)) or seam == "learners" and _reads_it(reverted):
            continue  # the two seams only work together, which is no inert hook
        if seam == "clip" and v.ratio.hook_name == "on_policy":
            continue  # the ratio is 1: no clip can act
        sampler = seam == "ratio" and getattr(v.ratio, "anchor", "old") == "sampler"
        if sampler and replace(v.ratio, anchor="old") == reverted.ratio:
            continue  # here the old policy is the sampler
        assert toy.apart(change(v, rows, generations), change(reverted, rows, generations)) > MOVED, (
            f"{seam} {getattr(v, seam)} changes nothing"
        )
