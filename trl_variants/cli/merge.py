"""`trl-variants merge RUN`: the adapter of a run folder and its base as one 16-bit model."""

from __future__ import annotations

from ..adapters import DTYPES, merge_adapter
from .parser import Parser


def run(words: list[str]) -> int:
    """Merges, says where and how exactly, uploads where asked; returns 0. Raises VariantError where it cannot."""
    parser = Parser(prog="trl-variants merge", description="Save an adapter merged into its 16-bit base.")
    parser.add_argument("adapter", help="a run folder, a checkpoint or a Hub id")
    parser.add_argument("--out", help="target folder; default: `merged` in the adapter's folder")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the merged weights (bfloat16)")
    parser.add_argument("--base", help="model to merge into, where the adapter's record no longer leads to it")
    parser.add_argument("--push", metavar="REPO", help="upload the merged model to this Hub repository, private")
    parser.add_argument("--public", action="store_true", help="a repository that is made becomes public")
    parser.add_argument("--overwrite", action="store_true", help="replace a model that lies in the target already")
    options = parser.parse_args(words)
    done = merge_adapter(
        options.adapter,
        options.out,
        dtype=options.dtype,
        base=options.base,
        push_to=options.push,
        private=not options.public,
        overwrite=options.overwrite,
    )
    print(f"merged into {options.dtype} weights of {done.base}: {done.path}")
    print(f"largest difference of a log-prob to base and adapter, on one text: {done.difference:.1e}")
    if options.push:
        print(f"pushed to {options.push}")
    return 0
