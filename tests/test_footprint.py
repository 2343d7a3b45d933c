"""The memory estimate against bytes that are there after one optimizer step, and against numbers by hand."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaConfig, Qwen3Config, T5Config

from benchmarks.memory import bytes_of
from tests.trainer import toy
from trl_variants import VariantError, estimate_memory, variant

LORA = dict(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
CRITIC = {"r": 4, "targets": "all-linear"}


def held(estimate, *names: str) -> int:
    return sum(estimate.held[name] for name in names)


@pytest.mark.parametrize(
    ("bits", "nested", "dtype"),
    [(4, False, "bfloat16"), (4, True, "float32"), (8, False, "bfloat16"), (None, False, "bfloat16")],
)
def test_against_a_run_with_an_adapter(bits, nested, dtype):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    packed = {4: dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"), 8: dict(load_in_8bit=True)}
    quantised = {} if bits is None else {"quantization_config": BitsAndBytesConfig(**packed[bits])}
    if nested:
        quantised["quantization_config"].bnb_4bit_use_double_quant = True
    path = toy.model_path("llama")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), **quantised)
    arguments = {"model": model, "peft_config": LoraConfig(**LORA)}
    trainer = toy.train(variant="grpo", max_steps=1, trainer_arguments=arguments).trainer
    found = bytes_of(trainer)
    guess = estimate_memory(path, "grpo", dtype=dtype, bits=bits, nested=nested, lora=LoraConfig(**LORA))
    assert held(guess, "weights", "adapter") == pytest.approx(found["weights"], rel=0.02)
    assert guess.held["gradients"] == found["gradients"]
    assert guess.held["optimizer"] == pytest.approx(found["optimizer"], rel=0.01)  # and one step counter a tensor


@pytest.mark.parametrize("body", ["adapter", "model", "trunk"])
def test_against_a_run_with_a_critic(body):
    method = variant("ppo", learners=[{"critic": {**CRITIC, "body": body}}])
    path, arguments = toy.model_path(), {"peft_config": LoraConfig(**LORA)}
    run = toy.train(model_given=path, variant=method.to_mapping(), max_steps=1, trainer_arguments=arguments)
    found = bytes_of(run.trainer)
    guess = estimate_memory(path, method, lora=LoraConfig(**LORA))
    assert sum(guess.held.values()) == pytest.approx(sum(found.values()), rel=0.02)
    assert guess.held["critic"] > 0


def test_against_a_full_run_with_reference_and_teacher():
    from benchmarks.memory import weights_of

    method = variant("grpo", teacher={"model": {"path": toy.model_path("teacher")}})
    trainer = toy.train(model_given=toy.model_path(), variant=method.to_mapping(), max_steps=1).trainer
    found = bytes_of(trainer)
    guess = estimate_memory(toy.model_path(), method)
    assert guess.held["weights"] == found["weights"] and guess.held["gradients"] == found["gradients"]
    assert guess.held["reference model"] == weights_of(trainer.ref_model)
    assert guess.held["teacher"] == weights_of(trainer.teaching.teacher.model) // 2  # auto: taken as 16 bits
    assert guess.held["optimizer"] == pytest.approx(found["optimizer"], rel=0.01)


def test_by_hand():
    """Two layers of 8 wide with 2 heads of 4 and 1 key head, 16 inside, 10 words tied: 80 + 2 (64 + 32 + 32 + 64 + 384)
    weights in linear layers and embedding, 2 (8 + 8) + 8 in norms.
    """
    shape = dict(vocab_size=10, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    config = LlamaConfig(**shape, num_key_value_heads=1, head_dim=4, tie_word_embeddings=True)
    guess = estimate_memory(config, "dapo", rows=3, prompt_tokens=4, completion_tokens=6, gradient_checkpointing=False)
    linear, rest = 2 * (64 + 32 + 32 + 64 + 384), 80 + 2 * 16 + 8
    assert guess.held == {
        "weights": 4 * (linear + rest),
        "gradients": 4 * (linear + rest),
        "optimizer": 8 * (linear + rest),
    }
    assert guess.passing["generation"] == 3 * (2 * 2 * 4 * 10 * 4 + 16 * 10)
    layer = 4 * (6 * 8 + 3 * 8 + 2 * 4 + 4 * 16) + 64
    assert guess.passing["update"] == 30 * (2 * layer + 2 * layer) + 4 * 30 * 10
    assert guess.total == 16 * (linear + rest) + guess.passing["update"]
    four = estimate_memory(config, bits=4, lora=LoraConfig(r=1, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    blocks = 2 * (1 + 1 + 1 + 1 + 2 + 2 + 2)  # of 64
    assert four.held["weights"] == linear // 2 + 4 * blocks + 14 * 64 + 4 * rest
    assert four.held["adapter"] == 2 * 2 * (8 + 8) and four.held["optimizer"] == 2 * four.held["adapter"]
    assert estimate_memory(config, shards=4).held["weights"] == linear + rest
    assert estimate_memory(config, optimizer="adamw_8bit").held["optimizer"] == 2 * (linear + rest)


def test_the_recipes_of_sixteen_gigabytes_fit():
    """Shapes as published of Qwen3-0.6B and Qwen3-4B."""
    shared = dict(vocab_size=151936, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)
    small = Qwen3Config(
        **shared, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16
    )
    lora = dict(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    run = dict(bits=4, fp16=True, mixed=True, rows=8, generated_rows=64, prompt_tokens=256, completion_tokens=512)
    plain = estimate_memory(small, "dapo", dtype="float16", lora=LoraConfig(**lora), **run)
    critic = estimate_memory(small, "ppo", dtype="float32", lora=LoraConfig(**lora), **run)
    assert plain.total < critic.total < 12e9
    assert "key-value cache of 64 rows" in str(plain) and "GB" in str(plain)


def test_what_is_refused():
    with pytest.raises(VariantError, match="dtype is auto or one of"):
        estimate_memory(toy.model_path(), dtype="int8")
    with pytest.raises(VariantError, match="bits is 4, 8 or None"):
        estimate_memory(toy.model_path(), bits=3)
    with pytest.raises(VariantError, match="configuration of 'no/such-model'"):
        estimate_memory("no/such-model")
    with pytest.raises(VariantError, match="T5Config is not the configuration of a causal language model"):
        estimate_memory(T5Config())
    with pytest.raises(VariantError, match="the adapter does not fit the model"):
        estimate_memory(toy.model_path(), lora=LoraConfig(target_modules=["nowhere"], task_type="CAUSAL_LM"))


def test_check_and_train_say_it_before_loading(tmp_path, capsys, monkeypatch):
    import yaml

    from trl_variants.cli import main

    settings = dict(task="arithmetic", variant="grpo", use_cpu=True, bf16=False, output_dir=str(tmp_path / "run"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(settings))
    words = [str(recipe), "--per_device_train_batch_size", "8"]
    assert main(["check", *words]) == 0 and "memory" not in capsys.readouterr().out
    assert main(["check", *words, "--model", toy.model_path()]) == 0
    out = capsys.readouterr().out
    assert "memory of each device, estimated: " in out and "reference model" in out and "8 rows of 256 + 512" in out
    assert main(["check", *words, "--model", "no/such-model"]) == 0
    assert "memory not estimated: the configuration of 'no/such-model'" in capsys.readouterr().out
    assert main(["train", *words, "--model", "no/such-model"]) == 2
    assert "memory not estimated" in capsys.readouterr().out

    def stop(*args, **kwargs):
        raise VariantError("the model would be loaded now")

    monkeypatch.setattr("trl_variants.cli.sources.load_model", stop)
    assert main(["train", *words]) == 2
    assert "memory of each device, estimated: " in capsys.readouterr().out


def test_shards_are_what_the_launcher_says(monkeypatch):
    from trl_variants.cli.memory import shards

    assert shards() == 1
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert shards() == 1
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert shards() == 8


def test_accuracy_is_left_out_while_weights_are_in_shards(tmp_path, capsys, monkeypatch):
    import json

    import yaml

    from trl_variants.cli import main

    monkeypatch.setattr("trl_variants.cli.memory.shards", lambda: 8)
    settings = dict(task="arithmetic", variant="grpo", use_cpu=True, bf16=False, gradient_checkpointing=False)
    small = dict(
        max_steps=2, max_completion_length=4, num_generations=4, per_device_train_batch_size=8, logging_steps=1
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**settings, **small, "self_test": False, "output_dir": str(tmp_path / "run")}))
    assert main(["train", str(recipe)]) == 0
    assert "accuracy is not measured while weights are in shards" in capsys.readouterr().out
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["accuracy_before"] is None and result["accuracy_after"] is None and result["steps"] == 2
