"""The greedy answer's reward: a baseline that costs a decode instead of a critic."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import Scored, weighted_sum
from .base import Rows

if TYPE_CHECKING:
    from ..trainer.grpo import VariantGRPOTrainer


class GreedyWorker:
    """Decodes each prompt greedily and scores it; see `hooks.advantage_remax.GreedyAnswer`. It has nothing to train."""

    provides = frozenset({"greedy_reward"})
    learns = "never"
    trains_policy = freezes_policy = False
    body = None

    def __init__(self, trainer: VariantGRPOTrainer, path: str, hook: Any):
        if getattr(trainer, "generation_config", None) is None:
            raise VariantError("greedy_answer decodes with transformers: set use_vllm: false")
        self.trainer, self.path, self.hook = trainer, path, hook

    def predict(self, rows: Rows, scored: Scored) -> dict[str, Tensor]:
        prompts = [ids[mask > 0].tolist() for ids, mask in zip(rows["prompt_ids"], rows["prompt_mask"], strict=True)]
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        with self._greedily():
            found, _ = self.trainer.services.generate([list(p) for p in distinct])
        answers = dict(zip(distinct, found, strict=True))
        matrix = self._rewards([list(answers[tuple(p)]) for p in prompts])
        return {"greedy_reward": weighted_sum(matrix, self.trainer.reward_weights.to(matrix.device))}

    def attachments(self, rows: Rows, scored: Scored) -> dict[str, Tensor]:
        return {}

    @contextlib.contextmanager
    def _greedily(self) -> Iterator[None]:
        config = self.trainer.generation_config
        before, config.do_sample = config.do_sample, False
        try:
            yield
        finally:
            config.do_sample = before

    def _rewards(self, ids: list[list[int]]) -> Tensor:
        """(b, F) of this process's rows; what reward functions log of greedy answers is left out of the run's log."""
        trainer = self.trainer
        data = trainer.generation_rows
        texts = trainer._tokenizer.batch_decode(ids, skip_special_tokens=True)
        prompts = [row["prompt"] for row in data]
        chat = not isinstance(prompts[0], str)
        completions = [[{"role": "assistant", "content": t}] for t in texts] if chat else texts
        kept = {name: getattr(trainer, name) for name in ("_reward_matrix", "_token_rewards")}
        muted = {name: lambda *_, **__: None for name in ("_log_completion_extra", "_log_metric")}
        attributes: Any = trainer.__dict__
        attributes.update(muted)
        try:
            matrix = trainer.stock_rewards(data, prompts, completions, ids)
        finally:
            for name in muted:
                del attributes[name]
            attributes.update(kept)
        rank = trainer.accelerator.process_index
        return matrix[rank * len(ids) : (rank + 1) * len(ids)]

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {"none": torch.zeros(1)}  # a file without tensors cannot be read back

    def load_state_dict(self, plain: Any, tensors: Any) -> None:
        pass

    def save_weights(self, folder: str) -> None:
        pass

    def restart(self) -> None:
        pass
