"""QLoRA on a CPU: an evaluation pass must not take the gradients away, and resume keeps the adapter's dtype."""

from __future__ import annotations

import pytest
import torch

from trl_variants import VariantGRPOTrainer

from . import toy

pytest.importorskip("bitsandbytes")


def quantized_run(tmp_path, max_steps: int = 3, resume: str | None = None, variant: str = "dapo", **changes):
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    return toy.train(
        VariantGRPOTrainer,
        model_given=toy.model_path(),
        variant=variant,
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


def test_a_critic_on_the_same_four_bit_base(tmp_path):
    """An adapter beside the policy's: both learn, and a resumed run is the run that was not stopped."""
    changes = dict(
        variant="ppo",
        hooks={"learners": [{"critic": {"lr": 1e-2, "r": 4, "epochs": 2}}]},
        save_strategy="steps",
        save_steps=1,
    )
    whole = quantized_run(tmp_path, **changes)
    [worker] = whole.trainer.team.workers.values()
    assert worker.body.kind == "adapter" and all(g.norm() > 1e-6 for g in whole.gradients)
    moved = [p for n, p in worker.parameters().items() if "lora_B" in n]
    assert moved and all(float(p.detach().abs().max()) > 0 for p in moved)
    resumed = quantized_run(tmp_path, resume=str(tmp_path / "checkpoint-2"), **changes)
    [again] = resumed.trainer.team.workers.values()
    for name, parameter in worker.parameters().items():
        assert torch.equal(parameter, again.parameters()[name]), name
    for (name, a), b in zip(whole.trainer.model.named_parameters(), resumed.trainer.model.parameters(), strict=True):
        assert not a.requires_grad or torch.equal(a, b), name


def test_a_quantised_policy_has_no_copy_to_train(tmp_path):
    from trl_variants import VariantError

    with pytest.raises(VariantError, match="no trainable copy: set the learner's body to adapter or trunk"):
        quantized_run(tmp_path, variant="ppo", hooks={"learners": [{"critic": {"body": "model"}}]})
