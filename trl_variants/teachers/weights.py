"""Forward passes under other weights than the policy's, which always come back as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def swapped(model: nn.Module, shadow: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with these parameters instead of its own; storage is exchanged, nothing of one precision is copied."""
    parameters = dict(model.named_parameters())
    own = {name: parameters[name].data for name in shadow}
    try:
        for name, value in shadow.items():
            parameters[name].data = value.to(own[name].dtype)
        yield
    finally:
        for name, value in own.items():
            parameters[name].data = value


@contextlib.contextmanager
def adapter(model: Any, name: str | None) -> Iterator[None]:
    """A PEFT model with another adapter active, or with none (`name=None`).

    PEFT's own switches also change which weights require a gradient; those flags are restored too.
    """
    flags = [(p, p.requires_grad) for p in model.parameters()]
    active = model.active_adapters
    try:
        if name is None:
            with model.disable_adapter():
                yield
        else:
            model.set_adapter(name)
            yield
    finally:
        if name is not None:
            model.base_model.set_adapter(active)
            model.active_adapter = active[0]
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters the optimizer moves, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def same_weights(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models have the same parameters, to the bit."""
    mine, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    return mine.keys() == theirs.keys() and all(
        p.dtype == theirs[name].dtype and torch.equal(p.to(theirs[name].device), theirs[name])
        for name, p in mine.items()
    )


def beginning(model: nn.Module, rate: Any) -> dict[str, Tensor]:
    """A shadow of the trainable parameters; in fp32 at least where it is an average, whose steps bf16 rounds away."""
    copies = {name: p.detach().clone() for name, p in trainable(model).items()}
    if rate in (0.0, 1.0):
        return copies
    return {name: p.to(torch.promote_types(p.dtype, torch.float32)) for name, p in copies.items()}


@torch.no_grad()
def average_into(shadow: Mapping[str, Tensor], model: nn.Module, rate: float) -> None:
    """shadow <- (1 - rate) shadow + rate policy, in place."""
    own = dict(model.named_parameters())
    for name, value in shadow.items():
        value.lerp_(own[name].detach().to(value.dtype), rate)
