"""Adapters, full weights and their freshness on a real vLLM in the trainer's process: `make test-vllm`."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from trl_variants import VariantError, VariantGRPOConfig, VariantGRPOTrainer
from trl_variants.tasks import load_task, smollm2_path
from trl_variants.trainer.engine.compare import mean_gap, of_trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not importable here"),
]
LORA = dict(r=8, lora_alpha=16, target_modules="all-linear")
NOISE = 0.05  # nats a token: bf16 engine, fp32 trainer


def trained(tmp_path, lora=LORA, model=None, watch=None, model_given=None, **changes):
    """A closed trainer after three steps; `watch(trainer)` runs after every generation, whose engine is still there."""
    task = load_task("arithmetic")
    settings = dict(
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        self_test=False,
        max_steps=3,
        num_generations=4,
        per_device_train_batch_size=16,
        max_completion_length=6,
        learning_rate=0.02,
        logging_steps=1,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=64,
    )
    args = VariantGRPOConfig(str(tmp_path), **{**settings, **changes})
    peft_config = None if lora is None else LoraConfig(**lora)
    path = model or task.model_path()
    trainer = VariantGRPOTrainer(
        model_given or path,
        task.reward_funcs,
        args,
        task.train_dataset,
        processing_class=AutoTokenizer.from_pretrained(path),
        variant="grpo",
        peft_config=peft_config,
    )
    if watch is not None:
        stock = trainer.vllm_generation.generate

        def generate(*given, **named):
            answer = stock(*given, **named)
            watch(trainer)
            return answer

        trainer.vllm_generation.generate = generate
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


def packed(model):
    """The bytes of every 4-bit weight and of its block scales."""
    found = [p for p in model.parameters() if getattr(p, "quant_state", None) is not None]
    return [(w.data.clone(), w.quant_state.absmax.clone()) for w in found]


def logged(trainer, name):
    return [float(line[name]) for line in trainer.state.log_history if name in line]


@pytest.mark.parametrize(
    "lora",
    [
        LORA,
        dict(LORA, use_rslora=True, rank_pattern={"q_proj": 3, "down_proj": 16}, alpha_pattern={"v_proj": 4}),
    ],
    ids=["plain", "patterns"],
)
def test_each_generation_is_under_the_adapter_of_its_step(tmp_path, lora):
    seen, probe = [], list(range(10, 40))

    def watch(trainer):
        engine = trainer.vllm_generation
        seen.append(
            (
                of_trainer(trainer, probe),
                torch.tensor(engine.engine.prompt_log_probs(probe), dtype=torch.float64),
                torch.tensor(engine.engine.prompt_log_probs(probe, base=True), dtype=torch.float64),
                engine.version,
            )
        )

    trainer = trained(tmp_path, lora, watch=watch)
    assert [version for *_, version in seen] == [1, 2, 3]
    for i, (mine, engines, base, _) in enumerate(seen):
        assert mean_gap(mine, engines) < NOISE * (1 + i)  # a larger adapter has more rounding
        assert torch.equal(base, seen[0][2])  # the base is never touched, to the bit
    for (_, before, *_), (mine, engines, *_) in zip(seen, seen[1:], strict=False):
        assert mean_gap(mine, before) > 4 * mean_gap(mine, engines)  # the version before would be far away
    assert logged(trainer, "engine/adapter_changed") == [1.0, 1.0]
    assert max(logged(trainer, "engine/base_gap")) < NOISE


def test_the_samplers_log_probs_are_compared_after_temperature_and_truncation(tmp_path):
    trainer = trained(tmp_path, max_steps=1, temperature=0.7, top_p=0.8, top_k=20)
    assert logged(trainer, "engine/sampler_gap")[0] < NOISE


def test_raw_log_probs_are_refused(tmp_path, monkeypatch):
    from trl.generation import vllm_generation

    stock = vllm_generation.LLM
    raw = lambda **settings: stock(**{**settings, "logprobs_mode": "raw_logprobs"})  # noqa: E731
    monkeypatch.setattr(vllm_generation, "LLM", raw)
    with pytest.raises(VariantError, match="not those of its sampler"):
        trained(tmp_path, max_steps=1, temperature=0.4)


def test_an_engine_that_keeps_an_old_adapter_stops_the_run(tmp_path):
    def watch(trainer):
        llm = trainer.vllm_generation.llm
        llm.serve = lambda *given: None  # later versions never arrive

    with pytest.raises(VariantError, match="does not generate under version 2 of the adapter"):
        trained(tmp_path, watch=watch, learning_rate=0.2)


def test_another_base_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(load_task("arithmetic").model_path(), dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(-1.0)
    with pytest.raises(VariantError, match="the engine's base model is not the trainer's"):
        trained(tmp_path, model_given=model, max_steps=1)


def test_full_fine_tuning_sends_its_weights(tmp_path, monkeypatch):
    from vllm.model_executor.layers import utils

    def plain(layer, remove_weight):  # the CPU backend packs each weight and leaves nothing to load into
        layer.cpu_linear = torch.nn.functional.linear

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", plain)
    trainer = trained(tmp_path, lora=None, learning_rate=1e-3)
    assert len(logged(trainer, "sampling/sampling_logp_difference/mean")) == 3
    assert max(logged(trainer, "sampling/sampling_logp_difference/mean")) < NOISE
    with pytest.raises(VariantError, match="the trainer was closed"):
        trainer.vllm_generation.llm.generate([])


def test_a_4bit_base_stays_as_it_is_and_the_gap_to_the_engines_base_is_said(tmp_path, capfd):
    seen = []
    smollm2 = smollm2_path()
    model = AutoModelForCausalLM.from_pretrained(
        smollm2,
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        ),
    )
    before = packed(model)
    assert len(before) == 210  # seven layers in each of 30 blocks
    trainer = trained(
        tmp_path,
        model=smollm2,
        model_given=model,
        watch=lambda t: seen.append(t.vllm_generation.version),
        learning_rate=1e-3,
        per_device_train_batch_size=4,
    )
    assert seen == [1, 2, 3]
    for (a, a_scale), (b, b_scale) in zip(before, packed(trainer.model), strict=True):
        assert torch.equal(a, b) and torch.equal(a_scale, b_scale)
    [gap], shifts = logged(trainer, "engine/base_gap"), logged(trainer, "engine/adapter_gap")
    assert NOISE < gap < 1.5  # NF4 on a small model
    effects = logged(trainer, "engine/adapter_effect")
    assert shifts[0] == effects[0] == 0.0  # a fresh adapter moves nothing, there as here
    assert effects[2] > NOISE  # and the run went on: the engine moved with it
    said = capfd.readouterr().out
    assert f"(here it is in 4 bits); without the adapter log-probs differ from the trainer's by {gap:.3f}" in said
    assert "importance correction on" in said
    with pytest.raises(VariantError, match="unquantized base under an adapter trained on a 4-bit one"):
        trained(
            tmp_path,
            model=smollm2,
            model_given=trainer.model.unload(),
            vllm_importance_sampling_correction=False,
            per_device_train_batch_size=4,
        )
