"""A code edit scored by how much its patch looks like the real one, without running anything."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher, unified_diff
from typing import Any

from .base import Reward, column, texts

_EDIT = re.compile(
    r"^###\s*(?P<path>\S+)[^\S\n]*\n<{5,9} SEARCH\n(?P<search>.*?)^={5,9}\n(?P<replace>.*?)^>{5,9} REPLACE\s*?$",
    re.DOTALL | re.MULTILINE,
)


class PatchSimilarityReward(Reward):
    """Similarity in [0, 1] of the predicted patch to the real one, -1.0 for a malformed edit. SWE-RL (2502.18449) 2.2.

    The completion holds one non-empty <think> and one <solution> part, each tag once; the solution holds edits

        ### path
        <<<<<<< SEARCH / old lines / ======= / new lines / >>>>>>> REPLACE

    whose old lines differ from the new ones and stand in the file, from the start of a line. Columns: `code_context`
    and `oracle_new_content`, mappings from path to text. `max_characters` caps either diff: the comparison is
    quadratic.
    """

    def __init__(self, format_penalty: float = -1.0, max_characters: int | None = None):
        super().__init__("patch_similarity_reward")
        self.format_penalty, self.max_characters = format_penalty, max_characters

    def __call__(
        self, prompts: Any, completions: list[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        contexts, oracles = column(columns, "code_context"), column(columns, "oracle_new_content")
        return [self.score(t, c, o) for t, c, o in zip(texts(completions), contexts, oracles, strict=True)]

    def score(self, text: str, context: Mapping[str, str], oracle: Mapping[str, str]) -> float:
        # a data set of mappings has every key in every row, None where the row lacks it
        context = {k: v for k, v in context.items() if v is not None}
        oracle = {k: v for k, v in oracle.items() if v is not None}
        predicted = edited_files(text, context)
        if predicted is None:
            return self.format_penalty
        found = [
            self._file(context.get(path, ""), predicted.get(path), oracle.get(path))
            for path in sorted({*predicted, *oracle})
        ]
        counted = [s for s in found if s is not None]
        return sum(counted) / len(counted) if counted else 1.0

    def _file(self, old: str, predicted: str | None, oracle: str | None) -> float | None:
        mine = patch(old, old if predicted is None else predicted)[: self.max_characters]
        real = patch(old, old if oracle is None else oracle)[: self.max_characters]
        if not mine and not real:
            return None
        if not mine or not real:
            return 0.0
        return SequenceMatcher(None, mine, real, autojunk=False).ratio()  # not symmetric: prediction first


def patch(old: str, new: str) -> str:
    """The unified diff with 3 lines of context, without its two header lines."""
    return "\n".join(list(unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=3))[2:])


def edited_files(text: str, context: Mapping[str, str]) -> dict[str, str] | None:
    """New contents by path after the completion's edits; None when the format or an edit is wrong."""
    parts = {}
    for tag in ("think", "solution"):
        if text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1:
            return None
        found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        if found is None or not found[1].strip():
            return None
        parts[tag] = found[1]
    edits = list(_EDIT.finditer(parts["solution"]))
    files: dict[str, str] = {}
    for edit in edits:
        path, search, replace = edit["path"], edit["search"].removesuffix("\n"), edit["replace"].removesuffix("\n")
        before = "\n" + files.get(path, context.get(path, ""))
        if path not in context or search == replace or not search.strip() or "\n" + search not in before:
            return None
        files[path] = before.replace("\n" + search, "\n" + replace, 1)[1:]
    return files or None
