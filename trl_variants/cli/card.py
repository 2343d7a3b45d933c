"""`trl-variants card RUN`: the model card of a run folder, rendered again."""

from __future__ import annotations

from .parser import Parser


def run(words: list[str]) -> int:
    """Writes the card and prints its path. Raises VariantError where the folder holds no run."""
    parser = Parser(prog="trl-variants card", description="Write the model card of a run folder again, from its files.")
    parser.add_argument("run", metavar="RUN", help="the run folder")
    parser.add_argument("--out", metavar="FOLDER", help="write NAME.md there, with log, curves and result beside it")
    options = parser.parse_args(words)
    from ..report.card import keep, write_card
    from ..report.record import RunRecord

    print(keep(options.run, options.out) if options.out else write_card(RunRecord.load(options.run), options.run))
    return 0
