"""The command `trl-variants`. A user's mistake is one sentence and exit code 2."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence

from ..errors import RewardError, VariantError, did_you_mean

COMMANDS = {
    "train": "train a recipe: trl-variants train recipes/quickstart.yaml --variant gspo",
    "list": "the catalog, one method a line (--json for programs)",
    "show": "one method: composition, math, defaults, deviations, papers",
    "check": "what a recipe would run into, without loading a model",
    "merge": "the adapter of a run and its base as one 16-bit model: trl-variants merge runs/NAME",
    "eval": "accuracy, avg@k and pass@k of a model, with intervals: trl-variants eval runs/NAME --k 8",
    "compare": "several recipes under one protocol: trl-variants compare a.yaml b.yaml --seeds 3",
    "card": "the model card of a run folder, rendered again: trl-variants card runs/NAME",
    "push": "a run folder to the Hub, private unless asked otherwise: trl-variants push runs/NAME",
}
USAGE = """usage: trl-variants COMMAND ...

{commands}

options: --debug (traceback of an error), --version, -h; trl-variants COMMAND -h explains a command
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command (`argv` without the program's name); returns 0, 2 for a mistake or 130 for ^C."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if not debug:
        _quiet()
    try:
        return _dispatch(words)
    except (VariantError, RewardError) as error:
        if debug:
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print("stopped; train again with --resume to continue from the last checkpoint", file=sys.stderr)
        return 130


def _quiet() -> None:
    """Keeps other libraries' notices out of the way: deprecations, missing kernels, bars in a log file."""
    for module in ("transformers", "trl", "torch"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(USAGE.format(commands="\n".join(f"  {name:<8}{text}" for name, text in COMMANDS.items())))
        return 0
    if words[0] == "--version":
        from ..report.run_folder import versions

        print(" ".join(f"{name} {version}" for name, version in versions().items()))
        return 0
    command, *rest = words
    if command not in COMMANDS:
        raise VariantError(f"no command {command!r}{did_you_mean(command, COMMANDS)}: one of {', '.join(COMMANDS)}")
    # each command imports only what it needs; a module called `list` would shadow the builtin in this package
    module = "listing" if command == "list" else command
    return importlib.import_module(f"{__name__}.{module}").run(rest)


def one_line(error: BaseException) -> str:
    """Returns an exception's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__
