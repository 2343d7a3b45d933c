"""OP-GRPO's three rewards: how many reference perspectives an answer covers, how few it repeats, and its layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import VariantError
from .base import Reward, column, prompt_texts, texts
from .embeddings import MINILM, Encoder, embed, load_encoder

MATCH, UNIQUE, PENALTY = 0.70, 0.78, -0.2
MASK = "[MASK]"
_LAYOUT = re.compile(
    r"\s*<core perspectives>(?P<core>.*?)</core perspectives>\s*<summary>(?P<summary>.*?)</summary>\s*", re.DOTALL
)
_START = re.compile(r"\b(?:from|in) the perspective of\b", re.IGNORECASE)
_WORD = re.compile(r"\w+(?:'\w+)?")
# what a masked word may not be: English function words
STOPWORDS = frozenset(
    "a about after all also an and any are as at be because been before being between both but by can could "
    "did do does for from had has have he her his how i if in into is it its just may me more most my no nor "
    "not of off on one only or other our out over own perspective should so some such than that the their them "
    "then there these they this those through to too under until up very was we were what when where which "
    "while who whom why will with would you your".split()
)


def core_of(text: str) -> str:
    """The core part of a text in the right layout, else the whole text."""
    found = _LAYOUT.fullmatch(text)
    return found["core"] if found else text


def perspectives(text: str) -> list[str]:
    """The parts that begin at "From the perspective of" or "In the perspective of"; the whole text without any."""
    starts = [m.start() for m in _START.finditer(text)]
    parts = [text[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=False)]
    return [p for p in parts or [text.strip()] if p]


def without_prompt_words(text: str, prompt: str) -> str:
    """The text with the prompt's content words masked: repeating the question covers nothing."""
    known = {w.casefold() for w in _WORD.findall(prompt)} - STOPWORDS
    return _WORD.sub(lambda m: MASK if m[0].casefold() in known else m[0], text)


def matches(similarity: Tensor, threshold: float = MATCH) -> list[tuple[int, int]]:
    """One-to-one pairs (row, column) of an (f, c) matrix: the largest left at or above the threshold, again and
    again."""
    left, found = similarity.clone(), []
    while left.numel() and float(left.max()) >= threshold:
        r, c = divmod(int(left.argmax()), left.shape[1])
        found.append((r, c))
        left[r, :] = left[:, c] = -torch.inf
    return found


def coverage_score(share: float) -> float:
    """0 for nothing, 1 below .2, 2 below .4, 3 below .6, 4 below .8, else 5."""
    return 0.0 if share <= 0 else 1.0 + sum(share >= edge for edge in (0.2, 0.4, 0.6, 0.8))


def unique_share(similarity: Tensor, threshold: float = UNIQUE) -> float:
    """Share of the n rows of an (n, n) matrix that are no near-copy of an earlier one; a near-copy judges nobody."""
    n, redundant = len(similarity), set[int]()
    for i in range(n):
        if i not in redundant:
            redundant |= {j for j in range(i + 1, n) if float(similarity[i, j]) >= threshold}
    return (n - len(redundant)) / n if n > 1 else 1.0


def uniqueness_score(share: float) -> float:
    """1 without a near-copy, 0.75 above .8, 0.4 above .6, else 0."""
    return 1.0 if share >= 1 else 0.75 if share > 0.8 else 0.4 if share > 0.6 else 0.0


class _Embedded(Reward):
    """Base: a reward that encodes all texts of a call at once."""

    def __init__(self, name: str, encoder: str | Encoder, threshold: float):
        super().__init__(name)
        if not -1 <= threshold <= 1:
            raise VariantError(f"{name}: the threshold is a cosine, got {threshold}")
        self.encoder, self.threshold = encoder, threshold
        if isinstance(encoder, str):
            load_encoder(encoder)  # a missing one is named before anything is generated

    def _encoded(self, lists: Sequence[list[str]]) -> list[Tensor]:
        return list(embed(self.encoder, [t for ts in lists for t in ts]).split([len(ts) for ts in lists]))


class PerspectiveCoverage(_Embedded):
    """0 to 5: the share of the reference's perspectives that the answer has, matched one to one. OP-GRPO (2026).

    Column `column`: the reference as text, or as a list of perspectives. `encoder`: a name, or a function list of
    texts -> (n, d).
    """

    def __init__(self, encoder: str | Encoder = MINILM, column: str = "perspectives", threshold: float = MATCH):
        super().__init__("perspective_coverage_reward", encoder, threshold)
        self.column = column

    def __call__(
        self, prompts: Any, completions: list[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        given = column(columns, self.column)
        wanted = [perspectives(core_of(g)) if isinstance(g, str) else [str(x) for x in g or ()] for g in given]
        own = [
            [without_prompt_words(t, p) for t in perspectives(core_of(text))]
            for text, p in zip(texts(completions), prompt_texts(prompts), strict=True)
        ]
        encoded = self._encoded([*wanted, *own])
        pairs = zip(encoded[: len(wanted)], encoded[len(wanted) :], strict=True)
        return [self._score(f, c) if len(f) else None for f, c in pairs]

    def _score(self, references: Tensor, candidates: Tensor) -> float:
        if not len(candidates):
            return 0.0
        return coverage_score(len(matches(references @ candidates.T, self.threshold)) / len(references))


class PerspectiveUniqueness(_Embedded):
    """0 to 1: how few perspectives of the answer nearly repeat an earlier one. OP-GRPO (2026)."""

    def __init__(self, encoder: str | Encoder = MINILM, threshold: float = UNIQUE):
        super().__init__("perspective_uniqueness_reward", encoder, threshold)

    def __call__(
        self, prompts: Any, completions: list[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        encoded = self._encoded([perspectives(core_of(t)) for t in texts(completions)])
        return [uniqueness_score(unique_share(z @ z.T, self.threshold)) for z in encoded]


def tag_layout_reward(prompts: Any, completions: list[Any], completion_ids: Any = None, **columns: Any) -> list[float]:
    """-0.2 unless the whole answer is <core perspectives>..</core perspectives><summary>..</summary>, neither part
    empty; else 0. OP-GRPO (2026)."""
    found = [_LAYOUT.fullmatch(t) for t in texts(completions)]
    right = [m is not None and m["core"].strip() != "" and m["summary"].strip() != "" for m in found]
    return [0.0 if r else PENALTY for r in right]
