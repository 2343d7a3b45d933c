"""Teachers whose weights are in this process: another model, or the policy under other weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import VariantError
from ..hooks.base import hook, param
from ..schedule import Schedule
from .base import Answer, Question, Stateless
from .cache import cached, of_weights
from .compat import Fit, announce, compare, ends_of, tokenizer_at
from .weights import adapter, average_into, beginning, same_weights, swapped

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
    def head(self) -> Head:
        with self.weights():
            return self.trainer.head_of(self.model).frozen()

    @torch.no_grad()
    def answer(self, question: Question) -> Answer:
        with self.weights():
            logps, hidden = self.trainer.frozen_pass(self.model, question.batch, question.distribution)
        return Answer(logps, hidden=hidden)


class Foreign(Local):
    """Another model: silent at the tokens it does not share with the policy.

    Args:
        tokenizer: renders conversations in the teacher's own template; None: it reads the policy's prompts.
    """

    def __init__(self, trainer: VariantGRPOTrainer, model: Any, fit: Fit, tokenizer: Any = None):
        super().__init__(trainer, model)
        self.fit, self.tokenizer = fit, tokenizer

    def answer(self, question: Question) -> Answer:
        batch = dict(question.batch)
        if self.tokenizer is not None and not isinstance(question.rows[0]["prompt"], str):
            batch["prompt_ids"], batch["prompt_mask"] = self._own_prompts(question.rows)
        ids = batch["completion_ids"]
        silent = torch.isin(ids, torch.tensor(sorted(self.fit.silent), dtype=ids.dtype, device=ids.device))
        if self.fit.vocabulary is not None:  # what follows an unknown token is said of another text
            unknown = ids >= self.fit.vocabulary
            before = (batch["prompt_ids"] >= self.fit.vocabulary).any(1, keepdim=True)
            silent = silent | (unknown.cumsum(1) > 0) | before
            batch["completion_ids"] = ids.masked_fill(unknown, 0)
            batch["prompt_ids"] = batch["prompt_ids"].clamp(max=self.fit.vocabulary - 1)
        answer = super().answer(replace(question, batch=batch))
        return replace(answer, mask=(~silent).to(answer.logps))

    def _own_prompts(self, rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        shared = {"tools": self.trainer.tools or None, **(self.trainer.chat_template_kwargs or {})}
        ids = [
            self.tokenizer.apply_chat_template(
                row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False, **shared
            )
            for row in rows
        ]
        return self.trainer.left_padded(ids)


@hook("teacher", "model")
@dataclass(frozen=True)
class ModelTeacher:
    """Another causal LM with the policy's tokenizer, frozen, evaluated at the run's temperature.

    Args:
        path: Hub name or folder. dtype: its precision, "auto" takes the checkpoint's.
        load_in_4bit: NF4 through bitsandbytes; its noise is of the size of small log-ratios.
        template: in whose chat template it reads conversations: the "policy"'s or its "own".
        cache: file that keeps its answers about traces (rows a data set column gave, not the policy).
    """

    path: str
    dtype: str = param("auto", choices=("auto", "float32", "bfloat16", "float16"))
    load_in_4bit: bool = False
    template: str = param("policy", choices=("policy", "own"))
    cache: str | None = None

    math = "pi_T = {path}"

    def build(self, trainer: VariantGRPOTrainer) -> Any:
        model = trainer.load_frozen(self.path, self.dtype, self.load_in_4bit)
        tokenizer = None if self.path == "given" else tokenizer_at(self.path)
        if self.template == "own" and not getattr(tokenizer, "chat_template", None):
            raise VariantError(f"teacher {self.path} has no chat template of its own: leave out `template: own`")
        fit = self._fit(trainer, trainer.causal_lm(model), tokenizer)
        inner = Foreign(trainer, model, fit, tokenizer if self.template == "own" else None)
        return cached(trainer, inner, self.cache, ["model", of_weights(model), self.template] if self.cache else None)

    def _fit(self, trainer: VariantGRPOTrainer, model: Any, tokenizer: Any) -> Fit:
        fit = compare(
            trainer._tokenizer,
            tokenizer,
            self.path,
            policy_ends=trainer.eos_token_ids,
            teacher_ends=ends_of(self.path, tokenizer, model),
        )
        notes, size, own = list(fit.notes), model.config.get_text_config().vocab_size, trainer.run_facts.vocabulary
        if size != own:
            notes.append(
                f"it has {size} embeddings and the policy {own}: divergences compare the first {min(size, own)}"
            )
        announce(self.path, notes, trainer.accelerator.is_main_process)
        return replace(fit, vocabulary=size if size < own else None)


class Base(Local):
    """The policy before training, which is TRL's reference too: what that pass found is not computed again."""

    def answer(self, question: Question) -> Answer:
        logps, hidden = question.batch.get("ref_per_token_logps"), question.batch.get("ref_hidden")
        if logps is None or (question.distribution and hidden is None):
            return super().answer(question)
        return Answer(logps, hidden=hidden if question.distribution else None)


