"""What the loss knows of the model: per-token statistics with gradient, from one forward of a micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..divergence import Divergence, divergence, divergence_topk, in_chunks
from .forward import Scores
from .head import Head

if TYPE_CHECKING:
    from .grpo import VariantGRPOTrainer
    from .passes import ModelPasses


@dataclass
class Statistics:
    """(B, T) each; `aux` is the MoE auxiliary loss."""

    logps: Tensor
    entropy: Tensor
    divergences: dict[str, Tensor] = field(default_factory=dict)
    aux: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        """By the names under which the one window objective hands back its coefficients."""
        return {"logps": self.logps, "entropy": self.entropy, **self.divergences}

    def surrogate(self, coefficients: Mapping[str, Tensor]) -> Tensor:
        """Scalar whose gradient is that of the window objective with these coefficients, sum(c * statistic).

        Statistics without a coefficient have no gradient.
        """
        known = self.named()
        return torch.stack([(c * known[name]).sum() for name, c in coefficients.items()]).sum()


def statistics(trainer: VariantGRPOTrainer, model: nn.Module, batch: dict, aux: bool = False) -> Statistics:
    """One forward of a micro-batch: log-probs, entropy and the divergences the variant's loss reads.

    Where the window's coefficients are known, a divergence that has none is computed without gradient.
    """
    wanted = loss_divergences(trainer.variant)
    seen = scored_rows(trainer, model, batch, aux=aux, hidden=bool(wanted))
    live = batch.get("coefficients")
    compared = {} if seen.hidden is None else compare(trainer, seen.hidden, batch, wanted, live)
    return Statistics(seen.logps, seen.entropy, compared, seen.aux)


def scored_rows(
    trainer: ModelPasses,
    model: nn.Module,
    batch: Mapping,
    *,
    aux: bool = False,
    batch_size: int | None = None,
    hidden: bool = False,
    entropy: bool = True,
) -> Scores:
    """Log-probs, entropy and, where asked for, hidden states of the completions, by the planner's pass or TRL's own."""
    if trainer.takes(batch):
        return trainer.forward(model, batch, aux=aux, batch_size=batch_size, hidden=hidden)
    with hidden_states(trainer, model, hidden) as seen:
        logps, entropies, aux_loss = trainer.logps_and_entropy(
            model, batch, aux=aux, batch_size=batch_size, entropy=entropy
        )
    width = batch["completion_ids"].shape[1]
    return Scores(logps, entropies, aux_loss, hidden=torch.cat(seen)[:, -width - 1 : -1] if hidden else None)


def loss_divergences(variant: Any) -> tuple[Divergence, ...]:
    """What the loss hooks compare, each once."""
    of_loss = ("credit", "ratio", "clip", "weight", "aggregate", "regularizers")
    found = [d for path, h in variant.hooks() if path.split(".")[0] in of_loss for d in h.divergences]
    return tuple({d.key: d for d in found}.values())


def scoring_divergences(variant: Any) -> tuple[Divergence, ...]:
    """What hooks on rewards, selection and advantages compare."""
    found = [
        d
        for path, h in variant.hooks()
        if path.split(".")[0] in ("rewards", "select", "advantage")
        for d in h.divergences
    ]
    return tuple({d.key: d for d in found}.values())


@contextlib.contextmanager
def hidden_states(trainer: ModelPasses, model: nn.Module, wanted: bool = True) -> Iterator[list[Tensor]]:
    """Collects the backbone's last hidden states of every forward inside, (b, P + T, H) each, with their graph."""
    seen: list[Tensor] = []
    if not wanted:
        yield seen
        return
    backbone = trainer.causal_lm(model).base_model
    handle = backbone.register_forward_hook(lambda _module, _inputs, output: seen.append(output.last_hidden_state))
    try:
        yield seen
    finally:
        handle.remove()


def compare(
    trainer: VariantGRPOTrainer,
    hidden: Tensor,
    batch: dict,
    wanted: tuple[Divergence, ...],
    live: Mapping | None = None,
) -> dict[str, Tensor]:
    """{key: (B, T)} divergences of the policy, whose hidden states (B, T, H) these are; 0 where the anchor is silent.

    Logits exist for a few hundred positions at a time, here and in the backward. Only those in `live` carry gradient
    (None: all of them).
    """
    own = Head.of(trainer.causal_lm(trainer.model), trainer.temperature, trainer.args.cast_lm_head_to_fp32)
    out = {}
    for spec in wanted:
        here = batch["completion_mask"] > 0
        if spec.anchor == "teacher":
            here = here & (batch["teacher_mask"] > 0)
        with torch.set_grad_enabled(torch.is_grad_enabled() and (live is None or spec.key in live)):
            values = in_chunks(*_comparison(trainer, own, hidden[here], here, batch, spec))
        out[spec.key] = torch.zeros(here.shape, dtype=values.dtype, device=values.device).masked_scatter(here, values)
    return out


def _comparison(trainer: Any, own: Head, mine: Tensor, here: Tensor, batch: dict, spec: Divergence) -> tuple:
    """(function of slices, tensors to slice)."""
    if f"{spec.anchor}_topk_ids" in batch:
        ids, known = batch[f"{spec.anchor}_topk_ids"][here], batch[f"{spec.anchor}_topk_logps"][here]
        return (lambda h, i, q: divergence_topk(own(h), i, q, spec)), mine, ids, known
    other = trainer.teaching.heads[spec.anchor]
    return (lambda h, t: divergence(own(h), other(t), spec)), mine, batch[f"{spec.anchor}_hidden"][here]
