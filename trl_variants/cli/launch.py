"""`trl-variants train --accelerate_config NAME RECIPE.yaml`: the same run on several processes.

A name is a file, one of `recipes/accelerate/`, or one that TRL ships. GPUs go through `accelerate launch`; a CPU, where
that starts a single process (accelerate 1.15), through torchrun.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..errors import VariantError, did_you_mean
from .overrides import read_recipe

OPTION = "--accelerate_config"
# options of the launcher, not of the run
_LAUNCHER = ("--num_processes", "--num_machines", "--machine_rank", "--main_process_ip", "--main_process_port")


def run(words: list[str]) -> int:
    """Starts the processes and returns their exit code. Raises VariantError for what cannot run here."""
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--accelerate_") else [word])]
    name, words = _taken(OPTION, words)
    given: list[str] = []
    for option in _LAUNCHER:
        if option in words:
            value, words = _taken(option, words)
            given += [option, value]
    return subprocess.call(command(name, given, ["train", *words]), env=environment(name))


def _taken(option: str, words: list[str]) -> tuple[str, list[str]]:
    at = words.index(option)
    if at + 1 == len(words) or words[at + 1].startswith("--"):
        raise VariantError(f"{option} needs a value")
    return words[at + 1], words[:at] + words[at + 2 :]


def command(name: str, given: list[str], words: list[str]) -> list[str]:
    """The command that starts `trl-variants WORDS` under a configuration; `given`: options of the launcher itself."""
    path, settings = _read(name)
    if not settings.get("use_cpu"):
        launcher = ["-m", "accelerate.commands.launch", "--config_file", str(path), *given]
        return [sys.executable, *launcher, "-m", "trl_variants.cli", *words]
    options = dict(zip(given[::2], given[1::2], strict=True))
    number = options.pop("--num_processes", None) or str(settings.get("num_processes", 1))
    if options:
        raise VariantError(f"{', '.join(options)}: on a CPU the processes of one machine are started")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", number]
    return [sys.executable, *launcher, "-m", "trl_variants.cli", *words]


def environment(name: str) -> dict[str, str]:
    """The processes' environment."""
    own = dict(os.environ)
    if _read(name)[1].get("use_cpu"):
        own["ACCELERATE_USE_CPU"] = "true"
        own.setdefault("OMP_NUM_THREADS", "1")
    return own


def _read(name: str) -> tuple[Path, dict[str, Any]]:
    path = resolve(name)
    settings = read_recipe(path)
    kind = str(settings.get("distributed_type", "NO"))
    if kind == "FSDP" and settings.get("use_cpu"):
        raise VariantError(f"{name}: on a CPU accelerate replaces FSDP by plain data parallel: use ddp2-cpu")
    if kind == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        raise VariantError(f"{name} needs DeepSpeed: pip install deepspeed, or use fsdp2 or multi_gpu")
    return path, settings


def resolve(name: str) -> Path:
    """The file of a configuration. Raises VariantError for an unknown name."""
    if Path(name).is_file():
        return Path(name)
    folders = _folders()
    for folder in folders:
        if (file := folder / f"{name}.yaml").is_file():
            return file
    known = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    raise VariantError(
        f"no accelerate configuration {name!r}{did_you_mean(name, known)}: a file, or {', '.join(known)}"
    )


def _folders() -> list[Path]:
    """Ours, in a checkout or in an installed package, then TRL's."""
    package = Path(__file__).parents[1]
    found = [package.parent / "recipes" / "accelerate", package / "accelerate_configs"]
    found.append(Path(str(importlib.resources.files("trl"))) / "accelerate_configs")
    return [folder for folder in found if folder.is_dir()]
