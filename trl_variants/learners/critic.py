"""The critic's worker: predicts values before advantages, then regresses on the returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..hooks.advantage_gae import GAE
from ..records import Scored
from ..schedule import at
from .base import Rows, Worker
from .bodies import ModelBody, make_body

if TYPE_CHECKING:
    from ..trainer.grpo import VariantGRPOTrainer


def value_loss(values: Tensor, old: Tensor, targets: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """0.5 max((V - G)^2, (Vc - G)^2) per state, (N, T), and where the clipped branch is the larger. PPO eq. 9.

    Vc = clip(V, V_old - clip, V_old + clip). The larger of the two: the clipped branch has no gradient.
    """
    plain = (values - targets) ** 2
    if clip is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    bounded = (torch.maximum(torch.minimum(values, old + clip), old - clip) - targets) ** 2
    return 0.5 * torch.maximum(plain, bounded), bounded > plain


def explained_variance(values: Tensor, targets: Tensor, mask: Tensor) -> float:
    """1 - Var(G - V) / Var(G) over the tokens of the mask; NaN where the targets do not vary."""
    count = mask.sum().clamp(min=1.0)
    variance = lambda x: ((x - (x * mask).sum() / count) ** 2 * mask).sum() / count  # noqa: E731
    spread = float(variance(targets))
    return 1.0 - float(variance(targets - values)) / spread if spread > 1e-12 else float("nan")


class CriticWorker(Worker):
    """See `hooks.learners_critic.Critic`. Gives `values` per token and `bootstrap` per row."""

    provides = frozenset({"values"})

    def __init__(self, trainer: VariantGRPOTrainer, path: str, hook: Any):
        given = trainer.given_models.get("value_model")
        body = make_body(trainer, hook.body, "critic", r=hook.r, alpha=hook.alpha, targets=hook.targets, given=given)
        own = body.score if isinstance(body, ModelBody) else None
        if own is None:
            self.head: nn.Module = nn.Linear(body.width, 1)
            nn.init.zeros_(self.head.weight)
            nn.init.constant_(self.head.bias, hook.init)
        else:
            self.head = own
        super().__init__(trainer, path, hook, body, {"value": self.head} if own is None else {})
        self._states: Tensor | None = None  # (b, T + 1) values of this generation's states, before its updates

    @property
    def freezes_policy(self) -> bool:
        return self.generations < self.hook.warmup

    def values(self, rows: Rows) -> Tensor:
        """(b, T + 1) value of the state before each token and after the last."""
        hidden = self.body.hidden(rows)
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden.to(next(self.head.parameters()).dtype)).squeeze(-1).float()

    def predict(self, rows: Rows, scored: Scored) -> dict[str, Tensor]:
        width = rows["completion_ids"].shape[1]
        states = self.over_rows(rows, self.values)
        states = torch.nn.functional.pad(states, (0, width + 1 - states.shape[1]))
        self._states = states
        lengths = (rows["completion_mask"] * torch.arange(1, width + 1, device=states.device)).amax(1)
        after = states.gather(1, lengths.unsqueeze(1)).squeeze(1)
        return {"values": states[:, :width], "bootstrap": after}

    def learn(self, rows: Rows, scored: Scored, advantage: Tensor | None) -> dict[str, float]:
        assert self._states is not None, "predict comes first"
        hook, rule = at(self.hook, self.trainer.progress), at(self.trainer.variant.advantage, self.trainer.progress)
        rule = rule if hasattr(rule, "value_targets") else GAE(lam=1.0)
        every, counted = rule.value_targets(scored, hook.lam)
        metrics = self._report(scored, rule)
        old = self._states
        mine, width = self.mine(len(old)), min(old.shape[1], every.shape[1])
        targets, mask = every[mine, :width].to(old), counted[mine, :width].to(old)
        lost: list[Tensor] = []

        def loss_sum(part: Rows, index: Tensor) -> Tensor:
            index = index.to(old.device)
            values = self.values(part)
            w = min(values.shape[1], width)  # the part's completions may be shorter
            loss, clipped = value_loss(values[:, :w], old[index, :w], targets[index, :w], hook.clip)
            m = mask[index, :w]
            lost.append(torch.stack([(loss * m).sum(), (clipped * m).sum(), m.sum()]).detach())
            return hook.coef * (loss * m).sum()

        fitted = self.fit(rows, mask.sum(1), loss_sum, hook.epochs, hook.minibatches)
        self.generations += 1
        self._states = None
        sums = torch.stack(lost).sum(0) if lost else torch.zeros(3, device=old.device)
        total = self.trainer.accelerator.reduce(sums, reduction="sum").tolist()
        metrics["critic/loss"] = total[0] / max(total[2], 1.0)
        metrics["critic/clip_fraction"] = total[1] / max(total[2], 1.0)
        metrics["critic/warming_up"] = float(self.generations <= self.hook.warmup)
        return metrics | {f"critic/{name}": x for name, x in fitted.items()}

    def _report(self, scored: Scored, rule: GAE) -> dict[str, float]:
        """How good the predictions were, before any update: against whole returns (lambda 1), which hold no value."""
        returns, mask = rule.value_targets(scored, 1.0)
        values = torch.nn.functional.pad(scored.need("values"), (0, returns.shape[1] - scored.need("values").shape[1]))
        mask = torch.nn.functional.pad(scored.need("mask"), (0, mask.shape[1] - scored.need("mask").shape[1])) * mask
        count = mask.sum().clamp(min=1.0)
        return {
            "critic/explained_variance": explained_variance(values * mask, returns, mask),
            "critic/value_mean": float((values * mask).sum() / count),
            "critic/return_mean": float((returns * mask).sum() / count),
        }
