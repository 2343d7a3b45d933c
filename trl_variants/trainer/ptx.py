"""PPO-ptx: the loss of pre-training text beside the policy's, InstructGPT (2203.02155) eq. 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import VariantError

if TYPE_CHECKING:
    from .grpo import VariantGRPOTrainer


class PretrainingTerm:
    """coef * mean over tokens of -log pi(token | text so far), at temperature 1.

    Which texts an optimizer step sees depends on the seed and the step alone, and its denominator is the tokens of all
    of them, so that neither micro-batches, processes nor a resumed run change the gradient.

    Args:
        data: rows with `text` or `input_ids`. rows: texts in an optimizer step, over all processes.

    Raises:
        VariantError: the data has neither column, or fewer texts than a step takes.
    """

    def __init__(self, trainer: VariantGRPOTrainer, data: Any, coef: float, rows: int, longest: int = 1024):
        columns = getattr(data, "column_names", None) or []
        if not {"text", "input_ids"} & set(columns):
            raise VariantError(
                f"ptx_dataset needs a column `text` or `input_ids`, it has {', '.join(columns) or 'none'}"
            )
        if len(data) < rows:
            raise VariantError(
                f"ptx_dataset has {len(data)} texts and an optimizer step takes {rows}: lower ptx_batch_size"
            )
        self.trainer, self.data, self.coef, self.rows, self.longest = trainer, data, coef, rows, longest

    def deal(self, micro_batches: int) -> list[tuple[list[list[int]], float]]:
        """This process's texts for each micro-batch of the coming step, with the tokens of the whole step."""
        trainer = self.trainer
        seed = hash((trainer.args.seed, trainer.state.global_step)) % 2**63
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(seed))[: self.rows]
        texts = [self._ids(self.data[int(i)]) for i in order]
        tokens = float(sum(max(len(ids) - 1, 0) for ids in texts))
        first = trainer.accelerator.process_index * micro_batches
        slots = micro_batches * trainer.world
        return [(texts[first + j :: slots], tokens) for j in range(micro_batches)]

    def _ids(self, row: dict) -> list[int]:
        ids = row.get("input_ids")
        if ids is None:
            ids = self.trainer._tokenizer(row["text"])["input_ids"]
        return list(ids)[: self.longest]

    def loss(self, model: nn.Module, dealt: tuple[list[list[int]], float]) -> Tensor | None:
        """The share of those texts in the term; None where there is no token to predict."""
        texts, tokens = [ids for ids in dealt[0] if len(ids) > 1], dealt[1]
        if not texts:
            return None
        device, width = self.trainer.accelerator.device, max(map(len, texts))
        pad = self.trainer._tokenizer.pad_token_id
        ids = torch.tensor([t + [pad] * (width - len(t)) for t in texts], device=device)
        mask = torch.tensor([[1] * len(t) + [0] * (width - len(t)) for t in texts], device=device)
        with self.trainer.accelerator.autocast():
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        logps = logits.float().log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        return -self.coef * (logps * mask[:, 1:]).sum() / tokens
