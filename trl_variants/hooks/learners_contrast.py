"""A contrastive head on the policy's states: how well right answers of a prompt agree with each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import Scored
from .base import hook, param

FORMS = ("infonce", "supcon_in", "supcon_out", "soft_nn")


def contrast(z: Tensor, anchors: Tensor, right: Tensor, positive: Tensor, tau: float, form: str) -> Tensor:
    """(n,) contrastive loss of anchors among answers to one prompt. CLIPO (2603.10101), SupCon (2004.11362) eq. 2-3.

    With s = z_i . z_a / tau, A all other answers, P the other right ones:

        infonce      -s_p + lse_A s, p one of P        supcon_out   -mean_P s + lse_A s
        supcon_in    -lse_P s + log |P| + lse_A s      soft_nn      -lse_P s + lse_A s

    Args:
        z: (G, D) unit vectors. anchors: (n,) which rows of it. right: (G,) bool. positive: (n,) p of each anchor.
    """
    s = z[anchors] @ z.T / tau
    own = torch.arange(len(z), device=z.device) == anchors.unsqueeze(1)
    everyone = torch.logsumexp(s.masked_fill(own, -torch.inf), 1)
    if form == "infonce":
        return everyone - s.gather(1, positive.unsqueeze(1)).squeeze(1)
    others = right.unsqueeze(0) & ~own
    count = others.sum(1).to(s)
    if form == "supcon_out":
        return everyone - torch.where(others, s, 0.0).sum(1) / count
    near = torch.logsumexp(s.masked_fill(~others, -torch.inf), 1)
    return everyone - near + (count.log() if form == "supcon_in" else 0.0)


@hook("learners", "contrastive_head")
@dataclass(frozen=True)
class ContrastiveHead:
    """Contrastive loss of each right answer, (N,), as key `contrastive_loss`, NaN where none. CLIPO (2603.10101).

    z = normalise(W h), h the mean over the answer's tokens of the policy's last hidden states, detached; W is `dim` x
    width, without bias. An answer has a loss when its group holds another right one and a wrong one. Per generation,
    before rewards are read: one AdamW step at `lr` on the mean loss, then the losses under the new W. The positive p of
    an anchor is drawn once a generation, from the run's seed, however rows are dealt to processes.

    `tau` in units of cosine. `form`: see `contrast`. The first `warmup` generations train the head alone, the policy
    standing still (14 in the authors' script).
    """

    tau: float = param(0.05, above=0.0)
    dim: int = param(512, low=1)
    form: str = param("infonce", choices=FORMS)
    lr: float | None = param(1e-3, above=0.0)
    weight_decay: float = param(0.01, low=0.0)
    max_grad_norm: float = param(1.0, above=0.0, ours=True)
    warmup: int = param(0, low=0)

    math = "min_W mean_right -log(exp(z_i.z_p/{tau}) / sum_a!=i exp(z_i.z_a/{tau})), z = normalise(W h) [{form}]"
    needs = frozenset({"tokens"})
    provides = frozenset({"contrastive_loss"})

    def attach(self, trainer: Any, path: str) -> Any:
        """The worker: the head and its optimizer."""
        from ..learners.contrast import ContrastWorker

        return ContrastWorker(trainer, path, self)


@hook("rewards", "contrastive_bonus")
@dataclass(frozen=True)
class ContrastiveBonus:
    """R + max(-lam loss, floor) for a right answer that has a `contrastive_loss`, (N,). CLIPO (2603.10101).

    Never positive for the sampled form: it ranks right answers. `lam` times the loss should stay below what separates
    right from wrong; `floor` bounds it, in units of reward.
    """

    lam: float = param(0.2, low=0.0)
    floor: float = param(-0.5, high=0.0)

    math = "R + [right] max(-{lam} l, {floor}), l the contrastive loss"
    reads = frozenset({"contrastive_loss"})
    combined = True

    def __call__(self, scored: Scored) -> Tensor:
        if "contrastive_loss" not in scored.keys:
            raise VariantError(
                "this method needs `contrastive_loss` per row: learners: [contrastive_head], or "
                "columns={'contrastive_loss': [...]}"
            )
        loss = scored.keys["contrastive_loss"].to(scored.reward)
        ranked = (scored.correct > 0) & ~torch.isnan(loss)
        return scored.reward + torch.where(ranked, (-self.lam * loss).clamp(min=self.floor), 0.0)
