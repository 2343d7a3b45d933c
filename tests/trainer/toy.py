"""A toy run for trainer tests: characters, a two-layer model, eight prompts; six steps take 0.2 s.

    run = train(VariantGRPOTrainer, variant="dapo", num_iterations=2, max_steps=6)
    run.change, run.gradients, run.logs, run.trainer

Everything is seeded and offline. Models are saved once per process: TRL loads a reference from its path.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import atexit
import copy
import functools
import gc
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from trl_variants import VariantGRPOConfig, VariantGRPOTrainer, variant

torch.set_num_threads(1)
gc.collect()
gc.freeze()  # train() collects garbage, which takes 0.2 s with everything that was imported

PAD, EOS = 0, 1
CHARACTERS = "0123456789abcdefghij "
PROMPTS = ("a1", "bc2", "d", "ef34", "g", "hij", "0", "77")
POSITIONS = 128

_SHAPE: dict[str, Any] = dict(
    vocab_size=2 + len(CHARACTERS),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=POSITIONS,
    eos_token_id=EOS,
    pad_token_id=PAD,
    initializer_range=0.3,
)
_EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_KINDS: dict[str, tuple[type, Callable]] = {
    "qwen3": (Qwen3ForCausalLM, lambda: Qwen3Config(**_SHAPE)),
    "teacher": (Qwen3ForCausalLM, lambda: Qwen3Config(**_SHAPE)),  # other weights, same tokenizer
    "llama": (LlamaForCausalLM, lambda: LlamaConfig(**_SHAPE)),
    "moe": (Qwen3MoeForCausalLM, lambda: Qwen3MoeConfig(**_SHAPE, **_EXPERTS)),
}


@functools.cache
def folder() -> str:
    """A folder for models and outputs, removed when the process ends."""
    made = tempfile.TemporaryDirectory(prefix="toy-", ignore_cleanup_errors=True)
    atexit.register(made.cleanup)
    return made.name


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, padded on the left."""
    vocabulary = {c: i for i, c in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    special = dict(pad_token="<pad>", eos_token="<eos>", padding_side="left")
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special)


@functools.cache
def model_path(kind: str = "qwen3") -> str:
    """The folder of a tiny model ("qwen3", "teacher", "llama", "moe") and its tokenizer; the same in every process."""
    path = os.path.join(folder(), kind)
    cls, configuration = _KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(kind == "teacher")
        cls(configuration()).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@functools.cache
def _loaded(kind: str) -> Any:
    return _KINDS[kind][0].from_pretrained(model_path(kind), dtype=torch.float32)


def model(kind: str = "qwen3") -> Any:
    """A fresh copy of the tiny model; its configuration knows the path it came from."""
    return copy.deepcopy(_loaded(kind))


