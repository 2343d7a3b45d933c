"""ReMax: the policy's own greedy answer is the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import Scored
from .advantage import reward_to_go
from .base import hook, param
from .regularizers import k1_in_reward
from .rewards import on_last_token


@hook("learners", "greedy_answer")
@dataclass(frozen=True)
class GreedyAnswer:
    """The reward of the policy's greedy answer to each row's prompt, (N,), as key `greedy_reward`. ReMax (2310.10505).

    One more decode a prompt, by the policy that sampled, scored by the same reward functions; it is never trained on
    and enters no statistic. Learns nothing.
    """

    math = "R_greedy = R(x, argmax decoding of pi_old)"
    needs = frozenset({"tokens"})
    provides = frozenset({"greedy_reward"})

    def attach(self, trainer: Any, path: str) -> Any:
        """The worker that decodes and scores."""
        from ..learners.greedy import GreedyWorker

        return GreedyWorker(trainer, path, self)


@hook("advantage", "greedy_baseline")
@dataclass(frozen=True)
class GreedyBaseline:
    """gamma^(T-t+1) clip(R - R_greedy, -limit, limit) - beta k1_t for t = 1..T, (N, T). ReMax (2310.10505).

    k1_t = log pi_old - log pi_ref of token t alone, as in the authors' code, which computes a cumulative penalty and
    then uses the one-step form. `form="to_go"` is verl's: sum_k>=t gamma^(k-t) (r_k - beta k1_k) - R_greedy, r the
    score on the last token.
    """

    gamma: float = param(1.0, above=0.0, high=1.0)
    beta: float = param(0.05, low=0.0)
    limit: float = param(5.0, above=0.0)
    form: str = param("one_step", choices=("one_step", "to_go"))

    reads = frozenset({"greedy_reward"})

    @property
    def math(self) -> str:
        if self.form == "to_go":
            return "A_t = sum_k>=t {gamma}^(k-t) (r_k - {beta} k1_k) - R_greedy"
        return "A_t = {gamma}^(T-t+1) clip(R - R_greedy, +-{limit}) - {beta} k1_t"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"tokens", "old_logps"} | ({"ref_logps"} if self.beta else set()))

    def __call__(self, scored: Scored) -> Tensor:
        if "greedy_reward" not in scored.keys:
            raise VariantError(
                "this method needs `greedy_reward` per row, the reward of the greedy answer: learners: "
                "[greedy_answer], or columns={'greedy_reward': [...]}"
            )
        mask = scored.need("mask").to(scored.reward)
        greedy = scored.keys["greedy_reward"].to(scored.reward)
        usable = scored.valid & ~torch.isnan(greedy)
        reward, greedy = (torch.where(usable, x, 0.0).unsqueeze(1) for x in (scored.reward, greedy))
        k1 = torch.zeros_like(mask)
        if self.beta:
            k1 = k1_in_reward(scored.need("old_logps"), scored.need("ref_logps"), mask)
        if self.form == "to_go":
            whole = reward_to_go(on_last_token(scored.reward, mask) - self.beta * k1, mask, self.gamma)
            return (whole - greedy) * mask * usable[:, None]
        remaining = mask.flip(1).cumsum(1).flip(1)  # T - t + 1 at token t, tokens outside the mask not counted
        gap = (reward - greedy).clamp(-self.limit, self.limit)
        return (gap * self.gamma**remaining - self.beta * k1) * mask * usable[:, None]
