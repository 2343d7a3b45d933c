"""Once per run, on the run's own model: is the on-policy ratio 1, and does the gradient ignore the split?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..objective import coefficients, evaluate
from ..records import TokenBatch, Window
from .statistics import Statistics, statistics
from .window import loss_mask

if TYPE_CHECKING:
    from .grpo import VariantGRPOTrainer

_MOST_WEIGHTS = 4_000_000  # gradients of the first trainable tensors up to this size are compared


@dataclass(frozen=True)
class SelfTest:
    """`log_ratio`: largest |log-ratio| between two passes on the same weights. `gradient`: relative difference in norm.

    The tolerances are what the weights' precision explains.
    """

    variant: str
    log_ratio: float
    gradient: float
    full_precision: bool

    @property
    def passed(self) -> bool:
        ratio, gradient = (1e-4, 1e-3) if self.full_precision else (0.1, 0.1)
        return self.log_ratio <= ratio and self.gradient <= gradient

    def __str__(self) -> str:
        verdict = (
            "ok"
            if self.passed
            else "NOT ok: is dropout on, or does the model depend on padding or on the rows beside it?"
        )
        return (
            f"self-test of {self.variant}: on-policy ratio 1 to {self.log_ratio:.0e}, re-split gradient equal to "
            f"{self.gradient:.0e} ({verdict})"
        )


def self_test(trainer: VariantGRPOTrainer, batches: Sequence[dict]) -> SelfTest | None:
    """Compares one pass over two rows with a pass over each; None where a lone process cannot run the model.

    Uses +1 and -0.5 as advantages, so that a generation without signal is no excuse. Leaves gradients, random state and
    optimizer as they were.
    """
    reentrant = (trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    pair = _pair(batches)
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or reentrant or pair is None:
        return None
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = _some_weights(model)
    devices = [trainer.accelerator.device] if trainer.accelerator.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        seen = statistics(trainer, model, pair)
        logps, whole = seen.logps, _record(trainer, pair, seen)
        states = trainer.memory.states
        in_one = torch.autograd.grad(evaluate(trainer.variant, whole, states).loss, weights, allow_unused=True)
        detached = replace(whole, logps=logps.detach(), entropy=seen.entropy.detach())
        _, c = coefficients(trainer.variant, detached, states)
        in_two = [torch.zeros_like(w) for w in weights]
        drift = size = 0.0
        for i in range(2):
            alone = statistics(trainer, model, _take(pair, torch.tensor([i], device=logps.device)))
            gap = (alone.logps[0] - logps[i]).detach() * whole.mask[i]
            drift = max(drift, float(gap.abs().max()))
            share = alone.surrogate({name: x[i : i + 1] for name, x in c.items()})
            grads = torch.autograd.grad(share, weights, allow_unused=True)
            size += _norm([g for g in grads if g is not None])
            for total, g in zip(in_two, grads, strict=True):
                total += 0 if g is None else g
    known = [(a, b) for a, b in zip(in_two, in_one, strict=True) if b is not None]
    # beside the two rows' own gradients, lest rows that cancel leave noise over noise
    difference = _norm([a - b for a, b in known]) / max(_norm([b for _, b in known]), 0.01 * size, 1e-30)
    full = torch.finfo(model.dtype).eps < 1e-6 and trainer.accelerator.mixed_precision == "no"
    return SelfTest(trainer.variant.name, drift, difference, full)


def _record(trainer: VariantGRPOTrainer, pair: dict, seen: Statistics) -> TokenBatch:
    mask = loss_mask(pair).to(seen.logps.dtype)
    sign = torch.tensor([[1.0], [-0.5]], device=mask.device)  # unequal: equal rows must not cancel
    old = None if pair.get("old_per_token_logps") is None else pair["old_per_token_logps"]
    tokens = mask.sum()
    rollout = pair.get("sampling_per_token_logps")
    return TokenBatch(
        seen.logps,
        mask,
        sign,
        old_logps=old,
        ref_logps=pair.get("ref_per_token_logps"),
        rollout_logps=rollout,
        teacher_logps=pair.get("teacher_logps"),
        teacher_mask=pair.get("teacher_mask"),
        divergences=seen.divergences,
        entropy=seen.entropy,
        reward=pair["reward"],
        correct=pair["correct"],
        solved=pair["solved"],
        group=pair["group"],
        truncated=pair["truncated"],
        origin=pair.get("origin"),
        extra={name.removeprefix("extra/"): x for name, x in pair.items() if name.startswith("extra/")},
        run=trainer.run_facts,
        window=Window(2.0, 2.0, float(tokens), 1.0, 1.0),
        prompt_tokens=tokens.expand(2),
        generation_tokens=tokens.expand(2),
        micro_tokens=tokens.expand(2),
    )


def _pair(batches: Sequence[dict]) -> dict | None:
    """The first two rows with a token in the loss and equal widths, from one micro-batch or from two."""
    found: list[dict] = []
    for batch in batches:
        if "pixel_values" in batch:
            return None
        widths = (batch["prompt_ids"].shape[1], batch["completion_ids"].shape[1])
        for row in loss_mask(batch).sum(-1).nonzero().squeeze(1):
            if found and widths != (found[0]["prompt_ids"].shape[1], found[0]["completion_ids"].shape[1]):
                break
            found.append(_take(batch, row.unsqueeze(0)))
            if len(found) == 2:
                one, two = found
                joined = {k: torch.cat([v, two[k]]) for k, v in one.items() if isinstance(v, Tensor) and v.dim() > 0}
                return {**one, **joined}
    return None


def _take(batch: dict, rows: Tensor) -> dict:
    n = len(batch["completion_mask"])
    return {k: v[rows] if isinstance(v, Tensor) and v.dim() > 0 and len(v) == n else v for k, v in batch.items()}


def _some_weights(model: torch.nn.Module) -> list[Tensor]:
    chosen: list[Tensor] = []
    for p in model.parameters():
        if p.requires_grad and (not chosen or sum(q.numel() for q in chosen) + p.numel() <= _MOST_WEIGHTS):
            chosen.append(p)
    return chosen


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([t.float().norm() for t in tensors]).norm()) if tensors else 0.0
