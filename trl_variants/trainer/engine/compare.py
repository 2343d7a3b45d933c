"""Log-probs of a few tokens from the engine beside the trainer's: at start-up, and after each sync."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import add_fused_lm_head

from ...errors import VariantError
from ...teachers.weights import adapter

FLOOR = 0.02  # nats a token: below this two engines agree whatever their noise
ROUNDING = 0.05  # nats a token between bf16 and fp32
ANOTHER_BASE = 0.5  # nats a token between the bare bases: rounding stays far below
QUANTIZED_BASE = 1.5  # the same where one is in 4 bits: 0.35 to 0.7 on a model of 135M, less on larger ones


def mean_gap(a: Tensor, b: Tensor) -> float:
    """Mean absolute difference of two (tokens,) vectors; NaN where one is."""
    return float((a - b).abs().mean())


@contextlib.contextmanager
def at_temperature(trainer: Any, temperature: float) -> Iterator[None]:
    """The trainer's log-probs at another temperature than the run's."""
    model = trainer.causal_lm(trainer.model)
    stock = model.forward
    fp32 = trainer.args.cast_lm_head_to_fp32
    add_fused_lm_head(model, temperature, fp32, outputs=("log_probs", "entropy"))
    try:
        yield
    finally:
        model.forward = stock


def of_trainer(trainer: Any, ids: list[int], base: bool = False) -> Tensor:
    """(len(ids) - 1,) log-probs at temperature 1 under the adapter or the bare base."""
    off = adapter(trainer.unwrapped, None) if base else contextlib.nullcontext()
    with at_temperature(trainer, 1.0), off, trainer.forward.uncounted():
        [found] = trainer.services.score([ids[:1]], [ids[1:]])
    return found.double().cpu()


def truncated(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """(..., V) logits at the run's temperature -> log-probs of what a sampler with these limits draws from."""
    if min_p:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(-1, descending=True)
        probs = ordered.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
    return logits.log_softmax(-1)


@torch.no_grad()
def of_sampler(trainer: Any, prompt: list[int], completions: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens,) three times: the completions' log-probs at the run's temperature under the whole distribution, under
    its top-k, top-p, min-p part (-inf outside it), and at temperature 1 under the whole."""
    longest, device = max(map(len, completions)), trainer.accelerator.device
    padded = [ids + [trainer.pad_id] * (longest - len(ids)) for ids in completions]
    live = torch.tensor([[i < len(ids) for i in range(longest)] for ids in completions], device=device)
    batch = {
        "prompt_ids": torch.tensor([prompt] * len(padded), device=device),
        "prompt_mask": torch.ones(len(padded), len(prompt), dtype=torch.long, device=device),
        "completion_ids": torch.tensor(padded, device=device),
        "completion_mask": live.long(),
    }
    with trainer.forward.uncounted():
        _, hidden = trainer.frozen_pass(trainer.model, batch, True)
    ids = batch["completion_ids"][live][:, None]
    logits = trainer.head_of(trainer.model)(hidden[live]).double()
    engine = trainer.vllm_generation
    part = truncated(logits, engine.top_k or 0, engine.top_p, engine.min_p or 0.0)
    whole, raw = logits.log_softmax(-1), (logits * trainer.temperature).log_softmax(-1)
    full, inside, plain = (x.gather(1, ids)[:, 0].cpu() for x in (whole, part, raw))
    return full, inside, plain


@dataclass(frozen=True)
class Agreement:
    """What the start-up comparison found, in nats a token (mean absolute differences)."""

    base: float  # between the bare bases
    sampler: float | None  # the engine's own log-probs of its samples beside the trainer's, after the same truncation
    untruncated: float | None  # the same beside the trainer's whole distribution
    raw: float | None = None  # the same beside its whole distribution at temperature 1
    quantized_only_here: bool = False  # the trainer's base is in 4 bits, the engine's is not

    def limit(self, temperature: float = 1.0) -> float:
        """The engine's own noise on a few tokens, with room for a small sample."""
        return (3 * self.base + FLOOR) / min(1.0, temperature or 1.0)

    @property
    def rounding(self) -> float:
        """The noise of the shift that an adapter makes, in which the two bases cancel."""
        return 3 * min(self.base, ROUNDING) + FLOOR

    def require(self, temperature: float, corrected: bool, settings: str) -> None:
        """Raises VariantError where the engine samples from something else than the policy, uncorrected."""
        most = QUANTIZED_BASE if self.quantized_only_here else ANOTHER_BASE
        if not self.base <= most:
            raise VariantError(
                f"the engine's base model is not the trainer's: their log-probs are {self.base:.2f} nats a token apart "
                "without any adapter. Save the model you pass and load it from that folder, or point the server to it"
            )
        if self.quantized_only_here and not corrected:
            raise VariantError(
                f"the engine serves an unquantized base under an adapter trained on a 4-bit one ({self.base:.3f} nats "
                "a token apart): set vllm_importance_sampling_correction: true"
            )
        if self.sampler is None or self.untruncated is None:
            return
        raw = self.raw is not None and self.sampler > FLOOR and self.raw < self.sampler / 2
        if raw or not self.sampler <= self.limit(temperature):
            raise VariantError(
                f"the engine's log-probs are not those of its sampler ({settings}): {self.sampler:.3f} nats a token "
                "from the trainer's. Start the server with --logprobs-mode processed_logprobs"
            )
        if self.untruncated > self.limit(temperature) and not corrected:
            raise VariantError(
                f"the engine samples from a truncated policy ({settings}), {self.untruncated:.3f} nats a token from "
                "the one that is trained: set vllm_importance_sampling_correction: true, or top_p: 1.0, top_k: 0 and "
                "min_p: 0"
            )


@dataclass(frozen=True)
class Shift:
    """How an adapter moves the log-probs of one prompt here and in the engine, in nats a token."""

    gap: float  # mean absolute difference of the two shifts
    effect: float  # mean absolute shift here
    answer: float  # mean absolute shift in the engine

    @classmethod
    def of(cls, here: Tensor, base_here: Tensor, there: Tensor, base_there: Tensor) -> Shift:
        """From four (tokens,) vectors of log-probs: with and without the adapter, in the trainer and in the engine."""
        return cls(
            mean_gap(here - base_here, there - base_there), mean_gap(here, base_here), mean_gap(there, base_there)
        )

    def arrived(self, rounding: float, same_base: bool) -> bool:
        """Whether the engine computes this adapter: within its noise, or far nearer to it than to the bare base (the
        rounding of a strong adapter grows with it).

        On a base in another precision the same adapter moves single log-probs differently (measured: cosine 0.2 to
        0.9), by about as much in all: there the engine must have moved by a quarter of it.
        """
        if math.isnan(self.gap) or self.gap <= rounding:
            return not math.isnan(self.gap)
        return self.gap <= self.effect / 2 if same_base else self.answer >= self.effect / 4