def dataset(prompts: Sequence[str] = PROMPTS, **columns: Sequence) -> Dataset:
    known = {
        "id": [f"toy {p}" for p in prompts],
        "task": [("even", "odd")[i % 2] for i in range(len(prompts))],
        "difficulty": [float(len(p)) for p in prompts],
        "solution": [p[::-1] for p in prompts],
        "target": [[{"role": "assistant", "content": f"{i}120"}] for i in range(len(prompts))],
        "answer": [p[:1] for p in prompts],
        "skill": [f"use {p[0]}" for p in prompts],
        "privileged_context": [p + "0" for p in prompts],
        "question": [f"question {i % 2}" for i in range(len(prompts))],
        "probes": [(3, 1)[i // 2 % 2] for i in range(len(prompts))],
    }
    return Dataset.from_dict({"prompt": list(prompts), **known, **columns})


def digits(completions: list[str], **_: Any) -> list[float]:
    """Share of digits."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def early(completions: list[str], **_: Any) -> list[float | None]:
    """How late in the alphabet the last character is: None for an empty text, NaN after a 7."""
    value = {c: i / len(CHARACTERS) for i, c in enumerate(CHARACTERS)} | {"7": float("nan")}
    return [value[text[-1]] if text else None for text in completions]


def settings(**changes: Any) -> dict[str, Any]:
    """GRPOConfig arguments: 16 rows a generation in four micro-batches, two a step, trained on twice."""
    common = dict(
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=3,
        learning_rate=1e-3,
        max_grad_norm=1e6,
        adam_epsilon=1e-4,  # with less, Adam makes steps of the rounding noise of weights without gradient
        max_completion_length=6,
        num_generations=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_iterations=2,
        max_steps=6,
        logging_steps=1,
        save_strategy="no",
    )
    return {**common, **changes}


@dataclass
class Outcome:
    """What a run did; `change` and each gradient are flat vectors over the trained weights, in one order."""

    change: torch.Tensor
    gradients: list[torch.Tensor]  # of every optimizer step
    logs: list[dict[str, Any]]
    trainer: Any
    tables: list[dict[str, list]] = field(default_factory=list)  # the completions table after every step

    def logged(self, name: str) -> list[Any]:
        """The values of one metric, in order."""
        return [line[name] for line in self.logs if name in line]


class _Record(TrainerCallback):
    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.gradients: list[torch.Tensor] = []
        self.tables: list[dict[str, list]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trained = [p for p in self.trainer.model.parameters() if p.requires_grad]
        parts = [torch.zeros(p.numel()) if p.grad is None else p.grad.detach().flatten() for p in trained]
        self.gradients.append(torch.cat(parts))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = self.trainer._logs
        self.tables.append({k: list(logs[k]) for k in ("prompt", "completion", "advantages")})


def asks_for_a_teacher(spec: Any) -> bool:
    """Whether a variant reads a teacher and leaves it to the user to name one."""
    v = None if spec is None else variant(spec)
    if v is None or v.teacher is not None:
        return False
    return any("teacher_logps" in h.needs or any(d.anchor == "teacher" for d in h.divergences) for _, h in v.hooks())


def build(
    cls: type = VariantGRPOTrainer,
    config_cls: type | None = None,
    *,
    model_given: Any = None,
    kind: str = "qwen3",
    dtype: torch.dtype = torch.float32,
    rewards: Any = digits,
    data: Any = None,
    output_dir: str | None = None,
    trainer_arguments: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A trainer on the toy; `changes` are configuration settings, `trainer_arguments` go to the trainer."""
    if config_cls is None:
        config_cls = VariantGRPOConfig if issubclass(cls, VariantGRPOTrainer) else GRPOConfig
    if issubclass(config_cls, VariantGRPOConfig):
        changes.setdefault("self_test", False)
    arguments = dict(
        model=model_given if isinstance(model_given, str) else (model_given or model(kind)).to(dtype),
        reward_funcs=rewards,
        args=config_cls(output_dir=output_dir or tempfile.mkdtemp(dir=folder()), **settings(**changes)),
        train_dataset=dataset() if data is None else data,
        processing_class=tokenizer(),
    )
    if changes.get("teacher") is None and asks_for_a_teacher(changes.get("variant")):
        arguments["teacher"] = model_path("teacher")
    trainer = cls(**{**arguments, **(trainer_arguments or {})})
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(
    cls: type = VariantGRPOTrainer,
    config_cls: type | None = None,
    *,
    patch: Callable[[Any], None] | None = None,
    resume: str | None = None,
    **changes: Any,
) -> Outcome:
    """Builds a trainer (see `build`), trains it and says what it did; `patch(trainer)` runs before that."""
    torch.manual_seed(0)
    trainer = build(cls, config_cls, **changes)
    record = _Record(trainer)
    trainer.add_callback(record)
    if patch is not None:
        patch(trainer)
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in parameters]
    trainer.train(resume_from_checkpoint=resume)
    change = torch.cat([(p.detach() - b).flatten() for p, b in zip(parameters, before, strict=True)])
    return Outcome(change, record.gradients, trainer.state.log_history, trainer, record.tables)


def train_trl(config_cls: type = GRPOConfig, **changes: Any) -> Outcome:
    """The same run with TRL's own trainer."""
    return train(GRPOTrainer, config_cls, **changes)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Distance over the norm of b; infinite when b is zero, so that a run without signal cannot pass."""
    scale = float(b.norm())
    return float((a - b).norm()) / scale if scale > 0 else float("inf")
