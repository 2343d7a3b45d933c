"""The @hook decorator: both forms, names, parameters, ranges, needs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, Optional

import pytest
import torch
import yaml

from trl_variants import Schedule, TokenBatch, VariantError, hook, variant
from trl_variants.hooks import base, clip
from trl_variants.hooks.base import hook_class, hook_names, instantiate, param, to_spec


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))


def batch() -> TokenBatch:
    # r = 1.5 and .5 with A = 1 and -1
    lp = torch.zeros(2, 1, requires_grad=True)
    return TokenBatch.from_tensors(lp, -torch.tensor([[1.5], [0.5]]).log(), advantage=[1.0, -1.0])


def test_own_hook_in_ten_lines():
    @hook("clip", "my_gate")
    def my_gate(log_ratio, advantage, batch, width: float = 0.3):
        """r A where |r - 1| < width, else nothing."""
        ratio = log_ratio.exp()
        return ratio * advantage * ((ratio - 1).abs() < width)

    v = variant("dapo", clip={"my_gate": {"width": 0.6}})
    loss = v.loss(batch())
    assert float(loss.loss.detach()) == pytest.approx(-(1.5 - 0.5) / 2)
    assert variant(yaml.safe_load(yaml.safe_dump(v.to_mapping()))) == v
    assert "my_gate(width=0.6)" in v.describe()
    assert not variant("dapo", clip="my_gate").loss(batch()).loss.any(), "the default width drops both"


def test_own_hook_as_a_class():
    @hook("clip")
    @dataclass(frozen=True)
    class NarrowGate:
        """r A, scaled."""

        scale: float = param(2.0, above=0.0, high=10.0)

        def __call__(self, log_ratio, advantage, batch):
            return self.scale * log_ratio.exp() * advantage

    assert (
        NarrowGate.hook_name == "narrow_gate"
        and NarrowGate.seam == "clip"
        and hook_class("clip", "narrow_gate") is NarrowGate
    )
    assert (NarrowGate.needs, NarrowGate.scope, NarrowGate.selects) == (frozenset(), "local", False)
    for spec in (NarrowGate, NarrowGate(), "narrow_gate", {"narrow_gate": {}}, {"narrow_gate": None}):
        assert variant("dapo", clip=spec).clip == NarrowGate()
    with pytest.raises(VariantError, match="narrow_gate.scale must be > 0.0 and <= 10.0, got 11"):
        NarrowGate(11)


def test_a_class_without_the_dataclass_line_becomes_one():
    @hook("ratio", "half")
    class Half:
        factor: float = 0.5

        def __call__(self, batch):
            return self.factor * (batch.logps - batch.anchor)

    assert [f.name for f in fields(Half)] == ["factor"] and Half(factor=0.25).factor == 0.25
    assert variant("dapo", ratio="half").loss(batch()).log_ratio[0].item() == pytest.approx(0.5 * 0.405465, abs=1e-6)
    with pytest.raises(VariantError, match="half.factor must be float, got 'x'"):
        Half(factor="x")


def test_a_subclass_keeps_the_checks_of_its_base():
    @hook("clip", "wider")
    @dataclass(frozen=True)
    class Wider(clip.PPOClip):
        """PPO with an own default."""

        eps_high: float = 0.4

    with pytest.raises(VariantError, match=r"ppo.delta|wider.delta"):
        Wider(delta=1.1)
    assert Wider(delta=1.5).hook_name == "wider" and clip.PPOClip.hook_name == "ppo"


def test_a_name_is_taken_once():
    with pytest.raises(
        VariantError, match=r"a clip hook named 'ppo' exists already \(trl_variants.hooks.clip.PPOClip\)"
    ):

        @hook("clip", "ppo")
        def mine(log_ratio, advantage, batch):
            return log_ratio

    hook("ratio", "ppo")(lambda batch: batch.logps)  # another seam's names are its own


def test_a_notebook_cell_may_run_again(monkeypatch):
    main = ModuleType("__main__")
    exec(CELL, main.__dict__ | {"hook": hook})  # a notebook's cells live in __main__
    first = hook_class("clip", "cell")
    exec(CELL, main.__dict__ | {"hook": hook})
    assert hook_class("clip", "cell") is not first
    assert variant("dapo", clip="cell").loss(batch()).loss.isfinite()
    with pytest.raises(VariantError, match="exists already"):
        exec(CELL.replace('"cell"', '"sapo"'), main.__dict__ | {"hook": hook})
    with pytest.raises(VariantError, match="exists already"):
        hook("clip", "cell")(lambda log_ratio, advantage, batch: log_ratio)  # a module may not take a notebook's name
    assert "cell" in hook_names("clip") and sys.modules["__main__"] is not main


CELL = """
__name__ = "__main__"

@hook("clip", "cell")
def cell(log_ratio, advantage, batch, scale=1.0):
    return scale * log_ratio.exp() * advantage
