"""What prompts and rollouts hooks may call: generation and scoring, whichever engine runs underneath."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import VariantError

if TYPE_CHECKING:
    from .grpo import VariantGRPOTrainer


class Services:
    """Bound to a trainer; collective, so every process must call it equally often."""

    def __init__(self, trainer: VariantGRPOTrainer):
        self._trainer = trainer

    @property
    def dataset(self):
        """The training data set, to draw other prompts from."""
        return self._trainer.train_dataset

    @torch.no_grad()
    def generate(
        self, prefix_ids: list[list[int]], n: int = 1, max_new_tokens: int | None = None
    ) -> tuple[list[list[int]], list | None]:
        """Continues each prefix `n` times. Returns (completion ids, the engine's log-probs or None), prefix-major."""
        trainer = self._trainer
        config = getattr(trainer, "generation_config", None)
        if config is None and max_new_tokens is not None:
            raise VariantError("max_new_tokens can be changed per call only with transformers generation")
        before = None if config is None else config.max_new_tokens
        try:
            if config is not None and max_new_tokens is not None:
                config.max_new_tokens = max_new_tokens
            repeated = [ids for ids in prefix_ids for _ in range(n)]
            return trainer._generate_single_turn(repeated, None, {}, 1)
        finally:
            if config is not None:
                config.max_new_tokens = before

    def score(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> list[Tensor]:
        """Log-probs of the completions' tokens under the current policy, one 1-D tensor per row."""
        trainer, pad = self._trainer, self._trainer._tokenizer.pad_token_id
        width, length = max(map(len, prompt_ids)), max(map(len, completion_ids))
        device = trainer.accelerator.device
        left = lambda rows, fill: torch.tensor([[fill] * (width - len(r)) + r for r in rows], device=device)  # noqa: E731
        right = lambda rows, fill: torch.tensor([r + [fill] * (length - len(r)) for r in rows], device=device)  # noqa: E731
        ones = lambda rows: [[1] * len(r) for r in rows]  # noqa: E731
        batch = {
            "prompt_ids": left(prompt_ids, pad),
            "completion_ids": right(completion_ids, pad),
            "prompt_mask": left(ones(prompt_ids), 0),
            "completion_mask": right(ones(completion_ids), 0),
        }
        with trainer.scoring():
            logps, _, _ = trainer.logps_and_entropy(
                trainer.model,
                batch,
                batch_size=trainer.args.per_device_train_batch_size,
            )
        return [row[: len(ids)] for row, ids in zip(logps, completion_ids, strict=True)]
