"""Advantages that spread the outcome over tokens with statistics of the whole group, so before the group is split."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import Scored
from .advantage import Grouped, labels_of, reward_to_go
from .base import hook, param

VARIANCE_FLOOR = 1e-8  # added under the root, as the public GTPO code


def moments_by(labels: Tensor, x: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance of the x inside that share a label, each in the shape of x; 0 where there is
    none."""
    size = int(labels.max()) + 1 if labels.numel() else 0
    zero = torch.zeros(size, dtype=x.dtype, device=x.device)
    at = labels[inside]
    count = zero.index_add(0, at, torch.ones_like(x[inside])).clamp(min=1.0)
    mean = (zero.index_add(0, at, x[inside]) / count)[labels]
    variance = (zero.index_add(0, at, ((x - mean) ** 2)[inside]) / count)[labels]
    return mean, variance


def standardised_by(labels: Tensor, x: Tensor, inside: Tensor, eps: float) -> Tensor:
    """(x - mean) / (population std + eps) among the x inside that share a label; 0 outside and for a lone x."""
    mean, variance = moments_by(labels, x, inside)
    return torch.where(inside, (x - mean) / (variance.sqrt() + eps), 0.0).nan_to_num(nan=0.0)


@hook("advantage", "entropy_share")
@dataclass(frozen=True)
class EntropyShare:
    """The outcome shared out by entropy among right and among wrong answers of a group, then standardised, (N, T). GTPO
    (2508.04349).

    r_t = a1 + a2 d_t H_t / sum H on right answers, -a1 - a2 d_t (1/H_t) / sum 1/H on wrong ones; sums over the d_t
    answers of that kind that have a t-th policy token. A = (r - mean) / sqrt(var + 1e-8), var dividing by n, over the
    tokens of that kind (`norm` "per_kind"), of the group ("joint"), or r itself ("none"). H is the sampling policy's,
    in nats, at least `floor`; a1, a2 are rewards.
    """

    a1: float = param(1.0, low=0.0)
    a2: float = param(0.1, low=0.0)
    norm: str = param("per_kind", choices=("per_kind", "joint", "none"))
    floor: float = param(1e-6, above=0.0, ours=True)

    math = "A = norm_{norm}(r_t), r_t = {a1} + {a2} d_t H_t / sum H (right), -{a1} - {a2} d_t (1/H_t) / sum 1/H (wrong)"
    needs = frozenset({"tokens", "entropy"})
    reads_token_rewards = False

    def __call__(self, scored: Scored) -> Tensor:
        mask = scored.need("mask")
        inside = (mask > 0) & scored.valid.unsqueeze(1)
        right = scored.correct.bool().unsqueeze(1).expand_as(inside)
        # double: the tokens of one kind differ by a2 H, which a float32 variance would drown
        entropy = torch.where(inside, scored.need("entropy").double(), 1.0).clamp(min=self.floor)
        weight = torch.where(right, entropy, 1 / entropy)
        group = labels_of(scored, "group").unsqueeze(1).expand_as(inside)
        kind = group * 2 + right
        place = (mask > 0).cumsum(1) - 1  # counts policy tokens, not columns
        mean_here, _ = moments_by(kind * mask.shape[1] + place.clamp(min=0), weight, inside)
        shaped = self.a1 + self.a2 * weight / torch.where(inside, mean_here, 1.0)
        reward = torch.where(right, shaped, -shaped)
        if self.norm != "none":
            mean, variance = moments_by(kind if self.norm == "per_kind" else group, reward, inside)
            reward = (reward - mean) / (variance + VARIANCE_FLOOR).sqrt()
        return torch.where(inside, reward, 0.0).to(scored.reward.dtype)


