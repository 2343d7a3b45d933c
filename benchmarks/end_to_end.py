"""Whole recipes with the update planner and without it: where the seconds go, and that the curves are the same.

    python benchmarks/end_to_end.py [--recipes quickstart,smollm2-cpu-lora] [--steps N] [--rounds 1] [--any.field VALUE]

Each recipe runs in a process of its own, in turn with `plan_updates` on and off, from the same seed. Prints rollout,
scoring and update seconds (wall, summed over the run) and the first logged step whose reward differs. Fails when the
two differ before `--same` steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PHASES = ("rollout", "scoring", "update")


def run(recipe: str, planned: bool, folder: str, options: list[str]) -> list[dict]:
    """The log lines of one run. Raises RuntimeError with the end of its output where it fails."""
    path = ROOT / "recipes" / f"{recipe}.yaml"
    words = ["train", str(path), "--output_dir", folder, "--plan_updates", str(planned), "--save_strategy", "no"]
    command = [sys.executable, "-m", "trl_variants.cli", *words, "--logging_steps", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{recipe}: {(done.stdout + done.stderr)[-2000:]}")
    lines = (Path(folder) / "log.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "reward" in line]


def seconds(lines: list[dict]) -> dict[str, float]:
    """Sums over a run; the phases are logged as means over the steps of a line, here one."""
    return {phase: sum(line.get(f"time/{phase}_seconds", 0.0) for line in lines) for phase in PHASES}


def first_difference(one: list[dict], other: list[dict], tolerance: float = 1e-6) -> int | None:
    """The first step whose reward or mean length differs; None where the curves are equal."""
    for a, b in zip(one, other, strict=True):
        if any(abs(a[name] - b[name]) > tolerance for name in ("reward", "completions/mean_length")):
            return int(a["step"])
    return None


def row(name: str, on: list[list[dict]], off: list[list[dict]]) -> str:
    """A line of the table: medians over rounds, without the planner -> with it."""
    cells = [name, str(on[0][-1]["step"])]
    for phase in PHASES:
        before, after = (statistics.median(seconds(lines)[phase] for lines in runs) for runs in (off, on))
        cells.append(f"{before:.1f} -> {after:.1f}")
    tokens = [sum(line.get("plan/tokens_processed", 0.0) for line in runs[0]) for runs in (off, on)]
    cells.append(f"{tokens[0]:.0f} -> {tokens[1]:.0f}" if all(tokens) else f"{tokens[1]:.0f}")
    at = first_difference(on[0], off[0])
    cells.append("all equal" if at is None else f"equal before step {at}")
    cells.append(f"{off[0][-1]['reward']:.3f}, {on[0][-1]['reward']:.3f}")
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "| recipe | steps | rollout, s | scoring, s | update, s | tokens processed | rewards | last reward, off and on |\n"
    "|---|---|---|---|---|---|---|---|"
)


def main(words: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="quickstart,smollm2-cpu-lora", help="names of files in recipes/")
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--same", type=int, default=1, help="steps whose rewards must be equal")
    args, options = parser.parse_known_args(words)  # the rest is the recipes'
    options += ["--max_steps", str(args.steps)] if args.steps else []
    print(HEAD, flush=True)
    wrong = False
    for name in args.recipes.split(","):
        runs: dict[bool, list[list[dict]]] = {True: [], False: []}
        for i in range(args.rounds):
            for planned in (True, False) if i % 2 else (False, True):
                with tempfile.TemporaryDirectory(prefix="end-to-end-") as folder:
                    runs[planned].append(run(name, planned, folder, options))
        print(row(name, runs[True], runs[False]), flush=True)
        at = first_difference(runs[True][0], runs[False][0])
        wrong |= at is not None and at <= args.same
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
