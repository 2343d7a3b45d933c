"""Hooks that compare the answers of a group by their sentence embeddings. Embeddings: (N, d) unit rows, frozen."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import Scored, TokenBatch, bounded_exp
from ..rewards.embeddings import MINILM, cosines
from ..rewards.text import formulas
from .aggregate_groups import PromptSum
from .base import hook, param
from .metrics import Mean
from .regularizers import Term
from .rewards_diversity import formula_diversity, groups_of, semantic_diversity
from .rewards_length import is_right

DENSITY_EPS = 1e-6  # added to the sum of cosines, as the authors' code


def in_groups(scored: Scored, usable: Tensor, of: Callable[[list[int]], Tensor]) -> Tensor:
    """(N,) `of(rows)`, (n,), of each group's usable rows; 0 elsewhere."""
    out = torch.zeros_like(scored.reward)
    for rows in groups_of(scored, usable):
        out[rows] = of(rows).to(out)
    return out


@hook("rewards", "semantic_density")
@dataclass(frozen=True)
class SemanticDensity:
    """R w, w = 1 / (sum_j cos(z_i, z_j) + 1e-6) over the group, i itself included, (N,). DRA-GRPO (2505.09655) eq. 5-6.

    Near-copies share the credit of one answer: n copies have w = 1/n, an answer like no other has w = 1. `floor`: the
    sum is at least this, for encoders with negative cosines (1: no answer counts more than once). Negative rewards
    turn the intention round, the distinct answer being punished most: give rewards >= 0.
    """

    encoder: str = MINILM
    floor: float = param(1.0, above=0.0, ours=True)

    math = "R / (sum_j cos(z_i, z_j))"
    needs = frozenset({"texts", "embeddings"})
    combined = True

    @property
    def encoders(self) -> tuple[str, ...]:
        return (self.encoder,)

    def __call__(self, scored: Scored) -> Tensor:
        if bool((scored.reward < 0).any()):
            warnings.warn(
                "semantic_density scales negative rewards too, which punishes the most distinct answer most: give "
                "rewards >= 0 (0 and 1 instead of -1 and 1)",
                stacklevel=2,
            )
        z = scored.embedding(self.encoder)
        density = in_groups(scored, scored.valid, lambda rows: cosines(z[rows]).sum(1).clamp(min=self.floor))
        return torch.where(scored.valid, scored.reward / (density + DENSITY_EPS), scored.reward)


@hook("regularizers", "distinct_entropy")
@dataclass(frozen=True)
class DistinctEntropy:
    """- coef * mean over prompts of sum_i w_i 1/|y_i| sum_t (- r lp), (B, T). DSDR (2602.19895), its local term.

    w: softmax of tau min(d, sigma) over the right answers of the prompt's whole group, detached; a prompt without one
    adds 0. d is the mean of semantic and formula distinctiveness, as `diversity_bonus` measures it. r and lp both carry
    gradient: a token below probability 1/e is lifted, one above lowered. `tau` 0: all right answers alike.
    """

    coef: float = param(0.001, low=0.0)
    tau: float = param(5.0, low=0.0)
    sigma: float = param(1.0, low=0.0, ours=True)
    encoder: str = MINILM

    math = "- {coef} mean_q sum_(i right) softmax({tau} d)_i mean_t (-r lp)"
    needs = frozenset({"old_logps", "texts", "embeddings"})

    @property
    def encoders(self) -> tuple[str, ...]:
        return (self.encoder,)

    def attachments(self, scored: Scored) -> dict[str, Tensor]:
        """`distinct_weight`, (N,): how much of its prompt's term each answer is."""
        z, texts, right = scored.embedding(self.encoder), scored.fact("texts")["completions"], is_right(scored)

        def shares(rows: list[int]) -> Tensor:
            by_formula = torch.tensor(formula_diversity(formulas(texts[i]) for i in rows), dtype=torch.float64).to(z)
            d = ((semantic_diversity(z[rows]) + by_formula) / 2).clamp(0.0, self.sigma)
            return torch.softmax((self.tau * d).masked_fill(~right[rows], -torch.inf), 0).nan_to_num(nan=0.0)

        return {"distinct_weight": in_groups(scored, scored.valid, shares)}

    def __call__(self, batch: TokenBatch) -> Term:
        weight = batch.need("distinct_weight").to(batch.mask).unsqueeze(1)
        surprise = -bounded_exp(batch.logps - batch.anchor) * batch.logps
        metrics = {"distinct_entropy": Mean.over(surprise, batch.mask * (weight > 0))}
        return Term(-surprise * weight, self.coef, PromptSum(), metrics=metrics)
