"""Reward functions that return one value per token, such as process reward models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import VariantError
from ..hooks.rewards import on_last_token
from ..records import Scored

if TYPE_CHECKING:
    from .grpo import VariantGRPOTrainer


def summed(values: list[Any], ids: list) -> tuple[list[Any], list[list[float | None]] | None]:
    """(one number per completion, the values per token or None): rows given as lists count as their sum, None in them
    (no step ends at that token) as 0; a row of nothing but None is None.

    Raises:
        VariantError: a row with another number of values than its completion has tokens.
    """
    if not any(isinstance(v, (list, tuple)) or (isinstance(v, Tensor) and v.dim()) for v in values):
        return values, None
    per_token = []
    for value, own in zip(values, ids, strict=True):
        row = [] if value is None else value.tolist() if isinstance(value, Tensor) else value
        if not isinstance(row, Iterable):
            raise VariantError(
                f"it returned a list for one completion and {row!r} for another: one value per token each"
            )
        row = [None if x is None else float(x) for x in row]
        if value is not None and len(row) != len(own):
            raise VariantError(f"it returned {len(row)} values for a completion of {len(own)} tokens")
        per_token.append(row)
    given = [[x for x in row if x is not None] for row in per_token]
    return [None if v is None or not xs else sum(xs) for v, xs in zip(values, given, strict=True)], per_token


def with_token_rewards(trainer: VariantGRPOTrainer, scored: Scored, output: dict) -> Scored:
    """The record with `token_rewards` and `tokens["steps"]`, (N, T), where a reward function gave one value per token.

    A value on a token that is not the policy's moves to the policy's last token before it (its first, if there is
    none); functions that give one number put it on the last token. Steps are 1 on tokens that got a value.

    Raises:
        VariantError: a rewards hook that edits the sum and would be ignored.
    """
    given = {n: rows for n, rows in trainer._token_rewards.items() if rows is not None}
    if not _anywhere(trainer, bool(given)):
        return scored
    here = len(output["completion_ids"])
    trainer.fail_together(
        "rewards per token cannot be combined with a rollouts hook that asks for single rewards: return "
        "one number per completion"
        if any(len(values) != here for values in given.values())
        else None
    )
    per_token = ("kl_in_reward", "adaptive_kl_in_reward", "missing_eos_penalty")
    for h in trainer.variant.rewards:
        if h.hook_name not in per_token or getattr(h, "level", "token") != "token":
            raise VariantError(
                f"a reward function gives one value per token, and rewards hook {h.hook_name} edits their sum: drop "
                "it, or return one number per completion"
            )
    local = output["completion_mask"].float()
    policy = local if output.get("tool_mask") is None else local * output["tool_mask"]
    total, ends = torch.zeros_like(local), torch.zeros_like(local)
    for name, weight in zip(trainer.reward_func_names, trainer.reward_weights.tolist(), strict=True):
        for i, row in enumerate(given.get(name, ())):
            total[i, : len(row)] += weight * torch.tensor([x or 0.0 for x in row], device=total.device)
            ends[i, : len(row)] += torch.tensor([float(x is not None) for x in row], device=total.device)
    whole = trainer.gather_rows(_onto_policy(total, policy), 0.0)
    steps = trainer.gather_rows(_onto_policy(ends, policy), 0.0)
    rest = [j for j, name in enumerate(trainer.reward_func_names) if name not in _names(trainer, given)]
    numbers = (scored.rewards[:, rest] * scored.weights[rest].to(scored.rewards)).nansum(1)
    everyone = trainer.gather_rows(policy, 0.0)
    whole = whole + on_last_token(numbers, everyone)
    if rest:
        scorable = (~torch.isnan(scored.rewards[:, rest])).any(1)
        steps = steps + on_last_token(scorable.to(steps), everyone)
    return scored.with_(token_rewards=whole, spread=True, tokens={**scored.tokens, "steps": (steps > 0).to(steps)})


def _onto_policy(x: Tensor, policy: Tensor) -> Tensor:
    position = torch.arange(x.shape[1], device=x.device).expand_as(x)
    before = torch.where(policy > 0, position, -1).cummax(1).values
    first = torch.where(policy > 0, position, x.shape[1] - 1).min(1, keepdim=True).values
    return torch.zeros_like(x).scatter_add(1, torch.where(before < 0, first, before), x)


def _names(trainer: VariantGRPOTrainer, given: dict) -> set[str]:
    if trainer.world == 1:
        return set(given)
    parts: list[Any] = [None] * trainer.world
    torch.distributed.all_gather_object(parts, sorted(given))
    return {name for part in parts for name in part}


def _anywhere(trainer: VariantGRPOTrainer, here: bool) -> bool:
    count = torch.tensor(float(here), device=trainer.accelerator.device)
    return bool(trainer.accelerator.reduce(count, reduction="sum") > 0)
