"""The update phase of one optimizer step: which rows carry gradient, and which micro-batch each of them goes to.

Every denominator of the loss is a count per row or a total of the window, so rows may be dealt to micro-batches at
will. Rows that add neither value nor gradient are left out: in a window-scoped method those whose coefficients are all
zero, otherwise those without a token in the loss and, where every hook says so (`silent_at_zero`), those whose
advantage is zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..hooks.metrics import Extreme, Max, Mean, Metric, Min
from ..records import column
from .batching import Item, Rectangle, balanced, deal, fewest, quickest
from .layout import Rows
from .window import loss_mask

if TYPE_CHECKING:
    from .grpo import VariantGRPOTrainer

_LEFT = ("prompt_ids", "prompt_mask")  # padded on the left


@dataclass(frozen=True)
class Plan:
    """What the micro-steps of one optimizer step will train on; counts are this process's.

    `batches` has one entry for each micro-step of transformers' loop, None where there is nothing to do; `real` of them
    hold rows, equally many on every process. `tokens`: all tokens in the loss. `dropped_live`: rows left out that have
    one.
    """

    batches: list[dict | None]
    real: int
    tokens: int = 0
    dropped_rows: int = 0
    dropped_live: int = 0
    dropped_tokens: int = 0


def kept_as_it_is(trainer: VariantGRPOTrainer, batches: Sequence[dict] = ()) -> str:
    """Why TRL's micro-batches must stay together; "" where rows may be dealt anew."""
    if not trainer.named:
        return "no variant is named"
    if not getattr(trainer.args, "plan_updates", True):
        return "plan_updates is off"
    local = sorted(h.hook_name for _, h in trainer.variant.hooks() if h.span == "micro-batch")
    if local:
        return f"{', '.join(local)} has span micro-batch"
    if trainer.aux_loss_enabled:
        return "the MoE auxiliary loss is one of each micro-batch"
    if not all(trainer.takes(b) for b in batches):
        return "rows with images or virtual tokens are left to TRL"
    if not trainer.forward.abilities.trim:
        return "the model's log-probs depend on padding"
    if len({b["iteration"] for b in batches}) > 1:
        return "the optimizer step makes several passes over a generation"
    return ""


def describe_plan(trainer: VariantGRPOTrainer, batches: Sequence[dict]) -> str:
    """One line about what the update phase will process."""
    head = f"update plan of {trainer.variant.name}: "
    if why := kept_as_it_is(trainer, batches):
        trims = all(trainer.takes(b) for b in batches) and trainer.forward.abilities.trim
        return f"{head}TRL's micro-batches, {'without' if trims else 'with'} padding ({why})"
    if trainer.variant.scope == "window":
        dropped = "rows whose coefficients are all zero are left out"
    elif trainer.variant.silent_at_zero:
        dropped = "rows with zero advantage are left out"
    else:
        dropped = "rows without a token in the loss are left out (a term acts on every other)"
    can = trainer.forward.abilities
    layout = [
        "several rows a line" if can.pack else "one row a line",
        *(["shared prompts where they pay"] if can.share else []),
    ]
    return f"{head}{dropped}; {', '.join(layout)}"


def together(batches: Sequence[dict], pad: int) -> dict[str, Any]:
    """The rows of several micro-batches as one, padded to common widths."""
    first = batches[0]
    widths = [b["completion_ids"].shape[1] for b in batches]
    whole: dict[str, Any] = {}
    for name, value in first.items():
        values = [b[name] for b in batches]
        if isinstance(value, Mapping):
            whole[name] = {k: _stack([v[k] for v in values], name, widths, pad) for k in value}
        elif isinstance(value, Tensor) and value.dim() > 0:
            whole[name] = _stack(values, name, widths, pad)
        elif isinstance(value, list):
            whole[name] = [x for v in values for x in v]
        else:
            whole[name] = value
    return whole


def _stack(values: list[Tensor], name: str, widths: list[int], pad: int) -> Tensor:
    fill = pad if name.endswith("_ids") else 0
    if values[0].dim() < 2 or len({v.shape[1] for v in values}) == 1:
        return torch.cat(values)
    if name in _LEFT:
        size = max(v.shape[1] for v in values)
        return torch.cat([torch.nn.functional.pad(v, (size - v.shape[1], 0), value=fill) for v in values])
    size = max(widths)  # per token: what else would have the widths of the completions
    return torch.cat([torch.cat([v, v.new_full((len(v), size - v.shape[1], *v.shape[2:]), fill)], 1) for v in values])


