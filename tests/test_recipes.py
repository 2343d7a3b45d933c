"""Every recipe is valid, and the quickstart trains any method by changing one word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trl_variants import variants
from trl_variants.cli import main

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.name)
def test_recipe_has_no_errors(recipe):
    assert main(["check", str(recipe)]) == 0


@pytest.mark.parametrize("name", [v.name for v in variants])
def test_quickstart_trains_every_method(name, tmp_path):
    """Four optimizer steps of the recipe as it is, but for that word (and where it writes)."""
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    words = [
        "--variant",
        name,
        "--max_steps",
        "4",
        "--output_dir",
        str(tmp_path),
        "--per_device_train_batch_size",
        "16",
    ]
    assert main(["train", recipe, *words, "--per_device_train_batch_size", "64", "--logging_steps", "1"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["variant"] == name and result["steps"] == 4
    logs = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert any(line.get("grad_norm", 0) > 0 for line in logs)


def test_the_first_line_names_the_hardware():
    for recipe in RECIPES:
        assert "CPU" in recipe.read_text().splitlines()[0] or "GPU" in recipe.read_text().splitlines()[0], recipe.name