"""


def test_an_undeclared_need_is_a_typing_mistake():
    with pytest.raises(
        VariantError, match=r"hook 'greedy' needs \['ref_logp'\], which no trainer offers; known: .*ref_logps"
    ):

        @hook("ratio", "greedy")
        class Greedy:
            needs = frozenset({"ref_logp"})

            def __call__(self, batch):
                return batch.logps


def test_unknown_seam():
    with pytest.raises(
        VariantError, match=r"unknown seam 'clips' \(did you mean clip\?\); the seams are prompts, rollouts"
    ):
        hook("clips", "x")
    assert hook("regularizer", "singular")(lambda batch: None).seam == "regularizers"


def test_types_of_annotations():
    @hook("weight", "typed")
    @dataclass(frozen=True)
    class Typed:
        a: int = 1
        b: float = 1.0
        c: str | None = None
        d: Optional[float] = None  # noqa: UP045  (the old spelling is checked too)
        e: bool = False
        f: Any = None

        def __call__(self, batch):
            return batch.mask

    assert Typed(b=2).b == 2 and Typed(c="x", d=0.5, f=object()).c == "x"
    for wrong, message in [
        ({"a": 1.0}, "typed.a must be int, got 1.0"),
        ({"a": True}, "typed.a must be int"),
        ({"b": True}, "typed.b must be float"),
        ({"c": 3}, "typed.c must be str or NoneType, got 3"),
        ({"d": "x"}, "typed.d must be float or NoneType"),
        ({"e": 0}, "typed.e must be bool"),
        ({"b": float("nan")}, "typed.b is NaN"),
        ({"a": Schedule(1, 2.5)}, "typed.a must be int, got 2.5"),
    ]:
        with pytest.raises(VariantError, match=message):
            Typed(**wrong)


def test_a_function_s_annotations_are_checked_and_others_are_not():
    @hook("weight", "loose")
    def loose(batch, strict: float = 1.0, free=None):
        return batch.mask

    assert instantiate("weight", {"loose": {"free": [1, 2]}}).free == [1, 2]
    with pytest.raises(VariantError, match="loose.strict must be float, got 'x'"):
        instantiate("weight", {"loose": {"strict": "x"}})


def test_a_parameter_without_default_must_be_given():
    @hook("weight", "strict_one")
    @dataclass(frozen=True)
    class StrictOne:
        size: int = param(low=1)

        def __call__(self, batch):
            return batch.mask

    with pytest.raises(VariantError, match="strict_one needs a value for size"):
        instantiate("weight", "strict_one")
    assert instantiate("weight", {"strict_one": {"size": 3}}).size == 3
    assert to_spec(StrictOne(3)) == {"strict_one": {"size": 3}}


@pytest.mark.parametrize(
    "seam, spec, message",
    [
        ("clip", "ppoo", r"unknown clip hook 'ppoo' \(did you mean ppo\?\); known: .*cispo, "),
        ("clip", "grouped", r"unknown clip hook 'grouped' \('grouped' is a advantage hook\)"),
        (
            "clip",
            {"ppo": {"eps": 0.2}},
            r"ppo has no parameter 'eps'.*; it takes eps_low, eps_high, delta, floor",
        ),
        ("clip", {"ppo": {"eps_hihg": 0.2}}, r"did you mean eps_high"),
        (
            "clip",
            {"ppo": {}, "sapo": {}},
            r"clip: write one hook as \{name: parameters\}, got the keys \['ppo', 'sapo'\]",
        ),
        ("clip", {"ppo": 0.2}, "ppo: parameters are a mapping, got 0.2"),
        ("clip", 3, "clip takes a hook, a hook's name or {name: parameters}, got 3"),
        ("clip", lambda lr, a, b: lr, "is not a hook yet; decorate it with @hook"),
        ("ratio", clip.PPOClip(), "'ppo' is a clip hook and cannot be used as ratio"),
    ],
)
def test_messages_of_wrong_specs(seam, spec, message):
    with pytest.raises(VariantError, match=message):
        instantiate(seam, spec)


def test_spec_names_only_what_differs_from_the_default():
    assert to_spec(clip.PPOClip()) == "ppo"
    assert to_spec(clip.PPOClip(eps_high=Schedule(0.2, 0.3))) == {
        "ppo": {"eps_high": {"schedule": {"start": 0.2, "end": 0.3, "begin": 0.0, "until": 1.0, "shape": "linear"}}}
    }


def test_hooks_are_values():
    assert clip.PPOClip() == clip.PPOClip(0.2, 0.2) != clip.PPOClip(0.2, 0.3)
    assert len({clip.PPOClip(), clip.PPOClip()}) == 1
    with pytest.raises(AttributeError):
        clip.PPOClip().eps_low = 0.1


def test_a_hook_that_wants_random_numbers_gets_a_generator():
    from trl_variants.objective import call

    @hook("weight", "dice")
    class Dice:
        random = True

        def __call__(self, batch, rng):
            return torch.rand(2, 1, generator=rng)

    mine = torch.Generator().manual_seed(3)
    wanted = torch.rand(2, 1, generator=torch.Generator().manual_seed(3))
    assert torch.equal(call(Dice(), None, path="weight.0", states=None, rngs={"weight.0": mine}), wanted)
    assert variant("dapo", weight=["dice"]).loss(batch()).loss.isfinite(), "and without one a fixed seed"


def test_a_misspelled_parameter_of_a_direct_call_is_named():
    from trl_variants.hooks.clip import PPOClip

    with pytest.raises(VariantError, match=r"ppo has no parameter 'eps_hi' \(did you mean eps_high"):
        PPOClip(eps_hi=0.3)


def test_a_parameter_without_annotation_is_checked_against_its_default():
    @hook("clip", "test_unannotated")
    def unannotated(log_ratio, advantage, batch, width=0.2, name="x", turns=3):
        return log_ratio.exp() * advantage

    assert unannotated(width=1, turns=2.5).width == 1
    with pytest.raises(VariantError, match="test_unannotated.width must be float, got 'a'"):
        unannotated(width="a")
    with pytest.raises(VariantError, match="test_unannotated.name must be str, got 1"):
        unannotated(name=1)
