"""Once per run, on the run's own model: is the on-policy ratio 1, and does the gradient ignore the split?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..objective import coefficients, evaluate
from ..records import TokenBatch, Window

if TYPE_CHECKING:
    from .grpo import VariantGRPOTrainer

_MOST_WEIGHTS = 4_000_000  # gradients of the first trainable tensors up to this size are compared


@dataclass(frozen=True)
class SelfTest:
    """`log_ratio`: largest |log-ratio| between two passes on the same weights. `gradient`: relative difference in norm."""

    variant: str
    log_ratio: float
    gradient: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.log_ratio <= self.tolerance and self.gradient <= 20 * self.tolerance

    def __str__(self) -> str:
        verdict = "ok" if self.passed else "NOT ok: is dropout on, or does the model depend on padding or on the rows beside it?"
        return (f"self-test of {self.variant}: on-policy ratio 1 to {self.log_ratio:.0e}, re-split gradient equal to "
                f"{self.gradient:.0e} ({verdict})")  # fmt: skip


def self_test(trainer: VariantGRPOTrainer, batch: dict) -> SelfTest | None:
    """Compares one pass over two rows with two passes over one row each; None where a lone process cannot run the model.

    Uses +1 and -1 as advantages, so that a generation without signal is no excuse. Leaves gradients, random state and
    optimizer as they were.
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or (trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        return None
    rows = batch["completion_mask"].sum(-1).nonzero().squeeze(1)[:2]
    if len(rows) < 2 or any(k in batch for k in ("pixel_values", "num_images")):
        return None
    model = trainer.accelerator.unwrap_model(trainer.model)
    parameters = _some_parameters(model)
    pair = _take(batch, rows)
    with torch.random.fork_rng(devices=[trainer.accelerator.device] if trainer.accelerator.device.type == "cuda" else []):
        together, entropy, _ = trainer.logps_and_entropy(model, pair)
        whole = _record(trainer, pair, together, entropy)
        states = trainer.memory.states
        stock = torch.autograd.grad(evaluate(trainer.variant, whole, states).loss, parameters, allow_unused=True, retain_graph=False)
        _, c = coefficients(trainer.variant, replace(whole, logps=together.detach(), entropy=None if entropy is None else entropy.detach()), states)
        apart = [torch.zeros_like(p) for p in parameters]
        drift = 0.0
        for i in range(2):
            alone, h, _ = trainer.logps_and_entropy(model, _take(pair, torch.tensor([i], device=rows.device)))
            drift = max(drift, float(((alone.detach() - together.detach()[i : i + 1]) * whole.mask[i : i + 1]).abs().max()))
            back = (c["logps"][i : i + 1] * alone).sum() + ((c["entropy"][i : i + 1] * h).sum() if "entropy" in c and h is not None else 0.0)
            for total, g in zip(apart, torch.autograd.grad(back, parameters, allow_unused=True), strict=True):
                if g is not None:
                    total += g
    difference = _norm([a - (0 if s is None else s) for a, s in zip(apart, stock, strict=True)])
    scale = _norm([s for s in stock if s is not None])
    lowest = min(torch.finfo(together.dtype).eps ** -1, torch.finfo(model.dtype).eps ** -1)
    return SelfTest(trainer.variant.name, drift, difference / max(scale, 1e-30), tolerance=max(1e-4, 20.0 / lowest))


def _record(trainer: VariantGRPOTrainer, pair: dict, logps: Tensor, entropy: Tensor | None) -> TokenBatch:
    mask = pair["completion_mask"].float()
    sign = torch.tensor([[1.0], [-1.0]], device=mask.device)
    old = None if pair.get("old_per_token_logps") is None else pair["old_per_token_logps"]
    tokens = mask.sum()
    rollout = pair.get("sampling_per_token_logps")
    return TokenBatch(logps, mask, sign, old_logps=old, ref_logps=pair.get("ref_per_token_logps"), rollout_logps=rollout, entropy=entropy,
                      reward=pair["reward"], correct=pair["correct"], group=pair["group"], truncated=pair["truncated"], run=trainer.run_facts,
                      window=Window(2.0, 2.0, float(tokens), 1.0, 1.0), prompt_tokens=tokens.expand(2), generation_tokens=tokens.expand(2),
                      micro_tokens=tokens.expand(2))  # fmt: skip


def _take(batch: dict, rows: Tensor) -> dict:
    n = len(batch["completion_mask"])
    return {k: v[rows] if isinstance(v, Tensor) and v.dim() > 0 and len(v) == n else v for k, v in batch.items()}


def _some_parameters(model: torch.nn.Module) -> list[Tensor]:
    chosen: list[Tensor] = []
    for p in model.parameters():
        if p.requires_grad and (not chosen or sum(q.numel() for q in chosen) + p.numel() <= _MOST_WEIGHTS):
            chosen.append(p)
    return chosen


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([t.float().norm() for t in tensors]).norm()) if tensors else 0.0
