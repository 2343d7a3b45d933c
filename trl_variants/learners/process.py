"""The worker of the implicit process reward: a causal LM beside the policy, trained on right and wrong answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import Scored
from ..schedule import at
from ..trainer.statistics import scored_rows
from .base import Rows, Worker
from .bodies import make_body

if TYPE_CHECKING:
    from ..trainer.grpo import VariantGRPOTrainer


def outcome_loss(log_ratio: Tensor, mask: Tensor, right: Tensor, beta: float) -> Tensor:
    """(b,) BCE(sigmoid(beta sum_t q_t), right) of answers with log-ratios q (b, T). PRIME (2502.01456) eq. 3."""
    total = beta * (log_ratio * mask).sum(1)
    return torch.nn.functional.binary_cross_entropy_with_logits(total, right.to(total), reduction="none")


class ProcessRewardWorker(Worker):
    """See `hooks.learners_process.ImplicitReward`. Gives `process_rewards` per token.

    Raises:
        VariantError: the policy continues an adapter, without which its base is not the reference.
    """

    provides = frozenset({"process_rewards"})

    def __init__(self, trainer: VariantGRPOTrainer, path: str, hook: Any):
        if "ref" in getattr(trainer.model, "peft_config", {}):
            raise VariantError(
                "the reward model of implicit_reward starts as the reference, and here that is the base with the "
                "adapter the policy was given: merge that adapter into the model first (merge_and_unload)"
            )
        body = make_body(
            trainer, hook.body, "process_reward", r=hook.r, alpha=hook.alpha, targets=hook.targets, lm=True
        )
        super().__init__(trainer, path, hook, body)
        self.learns = hook.order

    def predict(self, rows: Rows, scored: Scored) -> dict[str, Tensor]:
        here = _as_generated(rows, self.trainer.empty_rows)
        size = self.trainer.args.per_device_train_batch_size

        def passes() -> Tensor:
            with self.trainer.scoring(), self.body.active(), self.trainer.forward.uncounted():
                return scored_rows(self.trainer, self.body.model, here, batch_size=size, entropy=False).logps

        # in the layout of the reference's own pass: an untrained reward model then says exactly 0
        logps = self.together(passes)
        reference, mask = self._known(rows, scored)
        scale = at(self.hook, self.trainer.progress).beta if self.hook.scaled else 1.0
        return {"process_rewards": scale * (logps - reference) * mask}

    def learn(self, rows: Rows, scored: Scored, advantage: Tensor | None) -> dict[str, float]:
        hook = at(self.hook, self.trainer.progress)
        reference, mask = self._known(rows, scored)
        mine = self.mine(len(mask))
        right = scored.correct[mine]
        taught = scored.keep[mine] & ~torch.isnan(scored.reward[mine]) & (mask.sum(1) > 0)
        seen: list[Tensor] = []

        def loss_sum(part: Rows, index: Tensor) -> Tensor:
            index = index.to(mask.device)
            with self.trainer.forward.uncounted():
                logps = scored_rows(self.trainer, self.body.model, part, entropy=False).logps
            width = logps.shape[1]
            q, m, use = logps - reference[index, :width], mask[index, :width], taught[index]
            loss = outcome_loss(q, m, right[index], hook.beta) * use
            agrees = ((q.detach() * m).sum(1) > 0) == (right[index] > 0)
            seen.append(torch.stack([loss.detach().sum(), (agrees & use).to(loss).sum(), use.to(loss).sum()]))
            return loss.sum()

        fitted = self.fit(rows, taught.to(mask), loss_sum, hook.epochs, hook.minibatches)
        self.generations += 1
        sums = torch.stack(seen).sum(0) if seen else torch.zeros(3, device=mask.device)
        total = self.trainer.accelerator.reduce(sums.float(), reduction="sum").tolist()
        metrics = {"lr": fitted["lr"]}
        if total[2]:
            metrics |= {"loss": total[0] / total[2], "accuracy": total[1] / total[2], "grad_norm": fitted["grad_norm"]}
        return {f"implicit_reward/{name}": value for name, value in metrics.items()}

    def _known(self, rows: Rows, scored: Scored) -> tuple[Tensor, Tensor]:
        """(b, T) the reference's log-probs and the mask of the policy's tokens, of this process's rows."""
        mine, width = self.mine(len(rows["completion_ids"])), rows["completion_ids"].shape[1]
        reference = scored.need("ref_logps" if self.hook.reference == "frozen" else "old_logps")[mine, :width]
        return reference, scored.need("mask")[mine, :width].to(reference)


def _as_generated(rows: Rows, empty: list[int]) -> Rows:
    """The rows as TRL saw them, where a pad token stands for an empty answer."""
    text = {name: rows[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
    if empty:
        text["completion_mask"] = text["completion_mask"].clone()
        text["completion_mask"][empty, 0] = 1
    return text
