"""`trl-variants show NAME`: everything about one method."""

from __future__ import annotations

import json

from .parser import Parser


def run(words: list[str]) -> int:
    """Prints one catalog entry, or its mapping with `--json`; returns 0. Raises VariantError if unknown."""
    parser = Parser(prog="trl-variants show", description="Composition, math, defaults, deviations, papers.")
    parser.add_argument("name", help="a catalog id such as dapo")
    parser.add_argument("--json", action="store_true", help="the composition as a mapping, as recipes take it")
    options = parser.parse_args(words)

    from .. import variant

    chosen = variant(options.name)
    print(json.dumps(chosen.to_mapping(), indent=2) if options.json else chosen.describe())
    return 0
