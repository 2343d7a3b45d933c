"""Trains every method of the catalog on the scratchpad task and writes one table.

    python benchmarks/methods.py [--minutes 60] [--methods a,b] [--seeds 3] [--steps N] [--out runs/methods]

Two single-thread processes at once. Each finished run is appended to OUT/results.jsonl and never done again, so the
command can be stopped and repeated; a changed budget or composition makes a new result. Changed code of a hook does
not: delete the file then. First seeds of all methods come first. Writes OUT/table.md and OUT/table.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # it runs as a file too
os.environ["OMP_NUM_THREADS"] = "1"

import torch

from benchmarks.claims import CONTROLS, arm, claims_of
from benchmarks.learning import Settings, cost, train
from benchmarks.table import markdown, read, rows
from trl_variants import Variant, VariantError, variants

LONGEST_RUN = 300  # seconds of wall time, after which a run counts as failed
KINDS = ("method", "part")
Job = tuple[str, "int | str"]


def chosen(names: str | None, kinds: tuple[str, ...] = KINDS) -> list[str]:
    """The ids to train: those named, or all of these kinds; and what their claims compare them with.

    Raises:
        VariantError: an unknown id.
    """
    if names:
        wanted = [n if n in CONTROLS else arm(n).name for n in names.split(",")]
    else:
        wanted = [v.name for v in variants if v.about and v.about.kind in kinds and alone(v)]
    others = [claim.against for name in wanted for claim in claims_of(name)]
    return list(dict.fromkeys([*wanted, *others]))


def alone(v: Variant) -> bool:
    """Whether it trains from rewards, log-probs and the task's columns. Teachers, traces and critics have benchmarks of
    their own; a sentence encoder has nothing to read in sums."""
    others = {"teacher_logps", "distribution", "values", "embeddings"} & v.needs
    from trl_variants.trainer.scoring import wanted_columns, wanted_keys

    known = wanted_columns(v) | wanted_keys(v) <= set(Settings().task().train_dataset.column_names)
    return known and not (others or v.teacher or v.learners or any(not h.draws_prompts for h in v.rollouts))


def jobs(names: list[str], seeds: int, with_cost: bool) -> Iterator[Job]:
    """Seed by seed, so that a run cut short has every method once; costs come after the first seed."""
    for seed in range(seeds):
        yield from ((name, seed) for name in names)
        if seed == 0 and with_cost:
            yield from ((name, "cost") for name in names if name not in CONTROLS)


def prepare() -> None:
    """Once for each process: one thread, and the imports that take seconds."""
    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w")
    from benchmarks.learning import _classes

    _classes()


def work(job: Job, settings: Settings) -> dict[str, Any]:
    """One line of the results file; what a method raises is its result."""
    name, seed = job
    variant = arm(name)
    line = {"key": settings.key(variant, seed), "method": name, "seed": seed}
    return attempt(line, lambda: train(variant, seed, settings) if isinstance(seed, int) else cost(variant, settings))


def attempt(line: dict[str, Any], work: Callable[[], dict], longest: int = LONGEST_RUN) -> dict[str, Any]:
    """`line` with what `work` returns as its result, or what it raises (after `longest` seconds too) as its error, and
    the wall time."""

    def _too_long(*_: Any) -> None:
        raise TimeoutError(f"took more than {longest} s")

    before = signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(longest)
    began = time.time()
    try:
        line = {**line, "result": work()}
    except Exception as error:  # a method that fails must not end the benchmark
        line = {**line, "error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return {**line, "wall": round(time.time() - began, 1)}


def run(todo: list[Any], work: Callable[[Any], dict], path: Path, minutes: float, processes: int) -> int:
    """Does the jobs in order until the time is up, appending `work(job)` to `path`. Returns how many are left."""
    deadline = time.time() + 60 * minutes
    waiting = list(reversed(todo))
    pending: dict[Future, Any] = {}
    done, slowest = 0, 0.0
    with ProcessPoolExecutor(processes, get_context("spawn"), prepare) as pool, path.open("a") as file:
        while pending or waiting:
            while waiting and len(pending) < processes and time.time() + slowest < deadline:
                job = waiting.pop()
                pending[pool.submit(work, job)] = job
            if not pending:
                break
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                del pending[future]
                line = future.result()
                slowest = max(slowest, line["wall"])
                file.write(json.dumps(line) + "\n")
                file.flush()
                done += 1
                said = line.get("error") or _said(line["result"])
                print(f"{done}/{len(todo)}  {line['method']} {line['seed']}: {said} ({line['wall']} s)", flush=True)
    return len(waiting)


def _said(result: dict) -> str:
    if "ratio" in result:
        return f"cost {result['ratio']:.3f}"
    return f"accuracy {result['start']['accuracy']:.2f} -> {result['end']['accuracy']:.2f}"


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", help="ids, separated by commas; default: every method and part of the catalog")
    parser.add_argument("--recipes", action="store_true", help="recipes and notes too")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=Settings.steps, help="optimizer steps of a run")
    parser.add_argument(
        "--passes", type=int, default=Settings.passes, help="over each generation; 1 is how on-policy methods are meant"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="start no run that would end later")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-cost", action="store_true", help="leave the timing out")
    parser.add_argument("--out", type=Path, default=Path("runs/methods"))
    args = parser.parse_args(arguments)
    settings = dataclasses.replace(Settings(), steps=args.steps, passes=args.passes)
    try:
        names = chosen(args.methods, (*KINDS, "recipe", "note") if args.recipes else KINDS)
    except VariantError as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "results.jsonl"
    keys = {job: settings.key(arm(job[0]), job[1]) for job in jobs(names, args.seeds, not args.no_cost)}
    done = {line["key"] for line in read(path) if "result" in line}  # what failed is tried again
    todo = [job for job, key in keys.items() if key not in done]
    left = run(todo, functools.partial(work, settings=settings), path, args.minutes, args.processes)
    table = rows(names, keys, read(path))
    facts = dataclasses.asdict(settings)
    (args.out / "table.json").write_text(json.dumps({"settings": facts, "missing": left, "rows": table}, indent=1))
    (args.out / "table.md").write_text(markdown(table, facts, left))
    print(markdown(table, facts, left))
    return 0


if __name__ == "__main__":
    sys.exit(main())
