"""Where a learner's features come from: the policy's trunk, an adapter on the policy's base, or a model of its own."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import MissingExtra, VariantError

if TYPE_CHECKING:
    from ..trainer.grpo import VariantGRPOTrainer
    from .base import Rows


class Body:
    """Features of the states of an answer. `model` is what `trainer.logps_and_entropy` scores while it is active."""

    kind = ""
    width: int  # of the features
    model: Any

    def parameters(self) -> dict[str, nn.Parameter]:
        """What of it is trained, by name."""
        return {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, its weights are the ones in use and require gradients; forward and backward belong inside."""
        yield

    def hidden(self, rows: Rows) -> Tensor:
        """(b, T + 1, H) last hidden states: column t is the state before token t, column T the one after the last."""
        return _states(self.backbone(), rows)

    def backbone(self) -> nn.Module:
        raise NotImplementedError

    def save(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)


class TrunkBody(Body):
    """The policy's own hidden states, detached: nothing but the heads is trained."""

    kind = "trunk"

    def __init__(self, trainer: VariantGRPOTrainer):
        self.model, self._trainer = trainer.model, trainer
        self.width = trainer.model.config.get_text_config().hidden_size

    def backbone(self) -> nn.Module:
        return backbone_of(self.model)

    def hidden(self, rows: Rows) -> Tensor:
        with self._trainer.scoring():
            return super().hidden(rows).detach()


class AdapterBody(Body):
    """A second LoRA adapter on the policy's base, which may be quantised: no second copy of the weights.

    Raises:
        VariantError: the policy has no LoRA adapter, or none of the target modules exists.
    """

    kind = "adapter"

    def __init__(self, trainer: VariantGRPOTrainer, name: str, r: int, alpha: float, targets: str):
        try:
            from peft import LoraConfig, PeftModel
        except ImportError:
            raise MissingExtra("a learner on an adapter", "peft") from None
        model: Any = trainer.model
        if not isinstance(model, PeftModel) or str(getattr(model.active_peft_config.peft_type, "value", "")) != "LORA":
            raise VariantError(
                "a learner's body 'adapter' is a second LoRA adapter beside the policy's: pass "
                "peft_config=LoraConfig(...) to the trainer, or set body: model"
            )
        self.model, self.name = model, name
        self.width = model.config.get_text_config().hidden_size
        config = LoraConfig(
            r=r, lora_alpha=alpha, lora_dropout=0.0, target_modules=_targets(model, targets), task_type="CAUSAL_LM"
        )
        flags, active = _flags(model), list(model.active_adapters)
        model.add_adapter(name, config)
        _set_active(model, active)
        for parameter in model.parameters():
            parameter.requires_grad_(flags.get(parameter, False))
        self._own = {n: p for n, p in model.named_parameters() if f".{name}." in n}

    def parameters(self) -> dict[str, nn.Parameter]:
        return self._own

    def backbone(self) -> nn.Module:
        return backbone_of(self.model)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        # PEFT's set_adapter rewrites requires_grad of every adapter, so the flags are put back one by one
        flags, before = _flags(self.model), list(self.model.active_adapters)
        try:
            _set_active(self.model, [self.name])
            for parameter in flags:
                parameter.requires_grad_(False)
            for parameter in self._own.values():
                parameter.requires_grad_(True)
            yield
        finally:
            _set_active(self.model, before)
            for parameter, flag in flags.items():
                parameter.requires_grad_(flag)

    def save(self, folder: str) -> None:
        super().save(folder)
        self.model.save_pretrained(folder, selected_adapters=[self.name])


class ModelBody(Body):
    """A model of its own: the one given, else a copy of the policy's trunk as it is at the start.

    A given model with a `score` head (sequence or token classification) brings its own head.
    """

    kind = "model"

    def __init__(self, trainer: VariantGRPOTrainer, given: nn.Module | None = None):
        from trl.trainer.utils import disable_dropout_in_model

        self.model = _copied_trunk(trainer) if given is None else given
        disable_dropout_in_model(self.model)
        self.model.to(trainer.accelerator.device)
        self.model.train()
        self._checkpointing(trainer)
        for parameter in self.model.parameters():
            parameter.requires_grad_(True)
        head = getattr(self.model, "score", None)
        self.score: nn.Module | None = head if isinstance(head, nn.Module) else None
        self.width = self.model.config.get_text_config().hidden_size

    def _checkpointing(self, trainer: VariantGRPOTrainer) -> None:
        if trainer.args.gradient_checkpointing and hasattr(self.model, "gradient_checkpointing_enable"):
            kwargs = {"use_reentrant": False} | (trainer.args.gradient_checkpointing_kwargs or {})
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def backbone(self) -> nn.Module:
        return self.model.base_model

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        from trl.models.utils import disable_gradient_checkpointing

        # without gradient checkpointing would only warn
        with contextlib.nullcontext() if torch.is_grad_enabled() else disable_gradient_checkpointing(self.model):
            yield

    def save(self, folder: str) -> None:
        super().save(folder)
        self.model.save_pretrained(folder)


