"""What the update phase leaves out adds nothing: rows whose hooks declare them silent, and rows without a token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tests.batches import assert_close, build, gradient, leaves_of, split
from tests.catalog.test_battery import ALL, EXACT, GIVEN, states
from trl_variants import Variant, hook, variant
from trl_variants.hooks.base import _REGISTRY
from trl_variants.hooks.clip import PPOClip, SoftGate
from trl_variants.objective import evaluate, with_advantages

LOCAL = {k: v for k, v in EXACT.items() if v.scope == "local"}  # others keep their micro-batches
SILENT = {k: v for k, v in LOCAL.items() if v.silent_at_zero}
NO_ADVANTAGE = (1, 4, 7)


def assert_silent(v: Variant) -> None:
    """Rows with zero advantage have gradient 0, and without them the others' loss and gradient are the same."""
    whole = build(GIVEN)
    filled = with_advantages(v, whole, states(v))
    advantage = filled.advantage.clone()
    advantage[list(NO_ADVANTAGE)] = 0.0
    filled = replace(filled, advantage=advantage)
    loss = evaluate(v, filled, states(v))
    grads = gradient(loss.loss, leaves_of(whole))
    assert all(bool((g[list(NO_ADVANTAGE)] == 0).all()) for g in grads.values())
    assert not loss.clipped.expand_as(filled.mask)[list(NO_ADVANTAGE)].any()
    rest = [i for i in range(len(filled.mask)) if i not in NO_ADVANTAGE]
    kept = split(filled, [rest, list(NO_ADVANTAGE)])[0]
    # what a micro-batch divides by stays what it was
    kept = replace(kept, window=filled.window, micro_tokens=filled.micro_tokens[rest])
    alone = evaluate(v, kept, states(v))
    assert_close(alone.loss, loss.loss, "loss without the silent rows")
    assert_close(gradient(alone.loss, leaves_of(whole)), grads, "gradient without the silent rows")
    assert float(grads["logps"].abs().max()) > 1e-4


@pytest.mark.parametrize("v", SILENT.values(), ids=SILENT)
def test_rows_declared_silent_add_nothing(v):
    assert_silent(v)


def test_most_methods_without_a_term_on_every_row_are_silent():
    assert len(SILENT) > 30
    acting = [h for v in LOCAL.values() if not v.silent_at_zero for h in v.regularizers]
    assert {"kl", "entropy_bonus"} <= {h.hook_name for h in acting}


@pytest.mark.parametrize("v", LOCAL.values(), ids=LOCAL)
def test_rows_without_a_token_add_nothing(v):
    whole = build(GIVEN)
    filled = with_advantages(v, whole, states(v))
    empty = (filled.mask.sum(1) == 0).nonzero().squeeze(1).tolist()
    assert empty
    loss = evaluate(v, filled, states(v))
    grads = gradient(loss.loss, leaves_of(whole))
    rest = [i for i in range(len(filled.mask)) if i not in empty]
    kept = split(filled, [rest, empty])[0]
    kept = replace(kept, window=filled.window, micro_tokens=filled.micro_tokens[rest])
    alone = evaluate(v, kept, states(v))
    assert_close(alone.loss, loss.loss, "loss without the empty rows")
    assert_close(gradient(alone.loss, leaves_of(whole)), grads, "gradient without the empty rows")


def test_it_sees_a_wrong_declaration():
    @dataclass(frozen=True)
    class Wrong(SoftGate):
        silent_at_zero = True

        def __call__(self, log_ratio, advantage, batch):
            return log_ratio * (advantage + 0.1)

    try:
        with pytest.raises(AssertionError):
            assert_silent(variant("dapo", clip=hook("clip", "wrongly_silent")(Wrong)()))
    finally:
        _REGISTRY.pop(("clip", "wrongly_silent"), None)


def test_another_rule_does_not_inherit_the_declaration():
    @dataclass(frozen=True)
    class Mine(PPOClip):
        def __call__(self, log_ratio, advantage, batch):
            return log_ratio * (advantage + 0.1)

    try:
        assert PPOClip.silent_at_zero and not hook("clip", "my_own_rule")(Mine).silent_at_zero
        plain = hook("clip", "my_function")(lambda log_ratio, advantage, batch: log_ratio * advantage)
        assert not variant("dapo", clip=plain()).silent_at_zero
    finally:
        for name in ("my_own_rule", "my_function"):
            _REGISTRY.pop(("clip", name), None)


def test_a_row_left_out_by_its_coefficients():
    """A window-scoped method: the gradient of rows whose coefficients are all zero is zero by definition."""
    v = ALL["disco"]
    whole = build(GIVEN)
    loss = v.loss(whole, states(v))
    grads = gradient(loss.loss, leaves_of(whole))
    silent = ~torch.stack([(g != 0).any(1) for g in grads.values()]).any(0)
    assert 0 < int(silent.sum()) < len(silent)