@hook("advantage", "entropy_gated")
@dataclass(frozen=True)
class EntropyGated(Grouped):
    """The grouped advantage plus an entropy-gated log-ratio to the reference, re-standardised, (N, T). ERPO
    (2603.28204).

    s_t = log pi_old / pi_ref is standardised (population) among the group's tokens of the same relative position,
    `buckets` of them; B_t = W_t sgn(A) s_t; Psi = B scaled to the std `target_std` over the group's tokens; A_t = the
    standardised A + eta Psi over those tokens. W = sigmoid of the entropy's own z-score in the group (`gate` "none":
    1). `target_std` is in units of A, `eta` a factor. Rows with A = 0 have B = 0.
    """

    eta: float = param(0.5, low=0.0, ours=True)
    target_std: float = param(0.5, low=0.0, ours=True)
    buckets: int = param(10, low=1, ours=True)
    gate: str = param("sigmoid", choices=("sigmoid", "none"), ours=True)
    eps_token: float = param(1e-4, low=0.0, ours=True)

    reads_token_rewards = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"tokens", "old_logps", "ref_logps"} | ({"entropy"} if self.gate == "sigmoid" else set()))

    @property
    def math(self) -> str:
        return super().math + "; A_t = z(A + {eta} Psi_t), Psi ~ W(H_t) sgn(A) z_bucket(log pi_old/pi_ref)"

    def __call__(self, scored: Scored) -> Tensor:
        advantage = super().__call__(scored).unsqueeze(1)
        mask = scored.need("mask")
        inside = (mask > 0) & scored.valid.unsqueeze(1)
        group = labels_of(scored, "group").unsqueeze(1).expand_as(inside)
        z = lambda x, labels: standardised_by(labels, x, inside, self.eps_token)  # noqa: E731
        gap = torch.where(inside, scored.need("old_logps") - scored.need("ref_logps"), 0.0).to(advantage.dtype)
        count = inside.sum(1, keepdim=True).clamp(min=1)
        place = (inside.cumsum(1) - 1).clamp(min=0)
        bucket = group * self.buckets + torch.div(place * self.buckets, count, rounding_mode="floor")
        signal = advantage.sign() * z(gap, bucket)
        if self.gate == "sigmoid":
            entropy = torch.where(inside, scored.need("entropy"), 0.0).to(advantage.dtype)
            signal = signal * torch.sigmoid(z(entropy, group))
        _, variance = moments_by(group, signal, inside)
        combined = advantage + self.eta * self.target_std * signal / (variance.sqrt() + self.eps_token)
        return z(combined, group)


@hook("advantage", "process")
@dataclass(frozen=True)
class Process:
    """A_t = sum of z_ij over the rewarded segments j of row i that end at t or later, (N, T). Process supervision in
    GRPO (2402.03300) section 4.1.3; Unified GRPO (2603.09538).

    Reward function j scores segment j (its weight multiplies, NaN: no such segment); z_ij = (r_ij - mean) / (std + eps)
    over ALL segment rewards of the group together. A segment ends at a token of `delimiters` (token ids) and at the
    answer's end; functions beyond the last segment score that one. Without delimiters there is one segment.
    `per_segment` divides by the row's number of rewards, so that more segments are not more signal.
    """

    delimiters: tuple | list = ()
    ddof: int = param(1, choices=(0, 1))
    eps: float = param(1e-4, low=0.0)
    per_segment: bool = False

    math = "A_t = sum_j: end_j >= t (r_ij - mean) / (std + {eps}), over all segments of the group"
    needs = frozenset({"tokens"})
    reads_token_rewards = False

    def __post_init__(self):
        if not all(isinstance(d, int) and not isinstance(d, bool) for d in self.delimiters):
            raise VariantError(f"process.delimiters are token ids, got {self.delimiters!r}")
        object.__setattr__(self, "delimiters", tuple(self.delimiters))

    def __call__(self, scored: Scored) -> Tensor:
        matrix = scored.rewards * scored.weights.to(scored.rewards)
        given = ~torch.isnan(matrix) & scored.valid.unsqueeze(1)
        labels = labels_of(scored, "group").unsqueeze(1).expand_as(matrix)
        mean, variance = moments_by(labels, matrix.nan_to_num(nan=0.0), given)
        count = torch.zeros(int(labels.max()) + 1, dtype=matrix.dtype, device=matrix.device)
        count = count.index_add(0, labels[given], torch.ones_like(matrix[given]))[labels]
        std = (variance * count / (count - self.ddof).clamp(min=1.0)).sqrt()
        z = torch.where(given & (count > self.ddof), (matrix.nan_to_num(nan=0.0) - mean) / (std + self.eps), 0.0)
        z = z.nan_to_num(nan=0.0)
        if self.per_segment:
            z = z / given.sum(1, keepdim=True).clamp(min=1)
        mask = scored.need("mask").to(matrix.dtype)
        ends = self._ends(scored, mask)
        rewards = torch.zeros_like(mask)
        for j in range(matrix.shape[1]):  # the j-th end of each row, its last where it has fewer
            order = (
                ends.cumsum(1) == torch.minimum(ends.sum(1, keepdim=True), torch.full_like(mask[:, :1], j + 1))
            ) & ends
            rewards = rewards + order * z[:, j : j + 1]
        return reward_to_go(rewards, mask, 1.0)

    def _ends(self, scored: Scored, mask: Tensor) -> Tensor:
        place = mask.cumsum(1)
        ends = (mask > 0) & (place == mask.sum(1, keepdim=True))
        if self.delimiters:
            ends = ends | (mask > 0) & torch.isin(scored.need("ids"), torch.tensor(self.delimiters, device=mask.device))
        return ends