def make_body(
    trainer: VariantGRPOTrainer,
    kind: str,
    name: str,
    *,
    r: int,
    alpha: float,
    targets: str,
    given: nn.Module | None = None,
    lm: bool = False,
) -> Body:
    """The body of that kind; "auto" is the adapter where the policy has one, else a model of its own.

    `lm`: its `model` gives log-probs, so that a copy of the policy keeps its language-model head.

    Raises:
        VariantError: a kind that cannot be had with this policy.
    """
    from accelerate.utils import is_peft_model

    if kind == "auto":
        kind = "adapter" if given is None and is_peft_model(trainer.model) else "model"
    if given is not None and kind != "model":
        raise VariantError(f"a value model was given and the learner's body is {kind!r}: set body: model, or give none")
    if kind == "trunk":
        return TrunkBody(trainer)
    if kind == "adapter":
        return AdapterBody(trainer, name, r, alpha, targets)
    return ModelBody(trainer, _copied_policy(trainer) if lm else given)


def backbone_of(model: nn.Module) -> nn.Module:
    """The model without its language-model head; adapters in it stay in place."""
    from accelerate.utils import is_peft_model

    inner: Any = model.get_base_model() if is_peft_model(model) else model  # type: ignore[operator]
    return inner.base_model


def _states(backbone: nn.Module, rows: Rows) -> Tensor:
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
    mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
    out = backbone(input_ids=ids, attention_mask=mask, use_cache=False)
    return out.last_hidden_state[:, rows["prompt_ids"].shape[1] - 1 :]


def _flags(model: nn.Module) -> dict[nn.Parameter, bool]:
    return {p: p.requires_grad for p in model.parameters()}


def _set_active(model: Any, names: list[str]) -> None:
    model.base_model.set_adapter(names)
    model.active_adapter = names[0] if len(names) == 1 else names


def _targets(model: Any, targets: str) -> list[str]:
    """Names of the linear layers an adapter goes on: those listed, or "all-linear" for all but the head."""
    head = model.get_base_model().get_output_embeddings()
    names = set()
    for name, module in model.named_modules():
        parts = name.split(".")
        if any(part.startswith("lora_") for part in parts) or parts[-1] == "base_layer" or module is head:
            continue
        if isinstance(getattr(module, "base_layer", module), nn.Linear):
            names.add(parts[-1])
    wanted = sorted(names) if targets == "all-linear" else [t.strip() for t in targets.split(",")]
    found = [t for t in wanted if t in names]
    if not found:
        raise VariantError(
            f"the model has no linear layer named {targets!r}: targets is one of {', '.join(sorted(names))}"
        )
    return found


def _copied_trunk(trainer: VariantGRPOTrainer) -> Any:
    from transformers import AutoModel

    return _copied(trainer, AutoModel, lambda policy: policy.base_model)


def _copied_policy(trainer: VariantGRPOTrainer) -> Any:
    """The policy as it was before training, with TRL's fused head at the run's temperature."""
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    model = _copied(trainer, AutoModelForCausalLM, lambda policy: policy)
    vars(model).pop("forward", None)  # TRL's patch of the original refers to the original
    fp32 = trainer.args.cast_lm_head_to_fp32
    add_fused_lm_head(model, trainer.temperature, fp32, outputs=("log_probs", "entropy"))
    return model


def _copied(trainer: VariantGRPOTrainer, auto: Any, part: Callable[[Any], Any]) -> Any:
    """That part of the policy as it is; with adapters, the same loaded anew without them, by the class `auto`."""
    from accelerate.utils import is_peft_model

    model: Any = trainer.model
    inner = model.get_base_model() if is_peft_model(model) else model
    if getattr(inner, "is_quantized", False):
        raise VariantError("a quantised policy has no trainable copy: set the learner's body to adapter or trunk")
    if not is_peft_model(model):
        return copy.deepcopy(part(inner))
    path = inner.config._name_or_path
    try:
        return auto.from_pretrained(path, dtype=inner.dtype)
    except (OSError, ValueError) as error:
        raise VariantError(
            f"the learner's model is loaded from the policy's path, and {path!r} gave nothing: {error}"
        ) from None
