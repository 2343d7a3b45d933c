"""Advantages scaled by how hard the prompt is: by its success rate, its likelihood, or a difficulty column."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import Scored, bounded_exp
from .advantage import Grouped, grouped_normalise, labels_of, mean_by, std_by
from .base import hook, param


def success_rate(scored: Scored) -> Tensor:
    """(N,) share of correct rows in the row's group, from raw correctness; NaN for a group without a score."""
    return mean_by(labels_of(scored, "group"), scored.correct.to(scored.reward.dtype), scored.valid)


def tail_miss(n: int, mu: float, tau: float) -> float:
    """P(a group of n is mixed, yet holds none of the rare right answers): (1-tau)^n - (mu-tau)^n - (1-mu)^n.

    `mu` is the probability of all right answers, `tau` of the rare ones among them. F-GRPO (2602.06717).
    """
    return (1 - tau) ** n - (mu - tau) ** n - (1 - mu) ** n


@hook("advantage", "focal")
@dataclass(frozen=True)
class Focal(Grouped):
    """A = (1 - p)^gamma times the grouped advantage, (N,). F-GRPO (2602.06717).

    p in [0, 1] is the prompt's success rate, from raw correctness, never from shaped rewards; the weight is the
    prompt's, for right and wrong answers alike.
    """

    gamma: float = param(0.5, low=0.0)

    @property
    def math(self) -> str:
        return super().math + " * (1 - p_group)^{gamma}"

    def __call__(self, scored: Scored) -> Tensor:
        weight = (1 - success_rate(scored)).clamp(min=0.0) ** self.gamma
        return (weight * super().__call__(scored)).nan_to_num(nan=0.0)


@hook("advantage", "asymmetric")
@dataclass(frozen=True)
class Asymmetric(Grouped):
    """A = z [om/(2 sqrt p) + (1-om)/(2 sqrt(1-p))], then times min(1, om/alpha) where positive, (N,). A-GRAE
    (2602.05548).

    z is the grouped advantage, p the prompt's and om the whole batch's success rate, both from raw correctness; a
    prompt with p = 0 or 1 gets 0. `alpha` in (0, 1] is the success rate at which positive advantages count in full.
    """

    alpha: float = param(1.0, above=0.0, high=1.0)

    @property
    def math(self) -> str:
        z = super().math
        return z + " * (om/2sqrt(p) + (1-om)/2sqrt(1-p)) * (min(1, om/{alpha}) if > 0)"

    def __call__(self, scored: Scored) -> Tensor:
        p = success_rate(scored)
        om = mean_by(labels_of(scored, "batch"), scored.correct.to(p), scored.valid)
        mixed = (p > 0) & (p < 1)
        inside = torch.where(mixed, p, torch.tensor(0.5, dtype=p.dtype, device=p.device))
        weight = om / (2 * inside.sqrt()) + (1 - om) / (2 * (1 - inside).sqrt())
        advantage = torch.where(mixed, weight * super().__call__(scored), 0.0).nan_to_num(nan=0.0)
        damped = advantage * (om / self.alpha).clamp(max=1.0)
        return torch.where(advantage > 0, damped, advantage).nan_to_num(nan=0.0)


