"""Process rewards beside the outcome: a leave-one-out baseline for each of the two."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import Scored
from .advantage import labels_of, reward_to_go, sums_by
from .advantage_gae import whitened
from .base import hook, param
from .rewards import on_last_token


@hook("advantage", "process_and_outcome")
@dataclass(frozen=True)
class ProcessAndOutcome:
    """whiten_tokens(G_t(process) + G_t(outcome)), (N, T), each against the others of its group. PRIME (2502.01456).

    With K answers a prompt, r_t the process reward of a token and rbar_j its mean over the tokens of answer j:

        form "code"   G_t(r K/(K-1) - sum_j rbar_j / (K-1)) + G_t(R_i - mean_j!=i R_j on the last token)
        form "paper"  G_t(r - mean_j!=i rbar_j) + R_i - mean_j!=i R_j

    where G_t sums to the end of the answer with `gamma`. The authors' code scales the raw r_t by K/(K-1), the paper
    does not. `normalize` first divides r by the largest |sum_k>=t r_k| of the generation (+ 1e-6). Whitening is
    (A - mean) / sqrt(var + eps) over all policy tokens, unbiased. An answer alone in its group has no baseline and
    gets 0; one without tokens counts in the outcome's baseline alone.
    """

    form: str = param("code", choices=("code", "paper"))
    gamma: float = param(1.0, above=0.0, high=1.0)
    normalize: bool = True
    whiten: bool = True
    eps: float = param(1e-8, low=0.0)

    needs = frozenset({"tokens", "process_rewards"})
    reads_token_rewards = False

    @property
    def math(self) -> str:
        ahead = "sum_k>=t {gamma}^(k-t)"
        process = "(K p_k - sum_j pbar_j) / (K-1)" if self.form == "code" else "(p_k - mean_others pbar)"
        body = f"{ahead} {process} + R - mean_others R, p the process reward"
        return f"A_t = whiten_tokens({body})" if self.whiten else f"A_t = {body}"

    def __call__(self, scored: Scored) -> Tensor:
        valid, labels = scored.valid, labels_of(scored, "group")
        mask = scored.need("mask").to(scored.reward) * valid.unsqueeze(1)
        r = scored.need("process_rewards").to(mask) * mask
        if self.normalize:
            r = r / (reward_to_go(r, mask, 1.0).abs().max() + 1e-6)
        tokens = mask.sum(1)
        mean = r.sum(1) / tokens.clamp(min=1.0)
        others, count = _others(labels, mean, valid & (tokens > 0))
        share = 1.0 / (count - 1).clamp(min=1.0)
        if self.form == "code":
            process = r * (count * share).unsqueeze(1) - ((others + mean) * share).unsqueeze(1)
        else:
            process = r - (others * share).unsqueeze(1)
        process = torch.where((count > 1).unsqueeze(1), process * mask, 0.0)
        reward = torch.where(valid, scored.reward, 0.0)
        others, count = _others(labels, reward, valid)
        outcome = torch.where(valid & (count > 1), reward - others / (count - 1).clamp(min=1.0), 0.0)
        advantage = reward_to_go(process, mask, self.gamma)
        if self.form == "code":
            advantage = advantage + reward_to_go(on_last_token(outcome, mask), mask, self.gamma)
        else:
            advantage = (advantage + outcome.unsqueeze(1)) * mask
        return whitened(advantage, mask, 1, self.eps) if self.whiten else advantage


def _others(labels: Tensor, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) sum of x over the other valid rows of the row's group, and the number of valid rows in it."""
    total, count = sums_by(labels, x, valid)
    return total[labels] - torch.where(valid, x, 0.0), count[labels]
