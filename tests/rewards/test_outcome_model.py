"""A reward model by name in a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.trainer import toy  # noqa: F401  (freezes what is imported)
from trl_variants import VariantError
from trl_variants.cli import main
from trl_variants.cli.sources import reward_named
from trl_variants.report import run_folder
from trl_variants.tasks import load_task

ROOT = Path(__file__).resolve().parents[2]
FEW = "--max_steps 2 --per_device_train_batch_size 16 --task.eval_size 8 --task.train_size 64 --logging_steps 1"


def test_names(tmp_path):
    assert reward_named("org/model") == "org/model" and reward_named(str(tmp_path)) == str(tmp_path)
    with pytest.raises(VariantError, match="reward model's folder or Hub id"):
        reward_named("nothing")


def test_rlhf_with_a_reward_model_of_a_folder(tmp_path, monkeypatch):
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    tiny, folder = load_task("arithmetic").model_path(), str(tmp_path / "reward model")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(tiny, num_labels=1))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    monkeypatch.setattr(run_folder, "learning_curve_png", lambda *args, **kwargs: None)
    recipe = str(ROOT / "recipes" / "rlhf-ppo-cpu.yaml")
    assert main(["train", recipe, *FEW.split(), "--reward_funcs", folder, "--output_dir", str(tmp_path / "out")]) == 0
    logs = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert any(line.get("grad_norm", 0) > 0 for line in logs)
    assert any("reward model" in name for name in logs[0]), logs[0].keys()
