"""Teachers whose weights are in this process: another model, or the policy under other weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor

from ..errors import VariantError
from ..hooks.base import hook, param
from .base import Answer, Question, Stateless
from .weights import adapter, average_into, swapped, trainable

if TYPE_CHECKING:
    from ..trainer.grpo import VariantGRPOTrainer
    from ..trainer.head import Head


class Local(Stateless):
    """Forwards the rows through `model`, inside `weights()`.

    Args:
        trainer: whose pass, batch size and temperature are used.
        model: a causal LM with TRL's fused head.
        weights: opened around each answer, such as the adapter switch.
    """

    def __init__(self, trainer: VariantGRPOTrainer, model: Any, weights: Callable[[], Any] = contextlib.nullcontext):
        self.trainer, self.model, self.weights = trainer, model, weights

    @property
    def head(self) -> Head:  # type: ignore[override]
        with self.weights():
            return self.trainer.head_of(self.model).frozen()

    @torch.no_grad()
    def answer(self, question: Question) -> Answer:
        with self.weights():
            logps, hidden = self.trainer.frozen_pass(self.model, question.batch, question.distribution)
        return Answer(logps, hidden=hidden)


@hook("teacher", "model")
@dataclass(frozen=True)
class ModelTeacher:
    """Another causal LM with the policy's tokenizer, frozen, evaluated at the run's temperature.

    Args:
        path: Hub name or folder. dtype: its precision, "auto" takes the checkpoint's.
        load_in_4bit: NF4 through bitsandbytes; its noise is of the size of small log-ratios.
    """

    path: str
    dtype: str = param("auto", choices=("auto", "float32", "bfloat16", "float16"))
    load_in_4bit: bool = False

    math = "pi_T = {path}"

    def build(self, trainer: VariantGRPOTrainer) -> Local:
        return Local(trainer, trainer.load_frozen(self.path, self.dtype, self.load_in_4bit))


@hook("teacher", "base")
@dataclass(frozen=True)
class BaseTeacher:
    """The policy before training: its base with adapters off, or, without PEFT, a copy of its first weights."""

    math = "pi_T = the policy's base"

    def build(self, trainer: VariantGRPOTrainer) -> Any:
        model = trainer.unwrapped
        if is_peft_model(model):
            return Local(trainer, model, lambda: adapter(model, None))
        return Averaged(trainer, rate=0.0, every=1)


@hook("teacher", "adapter")
@dataclass(frozen=True)
class AdapterTeacher:
    """A named, frozen LoRA adapter on the policy's own base; `path` loads it under that name."""

    name: str = "teacher"
    path: str | None = None

    math = "pi_T = the base with adapter {name}"

    def build(self, trainer: VariantGRPOTrainer) -> Local:
        model = trainer.unwrapped
        if not is_peft_model(model):
            raise VariantError(
                "teacher adapter needs a policy with PEFT: give peft_config, or teacher: {model: {path: ...}}"
            )
        if self.path is not None:
            flags = [(p, p.requires_grad) for p in model.parameters()]
            model.load_adapter(self.path, adapter_name=self.name, is_trainable=False)
            for parameter, flag in flags:
                parameter.requires_grad_(flag)
        if self.name not in model.peft_config:
            raise VariantError(
                f"the policy has the adapters {sorted(model.peft_config)} and none named {self.name!r}: give its path"
            )
        return Local(trainer, model, lambda: adapter(model, self.name))


@hook("teacher", "live")
@dataclass(frozen=True)
class LiveTeacher:
    """The policy itself, as it is when the rows are scored; of use under `privileged`, which shows it more."""

    math = "pi_T = sg[pi]"

    def build(self, trainer: VariantGRPOTrainer) -> Local:
        return Local(trainer, trainer.unwrapped)


@hook("teacher", "ema")
@dataclass(frozen=True)
class EMATeacher:
    """A moving average of the weights the optimizer moves: shadow <- (1 - rate) shadow + rate policy every `every` steps.

    It begins at the policy's own weights. `rate=1` is a snapshot renewed every `every` steps. With LoRA the factors A and B
    are averaged, not their product: averaging the product needs full matrices (atlas: 2.47 against 3.85 in its example).
    """

    rate: float = param(0.05, low=0.0, high=1.0)
    every: int = param(1, low=1)

    math = "pi_T = average of pi, rate {rate} every {every} steps"

    def build(self, trainer: VariantGRPOTrainer) -> Averaged:
        return Averaged(trainer, self.rate, self.every)


class Averaged(Local):
    """Holds the shadow weights; a checkpoint holds them too."""

    def __init__(self, trainer: VariantGRPOTrainer, rate: float, every: int):
        super().__init__(trainer, trainer.unwrapped, lambda: swapped(self.model, self.shadow))
        self.rate, self.every, self.steps = rate, every, 0
        self.shadow = {name: p.detach().clone() for name, p in trainable(self.model).items()}

    def after_step(self) -> None:
        self.steps += 1
        if self.rate and self.steps % self.every == 0:
            average_into(self.shadow, self.model, self.rate)

    def state_dict(self) -> dict[str, Tensor]:
        return {"steps": torch.tensor(self.steps), **{f"shadow/{k}": v for k, v in self.shadow.items()}}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.steps = int(tensors["steps"])
        for name, value in self.shadow.items():
            value.copy_(tensors[f"shadow/{name}"])
