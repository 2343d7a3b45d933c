"""The run folder: `result.json`, `log.jsonl`, `composition.txt` and `curve.png` beside the trained model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from .curves import History, learning_curve_png

REQUIRED = ("accuracy_before", "accuracy_after", "train_seconds", "steps", "variant")
PACKAGES = ("trl_variants", "trl", "transformers", "torch", "peft", "accelerate", "datasets")


def versions() -> dict[str, str]:
    """Returns the installed version of every package that shapes a run; missing ones are left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def plain(value: Any) -> Any:
    """Turns a value into what JSON can hold: NaN and inf become null, unknown objects their text."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def write_text(path: Path, text: str) -> None:
    """Writes a file at once: a reader never sees half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_result(
    folder: str | Path,
    result: Mapping[str, Any],
    *,
    history: History = (),
    composition: str | None = None,
    metric: str = "reward",
    picture: bool = True,
) -> Path:
    """Writes a run's outcome into `folder` (made if missing) and returns the path of `result.json`.

    Args:
        folder: the run folder.
        result: must hold `accuracy_before`, `accuracy_after` (greedy, in [0, 1], None where the task has
            none), `train_seconds`, `steps`, `variant`; further keys are kept and `versions` is added.
        history: the trainer's log history, one dict per log; becomes `log.jsonl` and `curve.png`.
        composition: what `Variant.describe()` returned; becomes `composition.txt`.
        metric: which logged number the curve shows.
        picture: whether to draw `curve.png`, which takes half a second; a model card draws it too.

    Raises:
        KeyError: where one of the five keys is missing.
    """
    missing = [key for key in REQUIRED if key not in result]
    if missing:
        raise KeyError(f"a result needs {', '.join(missing)}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if history:
        write_text(folder / "log.jsonl", "".join(json.dumps(plain(row)) + "\n" for row in history))
        if picture:
            learning_curve_png(
                history,
                folder / "curve.png",
                metric,
                title=str(result["variant"] or "trl"),
                before=result["accuracy_before"],
                after=result["accuracy_after"],
            )
    if composition is not None:
        write_text(folder / "composition.txt", composition.rstrip() + "\n")
    # last and at once: a folder with a result.json is a finished run
    full = {"versions": versions(), **result}
    order = [*REQUIRED, *(key for key in full if key not in REQUIRED)]
    write_text(folder / "result.json", json.dumps({key: plain(full[key]) for key in order}, indent=2) + "\n")
    return folder / "result.json"


def read_result(folder: str | Path) -> dict[str, Any]:
    """Returns the `result.json` of a run folder. Raises FileNotFoundError where the run did not finish."""
    return json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
