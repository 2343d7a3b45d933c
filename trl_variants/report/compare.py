"""Several recipes, several seeds: what their run folders say side by side."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .curves import series
from .plots import bands_png
from .record import RunRecord
from .run_folder import plain, write_text

TITLES = {
    "accuracy_before": "accuracy before",
    "accuracy_after": "accuracy after",
    "reward_last": "reward, last tenth",
    "train_seconds": "seconds",
    "tokens": "tokens",
}


@dataclass(frozen=True)
class Spread:
    """Mean over runs, sample standard deviation (None for one run), and range."""

    mean: float
    sd: float | None
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """None where no run has a value."""
        known = [float(v) for v in values if v is not None]
        if not known:
            return None
        sd = statistics.stdev(known) if len(known) > 1 else None
        return cls(statistics.fmean(known), sd, min(known), max(known), len(known))

    def text(self, digits: int = 3) -> str:
        spread = (
            f" ± {self.sd:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})" if self.sd is not None else ""
        )
        return f"{self.mean:.{digits}f}{spread}"


@dataclass
class Arm:
    """One recipe of a comparison: its name, its finished runs by seed, and what the others died of."""

    name: str
    recipe: str
    runs: dict[int, RunRecord] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def values(self, key: str) -> dict[int, float | None]:
        """One figure of each run, by seed."""
        return {seed: tokens_of(run) if key == "tokens" else run.result.get(key) for seed, run in self.runs.items()}

    def spread(self, key: str) -> Spread | None:
        return Spread.of(list(self.values(key).values()))

    def against(self, other: Arm, key: str = "accuracy_after") -> Spread | None:
        """Differences to the other's runs of the same seeds."""
        mine, theirs = self.values(key), other.values(key)
        pairs = [(mine[s], theirs[s]) for s in mine if s in theirs]
        return Spread.of([a - b for a, b in pairs if a is not None and b is not None])


def tokens_of(run: RunRecord) -> float | None:
    """Prompt and completion tokens a run saw, as TRL counts them."""
    counted = series(run.history, "num_tokens")[1]
    return counted[-1] if counted else None


def headline(arms: Sequence[Arm]) -> str:
    """The figure that runs are compared by: accuracy after where some arm has one, else the reward at the end."""
    return "accuracy_after" if any(arm.spread("accuracy_after") for arm in arms) else "reward_last"


def markdown(arms: Sequence[Arm], shared: Mapping[str, Any], differing: Mapping[str, Sequence[Any]]) -> str:
    """The table, what every run shared, what differed, and what failed."""
    key = headline(arms)
    keys = [k for k in TITLES if any(arm.spread(k) for arm in arms)]
    lines = ["# Comparison", "", "| recipe | method | seeds | " + " | ".join(TITLES[k] for k in keys)]
    lines[-1] += f" | {TITLES[key]}: difference to {arms[0].name}, same seeds |"
    lines += ["|---" * (len(keys) + 4) + "|"]
    for arm in arms:
        variant = next((str(run.result.get("variant") or "TRL's own") for run in arm.runs.values()), "-")
        cells = [arm.name, variant, ", ".join(map(str, sorted(arm.runs))) or "none"]
        for k in keys:
            found = arm.spread(k)
            cells.append("-" if found is None else found.text(0 if k in ("train_seconds", "tokens") else 3))
        gap = None if arm is arms[0] else arm.against(arms[0], key)
        lines.append("| " + " | ".join([*cells, "-" if gap is None else gap.text()]) + " |")
    lines += ["", "Mean ± sample standard deviation over seeds (range)."]
    sizes = {n for arm in arms for run in arm.runs.values() if (n := run.result.get("eval_problems"))}
    if sizes:
        lines[-1] += f" Accuracy is greedy, on {' or '.join(map(str, sorted(sizes)))} held-out problems."
    lines += ["", "![reward](compare.png)", "", "Every run: " + json.dumps(plain(shared), sort_keys=True), ""]
    lines += ["What differs between the recipes:", ""] if differing else ["The recipes differ in nothing.", ""]
    for name, values in differing.items():
        lines.append(
            f"* {name}: " + "; ".join(f"{a.name} {json.dumps(plain(v))}" for a, v in zip(arms, values, strict=True))
        )
    for arm in arms:
        lines += [f"* {arm.name}, seed {seed} failed: {why}" for seed, why in arm.failures.items()]
    return "\n".join(lines).rstrip() + "\n"


def write_comparison(
    arms: Sequence[Arm], folder: str | Path, shared: Mapping[str, Any], differing: Mapping[str, Sequence[Any]]
) -> str:
    """Writes compare.md, compare.json and compare.png, and returns the first's text."""
    folder = Path(folder)
    text = markdown(arms, shared, differing)
    write_text(folder / "compare.md", text)
    body = {
        "shared": shared,
        "differing": {name: list(values) for name, values in differing.items()},
        "recipes": [
            {
                "name": arm.name,
                "recipe": arm.recipe,
                "runs": {seed: {key: arm.values(key)[seed] for key in TITLES} for seed in sorted(arm.runs)},
                "failures": arm.failures,
                **{key: vars(found) if (found := arm.spread(key)) else None for key in TITLES},
            }
            for arm in arms
        ],
    }
    write_text(folder / "compare.json", json.dumps(plain(body), indent=2) + "\n")
    bands_png(
        {arm.name: [series(run.history, "reward") for run in arm.runs.values()] for arm in arms},
        folder / "compare.png",
        "reward",
    )
    return text
