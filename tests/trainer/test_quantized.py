"""QLoRA on a CPU: an evaluation pass must not take the gradients away, and resume keeps the adapter's dtype."""

from __future__ import annotations

import pytest
import torch

from trl_variants import VariantGRPOTrainer

from . import toy

pytest.importorskip("bitsandbytes")


def quantized_run(tmp_path, max_steps: int = 3, resume: str | None = None, **changes):
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    return toy.train(
        VariantGRPOTrainer,
        model_given=toy.model_path(),
        variant="dapo",
        max_steps=max_steps,
        resume=resume,
        output_dir=str(tmp_path),
        trainer_arguments={
            "quantization_config": four_bit,
            "peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
            "eval_dataset": toy.dataset(),
        },
        **changes,
    )


def test_training_goes_on_after_evaluation(tmp_path):
    """Without the guard bitsandbytes repacks the weights in the first evaluation; every later gradient is zero."""
    changes = dict(eval_strategy="steps", eval_steps=1, eval_on_start=True, per_device_eval_batch_size=4)
    out = quantized_run(tmp_path, **changes)
    assert all(g.norm() > 1e-6 for g in out.gradients)
    assert len(out.logged("eval_loss")) == 4  # at the start and after each step


def test_the_guard_finds_the_layers():
    from torch import nn

    from trl_variants.trainer.seam import keep_4bit_trainable_on_cpu

    layer, plain = nn.Linear(2, 2), nn.Linear(2, 2)
    layer.support_avx512bf16_for_cpu = True
    assert keep_4bit_trainable_on_cpu(nn.Sequential(layer, plain)) == 1
    assert layer.support_avx512bf16_for_cpu is False


def test_resume_keeps_the_adapter_in_its_dtype(tmp_path):
    first = quantized_run(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    dtypes = {p.dtype for p in first.trainer.model.parameters() if p.requires_grad}
    assert dtypes == {torch.bfloat16}
    resumed = quantized_run(tmp_path, max_steps=2, resume=str(tmp_path / "checkpoint-1"))
    weights = [dict(t.model.named_parameters()) for t in (first.trainer, resumed.trainer)]
    for name, parameter in weights[0].items():
        if parameter.requires_grad:
            assert weights[1][name].dtype == torch.bfloat16, name
            assert torch.equal(parameter, weights[1][name]), name
