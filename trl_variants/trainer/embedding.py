"""Sentence embeddings of a generation: each process encodes its own completions once, all see the whole group's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..composition import Variant
from ..errors import VariantError
from ..rewards.embeddings import Encoder, embed, load_encoder

if TYPE_CHECKING:
    from .grpo import VariantGRPOTrainer


def wanted_encoders(variant: Variant) -> list[str]:
    """The encoders that some hook reads, sorted."""
    return sorted({name for _, h in variant.hooks() for name in h.encoders})


class Embedding:
    """The run's encoders, loaded when the trainer is built; they are frozen and in no checkpoint."""

    def __init__(self, trainer: VariantGRPOTrainer):
        self.trainer = trainer
        self.encoders: dict[str, Encoder] = {}
        for name in wanted_encoders(trainer.variant):
            error, cause = None, None
            try:
                self.encoders[name] = load_encoder(name, str(trainer.accelerator.device))
            except VariantError as raised:
                error, cause = str(raised), raised
            trainer.fail_together(error, cause=cause)

    def of(self, texts: list[str]) -> dict[str, Tensor]:
        """(N, d) unit rows by encoder, of the completions of all processes; `texts` are this process's. Collective."""
        found: dict[str, Tensor] = {}
        for name, encode in self.encoders.items():
            error, cause = None, None
            z = torch.zeros(len(texts), 1)
            try:
                z = embed(encode, texts)
            except Exception as raised:  # the other processes wait for this one's rows
                error, cause = f"the sentence encoder {name!r} failed: {raised}", raised
            self.trainer.fail_together(error, cause=cause)
            found[name] = self.trainer.gather_rows(z.to(self.trainer.accelerator.device), 0.0)
        return found
