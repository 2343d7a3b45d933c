"""QLoRA on a CPU: an evaluation pass must not take the gradients away, and resume keeps the adapter's dtype."""

from __future__ import annotations

import pytest
import torch

from trl_variants import VariantGRPOTrainer, variant, variants

from . import toy

pytest.importorskip("bitsandbytes")


def four_bit():
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def quantized_run(tmp_path, max_steps: int = 3, resume: str | None = None, variant: str = "dapo", **changes):
    from peft import LoraConfig

    return toy.train(
        VariantGRPOTrainer,
        model_given=toy.model_path(),
        variant=variant,
        max_steps=max_steps,
        resume=resume,
        output_dir=str(tmp_path),
        trainer_arguments={
            "quantization_config": four_bit(),
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

    from trl_variants.trainer.quantized import keep_4bit_trainable_on_cpu

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


def packed_bytes(model) -> dict[str, bytes]:
    """What the 4-bit base holds: codes, scales, tables."""
    found = {}
    for name, parameter in model.named_parameters():
        if (state := getattr(parameter, "quant_state", None)) is not None:
            parts = [parameter.data, state.absmax, state.code]
            found[name] = b"".join(t.cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in parts)
    return found


def test_the_base_is_the_same_bytes_after_training_and_evaluation(tmp_path):
    before: dict[str, bytes] = {}
    changes = dict(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    out = quantized_run(tmp_path, patch=lambda trainer: before.update(packed_bytes(trainer.model)), **changes)
    assert len(before) == 14 and out.change.norm() > 0
    assert packed_bytes(out.trainer.model) == before


@pytest.mark.parametrize("teacher", ["model", "base", "ema", "privileged"])
def test_a_teacher_beside_a_four_bit_policy(tmp_path, teacher):
    given = {
        "model": {"path": toy.model_path("teacher"), "load_in_4bit": True},
        "privileged": {"of": "base", "column": "answer", "template": "{context} {prompt}"},
    }
    out = quantized_run(tmp_path, variant="kdrl", teacher={teacher: given.get(teacher, {})}, max_steps=3)
    assert all(g.norm() > 1e-6 for g in out.gradients)
    assert out.logged("teacher/kl")[-1] != 0


def test_under_loss_scaling_adapters_are_float32():
    from peft import LoraConfig, get_peft_model
    from torch import nn

    from trl_variants.trainer.quantized import settle

    model = get_peft_model(toy.model(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.data = p.data.bfloat16()
    model.add_adapter("ref", model.peft_config["default"])
    settle(model, loss_scaling=False)
    assert all(p.dtype == torch.bfloat16 for p in trained)
    lookup = dict(model.named_parameters())
    copies = [n for n in lookup if ".ref." in n]
    assert copies and all(torch.equal(lookup[n], lookup[n.replace(".ref.", ".default.")]) for n in copies)
    settle(model, loss_scaling=True)
    assert all(p.dtype == torch.float32 for p in trained)
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.AdamW(trained)
    out = model(input_ids=torch.tensor([[2, 3, 4]])).logits
    scaler.scale(nn.functional.cross_entropy(out[0], torch.tensor([3, 4, 5]))).backward()
    scaler.unscale_(optimizer)
    assert all(torch.isfinite(p.grad).all() for p in trained if p.grad is not None)


def test_a_run_that_goes_on_from_an_adapter_resumes(tmp_path):
    """Bit for bit, in the adapter's dtype, with the adapter it began with as its reference."""
    first = quantized_run(tmp_path / "first", max_steps=2)
    first.trainer.save_model()

    def further(resume=None):
        return toy.train(
            VariantGRPOTrainer,
            model_given=str(tmp_path / "first"),
            variant="grpo",
            max_steps=2,
            resume=resume,
            output_dir=str(tmp_path / "further"),
            save_strategy="steps",
            save_steps=1,
            trainer_arguments={"quantization_config": four_bit()},
        )

    whole, resumed = further(), further(str(tmp_path / "further" / "checkpoint-1"))
    assert whole.logged("kl")[0] == 0.0 and whole.logged("kl") == resumed.logged("kl")
    again = dict(resumed.trainer.model.named_parameters())
    for name, parameter in whole.trainer.model.named_parameters():
        assert torch.equal(parameter, again[name]) and parameter.dtype == again[name].dtype, name
    assert {p.dtype for n, p in again.items() if "lora_" in n} == {torch.bfloat16}


# on so few rows: a rank needs a history, and hardly a completion counts as right
SILENT = {"dr-seg", "passk-analytic"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [v.name for v in variants])
def test_every_method_on_a_four_bit_base(name, tmp_path):
    """With an evaluation between the steps; a later gradient is there, but where a critic learns alone at first."""
    arguments = {"teacher": toy.model_path("teacher")} if toy.asks_for_a_teacher(name) else {}
    out = quantized_run(tmp_path, variant=name, eval_strategy="steps", eval_steps=1, **arguments)
    assert all(torch.isfinite(g).all() for g in out.gradients)
    if name not in SILENT and not any(getattr(learner, "warmup", 0) for learner in variant(name).learners):
        assert any(g.norm() > 1e-7 for g in out.gradients[1:])
