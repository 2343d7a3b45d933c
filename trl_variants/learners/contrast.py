"""The worker of the contrastive head: one step on this generation's answers, then their losses."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..hooks.learners_contrast import contrast
from ..records import Scored
from ..schedule import at
from .base import Rows, Worker, autocast, take
from .bodies import TrunkBody

if TYPE_CHECKING:
    from ..trainer.grpo import VariantGRPOTrainer


class ContrastWorker(Worker):
    """See `hooks.learners_contrast.ContrastiveHead`. Gives `contrastive_loss` per row."""

    provides = frozenset({"contrastive_loss"})
    learns = "before"

    def __init__(self, trainer: VariantGRPOTrainer, path: str, hook: Any):
        body = TrunkBody(trainer)
        dtype = torch.promote_types(trainer.model.dtype, torch.float32)
        self.head = nn.Linear(body.width, hook.dim, bias=False, dtype=dtype)
        super().__init__(trainer, path, hook, body, {"contrast": self.head})
        # (N, H) states, which rows have a loss and with whom: of this generation, where it has just learned from it
        self._known: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def freezes_policy(self) -> bool:
        return self.generations < self.hook.warmup

    def learn(self, rows: Rows, scored: Scored, advantage: Tensor | None) -> dict[str, float]:
        states, anchors, positive = self._known = self._seen(rows, scored)
        here = len(rows["completion_ids"])
        mine = self.mine(here)
        seen: list[Tensor] = []

        def loss_sum(part: Rows, index: Tensor) -> Tensor:
            chosen = torch.zeros_like(anchors)
            chosen[mine.start + index.to(chosen.device)] = True
            losses = self._losses(states, scored, anchors & chosen, positive)
            seen.append(losses.detach().sum())
            return losses.sum() if len(losses) else 0.0 * self.head.weight.sum()

        fitted = self.fit(rows, anchors[mine].to(states), loss_sum, epochs=1, minibatches=1)
        self.generations += 1
        total = torch.stack(seen).sum() if seen else states.new_zeros(())
        loss = float(self.trainer.accelerator.reduce(total, reduction="sum"))
        count = int(anchors.sum())
        metrics = {**fitted, "anchors": count / len(anchors), "warming_up": float(self.generations <= self.hook.warmup)}
        if count:
            metrics["loss"] = loss / count
        return {f"contrastive_head/{name}": value for name, value in metrics.items()}

    @torch.no_grad()
    def predict(self, rows: Rows, scored: Scored) -> dict[str, Tensor]:
        states, anchors, positive = self._known or self._seen(rows, scored)
        self._known = None
        every = torch.full_like(scored.reward, torch.nan)
        every[anchors] = self._losses(states, scored, anchors, positive).to(every)
        return {"contrastive_loss": every[self.mine(len(rows["completion_ids"]))]}

    def _seen(self, rows: Rows, scored: Scored) -> tuple[Tensor, Tensor, Tensor]:
        return self._pooled(rows, scored), *self._pairs(scored)

    def _pooled(self, rows: Rows, scored: Scored) -> Tensor:
        """(N, H) mean hidden state over the policy's tokens of each answer, of all processes; 0 without tokens."""
        count = len(rows["completion_ids"])
        mask = scored.need("mask")[self.mine(count)]

        def means() -> Tensor:
            parts = []
            with self.trainer.scoring(), autocast(self.trainer):
                for index in torch.arange(count).split(self.number_of_rows):
                    after = self.body.hidden(take(rows, index))[:, 1:].to(
                        self.head.weight.dtype
                    )  # having read its token
                    own = mask[index.to(mask.device), : after.shape[1]].to(after).unsqueeze(-1)
                    parts.append((after * own).sum(1) / own.sum(1).clamp(min=1.0))
            return torch.cat(parts)

        return self.trainer.gather_rows(self.together(means), 0.0)

    def _pairs(self, scored: Scored) -> tuple[Tensor, Tensor]:
        """(N,) bool, rows that have a loss; (N,) the row that is each one's positive."""
        usable = self._usable(scored)
        right = (scored.correct > 0) & usable
        digest = hashlib.sha256(f"{self.trainer.args.seed}/{self.path}/{self.generations}".encode()).digest()
        rng = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        draw = torch.rand(len(right), generator=rng, dtype=torch.float64).tolist()
        anchors, positive = torch.zeros_like(right), torch.zeros_like(scored.group)
        for members in self._groups(scored, usable):
            good = members[right[members]].tolist()
            if len(good) < 2 or len(good) == len(members):
                continue
            for place, i in enumerate(good):
                others = good[:place] + good[place + 1 :]
                anchors[i], positive[i] = True, others[int(draw[i] * len(others))]
        return anchors, positive

    def _losses(self, states: Tensor, scored: Scored, anchors: Tensor, positive: Tensor) -> Tensor:
        """(n,) losses of the anchors in their order, with gradient through the head."""
        usable, hook = self._usable(scored), at(self.hook, self.trainer.progress)
        found, order = [], []
        for members in self._groups(scored, usable):
            chosen = members[anchors[members]]
            if not len(chosen):
                continue
            with torch.autocast(states.device.type, enabled=False):
                z = torch.nn.functional.normalize(self.head(states[members]), dim=1)
            right = scored.correct[members] > 0
            place = lambda rows: torch.searchsorted(members, rows)  # noqa: B023, E731
            found.append(contrast(z, place(chosen), right, place(positive[chosen]), hook.tau, hook.form))
            order.append(chosen)
        if not found:
            return states.new_zeros(0)
        return torch.cat(found)[torch.cat(order).argsort()]

    @staticmethod
    def _usable(scored: Scored) -> Tensor:
        return ~torch.isnan(scored.reward) & (scored.need("mask").sum(1) > 0)

    @staticmethod
    def _groups(scored: Scored, usable: Tensor) -> list[Tensor]:
        """The usable rows of each group, ascending."""
        rows = usable.nonzero().squeeze(1)
        labels, counts = torch.unique(scored.group[rows], return_counts=True)
        order = scored.group[rows].argsort(stable=True)
        return list(rows[order].split(counts.tolist())) if len(labels) else []
