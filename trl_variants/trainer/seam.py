"""The one module that touches private names of TRL and transformers.

`SeamTrainer` turns them into a few methods of our own, which `VariantGRPOTrainer` fills in:

    window_batches(raw)          the micro-batches of one optimizer step, before its first backward
    eval_batch(rows)             one evaluation batch, its own window
    scored_generation(rows)      generation with our advantages
    micro_batch_loss(model, b)   the loss of one micro-batch, times the number of processes
    state_to_save / load_state   what a checkpoint must hold beside weights and optimizer

`PRIVATE` lists every name with the signature we rely on; a test compares it with the installed TRL and says what
changed.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import trl
from accelerate.utils import is_peft_model
from packaging.version import Version
from torch import Tensor, nn
from transformers import Trainer as HFTrainer
from transformers import TrainerCallback
from trl import GRPOTrainer, prepare_multimodal_messages
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import (
    add_fused_lm_head,
    pad,
    shuffle_sequence_dict,
    split_pixel_values_by_grid,
    split_tensor_dict,
    unsplit_pixel_values_by_grid,
)

from ..errors import RewardError, VariantError
from .engine import ClosesEngine, own_engine
from .forward import Forward
from .guard import RewardGuard
from .missing import missing_extra, missing_model
from .passes import ModelPasses
from .processes import Processes
from .publishing import Publishing, readme_kept
from .quantized import adapter_on_its_base, settle
from .sampler import ResumableRepeatSampler
from .timing import Stopwatch

SUPPORTED = ("1.16", "1.17")  # lower bound included, upper excluded

PRIVATE: dict[str, tuple[type, tuple[str, ...]]] = {
    "_prepare_inputs": (GRPOTrainer, ("self", "generation_batch")),
    "_generate_and_score_completions": (GRPOTrainer, ("self", "inputs")),
    "_calculate_rewards": (GRPOTrainer, ("self", "inputs", "prompts", "completions", "completion_ids_list")),
    "_generate": (GRPOTrainer, ("self", "prompts")),
    "_generate_single_turn": (
        GRPOTrainer,
        ("self", "prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"),
    ),
    "_tokenize_prompts": (GRPOTrainer, ("self", "prompts")),
    "_compute_loss": (GRPOTrainer, ("self", "model", "inputs")),
    "_get_train_sampler": (GRPOTrainer, ("self", "dataset")),
    "_get_per_token_logps_and_entropies": (
        GRPOTrainer,
        (
            "self",
            "model",
            "input_ids",
            "attention_mask",
            "logits_to_keep",
            "batch_size",
            "compute_entropy",
            "compute_aux_loss",
            "pixel_values",
            "image_grid_thw",
            "num_images",
            "pixel_attention_mask",
            "spatial_shapes",
            "num_tiles",
            "image_sizes",
            "token_type_ids",
            "mm_token_type_ids",
            "image_position_ids",
        ),
    ),
    "_load_optimizer_and_scheduler": (GRPOTrainer, ("self", "checkpoint")),
    "_save_checkpoint": (GRPOTrainer, ("self", "model", "trial")),
    "_save_optimizer_and_scheduler": (HFTrainer, ("self", "output_dir")),
    "_load_from_checkpoint": (HFTrainer, ("self", "resume_from_checkpoint", "model")),
    "_save": (HFTrainer, ("self", "output_dir", "state_dict")),
    "_push_from_checkpoint": (HFTrainer, ("self", "checkpoint_folder")),
    "get_batch_samples": (HFTrainer, ("self", "epoch_iterator", "num_batches", "device")),
}

_MULTIMODAL = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


def require_supported_trl(version: str = trl.__version__) -> None:
    """Raises ImportError unless the installed TRL is inside the tested range."""
    if not Version(SUPPORTED[0]) <= Version(version) < Version(SUPPORTED[1]):
        raise ImportError(
            f"trl_variants supports trl>={SUPPORTED[0]},<{SUPPORTED[1]} and found trl {version}: "
            f'pip install "trl>={SUPPORTED[0]},<{SUPPORTED[1]}"'
        )


def private_names_that_changed() -> list[str]:
    """One line for each private name whose signature is not the one this module was written for."""
    changed = []
    for name, (cls, expected) in PRIVATE.items():
        method = getattr(cls, name, None)
        found = None if method is None else tuple(inspect.signature(method).parameters)
        if found != expected:
            changed.append(f"{cls.__name__}.{name}: expected {expected}, found {found or 'nothing'}")
    return changed


require_supported_trl()


class SeamTrainer(ModelPasses, Processes, Publishing, ClosesEngine, GRPOTrainer):
    """trl.GRPOTrainer with its private seams named; see the module's text."""

    named = True  # whether the run names a variant; without one the logs are TRL's

    def __init__(self, *args: Any, **kwargs: Any):
        self._raw_window: list = []
        self._window: list[dict] = []
        self._loaded: dict | None = None
        self._token_rewards: dict[str, list | None] = {}  # of this process, where a function gives one value per token
        self._reward_matrix: Tensor = torch.empty(0)
        self.empty_rows: list[int] = []
        self._buffered_inputs: list[dict] | None = None
        self._first_turn = False
        self._pending_extra_logs: dict[str, list] = defaultdict(list)
        self.forward = Forward(self)
        self._dropout: bool | None = None
        self.stopwatch = Stopwatch()
        try:
            with own_engine(self):
                super().__init__(*args, **adapter_on_its_base(kwargs))
        except (OSError, ImportError) as error:
            given = inspect.signature(GRPOTrainer).bind(*args, **kwargs).arguments
            explained = missing_extra(given) if isinstance(error, ImportError) else missing_model(given)
            if explained is None:
                raise
            raise explained from error
        self.add_callback(_Restore(self))
        settle(self.model, loss_scaling=self.args.fp16)

    # --- what the subclass fills in -----------------------------------------------------------------------------

    def window_batches(self, raw: list) -> list[dict]:
        raise NotImplementedError

    def eval_batch(self, rows: list) -> dict:
        raise NotImplementedError

    def scored_generation(self, rows: list, generate: Callable[[list], dict]) -> dict:
        raise NotImplementedError

    def micro_batch_loss(self, model: nn.Module, batch: dict) -> Tensor:
        raise NotImplementedError

    def save_state(self, folder: str) -> None:
        raise NotImplementedError

    def load_state(self, folder: str) -> dict | None:
        raise NotImplementedError

    def apply_state(self, loaded: dict | None) -> None:
        raise NotImplementedError

    def policy_moved(self) -> None:
        """After each optimizer step, before anything is saved or evaluated."""

    def sampled(self, prompts: list, generate: Callable[[list], tuple]) -> tuple:
        """TRL's tuple of trajectories for this process's prompts, from `generate` or from elsewhere."""
        return generate(prompts)

    def first_turn(self, generate: Callable, prompt_ids: list, images: Any, fields: dict, group_size: int) -> tuple:
        """(completion ids, the engine's log-probs or None) of the first turn of this process's rows."""
        return generate(prompt_ids, images, fields, group_size)

    def replaced(self, output: dict) -> dict:
        """What a rollout function returned, with the rows that come from elsewhere."""
        return output

    @property
    def training(self) -> bool:
        return self.model.training

    # --- data ---------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        stock = super()._get_train_sampler(dataset)
        if len(stock) == 0:  # transformers would end the run before its first step
            prompts = self.args.generation_batch_size // self.num_generations
            raise VariantError(
                f"the data set has {stock.num_samples} prompts and one generation takes {prompts}: use more prompts, "
                "or a smaller per_device_train_batch_size or steps_per_generation"
            )
        return ResumableRepeatSampler(stock, epoch=lambda: int(self.state.epoch or 0))

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        if self.state.global_step >= self.state.max_steps > 0:  # resumed at its end: HF would train one step more
            self.control.should_training_stop = True
            return [], None
        samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._raw_window, self._window = samples, []
        return samples, count

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if self.takes({}):
            self.forward.settle()
        if not self.training:
            return self.eval_batch(generation_batch)
        if not self._window:
            self._window = self.window_batches(self._raw_window)
            self._raw_window = []
        return self._window.pop(0)

    def buffered_steps(self, raw: list) -> list[dict]:
        """The stock batches of the coming micro-steps, generating where a generation begins.

        All generations of an optimizer step happen before its first backward; the weights are the same either way.
        """
        per_generation = self.args.steps_per_generation
        cycle = per_generation * self.num_iterations
        batches = []
        for i, rows in enumerate(raw):
            step = self._step + i
            if step % cycle == 0 or self._buffered_inputs is None:
                generation = split_pixel_values_by_grid(self._generate_and_score_completions(rows))
                chunks = split_tensor_dict(self.mixed(generation), per_generation)
                self._buffered_inputs = [unsplit_pixel_values_by_grid(chunk) for chunk in chunks]
            batches.append(
                dict(self._buffered_inputs[step % per_generation], iteration=(step % cycle) // per_generation)
            )
        return batches

    def mixed(self, generation: dict) -> dict:
        """A generation's rows in the order they are dealt to micro-batches: TRL's shuffle."""
        return shuffle_sequence_dict(generation)

    @property
    def inside_generation(self) -> bool:
        """Whether the next micro-step still trains on rows that are already generated."""
        return (
            self._buffered_inputs is not None
            and self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        )

    # --- generation and rewards ---------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list) -> dict:
        with self.stopwatch.phase("scoring"):
            return self.scored_generation(inputs, super()._generate_and_score_completions)

    def _tokenize_prompts(self, prompts: list) -> Any:
        tokenized = super()._tokenize_prompts(prompts)
        self.fail_together(self._too_long(tokenized[0], "a prompt"))
        return tokenized

    def _too_long(self, prompt_ids: list, what: str) -> str | None:
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        longest = max((len(ids) for ids in prompt_ids), default=0)
        if not limit or longest + (self.max_completion_length or 0) <= limit:
            return None
        return (
            f"{what} of {longest} tokens plus max_completion_length={self.max_completion_length} exceeds the model's "
            f"{limit} positions: shorten or filter the prompts, or lower max_completion_length"
        )

    def _generate(self, prompts: list) -> tuple:
        return self.sampled(prompts, self.sample_all)

    def staged(self, rows: list) -> list:
        """Other data set rows than TRL's, made ready to be sampled: their prompts with images, the tools of each."""
        if self.tools:
            tools: list[Any] = getattr(self, "_standalone_tools")  # noqa: B009
            waiting = {t.__name__: t for t in tools if inspect.iscoroutinefunction(t)}
            self._sync_tool_dicts = [{t.__name__: t for t in tools if t.__name__ not in waiting} for _ in rows]
            self._async_tool_dicts = [dict(waiting) for _ in rows]
        if "images" in rows[0]:
            images = [row["images"] for row in rows]
        elif "image" in rows[0]:
            images = [None if row["image"] is None else [row["image"]] for row in rows]
        else:
            return [row["prompt"] for row in rows]
        if not any(images):
            return [row["prompt"] for row in rows]
        return [prepare_multimodal_messages(r["prompt"], images=i) for r, i in zip(rows, images, strict=True)]

    def sample_all(self, prompts: list) -> tuple:
        """TRL's generation for this process's prompts; every process must have equally many."""
        self.empty_rows, self._first_turn = [], True
        rollout_func: Any = getattr(self, "rollout_func")  # noqa: B009
        if rollout_func is not None:
            self.rollout_func = self._without_empty_completions(rollout_func)
        try:
            with self.stopwatch.phase("rollout"):
                return super()._generate(prompts)
        finally:
            self.rollout_func = rollout_func

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if not self._first_turn:
            return super()._generate_single_turn(*args, **kwargs)
        self._first_turn = False
        return self._fill_empty(*self.first_turn(super()._generate_single_turn, *args, **kwargs))

    def _without_empty_completions(self, rollout_func: Callable) -> Callable:
        def rollout(prompts: list, trainer: Any) -> dict:
            self._first_turn = False  # what a hook generates afterwards is no first turn either
            output, error, cause = {}, None, None
            try:
                output = rollout_func(prompts, trainer)
            except Exception as raised:  # the other processes must not wait for this one
                error, cause = f"rollout_func failed: {raised!r}", raised
            self.fail_together(error, RuntimeError, cause)
            if {"completion_ids", "logprobs"} <= output.keys():
                output = self.replaced(output)
                ids, logprobs = self._fill_empty(output["completion_ids"], output["logprobs"])
                output = {**output, "completion_ids": ids, "logprobs": logprobs}
                if "env_mask" in output:
                    output["env_mask"] = [mask or [0] for mask in output["env_mask"]]
            return output

        return rollout

    def _fill_empty(self, completion_ids: list, logprobs: list | None) -> tuple[list, list | None]:
        # TRL reads ids[-1] of every row; one pad token, masked afterwards, stands for "nothing was generated"
        self.empty_rows = [i for i, ids in enumerate(completion_ids) if len(ids) == 0]
        pad = self._tokenizer.pad_token_id
        filled = [ids if len(ids) else [pad] for ids in completion_ids]
        if logprobs is not None:
            logprobs = [lp if len(ids) else [0.0] for ids, lp in zip(completion_ids, logprobs, strict=True)]
        return filled, logprobs

    def _calculate_rewards(self, inputs: list, prompts: list, completions: list, completion_ids_list: list) -> Tensor:
        stock: list = getattr(self, "reward_funcs")  # noqa: B009
        guard = RewardGuard(completion_ids_list)
        names = self.reward_func_names
        self.reward_funcs = [
            f if isinstance(f, nn.Module) else guard.guarded(f, n) for f, n in zip(stock, names, strict=True)
        ]
        try:
            matrix = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        except Exception as error:  # a reward model; the other processes wait in the gather of the rewards
            guard.errors.append(f"the rewards failed: {error!r}")
            guard.cause = error
            matrix = self.accelerator.gather(torch.zeros(len(prompts), len(stock), device=self.accelerator.device))
        finally:
            self.reward_funcs = stock
        self.fail_together(guard.errors[0] if guard.errors else None, RewardError, guard.cause)
        self._token_rewards = guard.token_rewards
        self._reward_matrix = matrix
        return matrix

    @contextlib.contextmanager
    def logged_columns(self) -> Iterator[dict[str, list]]:
        """Keeps what reward functions log per completion away from the completions table."""
        before: dict[str, list] = self._pending_extra_logs
        columns: dict[str, list] = defaultdict(list)
        self._pending_extra_logs = columns
        try:
            yield columns
        finally:
            self._pending_extra_logs = before

    def log_columns(self, columns: Mapping[str, list]) -> None:
        """Adds columns to the completions table, one value for each of this process's rows."""
        for name, values in columns.items():
            self._pending_extra_logs[name].extend(values)

    # --- model passes -------------------------------------------------------------------------------------------

    def logps_and_entropy(
        self, model: nn.Module, batch: dict, aux: bool = False, batch_size: int | None = None, entropy: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(B, T) log-probs of the completion tokens, their entropy (when `entropy`), and the MoE auxiliary loss (when
        `aux`)."""
        if self.takes(batch):
            scores = self.forward(model, batch, aux=aux, batch_size=batch_size)
            return scores.logps, scores.entropy, scores.aux
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        result = super()._get_per_token_logps_and_entropies(
            model,
            ids,
            attention,
            batch["completion_ids"].size(1),
            compute_aux_loss=aux,
            compute_entropy=entropy,
            batch_size=batch_size,
            **{k: batch.get(k) for k in _MULTIMODAL},
        )
        return result[0], result[1], result[2]

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        batch = {
            "prompt_ids": input_ids[:, :-logits_to_keep],
            "completion_ids": input_ids[:, -logits_to_keep:],
            "prompt_mask": attention_mask[:, :-logits_to_keep],
            "completion_mask": attention_mask[:, -logits_to_keep:],
            **multimodal,
        }
        if self.takes(batch):  # TRL's passes over a generation: old policy and reference
            scores = self.forward(model, batch, aux=compute_aux_loss, batch_size=batch_size)
            return scores.logps, scores.entropy if compute_entropy else None, scores.aux
        return super()._get_per_token_logps_and_entropies(
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size,
            compute_entropy,
            compute_aux_loss,
            **multimodal,
        )

    def takes(self, batch: Mapping) -> bool:
        """Whether `forward` may run these rows; images, dropout and virtual tokens are left to TRL's own pass."""
        if self._dropout is None:  # its random numbers belong to the places of a padded batch
            rates = (getattr(self.model.config.get_text_config(), "attention_dropout", 0.0) or 0.0,)
            self._dropout = any(rates) or any(m.p > 0 for m in self.model.modules() if isinstance(m, nn.Dropout))
        prompted = is_peft_model(self.model) and self.model.active_peft_config.is_prompt_learning
        images = getattr(self, "_is_vlm") or any(batch.get(k) is not None for k in _MULTIMODAL)  # noqa: B009
        return bool(getattr(self.args, "plan_updates", True)) and not (images or prompted or self._dropout)

    @property
    def pad_id(self) -> int:
        return self._tokenizer.pad_token_id

    def logps_and_sum_sq_probs(self, batch: dict) -> tuple[Tensor, Tensor]:
        """(B, T) log-probs of the completion tokens and sum_v pi(v)^2 at each, without gradient."""
        model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        width, seen, size = batch["completion_ids"].size(1), [], self.args.per_device_train_batch_size
        stock = model.forward
        add_fused_lm_head(
            model,
            temperature=self.temperature,
            cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32,
            outputs=("log_probs", "entropy", "log_sum_sq_probs"),
        )
        try:
            with self.scoring():
                if self.takes(batch):
                    scores = self.forward(self.model, batch, batch_size=size, more=("log_sum_sq_probs",))
                    return scores.logps, scores.more["log_sum_sq_probs"].exp()
                handle = model.register_forward_hook(lambda _m, _i, out: seen.append(out.log_sum_sq_probs[:, -width:]))
                try:
                    logps, _, _ = self.logps_and_entropy(self.model, batch, batch_size=size)
                finally:
                    handle.remove()
                return logps, torch.cat(seen).exp()
        finally:
            model.forward = stock

    @staticmethod
    def has_images(batch: Mapping) -> bool:
        return any(batch.get(name) is not None for name in _MULTIMODAL)

    def tokenized(self, prompts: list) -> tuple[Tensor, Tensor]:
        """(ids, mask) of prompts as generation would see them, padded on the left.

        Raises:
            VariantError: one is too long. On this process alone: the others may not be asking.
        """
        rows = super()._tokenize_prompts(prompts)[0]
        if (why := self._too_long(rows, "the teacher's prompt")) is not None:
            raise VariantError(why)
        return self.left_padded(rows)

    def left_padded(self, prompt_ids: list) -> tuple[Tensor, Tensor]:
        """(ids, mask) of prompts of any length."""
        rows = [torch.as_tensor(ids, device=self.accelerator.device) for ids in prompt_ids]
        ids = pad(rows, padding_value=self._tokenizer.pad_token_id, padding_side="left")
        return ids, pad([torch.ones_like(r) for r in rows], padding_value=0, padding_side="left")

    @contextlib.contextmanager
    def scoring(self) -> Iterator[None]:
        """No gradient, and no gradient checkpointing either, which would only warn."""
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
        ):
            yield

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if self._raw_window:  # the first micro-step of an optimizer step
            self.stopwatch.take()
        with self.stopwatch.phase("update"):
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self.named and not self._window:
            for phase in ("rollout", "scoring", "update"):
                self._metrics["train"][f"time/{phase}_seconds"].append(self.stopwatch.seconds.get(phase, 0.0))
        return loss

    def _compute_loss(self, model: nn.Module, inputs: dict) -> Tensor:
        return self.micro_batch_loss(model, inputs)

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        os.makedirs(output_dir, exist_ok=True)
        self.save_state(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self._loaded = None if checkpoint is None else self.load_state(checkpoint)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        with self.policy_alone(), readme_kept(output_dir or self.args.output_dir):
            super()._save(output_dir, state_dict)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self.push_checkpoint(checkpoint_folder)

    def policy_alone(self) -> contextlib.AbstractContextManager:
        """What surrounds saving the model's weights."""
        return contextlib.nullcontext()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # PEFT loads adapters in fp32 whatever they were trained in
        dtypes = {name: p.dtype for name, p in self.model.named_parameters()}
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        for name, parameter in self.model.named_parameters():
            if parameter.dtype != dtypes.get(name, parameter.dtype):
                parameter.data = parameter.data.to(dtypes[name])

    def progress_counters(self) -> dict:
        """What transformers keeps between two log lines and forgets on resume."""
        return {
            "step": self._step,
            "tr_loss": float(self._tr_loss),
            "last_logged": self._globalstep_last_logged,
            "pending_metrics": {k: list(v) for k, v in self._metrics["train"].items()},
        }

    def restore_counters(self, counters: dict) -> None:
        self._step = counters["step"]
        self._tr_loss = torch.tensor(counters["tr_loss"], device=self.args.device)
        self._globalstep_last_logged = counters["last_logged"]
        for name, values in counters["pending_metrics"].items():
            self._metrics["train"][name] = list(values)

    def start_afresh(self) -> None:
        """A second `train()` begins at a generation boundary, in phase with the sampler's repeats."""
        self._step, self._buffered_inputs, self._window = 0, None, []


class _Restore(TrainerCallback):
    """Applies a loaded checkpoint after transformers has reset its own counters, and says when the policy moved."""

    def __init__(self, trainer: SeamTrainer):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loaded, self.trainer._loaded = self.trainer._loaded, None
        self.trainer.start_afresh()
        self.trainer.apply_state(loaded)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.policy_moved()
