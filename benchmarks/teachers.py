"""What a teacher adds on the scratchpad task: experiments over several seeds, one table each.

    python benchmarks/teachers.py [--experiments unsolved,speed] [--seeds 3] [--minutes 60] [--out DIR]

Like `methods.py`, whose runner it uses: single-thread processes, finished runs appended to OUT/results.jsonl and never
done again. Every arm of an experiment has the same problems, budget and learning rate; seeds are compared in pairs.
Writes OUT/table.md and OUT/table.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # it runs as a file too
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from transformers import TrainerCallback

from benchmarks.claims import judge
from benchmarks.learning import Settings, fresh_model, greedy, sampled, scratchpad, train
from benchmarks.methods import attempt, run
from benchmarks.table import read, spread
from benchmarks.teachers_arms import EXPERIMENTS, Arm, Experiment
from trl_variants import Variant, variant

SAMPLES = 256
LONGEST_RUN = 1800  # seconds of wall time, after which a run counts as failed
Job = tuple[str, str, int]


@dataclasses.dataclass(frozen=True)
class Budget(Settings):
    """Settings of `methods.py`, and which problems, how often accuracy is read and what counts as reached."""

    split: str = "standard"
    traces: int = 0  # the shipped teacher's own, for each training problem
    warm_up: int = 0  # supervised steps before, and so many fewer afterwards
    every: int = 4  # optimizer steps between two readings
    target: float = 0.6  # greedy accuracy

    def task(self):
        size = 2000 if self.split == "standard" else None  # all there are, a few less
        return scratchpad(train_size=size, split=self.split, traces=self.traces)


def budget(experiment: Experiment, arm: Arm, steps: int | None = None) -> Budget:
    """What an arm's runs get; `steps` replaces the experiment's."""
    chosen = Budget(**{**experiment.settings, **arm.settings})
    return chosen if steps is None else dataclasses.replace(chosen, steps=steps)


def composed(arm: Arm, teacher: str | None = None) -> Variant:
    """The arm's variant, with the shipped teacher (or that path) where it asks for one and names none."""
    made = variant(arm.entry, **arm.edits)
    asks = any(h.needs & {"teacher_logps"} for _, h in made.hooks())
    if asks and made.teacher is None:
        made = made.with_(teacher={"model": {"path": teacher or scratchpad(train_size=1).teacher_path()}})
    return made


# --- one run ----------------------------------------------------------------------------------------------------


class Curve(TrainerCallback):
    """Greedy accuracy every few optimizer steps, [step, accuracy]."""

    def __init__(self, settings: Budget):
        self.settings, self.points = settings, []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.settings.every == 0:
            with torch.random.fork_rng(devices=[]):
                self.points.append([state.global_step, greedy(model, self.settings)])


def warmed_model(settings: Budget, seed: int) -> Any:
    """The shipped model after TRL's SFTTrainer on the reference steps, as many rows a step as the run has."""
    from trl_variants.cli.warm_up import WarmUp, examples, supervised

    warm = WarmUp(settings.warm_up, "solution", settings.learning_rate, settings.rows)
    config = SimpleNamespace(seed=seed, use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False)
    task = settings.task()
    model, tokenizer = task.load_model()
    with tempfile.TemporaryDirectory(prefix="warm-up-") as folder:
        made = supervised(warm, config, model, tokenizer, examples(task.train_dataset, warm.column), folder)
        made.train()
    plain = fresh_model()
    plain.load_state_dict(made.model.state_dict())
    return plain


def one_run(made: Variant, seed: int, settings: Budget) -> dict[str, Any]:
    """`learning.train` with the curve and what is read from it: steps_to (the target; a reading later than the last
    where it was not reached), drop (largest fall from an earlier reading) and the curve itself."""
    model, curve = None, Curve(settings)
    if settings.warm_up:
        model = warmed_model(settings, seed)
        warm = greedy(model, settings)
    left = dataclasses.replace(settings, steps=settings.steps - settings.warm_up)
    result = train(made, seed, left, model, [curve])
    points = [[step + settings.warm_up, value] for step, value in curve.points]
    if settings.warm_up:
        points = [[settings.warm_up, warm], *points]
    points = [[0, result["start"]["accuracy"]], *points]
    result["curve"] = points
    result["run"] |= facts(points, settings)
    return result


