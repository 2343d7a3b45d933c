"""The critic: a value for every state of an answer, learned from the returns of the policy's own rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .base import hook, param


@hook("learners", "critic")
@dataclass(frozen=True)
class Critic:
    """V(state) for each token, (N, T), and the state after the last, (N,). PPO (1707.06347) eq. 9 with value clipping.

    loss = coef 0.5 mean_tokens max((V - G)^2, (clip(V, V_old +- clip) - G)^2), G the lambda-return of `lam` (None: the
    advantage's). `clip` is in units of value; None: no clipping.

    Per generation: `epochs` over it in `minibatches` optimizer steps each, AdamW at `lr` (None: the policy's current
    one). The first `warmup` generations train the critic alone, the policy standing still (VAPO). `body`: "adapter", a
    LoRA adapter of rank `r` on `targets` of the policy's base; "model", a model of its own; "trunk", a head on the
    policy's detached hidden states; "auto", the adapter with PEFT, else the model. The head starts at weight 0 and bias
    `init`, so that every value is `init`, in units of reward.
    """

    lam: float | None = param(None, low=0.0, high=1.0)
    clip: float | None = param(0.2, above=0.0)
    coef: float = param(1.0, above=0.0)
    epochs: int = param(1, low=1)
    minibatches: int = param(1, low=1)
    warmup: int = param(0, low=0)
    lr: float | None = param(None, above=0.0)
    weight_decay: float = param(0.0, low=0.0)
    max_grad_norm: float = param(1.0, above=0.0)
    init: float = 0.0
    body: str = param("auto", choices=("auto", "adapter", "model", "trunk"))
    r: int = param(8, low=1)
    alpha: float = param(16.0, above=0.0)
    targets: str = "q_proj,v_proj"

    needs = frozenset({"tokens"})
    provides = frozenset({"values"})

    @property
    def math(self) -> str:
        lam = "the advantage's lambda" if self.lam is None else "lambda {lam}"
        square = "(V - G)^2" if self.clip is None else "max((V - G)^2, (clip(V, V_old +- {clip}) - G)^2)"
        return f"min_V {{coef}} 0.5 mean_tokens {square}, G of {lam}"

    def attach(self, trainer: Any, path: str) -> Any:
        """The worker: value model or adapter, head and optimizer, on this trainer's device."""
        from ..learners.critic import CriticWorker

        return CriticWorker(trainer, path, self)
