"""Rewards hooks that compare the answers of a group with each other by their text; Python loops, a generation each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import Scored
from ..rewards.embeddings import MINILM, cosines
from ..rewards.text import bleu, canonical, final_answer, formulas
from .base import hook, param
from .rewards_length import is_right

BLEU_WEIGHTS = (0.02, 0.1, 0.15, 0.25, 0.38)  # of the 1- to 5-grams
BLEU_CHARACTERS = 1000


def groups_of(scored: Scored, usable: Tensor) -> Iterable[list[int]]:
    """Row numbers of each group's usable rows."""
    rows: dict[int, list[int]] = {}
    for i, (label, u) in enumerate(zip(scored.group.tolist(), usable.tolist(), strict=True)):
        if u:
            rows.setdefault(label, []).append(i)
    return rows.values()


@hook("rewards", "answer_frequency")
@dataclass(frozen=True)
class AnswerFrequency:
    """R = 1 - (f - 1/L) for a valid answer, `invalid` for others, (N,). GAPO (2511.12596) section 3.

    f: share of the answer among the group's valid answers, L: how many valid answers the prompt has. `column` of the
    data set holds the list of valid answers, or L as a number (validity is then raw correctness). Without it validity
    is correctness and L the distinct valid answers of the group: a constant within a group, so only the distance
    to `invalid` depends on it. Answers are compared without case, spaces and closing punctuation.
    """

    invalid: float = -1.0
    column: str | None = None

    math = "R = 1 - (f - 1/L) if valid else {invalid}"
    needs = frozenset({"texts"})
    combined = True

    @property
    def columns(self) -> frozenset[str]:
        """Data set columns this hook reads."""
        return frozenset({self.column} if self.column else ())

    def __call__(self, scored: Scored) -> Tensor:
        answers = [canonical(final_answer(t)) for t in scored.fact("texts")["completions"]]
        allowed = scored.column(self.column) if self.column else [None] * len(answers)
        right = is_right(scored).tolist()
        reward = scored.reward.tolist()
        for rows in groups_of(scored, scored.valid):
            valid = [i for i in rows if self._is_valid(answers[i], allowed[i], right[i])]
            count = Counter(answers[i] for i in valid)
            for i in rows:
                reward[i] = self.invalid
            for i in valid:
                reward[i] = 1.0 - (count[answers[i]] / len(valid) - 1.0 / self._choices(allowed[i], count))
        return torch.tensor(reward, dtype=scored.reward.dtype, device=scored.reward.device)

    def _is_valid(self, answer: str, allowed: Any, right: bool) -> bool:
        if isinstance(allowed, (list, tuple)):
            return answer in {canonical(str(a)) for a in allowed}
        return right

    def _choices(self, allowed: Any, count: Counter) -> int:
        if allowed is None:
            return len(count)
        number = len({canonical(str(a)) for a in allowed}) if isinstance(allowed, (list, tuple)) else allowed
        if not isinstance(number, (int, float)) or number < 1:
            raise VariantError(f"column {self.column!r} holds {allowed!r}: expected valid answers or their number")
        return int(number)


@hook("rewards", "diversity_bonus")
@dataclass(frozen=True)
class DiversityBonus:
    """R + weight * clip(d, 0, sigma) for right answers, (N,). DIVER (2509.26209) 3.2, potential-based with gamma = 1;
    DSDR (2602.19895), its global term.

    d: share of an answer's formulas that no other answer of its group has ("equation"), mean over the others of
    1 - BLEU ("textual") or of (1 - cos)/2 of their embeddings by `encoder` ("semantic"); the mean of formulas and BLEU
    ("mix") or of formulas and embeddings ("semantic_mix", DSDR). BLEU: 1- to 5-grams of the words in the first 1000
    characters, averaged over both directions.
    """

    weight: float = param(0.001, low=0.0)
    sigma: float = param(0.68, low=0.0)
    measure: str = param("equation", choices=("equation", "textual", "mix", "semantic", "semantic_mix"))
    encoder: str = MINILM  # read by the semantic measures alone

    math = "R + {weight} min(d_{measure}, {sigma}) [right]"
    combined = True

    @property
    def encoders(self) -> tuple[str, ...]:
        """Sentence encoders this hook reads."""
        return (self.encoder,) if self.measure.startswith("semantic") else ()

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"texts", "embeddings"} if self.encoders else {"texts"})

    def __call__(self, scored: Scored) -> Tensor:
        texts = scored.fact("texts")["completions"]
        z = scored.embedding(self.encoder) if self.encoders else None
        d = torch.zeros_like(scored.reward)
        for rows in groups_of(scored, scored.valid):
            here = [texts[i] for i in rows]
            parts: list[Tensor] = []
            if self.measure in ("equation", "mix", "semantic_mix"):
                parts.append(torch.tensor(formula_diversity(map(formulas, here)), dtype=torch.float64))
            if self.measure in ("textual", "mix"):
                parts.append(torch.tensor(text_diversity(bleu_matrix(here)), dtype=torch.float64))
            if z is not None:
                parts.append(semantic_diversity(z[rows]))
            d[rows] = torch.stack([p.to(d) for p in parts]).mean(0)
        return scored.reward + self.weight * torch.where(is_right(scored), d.clamp(0.0, self.sigma), 0.0)


def formula_diversity(sets: Iterable[frozenset[str]]) -> list[float]:
    """|F_i minus the others' union| / |F_i| per answer; 0 without formulas."""
    sets = list(sets)
    owners = Counter(f for s in sets for f in s)
    return [sum(owners[f] == 1 for f in s) / len(s) if s else 0.0 for s in sets]


def semantic_diversity(z: Tensor) -> Tensor:
    """(n,) mean over the other rows of (1 - cos)/2, of unit rows (n, d); a row alone has 0."""
    apart = (1.0 - cosines(z)) / 2
    return apart.sum(1) / max(len(z) - 1, 1)


def bleu_matrix(texts: Sequence[str]) -> list[list[float]]:
    """BLEU of every answer (row) against every other as reference (column)."""
    words = [t[:BLEU_CHARACTERS].split() for t in texts]
    return [[bleu(a, b, BLEU_WEIGHTS) for b in words] for a in words]


def text_diversity(similarity: Sequence[Sequence[float]], symmetric: bool = True) -> list[float]:
    """Mean over the others of 1 - similarity; a row alone has 0."""
    n = len(similarity)
    pair = lambda i, j: (similarity[i][j] + similarity[j][i]) / 2 if symmetric else similarity[i][j]  # noqa: E731
    return [sum(1.0 - pair(i, j) for j in range(n) if j != i) / (n - 1) if n > 1 else 0.0 for i in range(n)]
