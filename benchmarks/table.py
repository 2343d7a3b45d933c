"""The table of `methods.py`: from lines of results to rows, JSON and markdown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims import CLAIMS, CONTROLS, arm, judge, known, value

MOST_COST = 1.05
SHOWN = ("accuracy", "sampled", "entropy", "length", "wrong_length", "clipped", "no_right_signal")


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a results file; a last line that was cut off counts as not written."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for number, line in enumerate(lines):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            if number + 1 < len(lines):
                raise
    return found


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Mean and range; None without values."""
    numbers = [v for v in values if v is not None]
    if not numbers:
        return None
    return {"mean": statistics.fmean(numbers), "low": min(numbers), "high": max(numbers)}


def rows(names: Iterable[str], keys: Mapping[tuple[str, int | str], str], lines: Iterable[Mapping]) -> list[dict]:
    """One row a method.

    Args:
        names: catalog ids and controls, in the order to show them.
        keys: which result stands for (name, seed); its seed "cost" is the cost measurement.
        lines: of the results file; those under another key are of another budget or composition and do not count.
    """
    by_key = {line["key"]: line for line in lines}
    found = {at: by_key[key] for at, key in keys.items() if key in by_key}
    runs: dict[str, dict[int, Mapping]] = {}
    for (name, seed), line in found.items():
        if isinstance(seed, int) and "result" in line:
            runs.setdefault(name, {})[seed] = line["result"]
    out = []
    for name in names:
        mine = list(runs.get(name, {}).values())
        measured = found.get((name, "cost"), {})
        about = arm(name).about
        gains = [r["end"]["accuracy"] - r["start"]["accuracy"] for r in mine]
        verdicts = [judge(c, runs) for c in CLAIMS if c.method == name]
        out.append(
            {
                "method": name,
                "kind": "control" if name in CONTROLS or about is None else about.kind,
                "host": "" if name in CONTROLS or about is None else about.host,
                "inert": "" if name in CONTROLS or about is None else about.inert,
                "scope": arm(name).scope,
                "seeds": len(mine),
                "start": {m: spread([r["start"].get(m) for r in mine]) for m in SHOWN},
                "end": {m: spread([value(r, m) for r in mine]) for m in SHOWN},
                "seconds": spread([r["seconds"] for r in mine]),
                "cost": measured.get("result"),
                "learns": None if not gains else "yes" if min(gains) > 0 else "no" if max(gains) <= 0 else "some seeds",
                "claims": [v for v in verdicts if v],
                "errors": sorted({e["error"] for at, e in found.items() if at[0] == name and "error" in e}),
            }
        )
    return out


def _show(cell: Mapping | None, digits: int) -> str:
    if cell is None:
        return ""
    half = (cell["high"] - cell["low"]) / 2
    return f"{cell['mean']:.{digits}f}" + (f" ± {half:.{digits}f}" if half else "")


def _moved(row: Mapping, measure: str, digits: int) -> str:
    before, after = row["start"][measure], row["end"][measure]
    return "" if after is None else f"{before['mean']:.{digits}f} → {_show(after, digits)}"


def _claim(verdict: Mapping) -> str:
    figures = f"{verdict['difference']:+.3g} [{verdict['low']:+.3g}, {verdict['high']:+.3g}]"
    return f"**{verdict['verdict']}**: {verdict['test']}, {figures}, {verdict['agree']}/{verdict['seeds']} seeds"


def _cost(cost: Mapping) -> str:
    extra = f" / {cost['with_pass']:.2f}" if "with_pass" in cost else ""
    return f"{cost['ratio']:.3f} ({cost['low']:.3f} to {cost['high']:.3f}){extra}"


def markdown(table: Sequence[Mapping], settings: Mapping, missing: int = 0) -> str:
    """The table as markdown, with how it was made above and what failed below it."""
    width, updates = settings["batches"] * settings["rows"], settings["batches"] * settings["passes"]
    samples = settings["sampled_problems"] * settings["group"]
    head = [
        "# Every method on the scratchpad task",
        "",
        f"Same budget for all: {settings['steps']} steps of {settings['rows']} completions of at most "
        f"{settings['tokens']} tokens, {updates} updates for each {width} completions "
        f"generated, AdamW at {settings['learning_rate']:g}. Mean ± half the range over seeds. Accuracy is greedy on "
        f"{settings['greedy_problems']} held-out problems; sampled accuracy, entropy (nats a token) and length "
        f"(tokens) are of {samples} samples of held-out problems. Clipped: share of tokens (rows, for a sequence "
        "ratio) beyond the clip, over all updates. No right answer: mean |advantage| in groups without one. Cost: the "
        "method's update beside a plain one at equal needs and scope, step by step in turn in one process, with "
        f"quartiles; the bound is {MOST_COST:g}. A method that needs the whole window makes "
        "one more forward pass; its cost beside a plain loss without that pass stands after the slash.",
        "",
    ]
    names = ["method", "kind", "accuracy", "sampled", "entropy", "length", "of wrong answers", "clipped"]
    names += ["no right answer", "s/step", "cost", "learns", "its claim"]
    body = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in table:
        if not row["seeds"] and not row["cost"]:
            continue
        cost = row["cost"]
        cells = [
            row["method"],
            row["kind"] + (", window" if row["scope"] == "window" else ""),
            _moved(row, "accuracy", 2),
            _moved(row, "sampled", 2),
            _moved(row, "entropy", 3),
            _moved(row, "length", 1),
            _moved(row, "wrong_length", 1),
            _show(row["end"]["clipped"], 3),
            _show(row["end"]["no_right_signal"], 2),
            _show(row["seconds"], 2),
            _cost(cost) if cost else "",
            row["learns"] or "",
            "; ".join(map(_claim, row["claims"])),
        ]
        body.append("| " + " | ".join(cells) + " |")
    notes = []
    slow = [r["method"] for r in table if r["cost"] and r["cost"]["ratio"] > MOST_COST]
    notes += [f"Above the bound on cost: {', '.join(slow)}."] if slow else []
    flat = [r for r in table if r["learns"] in ("no", "some seeds")]
    notes += [f"Does not learn in every seed: {', '.join(r['method'] for r in flat)}."] if flat else []
    notes += [f"`{r['method']}` equals its host here: {r['inert']}" for r in table if r["inert"] and r["seeds"]]
    notes += [f"`{r['method']}` did not run: {e}" for r in table for e in r["errors"]]
    strangers = sorted({n for c in CLAIMS for n in (c.method, c.against) if not known(n)})
    notes += [f"Claims wait for entries that the catalog lacks: {', '.join(strangers)}."] if strangers else []
    notes += [f"{missing} runs are still to do: run the command again."] if missing else []
    return "\n".join([*head, *body, "", *(f"* {n}" for n in notes), ""])
