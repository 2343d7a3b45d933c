"""The states and named random generators of a variant's hooks: owned here, saved with every checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from ..composition import Variant
from ..errors import VariantError
from ..schedule import at


class HookMemory:
    """States by hook path. Hooks never mutate; `update` replaces. Nothing changes in evaluation."""

    def __init__(self, variant: Variant, seed: int):
        self.all_hooks = dict(variant.hooks())
        self.hooks = variant.stateful
        self.states: dict[str, Any] = {path: at(h, 0.0).init() for path, h in self.hooks.items()}
        self.rngs = {path: _generator(seed, path) for path, h in variant.hooks() if h.random}

    def generators(self, training: bool) -> dict[str, torch.Generator]:
        """The generators by path; in evaluation copies, so that training goes on as if there had been none."""
        if training:
            return self.rngs
        return {path: torch.Generator().set_state(g.get_state()) for path, g in self.rngs.items()}

    def update(self, when: str, seen: Any, progress: float = 0.0) -> None:
        """Calls update() of the hooks that want it `when` ("step": path -> window means at `progress`; "generation": a
        Scored)."""
        for path, h in self.hooks.items():
            if h.update_every != when or not hasattr(h, "update"):
                continue
            if when == "generation":
                self.states[path] = at(h, seen.progress).update(self.states[path], seen)
            elif path in seen:
                self.states[path] = at(h, progress).update(self.states[path], seen[path])

    def report(self, progress: float = 0.0) -> dict[str, float]:
        """Numbers hooks want in the log once per step, by their `report()` or, with memory, `report(state)`."""
        out: dict[str, float] = {}
        for path, h in self.all_hooks.items():
            if hasattr(h, "report"):
                now = at(h, progress)
                out.update(now.report(self.states[path]) if path in self.states else now.report())
        return out

    def state_dict(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """(JSON-able part, tensors)."""
        tensors: dict[str, torch.Tensor] = {f"rng/{path}": g.get_state() for path, g in self.rngs.items()}
        plain = {path: _split(state, f"state/{path}", tensors) for path, state in self.states.items()}
        return plain, tensors

    def load_state_dict(self, plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores what `state_dict` gave. Raises VariantError when the hooks are not the same."""
        if set(plain) != set(self.states):
            raise VariantError(
                f"the checkpoint holds states of {sorted(plain)}, this variant has {sorted(self.states)}"
            )
        self.states = {path: _join(state, tensors) for path, state in plain.items()}
        for path, generator in self.rngs.items():
            generator.set_state(tensors[f"rng/{path}"].to(torch.uint8))


def _generator(seed: int, path: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _split(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().cpu().clone().contiguous()
        return {"__tensor__": name}
    if isinstance(value, Mapping):
        return {"__map__": [[k, _split(v, f"{name}/{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_split(v, f"{name}/{i}", tensors) for i, v in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise VariantError(
        f"a hook's state may hold numbers, text, lists, mappings and tensors, not {type(value).__name__} ({name})"
    )


def _join(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, Mapping):
        if "__tensor__" in value:
            return tensors[value["__tensor__"]]
        return {k: _join(v, tensors) for k, v in value["__map__"]}
    if isinstance(value, list):
        return [_join(v, tensors) for v in value]
    return value