def facts(points: Sequence[Sequence[float]], settings: Budget) -> dict[str, float]:
    """steps_to and drop of a curve."""
    reached = next((step for step, value in points if value >= settings.target), settings.steps + settings.every)
    peak, drop = points[0][1], 0.0
    for _, value in points:
        peak = max(peak, value)
        drop = max(drop, peak - value)
    return {"steps_to": reached, "drop": drop}


def work(job: Job, steps: int | None = None) -> dict[str, Any]:
    """One line of the results file."""
    name, label, seed = job
    experiment = EXPERIMENTS[name]
    arm = experiment.arm(label)
    line = {"key": key_of(job, steps), "method": f"{name}: {label}", "job": list(job), "seed": seed}
    return attempt(line, lambda: one_run(composed(arm), seed, budget(experiment, arm, steps)), LONGEST_RUN)


def key_of(job: Job, steps: int | None = None) -> str:
    name, label, seed = job
    arm = EXPERIMENTS[name].arm(label)
    # not the folder, which is another on every machine
    return budget(EXPERIMENTS[name], arm, steps).key(composed(arm, "task"), seed)


def never_solved(problems: int = 100, samples: int = SAMPLES, split: str = "unsolved") -> dict[str, float]:
    """How often the shipped model is right in `samples` samples of each of the first held-out problems of a split."""
    task = scratchpad(train_size=1, split=split)
    model, tokenizer = task.load_model()
    right = torch.tensor([float(sum(r)) for _, r in sampled(model, tokenizer, task, problems, samples)])
    return {
        "problems": problems,
        "samples": samples,
        "right": float(right.sum()),
        "pass": float((right > 0).float().mean()),
    }


# --- tables -----------------------------------------------------------------------------------------------------

COLUMNS = (
    ("accuracy", "end", "accuracy", 2),
    ("sampled", "end", "sampled", 2),
    ("any of 8", "end", "pass_n", 2),
    ("steps to target", "run", "steps_to", 0),
    ("largest fall", "run", "drop", 2),
    ("entropy", "end", "entropy", 3),
    ("KL to the teacher", "run", "teacher/kl", 3),
    ("gradient norm", "run", "grad_norm", 2),
)


def rows_of(name: str, seeds: int, lines: Iterable[Mapping], steps: int | None = None) -> list[dict[str, Any]]:
    """One row an arm of an experiment; results under another key do not count."""
    by_key = {line["key"]: line for line in lines}
    experiment = EXPERIMENTS[name]
    runs: dict[str, dict[int, Mapping]] = {}
    errors: dict[str, set[str]] = {}
    for arm in experiment.arms:
        for seed in range(seeds):
            line = by_key.get(key_of((name, arm.label, seed), steps), {})
            if "result" in line:
                runs.setdefault(arm.label, {})[seed] = line["result"]
            elif "error" in line:
                errors.setdefault(arm.label, set()).add(line["error"])
    out = []
    for arm in experiment.arms:
        mine = list(runs.get(arm.label, {}).values())
        cells = {head: spread([r[page].get(at) for r in mine]) for head, page, at, _ in COLUMNS}
        every = (budget(experiment, arm, steps).every, budget(experiment, arm, steps).steps)
        out.append(
            {
                "arm": arm.label,
                "seeds": len(mine),
                "start": spread([r["start"]["accuracy"] for r in mine]),
                "cells": cells,
                "reached": sum(r["run"]["steps_to"] <= every[1] for r in mine),
                "accuracies": [r["end"]["accuracy"] for r in mine],
                "errors": sorted(errors.get(arm.label, ())),
                "claims": [v for c in experiment.claims if c.method == arm.label and (v := judge(c, runs))],
            }
        )
    return out


