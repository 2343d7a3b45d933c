"""Forward passes beside the loss: frozen models, the reference, hidden states. What a teacher needs of a trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from transformers import BitsAndBytesConfig
from trl.trainer.utils import add_fused_lm_head, create_model_from_path

from ..errors import VariantError
from ..teachers.weights import adapter
from .forward import Abilities
from .head import Head
from .layout import Layout
from .missing import missing_model
from .quantized import keep_4bit_trainable_on_cpu
from .statistics import scored_rows


class ModelPasses:
    """A part of the trainer; what it uses of transformers and TRL is public."""

    given_teacher: nn.Module | None = None  # an instance the trainer was given
    model: Any
    ref_model: Any
    args: Any
    accelerator: Any
    temperature: float
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    scoring: Callable
    logps_and_entropy: Callable
    takes: Callable
    gather_rows: Callable
    forward: Any

    @property
    def unwrapped(self) -> Any:
        """The policy without DDP's wrapper, still with PEFT's."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def has_adapters(self) -> bool:
        """Whether the policy is a PEFT model."""
        return is_peft_model(self.unwrapped)

    def causal_lm(self, model: nn.Module) -> Any:
        """The transformers model inside whatever wraps it."""
        bare: Any = self.accelerator.unwrap_model(model)
        return bare.get_base_model() if is_peft_model(bare) else bare

    def head_of(self, model: nn.Module) -> Head:
        return Head.of(self.causal_lm(model), self.temperature, self.args.cast_lm_head_to_fp32)

    @property
    def sharded(self) -> bool:
        """Whether a forward is collective even without gradient."""
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    def load_frozen(self, path: str, dtype: str = "auto", load_in_4bit: bool = False) -> nn.Module:
        """Another causal LM that answers at the run's temperature, in evaluation mode and without gradient."""
        if self.given_teacher is not None:
            if self.causal_lm(self.given_teacher) is self.causal_lm(self.model):
                raise VariantError("the policy's own model was given as its teacher: write teacher: base, or live")
            return self.prepare_frozen(self.given_teacher)
        quantized: dict[str, Any] = {}
        if load_in_4bit:
            quantized["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=self._compute_dtype
            )
        try:
            model = create_model_from_path(path, dtype=dtype, device_map=None, **quantized)
        except OSError as error:
            raise missing_model({"model": path}, "the teacher") or error from error
        return self.prepare_frozen(model)

    def prepare_frozen(self, model: nn.Module) -> nn.Module:
        model.requires_grad_(False)
        keep_4bit_trainable_on_cpu(model)
        inside: Any = model.get_base_model() if is_peft_model(model) else model  # type: ignore[operator]
        fp32 = self.args.cast_lm_head_to_fp32
        add_fused_lm_head(inside, self.temperature, fp32, outputs=("log_probs", "entropy"))
        return self.accelerator.prepare_model(model, evaluation_mode=True).eval()

    @property
    def _compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else torch.float32

    @contextlib.contextmanager
    def reference(self) -> Iterator[nn.Module]:
        """The reference policy: its own model, or the policy with the adapter that stands for it."""
        if self.ref_model is not None:
            yield self.ref_model
            return
        model = self.unwrapped
        with adapter(model, "ref" if "ref" in model.peft_config else None):
            yield self.model

    @torch.no_grad()
    def frozen_pass(self, model: nn.Module, batch: Mapping, hidden: bool) -> tuple[Tensor, Tensor | None]:
        """(b, T) log-probs of the completions under `model` and, where asked for, its last hidden states (b, T, H)."""
        with self.scoring():
            size = self.args.per_device_train_batch_size
            seen = scored_rows(
                self, model, batch, batch_size=size, hidden=hidden, entropy=False
            )  # TRL's reference has none
        return seen.logps, seen.hidden

    def run_layout(self, model: nn.Module, layout: Layout, aux: bool) -> tuple[Any, Tensor]:
        """One forward of TRL's fused head on the layout's scored positions alone.

        The head of TRL 1.16 projects every position on a device without Triton; here a hook on the backbone hands it
        only those to score. Returns its output, whose fields are (1, n), and their hidden states (n, H).
        """
        base = self.causal_lm(model)
        source, labels = layout.source, layout.labels
        if not len(source):  # nothing to score: one position keeps the result connected to the model
            source = labels = source.new_zeros(1)
        kept: list[Tensor] = []

        def select(module: nn.Module, given: Any, output: Any) -> Any:
            hidden = output.last_hidden_state
            kept.append(hidden.flatten(0, 1).index_select(0, source.to(hidden.device)))
            output.last_hidden_state = kept[0].unsqueeze(0)
            return output

        inputs = {"input_ids": layout.input_ids, "shift_labels": labels.unsqueeze(0), "fused_lm_head": True}
        for name in ("attention_mask", "position_ids"):
            if (value := getattr(layout, name)) is not None:
                inputs[name] = value
        if aux:
            inputs["output_router_logits"] = True
        handle = base.base_model.register_forward_hook(select)
        try:
            with self.accelerator.autocast():
                return model(**inputs), kept[0]
        finally:
            handle.remove()

    @property
    def vocabulary(self) -> int:
        return self.model.config.get_text_config().vocab_size

    @property
    def full_precision(self) -> bool:
        return torch.finfo(self.model.dtype).eps < 1e-6 and self.accelerator.mixed_precision == "no"

    def agree(self, mine: Abilities) -> Abilities:
        """What the model can on every process."""
        table = self.gather_rows(torch.tensor([[mine.trim, mine.pack, mine.share]], device=self.accelerator.device), 0)
        return Abilities(*table.bool().all(0).tolist())
