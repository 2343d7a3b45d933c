"""The one-line self-test finds what it looks for, and leaves the run as it was."""

from __future__ import annotations

import torch
from torch import nn

from trl_variants import VariantGRPOTrainer

from . import toy


def test_it_prints_one_line_and_changes_nothing(capsys):
    silent = toy.train(VariantGRPOTrainer, variant="gspo", self_test=False, max_steps=3)
    assert "self-test" not in capsys.readouterr().out
    spoken = toy.train(VariantGRPOTrainer, variant="gspo", self_test=True, max_steps=3)
    [line] = [x for x in capsys.readouterr().out.splitlines() if x.startswith("self-test")]
    assert line.startswith("self-test of gspo: on-policy ratio 1") and line.endswith("(ok)")
    assert torch.equal(silent.change, spoken.change)


def test_with_no_variant_named_there_is_none(capsys):
    toy.train(VariantGRPOTrainer, self_test=True, max_steps=1)
    assert "self-test" not in capsys.readouterr().out


class _Noise(nn.Module):
    """Dropout that TRL's switch does not know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.05 * torch.randn_like(x)


class _BatchCoupled(nn.Module):
    """A layer that mixes the rows that are forwarded together."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * x.mean(0, keepdim=True)


def spoiled(layer: nn.Module):
    model = toy.model()
    model.model.norm = nn.Sequential(model.model.norm, layer)
    return model


def test_it_finds_noise_and_coupled_rows(capsys):
    for layer in (_Noise(), _BatchCoupled()):
        toy.train(VariantGRPOTrainer, variant="dapo", self_test=True, max_steps=1, model_given=spoiled(layer))
        [line] = [x for x in capsys.readouterr().out.splitlines() if x.startswith("self-test")]
        assert "NOT ok" in line


def test_dropout_is_off_for_named_variants():
    from peft import LoraConfig

    lora = LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = toy.build(VariantGRPOTrainer, variant="dapo", trainer_arguments={"peft_config": lora})
    dropouts = [m.p for m in trainer.model.modules() if isinstance(m, nn.Dropout)]
    assert dropouts and not any(dropouts)


def test_two_equal_rows_do_not_cancel(capsys):
    """Two completions of the same text pull in opposite directions: noise over noise must not fail the test."""

    def same(prompts, trainer):
        ids = [[5, 6, toy.EOS] for _ in prompts]
        return {"prompt_ids": [[3] for _ in prompts], "completion_ids": ids, "logprobs": None}

    for name in ("clip-higher", "gspo", "grpo"):
        toy.train(
            VariantGRPOTrainer, variant=name, self_test=True, max_steps=1, trainer_arguments={"rollout_func": same}
        )
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("self-test")]
    assert len(lines) == 3 and all(x.endswith("(ok)") for x in lines)
