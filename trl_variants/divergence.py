"""Divergences between the policy's next-token distribution and another model's, per token.

    RKL = KL(pi || pi_T)     FKL = KL(pi_T || pi)
    JSD_b = b KL(pi_T || M) + (1 - b) KL(pi || M),   M = b pi_T + (1 - b) pi

Nothing here holds a (rows, tokens, vocabulary) tensor: `divergence` works on the n positions it is given, and
`in_chunks` walks over hidden states in slices whose logits are computed, used and, in the backward, computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .errors import VariantError

CHUNK = 256  # positions whose logits exist at once
NOTHING = -1e4  # the log-prob of an entry that is not there: exp gives 0 and differences stay finite


@dataclass(frozen=True)
class Divergence:
    """Which divergence, from whom, over which part of the vocabulary.

    Args:
        kind: "rkl" KL(pi || other), "fkl" KL(other || pi), "jsd" as GKD (2306.13649) defines it.
        anchor: the other model: "teacher" or "ref".
        beta: weight of the other model in the mixture of "jsd", in (0, 1).
        top_k: entries of the vocabulary that are told apart; None: all.
        support: whose most likely entries these are: "teacher" or "student" (the current policy's, SDPO 2601.20802).
        rest: what happens to the mass outside: "tail" one bucket on both sides; "renormalize" both sides over the
            support (disagreement outside is invisible); "student" the other model is renormalised over its support
            and the policy's outside mass is kept (HDPO 2603.23871: its JSD has + (1 - b) P_rest log(1 / (1 - b))).
        entry_cap: upper bound of each vocabulary entry's contribution before the sum, in nats (OPSD 2601.18734).
    """

    kind: str = "rkl"
    anchor: str = "teacher"
    beta: float = 0.5
    top_k: int | None = None
    support: str = "teacher"
    rest: str = "tail"
    entry_cap: float | None = None

    def __post_init__(self):
        for name, choices in (
            ("kind", ("rkl", "fkl", "jsd")),
            ("anchor", ("teacher", "ref")),
            ("support", ("teacher", "student")),
            ("rest", ("tail", "renormalize", "student")),
        ):
            if getattr(self, name) not in choices:
                raise VariantError(f"divergence {name} must be one of {choices}, got {getattr(self, name)!r}")
        if self.kind == "jsd" and not 0 < self.beta < 1:
            raise VariantError(f"jsd needs beta in (0, 1), got {self.beta}: its ends are kind 'fkl' (0) and 'rkl' (1)")
        if self.rest == "student" and (self.kind == "rkl" or self.support == "student") and self.top_k is not None:
            raise VariantError(
                "rest='student' is for 'jsd' and 'fkl' over the teacher's own top_k: rkl is infinite there"
            )

    @property
    def key(self) -> str:
        """Names the statistic in batches and metrics, e.g. `jsd/teacher` or `rkl/teacher/top64-student-tail`."""
        kind = f"jsd{self.beta:g}" if self.kind == "jsd" and self.beta != 0.5 else self.kind
        part = f"/top{self.top_k}-{self.support}-{self.rest}" if self.top_k is not None else ""
        cap = f"/cap{self.entry_cap:g}" if self.entry_cap is not None else ""
        return f"{kind}/{self.anchor}{part}{cap}"


def divergence(student: Tensor, other: Tensor, spec: Divergence) -> Tensor:
    """(n,) divergence at each position, with gradient through `student` alone.

    Args:
        student, other: (n, V) logits or log-probs; both are normalised here. `other` is detached. Where one has more
            entries (embeddings padded to another size), the common ones are compared.
    """
    common = min(student.shape[-1], other.shape[-1])
    student, other = student[..., :common], other[..., :common]
    p, q = student.log_softmax(-1), other.detach().log_softmax(-1)
    if spec.top_k is None or spec.top_k >= p.shape[-1]:
        return _over_entries(p, q, spec)
    ids = (q if spec.support == "teacher" else p.detach()).topk(spec.top_k, dim=-1).indices
    return _restricted(p.gather(-1, ids), q.gather(-1, ids), spec)


def divergence_topk(student: Tensor, ids: Tensor, other: Tensor, spec: Divergence) -> Tensor:
    """As `divergence`, where only the other model's log-probs (n, K) of the entries `ids` (n, K) are known.

    An id below 0 stands for no entry, one of K that is not there.

    Raises:
        VariantError: the divergence needs more of the distribution than that.
    """
    known = ids.shape[-1]
    if spec.top_k is None or spec.support == "student" or spec.top_k > known:
        wanted = "every entry" if spec.top_k is None else f"the {spec.support}'s top {spec.top_k}"
        raise VariantError(
            f"this teacher answers with its own top {known} entries and the method compares {wanted}: "
            f"set top_k at most {known} with support 'teacher'"
        )
    ids, other = ids[:, : spec.top_k], other[:, : spec.top_k].detach()
    p = student.log_softmax(-1).gather(-1, ids.clamp(min=0))
    return _restricted(p.masked_fill(ids < 0, NOTHING), other.masked_fill(ids < 0, NOTHING), spec)


def _restricted(p: Tensor, q: Tensor, spec: Divergence) -> Tensor:
    if spec.rest == "renormalize":
        return _over_entries(p.log_softmax(-1), q.log_softmax(-1), spec)
    if spec.rest == "tail":
        return _over_entries(_with_tail(p), _with_tail(q), spec)
    q = q.log_softmax(-1)
    outside = -torch.expm1(torch.logsumexp(p, -1).clamp(max=-1e-7))
    # where the other model has no mass, FKL adds nothing and JSD (1 - b) P_rest log(P_rest / M_rest)
    extra = -(1 - spec.beta) * math.log(1 - spec.beta) * outside if spec.kind == "jsd" else 0.0
    return _over_entries(p, q, spec) + extra


def _with_tail(x: Tensor) -> Tensor:
    """One more entry that holds the mass of all others."""
    inside = torch.logsumexp(x, -1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([x, torch.log(-torch.expm1(inside))], -1)


def _over_entries(p: Tensor, q: Tensor, spec: Divergence) -> Tensor:
    if spec.kind == "rkl":
        entries = p.exp() * (p - q)
    elif spec.kind == "fkl":
        entries = q.exp() * (q - p)
    else:
        b = spec.beta
        mixture = torch.logaddexp(p + math.log(1 - b), q + math.log(b))
        entries = b * q.exp() * (q - mixture) + (1 - b) * p.exp() * (p - mixture)
    if spec.entry_cap is not None:
        entries = entries.clamp(max=spec.entry_cap)
    return entries.sum(-1)


def in_chunks(function: Callable[..., Tensor], *tensors: Tensor, size: int = CHUNK) -> Tensor:
    """Concatenates function(slice of each tensor) over slices of the first dimension.

    What a slice computes inside is recomputed in the backward instead of kept.
    """
    pieces = []
    for parts in zip(*(t.split(size) for t in tensors), strict=True):
        if torch.is_grad_enabled():
            pieces.append(checkpoint(function, *parts, use_reentrant=False))
        else:
            pieces.append(function(*parts))
    return torch.cat(pieces) if pieces else tensors[0].new_zeros(0)
