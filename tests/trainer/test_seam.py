"""Every private name of TRL that the trainer uses is listed with its signature, and a change is reported."""

from __future__ import annotations

import ast
import inspect

from transformers import Trainer as HFTrainer
from trl import GRPOTrainer

from trl_variants.trainer import seam


def test_the_installed_trl_is_the_one_this_was_written_for():
    assert seam.private_names_that_changed() == []


def test_a_changed_signature_is_reported(monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_generate", lambda self, prompts, images: None)
    [line] = seam.private_names_that_changed()
    assert line.startswith("GRPOTrainer._generate: expected ('self', 'prompts'), found ('self', 'prompts', 'images')")


def test_a_method_that_is_gone_is_reported(monkeypatch):
    monkeypatch.delattr(GRPOTrainer, "_calculate_rewards")
    [line] = seam.private_names_that_changed()
    assert line.startswith("GRPOTrainer._calculate_rewards: expected") and line.endswith("found nothing")


def _methods() -> list[ast.FunctionDef]:
    [body] = [
        n for n in ast.parse(inspect.getsource(seam)).body if isinstance(n, ast.ClassDef) and n.name == "SeamTrainer"
    ]
    return [n for n in body.body if isinstance(n, ast.FunctionDef)]


def test_every_overridden_or_called_private_method_is_listed():
    stock = {name for cls in (GRPOTrainer, HFTrainer) for name in vars(cls) if callable(getattr(cls, name))}
    private = {name for name in stock if name.startswith("_") and not name.startswith("__")}
    overridden = {m.name for m in _methods()} & private
    called = {
        n.func.attr
        for m in _methods()
        for n in ast.walk(m)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    }
    assert (overridden | (called & private)) - set(seam.PRIVATE) == set()


def test_overrides_take_what_trl_passes():
    for name, (cls, _) in seam.PRIVATE.items():
        mine = inspect.signature(getattr(seam.SeamTrainer, name)).parameters
        if any(p.kind is p.VAR_KEYWORD for p in mine.values()):
            continue
        theirs = inspect.signature(getattr(cls, name)).parameters
        assert len(mine) == len(theirs), f"{name}: ours takes {list(mine)}, {cls.__name__} has {list(theirs)}"
