"""A process reward model as a reward function: one value at the end of every step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import VariantError
from .base import Reward, prompt_texts


def step_ends(text: str, separator: str) -> list[tuple[str, int]]:
    """(step without its separator, number of characters up to its end, separator included) in order; no blank ones."""
    found, start = [], 0
    while start < len(text):
        at = text.find(separator, start)
        end = len(text) if at < 0 else at + len(separator)
        step = text[start : len(text) if at < 0 else at]
        if step.strip():
            found.append((step, end))
        start = end
    return found


def token_at(ids: Sequence[int], characters: int, tokenizer: Any) -> int:
    """The first token with which the decoded text has that many characters."""
    length = lambda t: len(tokenizer.decode(list(ids[: t + 1]), skip_special_tokens=True))  # noqa: E731
    return min(bisect_left(range(len(ids)), characters, key=length), len(ids) - 1)


class ProcessRewardModel(Reward):
    """A token-classification model that says at each step's end how likely the step is right, in [0, 1].

    Reads what TRL's PRMTrainer trains on: the prompt, then each step and the separator; the value is p(label 1) at the
    separator's last token (a model with one output gives that number as it is). Returns for each completion one value
    per token: the step's value on the policy's token that ends it, None elsewhere. With `advantage: step_rewards` this
    is GRPO with process supervision; other per-token advantages (gae, token_whitened) read it too.

    Args:
        model, tokenizer: of the reward model. policy_tokenizer: of the policy, to find the tokens at which steps end.
        separator: what ends a step, in the policy's answers and in the model's input.
        max_length: the model's input is cut on the left to this many tokens; steps cut away have no value.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        policy_tokenizer: Any,
        separator: str = "\n",
        batch_size: int = 8,
        max_length: int | None = None,
    ):
        super().__init__("process_reward")
        if not separator:
            raise VariantError("separator is the text that ends a step, such as a line end; it is empty")
        self.model, self.tokenizer, self.policy_tokenizer = model, tokenizer, policy_tokenizer
        self.separator, self.batch_size, self.max_length = separator, batch_size, max_length
        self.mark = tokenizer.encode(separator, add_special_tokens=False)
        if not self.mark:
            raise VariantError(f"the reward model's tokenizer has no token for the separator {separator!r}")
        if tokenizer.pad_token_id is None:
            raise VariantError("the reward model's tokenizer has no pad token: set tokenizer.pad_token")

    def __call__(
        self, prompts: Any, completions: list[Any], completion_ids: Any = None, **columns: Any
    ) -> list[list[float | None] | None]:
        if completion_ids is None:
            raise VariantError("process_reward needs the completions' token ids: it rewards tokens")
        texts = [self.policy_tokenizer.decode(list(ids), skip_special_tokens=True) for ids in completion_ids]
        steps = [step_ends(text, self.separator) for text in texts]
        asked = [self._input(p, [s for s, _ in row]) for p, row in zip(prompt_texts(prompts), steps, strict=True)]
        values: list[list[float | None]] = []
        for i in range(0, len(asked), self.batch_size):
            values += self._values(asked[i : i + self.batch_size])
        out: list[list[float | None] | None] = []
        for ids, row, found in zip(completion_ids, steps, values, strict=True):
            per_token: list[float | None] = [None] * len(ids)
            for (_, end), value in zip(row, found, strict=True):
                per_token[token_at(ids, end, self.policy_tokenizer)] = value
            out.append(per_token)
        return out

    def _input(self, prompt: str, steps: list[str]) -> tuple[list[int], list[int]]:
        """(token ids, the place of each step's end; negative: cut away)."""
        ids, places = self.tokenizer.encode(prompt), []
        for step in steps:
            ids = [*ids, *self.tokenizer.encode(step, add_special_tokens=False), *self.mark]
            places.append(len(ids) - 1)
        cut = max(0, len(ids) - self.max_length) if self.max_length else 0
        return ids[cut:], [p - cut for p in places]

    @torch.no_grad()
    def _values(self, rows: list[tuple[list[int], list[int]]]) -> list[list[float | None]]:
        width, pad, device = max(max(len(ids) for ids, _ in rows), 1), self.tokenizer.pad_token_id, self.model.device
        ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row, _ in rows], device=device)
        logits = self.model(input_ids=ids, attention_mask=mask).logits.float()
        right = logits[..., 0] if logits.shape[-1] == 1 else logits.softmax(-1)[..., 1]
        return [[None if p < 0 else float(right[i, p]) for p in places] for i, (_, places) in enumerate(rows)]
