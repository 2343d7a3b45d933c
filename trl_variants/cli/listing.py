"""`trl-variants list`: the catalog."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from ..composition import KINDS
from ..errors import VariantError
from .parser import Parser

COLUMNS = ("id", "name", "family", "kind", "side", "seams", "paper", "idea")


def run(words: list[str]) -> int:
    """Prints the catalog as a table, or as one JSON list with `--json`; returns 0."""
    options = _options(words)
    rows = [row(entry) for entry in _catalog()]
    rows = [r for r in rows if options.family in (None, r["family"]) and options.kind in (None, r["kind"])]
    if not rows:
        known = sorted({entry.about.family for entry in _catalog()})
        raise VariantError(f"no method of that family and kind; the families are {', '.join(known)}")
    if options.json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return 0
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("id", "family", "kind", "side", "idea"):
        table.add_column(column, no_wrap=column == "id", overflow="fold")
    for r in rows:
        table.add_row(*(str(r[column] or "") for column in ("id", "family", "kind", "side", "idea")))
    console.print(table, markup=False, highlight=False)
    console.print(f"{len(rows)} methods; trl-variants show ID tells the rest", style="dim", highlight=False)
    return 0


def row(entry: Any) -> dict[str, Any]:
    """Returns a catalog entry's eight public columns; `seams` are where it departs from its host."""
    about = entry.about
    return {
        "id": about.id,
        "name": about.title,
        "family": about.family,
        "kind": about.kind,
        "side": about.side,
        "seams": list(entry.changed_seams),
        "paper": about.paper,
        "idea": about.idea,
    }


def _catalog() -> list[Any]:
    from .. import variants

    return list(variants)


def _options(words: list[str]) -> argparse.Namespace:
    parser = Parser(prog="trl-variants list", description="The catalog, one method a line.")
    parser.add_argument("--json", action="store_true", help=f"one JSON list with {', '.join(COLUMNS)}")
    parser.add_argument("--family", help="only this family")
    parser.add_argument("--kind", choices=KINDS, help="only this kind")
    return parser.parse_args(words)
