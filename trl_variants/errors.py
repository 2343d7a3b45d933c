"""Errors a user can act on: one sentence that names the mistake and, where possible, what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VariantError(ValueError):
    """A mistake in a composition, a recipe or a configuration; the message is meant for the user's eyes."""


class MissingExtra(VariantError, ImportError):
    """A feature needs an optional dependency. The message says which extra to install."""

    def __init__(self, what: str, extra: str):
        super().__init__(f'{what} needs an optional dependency: pip install "trl_variants[{extra}]"')


class RewardError(RuntimeError):
    """A reward function failed on some process; raised on every process with the original message."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns " (did you mean x?)" for the closest known names, or "" when nothing is close."""
    known = list(known)
    lowered = {k.lower(): k for k in known}
    close = difflib.get_close_matches(str(name).lower(), list(lowered), n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(lowered[c] for c in close)}?)" if close else ""
