"""Every recipe is valid, and the quickstart trains any method by changing one word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer import toy  # freezes what is imported: collecting it takes a third of a short run
from trl_variants import variant, variants
from trl_variants.cli import main
from trl_variants.report import run_folder
from trl_variants.tasks.base import COLUMNS
from trl_variants.trainer.scoring import wanted_columns, wanted_keys

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(r for r in (ROOT / "recipes").rglob("*.yaml") if r.parent.name != "accelerate")
# a GPU recipe is read as far as a machine without one can
CPU = "--use_cpu true --bf16 false".split()
TINY = [r for r in RECIPES if "task: scratchpad" in r.read_text() or "name: scratchpad" in r.read_text()]
FEW = "--max_steps 2 --per_device_train_batch_size 16 --task.eval_size 8 --task.train_size 64 --logging_steps 1"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_recipe_has_no_errors(recipe):
    assert main(["check", str(recipe), *(CPU if on_gpu(recipe) else [])]) == 0


def on_gpu(recipe: Path) -> bool:
    return "GPU" in recipe.read_text().splitlines()[0]


@pytest.mark.parametrize("recipe", TINY, ids=lambda p: p.stem)
def test_a_recipe_of_the_tiny_pair_trains(recipe, tmp_path, monkeypatch):
    """Two optimizer steps of it, on fewer rows; a warm-up of two more."""
    monkeypatch.setattr(run_folder, "learning_curve_png", lambda *args, **kwargs: None)
    warm = "--warm_up.steps 2 --warm_up.batch_size 8".split() if "warm_up:" in recipe.read_text() else []
    assert main(["train", str(recipe), *FEW.split(), *warm, "--output_dir", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] == 2
    logs = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert any(line.get("grad_norm", 0) > 0 for line in logs) or warm
    if "teacher:" in recipe.read_text():
        assert logs[0]["teacher/rows"] > 0 and logs[0]["teacher/tokens"] > 0


def test_the_tiny_pair_has_every_recipe():
    """Each of them has its like for a GPU; and the gaps."""
    names = {r.name.replace("-cpu.yaml", "") for r in TINY if r.name.endswith("-cpu.yaml")}
    assert names and names <= {r.stem for r in RECIPES if on_gpu(r)}
    assert len([r for r in TINY if r.parent.name == "gaps"]) == 4


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory) -> str:
    """The quickstart's model with noise on its weights: a teacher where a method leaves that to the user."""
    path = str(tmp_path_factory.mktemp("teacher"))
    tiny = ROOT / "trl_variants" / "tasks" / "tiny"
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.no_grad():
        for p, noise in ((p, torch.Generator().manual_seed(i)) for i, p in enumerate(model.parameters())):
            p += 0.05 * torch.randn(p.shape, generator=noise)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", [v.name for v in variants])
def test_quickstart_trains_every_method(name, tmp_path, monkeypatch, other_weights, capsys):
    """Four optimizer steps of the recipe with that word changed, on half the rows and without its picture; a teacher
    where the method wants one, and one clear error where it reads columns that the task has not."""
    monkeypatch.setattr(run_folder, "learning_curve_png", lambda *args, **kwargs: None)
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    words = f"--variant {name} --max_steps 4 --per_device_train_batch_size 64 --task.eval_size 20 --logging_steps 1"
    words += f" --teacher.model.path {other_weights}" if toy.asks_for_a_teacher(name) else ""
    v = variant(name)
    shown = {h.column for h in (*v.rollouts, v.teacher) if getattr(h, "column", None)}
    missing = (wanted_keys(v) | wanted_columns(v) | shown) - set(COLUMNS)
    failed = main(["train", recipe, *words.split(), "--output_dir", str(tmp_path)])
    if missing:
        said = capsys.readouterr().err
        assert failed and any(repr(column) in said for column in missing)
        return
    assert not failed
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["variant"] == name and result["steps"] == 4
    logs = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    warming_up = any(line.get("critic/warming_up") for line in logs)  # then the policy stands still by design
    assert any(line.get("grad_norm", 0) > 0 for line in logs) != warming_up


def test_the_first_line_names_the_hardware():
    for recipe in RECIPES:
        assert "CPU" in recipe.read_text().splitlines()[0] or "GPU" in recipe.read_text().splitlines()[0], recipe.name
