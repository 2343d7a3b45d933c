"""The implicit process reward: a language model trained on outcomes alone, whose log-ratio rewards each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .base import hook, param


@hook("learners", "implicit_reward")
@dataclass(frozen=True)
class ImplicitReward:
    """q_t = log pi_phi - log pi_ref of the sampled token as `process_rewards`, (N, T), in nats. PRIME (2502.01456).

    A language model pi_phi, at first the reference itself, is trained on the rows that are in the policy's loss:
    loss = mean_rows BCE(sigmoid(beta sum_t q_t), right or wrong). `scaled` gives beta q_t, as the paper writes it; the
    authors' code gives q_t.

    `order`: "after" the generation's rewards were read (the authors' script), or "before", on every row with a reward,
    which no select hook has seen yet. `reference`: "frozen", the policy before training, or "policy", the one that
    sampled. Per generation: `epochs` over it in `minibatches` optimizer steps each, AdamW at `lr` (None: the policy's).
    `body`: "adapter", a LoRA adapter of rank `r` on `targets` of the policy's base; "model", a copy of the policy;
    "auto", the adapter with PEFT, else the copy. The authors' `lr` is for a whole model: an adapter takes about ten
    times that. Log-probs are at the run's temperature.
    """

    beta: float = param(0.05, above=0.0)
    scaled: bool = False
    order: str = param("after", choices=("after", "before"))
    reference: str = param("frozen", choices=("frozen", "policy"))
    epochs: int = param(1, low=1)
    minibatches: int = param(1, low=1)
    lr: float | None = param(1e-6, above=0.0)
    weight_decay: float = param(0.0, low=0.0)
    max_grad_norm: float = param(10.0, above=0.0)
    body: str = param("auto", choices=("auto", "adapter", "model"))
    r: int = param(8, low=1)
    alpha: float = param(16.0, above=0.0)
    targets: str = "q_proj,v_proj"

    provides = frozenset({"process_rewards"})

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"tokens", "ref_logps" if self.reference == "frozen" else "old_logps"})

    @property
    def math(self) -> str:
        other = "lp_ref" if self.reference == "frozen" else "lp_old"
        given = "{beta} q_t" if self.scaled else "q_t"
        return f"min_phi mean_rows BCE(sigmoid({{beta}} sum_t q_t), right), q_t = lp_phi - {other}; p_t = {given}"

    def attach(self, trainer: Any, path: str) -> Any:
        """The worker: the reward model, or the adapter that is one, and its optimizer."""
        from ..learners.process import ProcessRewardWorker

        return ProcessRewardWorker(trainer, path, self)