def _cell(found: Mapping | None, digits: int) -> str:
    if found is None:
        return ""
    half = (found["high"] - found["low"]) / 2
    return f"{found['mean']:.{digits}f}" + (f" ± {half:.{digits}f}" if half else "")


def markdown(name: str, table: Sequence[Mapping], settings: Budget) -> str:
    """An experiment's table and the verdicts on its claims."""
    experiment = EXPERIMENTS[name]
    heads = [head for head, *_ in COLUMNS if any(r["cells"][head] for r in table)]
    digits = {head: n for head, *_, n in COLUMNS}
    lines = [
        f"## {name}: {experiment.title}",
        "",
        f"{settings.steps} steps of {settings.rows} completions, groups of {settings.group}, "
        f"{settings.batches * settings.passes} updates a generation, AdamW at {settings.learning_rate:g}; split "
        f"{settings.split}; mean ± half the range over seeds. Target: greedy accuracy {settings.target:g}, read every "
        f"{settings.every} steps on {settings.greedy_problems} held-out problems; a run that does not reach it counts "
        f"as {settings.steps + settings.every}. Largest fall: of that reading from an earlier one.",
        "",
        "| arm | seeds | start | " + " | ".join(heads) + " |",
        "|---|---|---|" + "---|" * len(heads),
    ]
    for row in table:
        if row["seeds"]:
            cells = []
            for head in heads:
                cell = _cell(row["cells"][head], digits[head])
                missed = row["seeds"] - row["reached"]
                cells.append(cell + (f" ({missed} not)" if head == "steps to target" and missed else ""))
            lines.append(f"| {row['arm']} | {row['seeds']} | {_cell(row['start'], 2)} | " + " | ".join(cells) + " |")
    lines.append("")
    for row in table:
        for v in row["claims"]:
            figures = f"{v['difference']:+.3g} [{v['low']:+.3g}, {v['high']:+.3g}], {v['agree']}/{v['seeds']} seeds"
            lines.append(f"* **{v['verdict']}**: {row['arm']}: {v['claim']} ({v['test']}: {figures})")
        lines += [f"* {row['arm']} did not run: {e}" for e in row["errors"]]
    return "\n".join([*lines, ""])


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experiments", default=",".join(EXPERIMENTS), help=f"of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="optimizer steps of a run, instead of the experiment's")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no run that would end later")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--solve", type=int, metavar="N", help="only sample N unsolved problems 256 times each")
    parser.add_argument("--out", type=Path, default=Path("runs/teachers"))
    args = parser.parse_args(arguments)
    if args.solve:
        torch.set_num_threads(1)
        print(json.dumps(never_solved(args.solve)))
        return 0
    names = args.experiments.split(",")
    if unknown := [n for n in names if n not in EXPERIMENTS]:
        parser.error(f"no experiment {unknown[0]}; there are {', '.join(EXPERIMENTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "results.jsonl"
    done = {line["key"] for line in read(path) if "result" in line}  # what failed is tried again
    jobs = [(n, arm.label, seed) for seed in range(args.seeds) for n in names for arm in EXPERIMENTS[n].arms]
    keyed = {key_of(job, args.steps): job for job in reversed(jobs)}  # the same run serves several experiments
    todo = [job for key, job in reversed(keyed.items()) if key not in done]
    left = run(todo, functools.partial(work, steps=args.steps), path, args.minutes, args.processes)
    tables = {n: rows_of(n, args.seeds, read(path), args.steps) for n in names}
    texts = [markdown(n, t, budget(EXPERIMENTS[n], EXPERIMENTS[n].arms[0], args.steps)) for n, t in tables.items()]
    texts += [f"* {left} runs are still to do: run the command again.\n"] if left else []
    (args.out / "table.json").write_text(json.dumps({"missing": left, "experiments": tables}, indent=1))
    (args.out / "table.md").write_text("\n".join(texts))
    print("\n".join(texts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
