"""LoRA adapters as folders: go on from one, or merge it into the 16-bit weights it belongs to."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import VariantError

DTYPES = ("bfloat16", "float16", "float32")
FOLDER = "merged"
_PROBE = "The answer to 12 + 30 is 42, because 12 + 30 = 42."
_CARD = """---
base_model: {base}
tags: [trl-variants]
---

The adapter `{adapter}`, merged into the {dtype} weights of `{base}`. On one text its log-probs are within
{difference:.1e} of those of that base with the adapter beside it.
"""


@dataclass(frozen=True)
class Merged:
    """Where a merged model lies, what it was merged into, and how far its log-probs are from base plus adapter's.

    `difference` is the largest over the tokens of one text, in nats.
    """

    path: str
    base: str
    difference: float


def is_adapter(path: str | Path) -> bool:
    """Whether a folder holds a PEFT adapter."""
    return (Path(path) / "adapter_config.json").is_file()


def config_of(adapter: str | Path) -> Any:
    """The PeftConfig of an adapter, a folder or Hub id. Raises VariantError where there is none."""
    from peft import PeftConfig

    try:
        return PeftConfig.from_pretrained(str(adapter))
    except (OSError, ValueError) as error:
        raise VariantError(f"{adapter} holds no adapter: it has no adapter_config.json") from error


def base_of(adapter: str | Path) -> str:
    """The model an adapter (folder or Hub id) belongs to. Raises VariantError where it does not say."""
    base = config_of(adapter).base_model_name_or_path
    if not base:
        raise VariantError(f"the adapter {adapter} does not say which model it belongs to: name it with base")
    return str(base)


def continued(model: Any, adapter: str | Path) -> Any:
    """`model` with that adapter (folder or Hub id) on it, ready to be trained further: a PeftModel.

    Raises VariantError for an adapter that does not fit the model.
    """
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise VariantError(f"the adapter {adapter} does not load onto the model: {reason}") from error


def merge_adapter(
    adapter: str | Path,
    out: str | Path | None = None,
    *,
    dtype: str = "bfloat16",
    base: str | None = None,
    push_to: str | None = None,
    private: bool = True,
    overwrite: bool = False,
) -> Merged:
    """Loads the adapter's base in `dtype`, adds the adapter to it in float32, saves model and tokenizer.

    An adapter trained on a 4-bit base meets the original weights here, not the rounded ones it was trained on.

    Args:
        adapter: a run folder, a checkpoint or a Hub id.
        out: where to; default: `merged` inside the adapter's folder.
        base: the model to merge into, where the adapter's own record no longer leads to it.
        push_to: Hub repository to upload to as well; its README, if it has one, stays.
        private: what a repository that does not exist yet becomes.
        overwrite: replaces a model that lies in `out` already; otherwise that is an error.

    Raises:
        VariantError: no adapter there, no base to be had, a base that is itself quantised, a target that is taken.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if dtype not in DTYPES:
        raise VariantError(f"dtype is one of {', '.join(DTYPES)}, got {dtype!r}")
    kind = str(getattr(config_of(adapter).peft_type, "value", ""))
    if kind != "LORA":
        raise VariantError(f"{adapter} is a {kind} adapter: only LoRA is merged here")
    name = base or base_of(adapter)
    target = Path(out) if out is not None else Path(adapter) / FOLDER
    if target.is_dir() and any(target.iterdir()):
        if not (overwrite and (target / "config.json").is_file()):
            raise VariantError(f"{target} is not empty: choose another folder with out, or overwrite a model there")
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise VariantError(
            f"the base {name!r} of {adapter} cannot be had: name a folder or Hub id with base"
        ) from error
    if getattr(model, "is_quantized", False):
        raise VariantError(f"{name} is stored quantised: name the 16-bit model it was made from with base")
    tokenizer = _tokenizer(AutoTokenizer, adapter, name)
    wrapped = continued(model, adapter).eval()
    before = _logps(wrapped, tokenizer)
    merged = _merged(wrapped)
    difference = float((before - _logps(merged, tokenizer)).abs().max())
    if target.is_dir():
        shutil.rmtree(target)
    merged.save_pretrained(target)
    tokenizer.save_pretrained(target)
    card = _CARD.format(base=name, adapter=adapter, dtype=dtype, difference=difference)
    if Path(name).exists():  # a folder of this machine is no valid base_model
        card = card.replace(f"base_model: {name}\n", "")
    (target / "README.md").write_text(card, encoding="utf-8")
    if push_to is not None:
        _push(target, push_to, private)
    return Merged(str(target), name, difference)


def _tokenizer(auto: Any, adapter: str | Path, base: str) -> Any:
    try:
        return auto.from_pretrained(str(adapter))
    except (OSError, ValueError):  # an adapter is often saved without one
        return auto.from_pretrained(base)


def _merged(model: Any) -> Any:
    """The base with the adapter added, each weight rounded once: sums of 16-bit weights are taken in float32."""
    for module in model.modules():
        if not hasattr(module, "lora_A") or not hasattr(module, "merge"):
            continue
        weight = module.get_base_layer().weight
        dtype = weight.dtype
        weight.data = weight.data.float()
        try:
            module.merge(safe_merge=True)
        except (RuntimeError, ValueError) as error:
            raise VariantError(f"the adapter cannot be merged: {error}") from error
        weight = module.get_base_layer().weight
        weight.data = weight.data.to(dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="All adapters are already merged")
        merged = model.merge_and_unload()  # unties a head that was trained, which unload() would not
    for parameter in merged.parameters():
        parameter.requires_grad_(True)
    return merged


def _logps(model: Any, tokenizer: Any) -> Any:
    """(T,) log-probs of the probe's tokens."""
    import torch

    ids = tokenizer(_PROBE, return_tensors="pt", add_special_tokens=False)["input_ids"]
    ids = ids[:, : getattr(model.config, "max_position_embeddings", None) or ids.shape[1]].to(model.device)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)


def _push(folder: Path, repo: str, private: bool) -> None:
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        theirs = ["README.md"] if api.file_exists(repo, "README.md") else None
        api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=theirs)
    except Exception as error:  # whatever the network or the Hub says: the merged model is there
        raise VariantError(f"merged to {folder}, but the push to {repo} failed: {error}") from error
