"""Between TRL's generation and the rollouts hooks: its tuple as a record and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import Rollouts

if TYPE_CHECKING:
    from .grpo import VariantGRPOTrainer


def apply_rollout_hooks(trainer: VariantGRPOTrainer, generated: tuple) -> tuple[tuple, dict[str, Tensor]]:
    """Runs the rollouts hooks on this process's rows. Returns TRL's tuple, and per-row flags for `Scored`.

    Raises:
        VariantError: a hook changed the number of rows, or its lists do not fit each other.
    """
    prompt_ids, completion_ids, tool_mask, completions, logprobs, extra, images, tool_images = generated
    rows = len(prompt_ids)
    before = [list(ids) for ids in completion_ids]
    rollouts = Rollouts(
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        mask=tool_mask,
        logps=logprobs,
        origin=[0] * rows,
        in_baseline=[True] * rows,
        in_policy_loss=[True] * rows,
    )
    for h in trainer.variant.rollouts:
        rollouts = h(rollouts, trainer.services)
    if len(rollouts.completion_ids) != rows or any(not ids for ids in rollouts.completion_ids):
        raise VariantError(
            f"a rollouts hook must return {rows} non-empty completions, got {len(rollouts.completion_ids)}"
        )
    completions = list(completions)
    for i, ids in enumerate(rollouts.completion_ids):
        if list(ids) != before[i]:
            text = trainer._tokenizer.decode(ids, skip_special_tokens=True)
            completions[i] = [{"role": "assistant", "content": text}] if isinstance(completions[i], list) else text
    device = trainer.accelerator.device
    flags = {
        "origin": torch.tensor(rollouts.origin, device=device),
        "in_baseline": torch.tensor(rollouts.in_baseline, device=device),
        "keep": torch.tensor(rollouts.in_policy_loss, device=device),
    }
    return (
        rollouts.prompt_ids,
        rollouts.completion_ids,
        rollouts.mask,
        completions,
        rollouts.logps,
        extra,
        images,
        tool_images,
    ), flags