@hook("teacher", "base")
@dataclass(frozen=True)
class BaseTeacher:
    """The policy before training: its base with adapters off, or, without PEFT, a copy of its first weights."""

    math = "pi_T = the policy's base"

    def build(self, trainer: VariantGRPOTrainer) -> Any:
        model = trainer.unwrapped
        if trainer.has_adapters:
            if "ref" in model.peft_config:  # TRL's reference is then the adapter the run began with
                return Local(trainer, model, lambda: adapter(model, None))
            return Base(trainer, model, lambda: adapter(model, None))
        reference = trainer.ref_model
        if reference is not None and not trainer.args.sync_ref_model and same_weights(model, reference):
            return Base(trainer, reference)
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
        if not trainer.has_adapters:
            raise VariantError(
                "teacher adapter needs a policy with PEFT: give peft_config, or teacher: {model: {path: ...}}"
            )
        if self.path is not None:
            flags = [(p, p.requires_grad) for p in model.parameters()]
            model.load_adapter(self.path, adapter_name=self.name, is_trainable=False)
            from trl.trainer.utils import disable_dropout_in_model

            disable_dropout_in_model(model)  # its configuration brings its own
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
    """A moving average of the weights the optimizer moves: shadow <- (1 - rate) shadow + rate policy.

    It begins at the policy's own weights and moves every `every` steps. `rate=1` is a snapshot renewed then. With LoRA
    the factors A and B are averaged, not their product, which would need full matrices.
    """

    rate: float = param(0.05, low=0.0, high=1.0)
    every: int = param(1, low=1)

    math = "pi_T = average of pi, rate {rate} every {every} steps"

    def build(self, trainer: VariantGRPOTrainer) -> Averaged:
        return Averaged(trainer, self.rate, self.every)


class Averaged(Local):
    """Holds the shadow weights; a checkpoint holds them too."""

    def __init__(self, trainer: VariantGRPOTrainer, rate: float | Schedule, every: int):
        super().__init__(trainer, trainer.unwrapped, lambda: swapped(self.model, self.shadow))
        self.rate, self.every, self.steps = rate, every, 0
        self.shadow = beginning(self.model, rate)

    def after_step(self) -> None:
        self.steps += 1
        rate = self.rate(self.trainer.progress) if isinstance(self.rate, Schedule) else self.rate
        if rate and self.steps % self.every == 0:
            average_into(self.shadow, self.model, rate)

    def state_dict(self) -> dict[str, Tensor]:
        return {"steps": torch.tensor(self.steps), **{f"shadow/{k}": v for k, v in self.shadow.items()}}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.steps = int(tensors["steps"])
        for name, value in self.shadow.items():
            value.copy_(tensors[f"shadow/{name}"])
