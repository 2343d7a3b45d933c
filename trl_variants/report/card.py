"""A run folder as a page to keep: `python -m trl_variants.report.card runs/NAME model_cards` copies its evidence
there."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .curves import series, sparkline

KEPT = ("log.jsonl", "curve.png", "result.json")


def run_card(result: Mapping[str, Any], history: Sequence[Mapping[str, Any]], composition: str, name: str) -> str:
    """Markdown: what was run, on what, with which outcome, and how to run it again.

    Args:
        result: the contents of `result.json`. history: the lines of `log.jsonl`. name: stem of the files beside
        the page.
    """
    _, rewards = series(history, "reward")
    settings = {k: v for k, v in result.get("settings", {}).items() if k != "output_dir"}
    lines = [
        f"# {name}",
        "",
        f"`trl-variants train {result.get('recipe', name)}`: {result.get('model')} on {result.get('task')}, "
        f"variant **{result.get('variant')}**, seed {result.get('seed')}.",
        "",
        "| | before | after |",
        "|---|---|---|",
        f"| greedy accuracy, held-out problems | {result['accuracy_before']:.3f} | {result['accuracy_after']:.3f} |",
    ]
    if "reward_first" in result:
        first, last = result["reward_first"], result["reward_last"]
        lines.append(f"| mean reward, first and last tenth of the run | {first:.3f} | {last:.3f} |")
    versions = ", ".join(f"{k} {v}" for k, v in result.get("versions", {}).items())
    lines += [
        "",
        f"{result['steps']} optimizer steps in {result['train_seconds']:.0f} s on {result.get('device')} with "
        f"{result.get('threads')} threads and {result.get('processes')} process. {versions}.",
        "",
        f"    reward {sparkline(rewards)}",
        "",
        f"![learning curve]({name}.curve.png)",
        "",
        f"Every logged line: [{name}.log.jsonl]({name}.log.jsonl). Composition and settings:",
        "",
        "```",
        composition.strip(),
        "",
        json.dumps(settings, indent=2),
        "```",
    ]
    return "\n".join(lines) + "\n"


def keep(folder: Path, target: Path) -> Path:
    """Writes the page of a run folder and copies log, curve and result beside it; returns the page's path."""
    result = json.loads((folder / "result.json").read_text())
    history = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    target.mkdir(parents=True, exist_ok=True)
    for file in KEPT:
        if (folder / file).exists():
            shutil.copy(folder / file, target / f"{folder.name}.{file}")
    composition = (
        (folder / "composition.txt").read_text() if (folder / "composition.txt").exists() else "TRL's own settings"
    )
    page = target / f"{folder.name}.md"
    page.write_text(run_card(result, history, composition, folder.name))
    return page


if __name__ == "__main__":
    print(keep(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "model_cards")))
