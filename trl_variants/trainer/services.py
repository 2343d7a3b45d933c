"""What prompts and rollouts hooks may call: generation and scoring, whichever engine runs underneath."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import Rollouts
from .traces import Traces

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

    @property
    def rows(self) -> list[dict[str, Any]]:
        """This process's data set rows of the generation at hand."""
        return self._trainer.rollouts.rows

    @property
    def given(self) -> list:
        """`Given` or None for each row of this process, while its rows are sampled in training; else empty."""
        return self._trainer.rollouts.plan if self._trainer.training else []

    @property
    def group_size(self) -> int:
        return self._trainer.num_generations

    @property
    def progress(self) -> float:
        return self._trainer.progress

    @property
    def max_new_tokens(self) -> int | None:
        """max_completion_length."""
        return self._trainer.max_completion_length

    def log(self, name: str, value: float) -> None:
        """A metric of this generation, summed over the processes. Collective."""
        trainer = self._trainer
        total = trainer.accelerator.reduce(torch.tensor(float(value), device=trainer.accelerator.device), "sum")
        trainer._metrics["train"][name].append(float(total))

    def place(self, i: int) -> tuple[int, int]:
        """(group, place in the group) of this process's row i, counted over all processes."""
        return divmod(self._trainer.accelerator.process_index * len(self.rows) + i, self.group_size)

    def draw(self, i: int, purpose: str) -> random.Random:
        """A generator for row i of this generation: the same however rows are dealt, and after a resume."""
        trainer, (group, place) = self._trainer, self.place(i)
        return random.Random(f"{trainer.args.seed}/{purpose}/{trainer.generation}/{group}/{place}")

    @property
    def traces(self) -> Traces:
        """Texts of the data set as token ids of completions, in the policy's own format."""
        return Traces(self._trainer)

    def tokenize(self, prompts: list) -> list[list[int]]:
        """Prompts, text or conversations, as generation sees them."""
        return [list(ids) for ids in self._trainer._tokenize_prompts(prompts)[0]]

    def verify(self, rollouts: Rollouts, chosen: Sequence[int] | None = None) -> list[tuple[list[float], bool]]:
        """(rewards of each function, right or wrong) of the chosen rows of this process, by default of every one.

        They are kept: no trajectory is rewarded twice. Collective, with any number of rows.
        """
        ids = rollouts.completion_ids
        earned = self._trainer.rollouts.verify(list(range(len(ids)) if chosen is None else chosen), ids)
        above = getattr(self._trainer.args, "correct_above", 0.5)
        found = [e.rewards.tolist() for e in earned]
        return [(rewards, bool(rewards) and rewards[0] > above) for rewards in found]

    def in_groups(self, values: list) -> list[list]:
        """One value for each row of this process -> for each, those of its whole group. Collective."""
        everyone, size = self._trainer.gather_objects(values), self.group_size
        return [everyone[g * size : (g + 1) * size] for g, _ in map(self.place, range(len(values)))]

    @contextlib.contextmanager
    def budget(self, max_new_tokens: int | None) -> Iterator[None]:
        """Transformers generates at most this many tokens inside; an engine with a fixed limit is left alone."""
        config = getattr(self._trainer, "generation_config", None)
        if config is None or max_new_tokens is None:
            yield
            return
        before, config.max_new_tokens = config.max_new_tokens, max_new_tokens
        try:
            yield
        finally:
            config.max_new_tokens = before

    @torch.no_grad()
    def generate(
        self, prefix_ids: list[list[int]], n: int = 1, max_new_tokens: int | None = None
    ) -> tuple[list[list[int]], list | None]:
        """Continues each prefix `n` times. Returns (completion ids, the engine's log-probs or None), prefix-major."""
        trainer = self._trainer
        if getattr(trainer, "generation_config", None) is None and max_new_tokens is not None:
            raise VariantError("max_new_tokens can be changed per call only with transformers generation")
        repeated = [ids for ids in prefix_ids for _ in range(n)]
        seam, spare = trainer.rollouts, min(prefix_ids, key=len, default=[trainer._tokenizer.pad_token_id])
        return seam.part(trainer._generate_single_turn, repeated, spare, max_new_tokens)

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
