"""`trl-variants compare A.yaml B.yaml ...`: the same task, model and budget, several seeds, one table."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import VariantError
from . import recipe as recipes
from .check import findings
from .parser import Parser

EPILOG = """Other options are set in every recipe: --max_steps 100 --learning_rate 1e-4. Finished runs are kept: the
same command goes on where it stopped, inside a run from its last checkpoint."""
# the method, and what says nothing about a run's outcome
FREE = ("variant", "hooks", "teacher", "imports", "output_dir", "seed", "run_name", "report_to", "num_threads")
# recipes that differ here measure different things
SAME = ("task", "dataset_name", "dataset_config", "dataset_train_split", "reward_funcs", "model", "model_name_or_path")
KEY, SAID = "compare.json", "output.txt"


def run(words: list[str]) -> int:
    """Runs what is not there yet, prints the table; returns 0, or 1 where a run failed.

    Raises:
        VariantError: recipes that cannot be compared, a mistake in one of them, a folder of another comparison.
    """
    parser = Parser(prog="trl-variants compare", description=__doc__, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE.yaml")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each recipe, with seeds 0, 1, ... (default 3)")
    parser.add_argument("--out", default="runs/compare", help="where runs and table lie (default runs/compare)")
    parser.add_argument("--anyway", action="store_true", help="compare recipes of different tasks or models too")
    parser.add_argument("--table", action="store_true", help="only the table of the runs that are there")
    paths, rest = _leading(words)
    options, others = parser.parse_known_args([*paths, *rest])
    if options.seeds < 1:
        raise VariantError(f"--seeds must be at least 1, got {options.seeds}")
    specs = {name: recipes.load(path, others) for name, path in named(options.recipes).items()}
    for spec in specs.values():
        errors = [str(f) for f in findings(spec)[1] if f.level == "error"]
        if errors:
            raise VariantError(f"{spec.path}: {'; '.join(errors)}")
    shared, differing = protocol(list(specs.values()))
    apart = [key for key in SAME if key in differing]
    if apart and not options.anyway:
        told = "; ".join(f"{key} is {' and '.join(map(str, differing[key]))}" for key in apart)
        raise VariantError(f"these recipes measure different things ({told}): make them agree, or pass --anyway")
    for key, values in differing.items():
        if key not in FREE:
            print(f"the recipes differ in {key}: {', '.join(map(str, values))}")

    from ..report.compare import write_comparison

    out = Path(options.out)
    try:
        arms = collect(specs, range(options.seeds), out, others, launch=not options.table)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    print(write_comparison(arms, out, shared, differing))
    print(f"in {out}: compare.md, compare.json, compare.png")
    return 1 if any(arm.failures for arm in arms) else 0


def _leading(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The recipes, which stand first, and everything after them."""
    first = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    return list(words[:first]), list(words[first:])


def named(paths: Sequence[str]) -> dict[str, str]:
    """Name -> path: the file's stem, with its folder where two stems are the same."""
    stems = [Path(path).stem for path in paths]
    out: dict[str, str] = {}
    for path, stem in zip(paths, stems, strict=True):
        name = stem if stems.count(stem) == 1 else f"{Path(path).resolve().parent.name}-{stem}"
        if name in out:
            raise VariantError(f"{path} and {out[name]} would both be called {name}: rename one")
        out[name] = path
    return out


def protocol(specs: Sequence[recipes.RunSpec]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """What the recipes set alike, and key -> one value a recipe where they do not (None: not set, so the default)."""
    keys = dict.fromkeys(key for spec in specs for key in spec.mapping if key not in ("output_dir", "seed"))
    table = {key: [spec.mapping.get(key) for spec in specs] for key in keys}
    alike = {key: values[0] for key, values in table.items() if all(v == values[0] for v in values)}
    return alike, {key: values for key, values in table.items() if key not in alike}


def collect(specs: dict[str, recipes.RunSpec], seeds: range, out: Path, others: list[str], launch: bool) -> list[Any]:
    """The arms with their finished runs; those not there yet are run first, seed by seed, so that a comparison that
    is cut short has every recipe once."""
    from ..report.compare import Arm
    from ..report.record import RESULT, RunRecord

    arms = {name: Arm(name, str(spec.path)) for name, spec in specs.items()}
    jobs = [(seed, name) for seed in seeds for name in specs]
    for i, (seed, name) in enumerate(jobs):
        spec, folder = specs[name], out / name / f"seed-{seed}"
        ours(folder, spec, seed)
        if not (folder / RESULT).is_file() and launch:
            print(f"run {i + 1} of {len(jobs)}: {name}, seed {seed} ...", flush=True)
            began = time.perf_counter()
            why = train(str(spec.path), others, seed, folder)
            print(f"  {why or 'done'} ({time.perf_counter() - began:.0f} s)", flush=True)
            if why is not None:
                arms[name].failures[seed] = why
                continue
        if (folder / RESULT).is_file():
            arms[name].runs[seed] = RunRecord.load(folder)
    return list(arms.values())


def ours(folder: Path, spec: recipes.RunSpec, seed: int) -> None:
    """Marks a run's folder with what is run there. Raises VariantError where something else was."""
    settings = {k: v for k, v in spec.mapping.items() if k not in ("output_dir", "seed")}
    key = hashlib.sha256(json.dumps([settings, seed], sort_keys=True, default=str).encode()).hexdigest()[:16]
    mark = folder / KEY
    if mark.is_file():
        if json.loads(mark.read_text())["key"] != key:
            raise VariantError(
                f"{folder} holds a run of other settings: name another --out, or delete that folder to run it again"
            )
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise VariantError(f"{folder} holds files of something else: name another --out")
    folder.mkdir(parents=True, exist_ok=True)
    mark.write_text(json.dumps({"key": key, "recipe": spec.path, "seed": seed, "settings": settings}, default=str))


def train(path: str, others: list[str], seed: int, folder: Path) -> str | None:
    """One run in a process of its own, from its last checkpoint where it has one; returns what it died of."""
    words = ["train", path, *others, "--seed", str(seed), "--output_dir", str(folder), "--push_to_hub", "false"]
    if any(folder.glob("checkpoint-*/trainer_state.json")):
        words.append("--resume")
    with open(folder / SAID, "a") as said:
        status = launch_train(words, said)
    if status == 0:
        return None
    lines = (folder / SAID).read_text(errors="replace").strip().splitlines()
    return f"exit code {status}: {lines[-1] if lines else 'it said nothing'} (all it said: {folder / SAID})"


def launch_train(words: list[str], said: Any) -> int:
    """`trl-variants` with these words as a process; returns its exit code."""
    command = [sys.executable, "-m", "trl_variants.cli", *words]
    return subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, check=False).returncode