def taken(whole: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Some rows of a batch, without the columns in which none of them has a token."""
    mask = whole["completion_mask"]
    index = torch.tensor(list(rows), dtype=torch.long, device=mask.device)
    width, used = mask.shape[1], mask[index].any(0).nonzero()
    end = int(used[-1]) + 1 if len(used) else 1
    start = int(whole["prompt_mask"][index].any(0).nonzero()[0])

    def cut(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: cut(name, v) for k, v in value.items()}
        if isinstance(value, list):
            return [value[i] for i in rows]
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        value = value[index]
        if name in _LEFT:
            return value[:, start:]
        return value[:, :end] if value.dim() >= 2 and value.shape[1] == width else value

    return {name: cut(name, value) for name, value in whole.items()}


def with_gradient(trainer: VariantGRPOTrainer, whole: Mapping[str, Any]) -> Tensor:
    """(N,) bool: rows that add value or gradient to the loss of the window."""
    if "coefficients" in whole:  # statistics of padding are constants
        scored = whole["completion_mask"].bool()
        return torch.stack([((c != 0) & scored).any(1) for c in whole["coefficients"].values()]).any(0)
    mask = loss_mask(dict(whole)).bool()
    live = mask.any(1)
    if trainer.variant.silent_at_zero:
        live = live & ((column(whole["advantages"]) != 0) & mask).any(1)
    return live


def plan_update(trainer: VariantGRPOTrainer, batches: list[dict]) -> Plan:
    """Deals the rows of an optimizer step that carry gradient to as few micro-batches as the token budget allows.

    The number of micro-steps stays; those with nothing to do come first. Every process runs equally many, on a row of
    weight 0 where it has no other.
    """
    if kept_as_it_is(trainer, batches):
        return Plan(list(batches), len(batches), sum(int(loss_mask(b).sum()) for b in batches))
    whole = together(batches, trainer.pad_id)
    mask, live = loss_mask(whole).bool(), with_gradient(trainer, whole)
    planned: list[dict | None] = []
    idle: list[dict | None] = []
    for rectangle in _rectangles(trainer, len(batches), whole, live.nonzero().squeeze(1).tolist()):
        rows = [i for line in rectangle for item in line for i in item]
        place = {row: k for k, row in enumerate(rows)}
        arrangement = [[tuple(place[i] for i in item) for item in line] for line in rectangle]
        planned.append({**taken(whole, rows), "arrangement": arrangement} if rows else _weightless(whole))
    dropped, idle = ~live, [None] * (len(batches) - len(planned))
    return Plan(
        idle + planned,
        len(planned),
        int(mask.sum()),
        int(dropped.sum()),
        int((dropped & mask.any(1)).sum()),
        int(mask[dropped].sum()),
    )


def _rectangles(trainer: VariantGRPOTrainer, steps: int, whole: Mapping[str, Any], kept: list[int]) -> list[Rectangle]:
    """Equally many on every process, at most `steps`, empty ones first."""
    forward, lengths = trainer.forward, Rows.of(whole).lengths
    wanted = getattr(trainer.args, "max_tokens_per_microbatch", None)
    budget = wanted or trainer.args.per_device_train_batch_size * (max(lengths.prompt) + max(lengths.completion))
    can = forward.abilities
    cost = forward.cost(can)

    def dealt(budget: int) -> list[Rectangle]:
        items: list[Item] = forward.items(kept, lengths, budget, can)
        return deal(items, lengths, budget, cost)

    plan, took = fewest(dealt, budget, steps)
    if wanted and took > wanted and not trainer.warned_of_budget:
        trainer.warned_of_budget = True
        warnings.warn(
            f"max_tokens_per_microbatch={wanted} gives more than {steps} micro-batches, so they hold up to {took} "
            "tokens: raise gradient_accumulation_steps",
            stacklevel=2,
        )
    if kept and not trainer.sharded:
        plan = quickest(dealt, lengths, took, len(plan), steps, cost)
    counts = trainer.gather_rows(torch.tensor([len(plan)], device=trainer.accelerator.device), 0)
    # where parameters are sharded every micro-step is a forward on every process
    real = steps if trainer.sharded else max(1, int(counts.max()))
    if len(plan) != real and kept:
        plan = balanced(dealt, lengths, took, real)
    empty: list[Rectangle] = [[] for _ in range(real - len(plan))]
    return empty + plan


def _weightless(whole: Mapping[str, Any]) -> dict[str, Any]:
    """A row that is processed and counts nothing, so that a process without rows stays in step."""
    batch = taken(whole, [0])
    for name in ("completion_mask", "tool_mask"):
        if batch.get(name) is not None:
            batch[name] = torch.zeros_like(batch[name])
    return {**batch, "weightless": True}


def blank(parts: Mapping[str, Metric]) -> dict[str, Metric]:
    """The same names with nothing measured: what a weightless row adds to the metrics."""
    nothing: dict[str, Metric] = {}
    for name, part in parts.items():
        if isinstance(part, Extreme):
            nothing[name] = type(part)(torch.full_like(part.at, torch.nan))
        else:
            nothing[name] = Mean(torch.zeros_like(part.total), torch.zeros_like(part.count))
    return nothing


def unclipped(plan: Plan, parts: Mapping[str, Metric], per_row: bool) -> dict[str, Metric]:
    """What the rows left out add to the clip fractions: a row without advantage is never clipped."""
    count = plan.dropped_rows if per_row else plan.dropped_tokens
    seen = plan.dropped_rows if per_row else plan.dropped_live
    added: dict[str, Metric] = {}
    for name, part in parts.items():
        if not name.startswith("clip_ratio/"):
            continue
        if isinstance(part, Mean):
            added[name] = Mean(torch.zeros_like(part.total), torch.full_like(part.count, count))
        elif isinstance(part, (Min, Max)):
            added[name] = type(part)(torch.full_like(part.at, 0.0 if seen else torch.nan))
    return added