@hook("advantage", "difficulty_shared_std")
@dataclass(frozen=True)
class DifficultySharedStd:
    """A = w_own (R - mean)/std_group + w_shared (R - mean)/std_bin, the prompt's mean in both, (N,). Durian
    (2602.21743).

    A bin holds the prompts of similar L = mean over the prompt's answers of sum_t (or, `length` "mean", mean_t) log
    pi_old; bin borders are the quantiles k/bins of L, equal L share a bin, std_bin is over all rewards of its prompts.
    `min_prompts`: there are at most (prompts / min_prompts) bins; with one prompt a bin std_bin is std_group.
    """

    w_own: float = param(0.6, low=0.0, ours=True)
    w_shared: float = param(0.4, low=0.0, ours=True)
    bins: int = param(12, low=1)
    min_prompts: int = param(2, low=1, ours=True)
    length: str = param("sum", choices=("sum", "mean"))
    ddof: int = param(1, choices=(0, 1))
    eps: float = param(1e-4, low=0.0, ours=True)

    math = "A = (R - mean_group) ({w_own} / std_group + {w_shared} / std_bin)"
    needs = frozenset({"tokens", "old_logps"})
    reads_token_rewards = False

    def bin_of(self, scored: Scored) -> Tensor:
        """(N,) bin of the row's prompt; -1 where the prompt has no scored row."""
        mask = scored.need("mask")
        total = (torch.where(mask > 0, scored.need("old_logps"), 0.0)).sum(1).to(scored.reward.dtype)
        if self.length == "mean":
            total = total / mask.sum(1).clamp(min=1.0)
        labels = labels_of(scored, "group")
        likelihood = mean_by(labels, total, scored.valid)
        first = torch.full((int(labels.max()) + 1,), torch.nan, dtype=total.dtype, device=total.device)
        first[labels] = likelihood
        prompts = first[~torch.isnan(first)]
        bins = max(1, min(self.bins, len(prompts) // self.min_prompts))
        if not len(prompts):
            return torch.full_like(labels, -1)
        cuts = torch.arange(1, bins, dtype=total.dtype, device=total.device) / bins
        borders = torch.quantile(prompts, cuts) if bins > 1 else prompts[:0]
        found = (likelihood.unsqueeze(1) > borders).sum(1)
        return torch.where(torch.isnan(likelihood), -1, found)

    def __call__(self, scored: Scored) -> Tensor:
        reward, valid = scored.reward, scored.valid
        own = grouped_normalise(reward, valid, scored, "group", "group", self.ddof, self.eps, "zero")
        centred = reward - mean_by(labels_of(scored, "group"), reward, valid)
        shared = centred / (std_by(self.bin_of(scored) + 1, reward, valid, self.ddof) + self.eps)
        return torch.where(valid, self.w_own * own + self.w_shared * shared.nan_to_num(nan=0.0), 0.0)


@hook("advantage", "local_global")
@dataclass(frozen=True)
class LocalGlobal:
    """A = z within the variant's group + exp(k dD sign(z_glob)) z_glob within the whole problem, (N,). DIVA-GRPO.

    Rows of a problem share the value of column `problem`; each of its variants is a group. dD = the row's `difficulty`
    column - its mean over the problem: hard variants boost successes and soften failures. Every z has the unbiased std,
    as TRL's; `batch_z` z-scores both over the batch's rows first. A part whose rewards are all below `low_reward` is
    multiplied by `low_scale`.
    """

    k: float = param(0.1, low=0.0)
    problem: str = "id"
    difficulty: str = "difficulty"
    batch_z: bool = True
    low_reward: float = 0.15
    low_scale: float = param(0.1, low=0.0)
    eps: float = param(1e-6, low=0.0)

    math = "A = z_group + exp({k} (D - mean_{problem} D) sign(z_{problem})) z_{problem}"

    @property
    def keys(self) -> frozenset[str]:
        """Data set columns this hook reads."""
        return frozenset({self.problem, self.difficulty})

    def __call__(self, scored: Scored) -> Tensor:
        reward, valid = scored.reward, scored.valid
        if self.difficulty not in scored.keys:
            raise VariantError(f"local_global reads column {self.difficulty!r}, and there is none")
        parts = {}
        for name, key in (("local", "group"), ("global", self.problem)):
            z = grouped_normalise(reward, valid, scored, key, key, 1, self.eps, "zero")
            if self.batch_z:
                z = grouped_normalise(z, valid, scored, "batch", "batch", 1, self.eps, "zero")
            parts[name] = z
        level = scored.keys[self.difficulty].to(reward)
        delta = level - mean_by(labels_of(scored, self.problem), level, valid)
        weight = bounded_exp(self.k * delta * parts["global"].sign())  # 1 where z is 0
        local = self._damp(parts["local"], "group", scored)
        return torch.where(valid, local + weight * self._damp(parts["global"], self.problem, scored), 0.0)

    def _damp(self, z: Tensor, key: str, scored: Scored) -> Tensor:
        labels = labels_of(scored, key)
        reached = mean_by(labels, (scored.reward >= self.low_reward).to(z), scored.valid)
        return torch.where(reached > 0, z, self.low_scale * z)
