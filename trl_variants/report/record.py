"""What a run was and what came of it, from its trainer or from its folder: all that a model card says."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..composition import Variant, variant
from ..errors import VariantError
from .run_folder import plain, versions, write_text

RUN, RESULT, LOG = "run.json", "result.json", "log.jsonl"
# never printed: secrets, and where things lie on one machine
HIDDEN = {"hub_token", "push_to_hub_token", "output_dir", "logging_dir", "resume_from_checkpoint"}
# set by transformers and TRL from other settings
_DERIVED = {"generation_batch_size", "local_rank", "run_name", "disable_dropout", "accelerator_config", "deepspeed"}
_DERIVED |= {"activation_checkpointing", "debug", "report_to", "disable_tqdm", "dataloader_pin_memory"}
_DERIVED |= {"fsdp", "fsdp_config", "liger_kernel_config", "ddp_timeout", "beta", "variant"}


@dataclass
class RunRecord:
    """A run as its card tells it.

    Args:
        name: of the run, usually its folder's.
        result: plain facts and figures: the keys of `result.json`.
        history: the trainer's log, one dict a line.
        composition: what was trained; None where the folder does not say.
    """

    name: str
    result: dict[str, Any]
    history: list[dict[str, Any]] = field(default_factory=list)
    composition: Variant | None = None
    composition_text: str = ""  # what the run printed of it, where the value cannot be read back

    @classmethod
    def load(cls, folder: str | Path) -> RunRecord:
        """Reads a run folder, finished (`result.json`) or not (`run.json`); the newer of the two counts.

        Raises VariantError where it holds neither.
        """
        folder = Path(folder)
        files = [folder / name for name in (RESULT, RUN) if (folder / name).is_file()]
        if not files:
            raise VariantError(
                f"{folder} is no run folder: it holds neither {RESULT} nor {RUN}, which training writes with every "
                "checkpoint and at the end"
            )
        newest = max(files, key=lambda file: file.stat().st_mtime_ns)
        try:
            result = json.loads(newest.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise VariantError(f"{newest} is no JSON file: {error}") from error
        log = folder / LOG
        lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
        if "adapter" not in result:
            result["adapter"] = _adapter_in(folder)
        history = [json.loads(line) for line in lines]
        return cls(folder.resolve().name, result, history, _composition_in(folder, result), _text_in(folder))

    @classmethod
    def of(cls, trainer: Any) -> RunRecord:
        """The run of a trainer as far as it has come; what its caller knows beside it lies in `trainer.facts`."""
        name = (trainer.hub_model_id or trainer.args.hub_model_id or trainer.args.output_dir).rstrip("/").split("/")[-1]
        result = {**facts_of(trainer), **trainer.facts}
        return cls(name, plain(result), list(trainer.state.log_history), trainer.variant)

    def save(self, folder: str | Path) -> None:
        """Writes `run.json` and `log.jsonl`, from which the card can be rendered again."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self.history:
            write_text(folder / LOG, "".join(json.dumps(plain(row)) + "\n" for row in self.history))
        write_text(folder / RUN, json.dumps(plain(self.result), indent=2) + "\n")


def add_evaluation(folder: str | Path, evaluation: Mapping[str, Any]) -> None:
    """Adds an evaluation to a run folder's files; one of the same problems, done the same way, is replaced."""
    for file in (Path(folder) / name for name in (RESULT, RUN)):
        if file.is_file():
            result = json.loads(file.read_text(encoding="utf-8"))
            others = [e for e in result.get("evaluations") or [] if _how(e) != _how(evaluation)]
            result["evaluations"] = [*others, plain(evaluation)]
            write_text(file, json.dumps(result, indent=2) + "\n")


def _how(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in evaluation.items() if k not in ("metrics", "seconds", "unscorable", "batch_size")}


def _composition_in(folder: Path, result: Mapping[str, Any]) -> Variant | None:
    """As the run wrote it, else as its last checkpoint did: a name alone may mean something else by now."""
    given = result.get("composition")
    checkpoints = sorted(folder.glob("checkpoint-*/variant.json"), key=lambda file: file.stat().st_mtime_ns)
    if given is None and checkpoints:
        given = json.loads(checkpoints[-1].read_text(encoding="utf-8"))["composition"]
    try:
        return None if given is None else variant(given)
    except VariantError:  # a hook of the user's own that is not imported here
        return None


