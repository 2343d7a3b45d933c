"""Recipes that ask for a GPU take two steps here: a tiny Qwen3 in the place of theirs, a few rows in that of GSM8K."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.trainer import toy  # noqa: F401  freezes what is imported
from trl_variants.cli import main
from trl_variants.report import run_folder
from trl_variants.rewards.base import texts
from trl_variants.tasks.build_tiny import tokenizer

pytest.importorskip("bitsandbytes")

RECIPES = sorted(
    path
    for path in (Path(__file__).resolve().parents[1] / "recipes").rglob("*.yaml")
    if "GPU" in path.read_text().splitlines()[0] and "variant:" in path.read_text()
)
SMALL = "--use_cpu true --bf16 false --use_vllm false --max_steps 2 --max_completion_length 6 --task.eval_size 2"
SMALL += " --task.max_new_tokens 2 --per_device_train_batch_size 4 --gradient_accumulation_steps 2"
SMALL += " --save_strategy no --report_to none --self_test false --lora_r 4"


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A folder with two tiny Qwen3 models, `policy` and `teacher`, and rows in the form of GSM8K."""
    folder = tmp_path_factory.mktemp("gpu-recipes")
    words = tokenizer()
    sizes = dict(vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512)
    for seed, name in enumerate(("policy", "teacher")):
        torch.manual_seed(seed)
        config = Qwen3Config(**sizes, **heads, eos_token_id=1, pad_token_id=0, tie_word_embeddings=True)
        Qwen3ForCausalLM(config).save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    (folder / "rows").mkdir()
    for split, first in (("train", 1), ("test", 101)):
        lines = [
            json.dumps({"question": f"What is {i} + 1?", "answer": f"{i}+1 = <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"})
            for i in range(first, first + 20)
        ]
        (folder / "rows" / f"{split}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_two_steps(recipe, here, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "learning_curve_png", lambda *args, **kwargs: None)
    # an untrained model is never right: reward what it does say
    monkeypatch.setattr("trl_variants.tasks.gsm8k.final_number_reward", even_characters)
    settings = yaml.safe_load(recipe.read_text())
    on_policy = "steps_per_generation" not in settings
    words = [*SMALL.split(), "--steps_per_generation", "2" if on_policy else "4", "--output_dir", str(tmp_path)]
    words += ["--model", str(here / "policy"), "--task.path", str(here / "rows")]
    if "model" in (settings.get("teacher") or {}):
        words += ["--teacher.model.path", str(here / "teacher")]
    if "warm_up" in settings:
        words += ["--warm_up.steps", "2", "--warm_up.batch_size", "4"]
    assert main(["train", str(recipe), *words]) == 0
    logs = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = [line for line in logs if "loss" in line]
    warming_up = any(line.get("critic/warming_up") for line in steps)  # then the policy stands still by design
    assert len(steps) == 2 and any(line["grad_norm"] > 0 for line in steps) != warming_up
    adapter = (tmp_path / "adapter_model.safetensors").is_file()
    assert adapter == bool(settings.get("use_peft")) and (adapter or (tmp_path / "model.safetensors").is_file())


def even_characters(prompts, completions, **columns):
    """1.0 where the completion has an even number of vowels."""
    return [float(sum(text.count(v) for v in "aeiou") % 2 == 0) for text in texts(completions)]


def test_what_the_recipes_share():
    """The table of the README speaks of all of them at once."""
    small = [yaml.safe_load(r.read_text()) for r in RECIPES if r.parent.name == "qwen3-0.6b"]
    assert {s["variant"] for s in small} >= {"dapo", "gspo", "dr-grpo", "cispo", "luffy", "kdrl", "dgrpo", "ppo"}
    for key in (
        "model",
        "load_in_4bit",
        "fp16",
        "attn_implementation",
        "gradient_checkpointing",
        "chat_template_kwargs",
    ):
        assert len({json.dumps(s[key]) for s in small}) == 1, key
    assert all(("learners" in s.get("hooks", {})) == (s["dtype"] == "float32") for s in small)
    for recipe in RECIPES:
        assert yaml.safe_load(recipe.read_text())["output_dir"] == f"runs/{recipe.parent.name}-{recipe.stem}"
        assert "not run" in recipe.read_text().splitlines()[0]
