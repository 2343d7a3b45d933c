"""The README's Python runs as printed."""

import re
from pathlib import Path

import torch

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


def test_six_numbers():
    [block] = [b for b in BLOCKS if "from_tensors" in b]
    names: dict = {}
    exec(block, names)
    assert names["logps"].grad.abs().sum() > 0


def test_first_lines_and_own_hook():
    """Everything but the two calls that need a model and data."""
    from trl_variants import TokenBatch

    first = BLOCKS[0].split("trainer = ")[0]
    own = next(b for b in BLOCKS if "smooth_clip" in b).split("VariantGRPOTrainer(")[0]
    names: dict = {}
    exec(first, names)
    exec(own, names)
    assert names["mixed"].advantage.hook_name == "leave_one_out"
    batch = TokenBatch.from_tensors(torch.zeros(2, 3, requires_grad=True), rewards=[1.0, 0.0])
    assert torch.isfinite(names["mine"].loss(batch).loss)


def test_the_built_in_task_snippet_trains(tmp_path, monkeypatch):
    from trl_variants import variant

    monkeypatch.chdir(tmp_path)
    block = next(b for b in BLOCKS if "load_task" in b)
    names: dict = {"mine": variant("dapo", clip="sapo")}
    exec(block.replace("max_steps=20", "max_steps=2"), names)
    assert names["args"].max_steps == 2