def _text_in(folder: Path) -> str:
    file = folder / "composition.txt"
    return file.read_text(encoding="utf-8").rstrip() if file.is_file() else ""


def _adapter_in(folder: Path) -> dict[str, Any] | None:
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    targets = config.get("target_modules")
    return {
        "kind": config.get("peft_type", "adapter"),
        "r": config.get("r"),
        "alpha": config.get("lora_alpha"),
        "targets": sorted(targets) if isinstance(targets, list) else targets,
    }


def hub_id(name: str | None) -> str | None:
    """`name` where it can be a Hub repository; None for a local folder and for what no repository can be called."""
    if not name or os.path.exists(name) or name.startswith((".", "~")):
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def facts_of(trainer: Any) -> dict[str, Any]:
    """What the trainer itself knows of its run, as plain data."""
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    path = getattr(model.config, "_name_or_path", "") or ""
    adapters = getattr(model, "peft_config", None)
    quantized = getattr(model.config, "quantization_config", None)
    every = args.steps_per_generation // args.gradient_accumulation_steps * args.num_iterations or 1
    generations = max(1, round(args.logging_steps / every)) if args.logging_steps >= 1 else 1
    return {
        "variant": trainer.variant.name if trainer.named else None,
        "composition": trainer.variant.to_mapping(),
        "settings": changed_settings(args),
        "seed": args.seed,
        "steps": trainer.state.global_step,
        "model": path if hub_id(path) else os.path.basename(path.rstrip("/")),
        "base_model": getattr(args, "hub_base_model", None) or hub_id(path),
        "adapter": None if not adapters else adapter_facts(next(iter(adapters.values()))),
        "quantization": quantization_name(quantized),
        "dataset": getattr(getattr(trainer.train_dataset, "info", None), "dataset_name", None),
        "completions_per_log": generations * args.generation_batch_size,
        "max_new_tokens": args.max_completion_length,
        "device": device_name(trainer.accelerator.device),
        "processes": trainer.accelerator.num_processes,
        "versions": versions(),
    }


def changed_settings(args: Any) -> dict[str, Any]:
    """The fields of a config that differ from their defaults, without secrets, folders and what others imply."""
    found = {"variant": args.variant} if getattr(args, "variant", None) is not None else {}
    for f in fields(args):
        if not f.init or f.name in HIDDEN | _DERIVED or f.name.startswith(("hub_", "push_to_hub", "_")):
            continue
        default = f.default if f.default_factory is MISSING else f.default_factory()
        value = getattr(args, f.name)
        value = getattr(value, "value", value)
        if value != getattr(default, "value", default) and isinstance(value, (bool, int, float, str, list, dict)):
            found[f.name] = value
    return found


def adapter_facts(config: Any) -> dict[str, Any]:
    """Kind, rank, alpha and target modules of a PEFT configuration."""
    targets = getattr(config, "target_modules", None)
    return {
        "kind": str(getattr(config.peft_type, "value", config.peft_type)),
        "r": getattr(config, "r", None),
        "alpha": getattr(config, "lora_alpha", None),
        "targets": sorted(targets) if isinstance(targets, (set, list, tuple)) else targets,
    }


def quantization_name(config: Any) -> str | None:
    """`4-bit nf4`, `8-bit` or the method's name; None for a model that is not quantized."""
    if config is None:
        return None
    get = config.get if isinstance(config, Mapping) else lambda name, default=None: getattr(config, name, default)
    if get("load_in_4bit"):
        return f"4-bit {get('bnb_4bit_quant_type') or ''}".strip()
    if get("load_in_8bit"):
        return "8-bit"
    method = get("quant_method")
    return str(getattr(method, "value", method)) if method else None


def device_name(device: Any) -> str:
    """`cpu`, or the GPU's own name."""
    if getattr(device, "type", None) != "cuda":
        return str(device)
    import torch

    return torch.cuda.get_device_name(device)
