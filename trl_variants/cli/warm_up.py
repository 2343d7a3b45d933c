"""`warm_up: {column: solution, steps: 40}`: a supervised phase on a column of the data, before the run proper."""

from __future__ import annotations

import gc
import shutil
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import VariantError, did_you_mean
from .recipe import RunSpec

FOLDER = "warm_up"


@dataclass(frozen=True)
class WarmUp:
    """TRL's SFTTrainer on prompt and column, the loss on the column's tokens alone.

    Args:
        steps: optimizer steps.
        column: completions to imitate, text or assistant messages; rows where it is empty are left out. Of a list of
            texts the first is taken.
        learning_rate: constant after the first tenth of the steps.
        batch_size: rows of each process in a step.
    """

    steps: int
    column: str = "solution"
    learning_rate: float = 2e-5
    batch_size: int = 8

    def __post_init__(self):
        for name in ("steps", "batch_size"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise VariantError(f"warm_up.{name} must be a whole number above 0, got {getattr(self, name)!r}")
        if not isinstance(self.learning_rate, (int, float)) or not self.learning_rate > 0:
            raise VariantError(f"warm_up.learning_rate must be a number above 0, got {self.learning_rate!r}")


def warm_up_of(spec: RunSpec) -> WarmUp | None:
    """The recipe's `warm_up`; None where it has none. Raises VariantError for a mistake in it."""
    given = spec.recipe.warm_up
    if given is None:
        return None
    known = [f.name for f in fields(WarmUp)]
    if not isinstance(given, dict) or "steps" not in given:
        raise VariantError(f"warm_up must be a mapping with steps, and may have {', '.join(known[1:])}")
    for name in given:
        if name not in known:
            raise VariantError(f"warm_up has no {name!r}{did_you_mean(name, known)}; it has {', '.join(known)}")
    return WarmUp(**given)


def warm_folder(spec: RunSpec) -> Path:
    """Where the warmed-up weights lie: the policy starts from them, and so does the reference model."""
    return Path(spec.config.output_dir) / FOLDER


def run_warm_up(warm: WarmUp, spec: RunSpec, data: Any, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Trains, saves to `warm_folder(spec)`, and returns accuracy before, first and last loss, steps and seconds.

    Raises:
        VariantError: no such column, or nothing in it.
    """
    from accelerate.utils import is_peft_model
    from trl import get_peft_config

    folder = warm_folder(spec)
    rows = examples(data.train, warm.column)
    new_adapter = None if is_peft_model(model) else get_peft_config(spec.model)
    trainer = supervised(warm, spec.config, model, tokenizer, rows, folder, new_adapter)
    before = data.accuracy(trainer.accelerator.unwrap_model(trainer.model), tokenizer)
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    if trainer.is_world_process_zero() and folder.exists():
        shutil.rmtree(folder)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(folder))
    trainer.accelerator.wait_for_everyone()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    del trainer
    gc.collect()
    return {
        "accuracy_before": before,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "steps": warm.steps,
        "seconds": round(seconds, 2),
    }


def supervised(
    warm: WarmUp, config: Any, model: Any, tokenizer: Any, rows: Any, folder: str | Path, peft_config: Any = None
) -> Any:
    """The SFTTrainer of a warm-up; device, precision, checkpointing and seed are those of the run's `config`."""
    from transformers import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    from ..trainer.quantized import settle

    arguments = SFTConfig(
        output_dir=str(folder),
        max_steps=warm.steps,
        learning_rate=warm.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=warm.steps // 10,
        per_device_train_batch_size=warm.batch_size,
        gradient_accumulation_steps=1,
        completion_only_loss=True,
        max_length=None,
        seed=config.seed,
        use_cpu=config.use_cpu,
        bf16=config.bf16,
        fp16=config.fp16,
        gradient_checkpointing=config.gradient_checkpointing,
        logging_steps=max(warm.steps // 10, 1),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model,
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    trainer.remove_callback(PrinterCallback)
    settle(trainer.model, loss_scaling=config.fp16)
    return trainer


def examples(rows: Any, column: str) -> Any:
    """`rows` as TRL's prompt-completion data: columns `prompt` and `completion`, both text or both messages."""
    if column not in rows.column_names:
        raise VariantError(
            f"warm_up reads column {column!r}, and the data has only {', '.join(sorted(rows.column_names))}"
        )

    def example(row: dict[str, Any]) -> dict[str, Any]:
        found = row[column]
        if isinstance(found, list) and found and isinstance(found[0], (str, list)):
            found = found[0]
        if isinstance(found, dict):
            found = [found]
        if isinstance(found, str) and found and not isinstance(row["prompt"], str):
            found = [{"role": "assistant", "content": found}]
        elif isinstance(found, list) and found and isinstance(row["prompt"], str):
            found = found[-1]["content"]
        return {"prompt": row["prompt"], "completion": found}

    made = [e for e in map(example, rows) if e["completion"]]
    if not made:
        raise VariantError(f"warm_up: column {column!r} is empty in every row")
    return type(rows).from_list(made)
