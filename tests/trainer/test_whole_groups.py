"""Losses that compare the answers to one prompt see all of them: no window cuts a group."""

from __future__ import annotations

import pytest
import torch

from trl_variants import VariantError, VariantGRPOTrainer, check, variant
from trl_variants.trainer.window import shuffle_groups

from . import toy

GROUP = 4


def windows(name: str, **changes) -> list[list[int]]:
    """The group label of every row, for each optimizer window of a run."""
    seen: list[list[int]] = []

    def patch(trainer):
        plain = trainer.buffered_steps

        def spy(raw):
            batches = plain(raw)
            seen.append([label for b in batches for label in b["group"].tolist()])
            return batches

        trainer.buffered_steps = spy

    toy.train(VariantGRPOTrainer, variant=name, max_steps=8, num_generations=GROUP, patch=patch, **changes)
    return seen


@pytest.mark.parametrize("name", ["disco", "conspo"])
def test_a_window_holds_whole_groups_in_random_order(name):
    # 16 rows a generation, four groups, two windows of 8 rows
    seen = windows(name)
    assert len(seen) == 8
    for labels in seen:
        assert [labels.count(g) for g in set(labels)] == [GROUP, GROUP]
    first = [labels[0] % 4 for labels in seen[::2]]
    assert any(label != 0 for label in first), "groups are dealt in random order"


def test_other_methods_mix_rows():
    assert any(labels.count(g) != GROUP for labels in windows("dapo") for g in set(labels))


def test_rows_move_together_and_nothing_else_changes():
    torch.manual_seed(0)
    generation = {
        "group": torch.arange(6).repeat_interleave(2),
        "row": torch.arange(12),
        "text": [str(i) for i in range(12)],
        "total": torch.tensor(7.0),
        "none": None,
    }
    moved = shuffle_groups(generation, 2)
    assert moved["row"].tolist() != list(range(12)) and sorted(moved["row"].tolist()) == list(range(12))
    assert moved["text"] == [str(i) for i in moved["row"].tolist()]
    assert torch.equal(moved["group"], moved["row"] // 2) and moved["row"][0] % 2 == 0
    assert moved["total"] == 7.0 and moved["none"] is None
    assert shuffle_groups(generation, 5) is generation, "parts of groups stay where they are"


def config(**changes):
    from trl_variants import VariantGRPOConfig

    return VariantGRPOConfig(output_dir=toy.folder(), **toy.settings(**changes))


def test_windows_that_would_cut_a_group_are_an_error():
    message = "its windows cut groups of 4"
    cut = config(per_device_train_batch_size=2, gradient_accumulation_steps=1, steps_per_generation=4)
    assert any(message in f.message and f.level == "error" and f.hint for f in check(variant("disco"), cut))
    assert not any(message in f.message for f in check(variant("dapo"), cut))
    for fine in (
        config(per_device_train_batch_size=4, gradient_accumulation_steps=1, steps_per_generation=4),
        config(per_device_train_batch_size=2, gradient_accumulation_steps=2, steps_per_generation=4),
        config(per_device_train_batch_size=2, gradient_accumulation_steps=4, steps_per_generation=4),
        config(per_device_train_batch_size=2, gradient_accumulation_steps=8, steps_per_generation=4),
    ):
        assert not any(message in f.message for f in check(variant("disco"), fine))
    with pytest.raises(VariantError, match=message):
        toy.build(variant="disco", per_device_train_batch_size=2, gradient_accumulation_steps=1)
