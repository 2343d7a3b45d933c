"""VariantPPOConfig: the names of TRL's removed PPOConfig, mapped to where they live now."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ..composition import Variant, variant
from ..errors import VariantError
from .config import VariantGRPOConfig

# names that a hook replaces once a variant is named -> what to edit then
REPLACED = {
    "kl_coef": "rewards: kl_in_reward.coef",
    "kl_estimator": "rewards: kl_in_reward.estimator",
    "kl_target": "rewards: adaptive_kl_in_reward.target",
    "kl_horizon": "rewards: adaptive_kl_in_reward.horizon",
    "missing_eos_penalty": "rewards: missing_eos_penalty.penalty",
    "whiten_rewards": "advantage: gae.whiten_rewards",
    "gamma": "advantage: gae.gamma",
    "lam": "advantage: gae.lam",
    "cliprange": "clip.eps_low and clip.eps_high (ppo)",
    "cliprange_value": "learners: critic.clip",
    "vf_coef": "learners: critic.coef",
    "value_learning_rate": "learners: critic.lr",
    "value_warmup": "learners: critic.warmup",
    "value_body": "learners: critic.body",
}


def _help(text: str, default: Any) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class VariantPPOConfig(VariantGRPOConfig):
    """VariantGRPOConfig with the names and defaults of TRL 1.12's PPOConfig.

    With no `variant` named these numbers are the method: `composition()` is what TRL's PPOTrainer computed. With one,
    those that a hook replaces must stay at their defaults. `num_generations` may be 1.

    One batch is `per_device_train_batch_size * gradient_accumulation_steps` rows a process, generated at once, split
    into `num_mini_batches` optimizer steps, `num_ppo_epochs` times.

    Raises:
        VariantError: settings that contradict each other or do not divide.
    """

    allows_single = True

    num_generations: int | None = _help("Completions per prompt; 1 is allowed, since a critic is the baseline.", 1)
    learning_rate: float = _help("The initial learning rate for AdamW.", 3e-6)
    temperature: float = _help("Sampling temperature.", 0.7)
    max_completion_length: int | None = _help("Longest completion in tokens. Default: response_length.", None)
    num_iterations: int | None = _help("Passes over each generation. Default: num_ppo_epochs.", None)
    response_length: int = _help("Length of the response, in tokens.", 53)
    num_ppo_epochs: int = _help("Passes over each batch.", 4)
    num_mini_batches: int = _help("Optimizer steps in each pass over a batch.", 1)
    total_episodes: int | None = _help("Completions to train on; sets max_steps.", None)
    local_rollout_forward_batch_size: int = _help("Kept for old scripts: per_device_train_batch_size is used.", 64)
    num_sample_generations: int = _help("Kept for old scripts: set log_completions to see samples.", 10)
    stop_token: Literal["eos"] | None = _help("'eos': the tokenizer's end of text, which always ends an answer.", None)
    stop_token_id: int | None = _help("Another token that ends an answer, in place of the end of text.", None)
    missing_eos_penalty: float | None = _help("Taken from the score of an answer that the length limit cut.", None)
    sft_model_path: str = _help("Kept for old scripts, which read it themselves.", "EleutherAI/pythia-160m")
    reward_model_path: str = _help("Kept for old scripts, which read it themselves.", "EleutherAI/pythia-160m")
    model_adapter_name: str | None = _help("Kept for old scripts: the policy's adapter is the active one.", None)
    ref_adapter_name: str | None = _help("Kept for old scripts: the reference is the base, or adapter 'ref'.", None)
    dataset_num_proc: int | None = _help("Processes that prepare a data set with input_ids.", None)
    whiten_rewards: bool = _help("Whiten the token rewards, their mean kept.", False)
    kl_coef: float = _help("Coefficient of the KL penalty inside the token rewards.", 0.05)
    kl_estimator: Literal["k1", "k3"] = _help("Estimator of that KL.", "k1")
    kl_target: float | None = _help(
        "Nats an answer that an adaptive kl_coef holds. Default: a fixed coefficient.", None
    )
    kl_horizon: float = _help("Answers over which the adaptive kl_coef moves.", 10000.0)
    cliprange: float = _help("Clip range of the ratio.", 0.2)
    vf_coef: float = _help("Coefficient of the value loss.", 0.1)
    cliprange_value: float = _help("Clip range of the values, in units of value.", 0.2)
    gamma: float = _help("Discount factor.", 1.0)
    lam: float = _help("Lambda of GAE.", 0.95)
    value_learning_rate: float | None = _help(
        "Learning rate of the critic. Default: the policy's, schedule and all.", None
    )
    value_warmup: int = _help("Generations that train the critic alone at the start.", 0)
    value_body: Literal["auto", "adapter", "model", "trunk"] = _help("Where the critic's features come from.", "auto")
    ptx_coef: float = _help("Coefficient of the pre-training loss on ptx_dataset (PPO-ptx); 0: none.", 0.0)
    ptx_batch_size: int | None = _help("Texts of it in an optimizer step, over all processes. Default: as rows.", None)

    def __post_init__(self):
        self.num_iterations = self.num_ppo_epochs if self.num_iterations is None else self.num_iterations
        if self.max_completion_length is None:
            self.max_completion_length = self.response_length
        if self.stop_token is not None and self.stop_token_id is not None:
            raise VariantError("stop_token and stop_token_id contradict each other: set one of them")
        if self.stop_token_id is not None:
            key, value = (
                ("stop_token_ids", [self.stop_token_id]) if self.use_vllm else ("eos_token_id", self.stop_token_id)
            )
            known: Any = self  # TRL's fields, whose types mypy does not see
            self.generation_kwargs = {**(known.generation_kwargs or {}), key: value}
        if self.missing_eos_penalty is not None and self.missing_eos_penalty <= 0:
            raise VariantError(
                f"missing_eos_penalty is taken from the score and must be positive, got {self.missing_eos_penalty}"
            )
        self._split_into_mini_batches()
        if self.num_generations == 1:
            self._as_if_grouped()
        else:
            super().__post_init__()
        if self.total_episodes is not None:
            updates = self.num_iterations * self.steps_per_generation // self.gradient_accumulation_steps
            self.max_steps = math.ceil(self.total_episodes / self.generation_batch_size) * max(updates, 1)

    def _split_into_mini_batches(self) -> None:
        known: Any = self
        if known.steps_per_generation is not None or known.generation_batch_size is not None:
            if self.num_mini_batches != 1:
                raise VariantError(
                    "num_mini_batches and steps_per_generation (or generation_batch_size) both say how a batch "
                    "is split: keep one"
                )
            return
        steps, count = known.gradient_accumulation_steps, self.num_mini_batches
        if count < 1 or steps % count:
            raise VariantError(
                f"gradient_accumulation_steps={steps} micro-batches do not split into num_mini_batches={count}: "
                "make one a multiple of the other"
            )
        self.steps_per_generation, self.gradient_accumulation_steps = steps, steps // count

    def _as_if_grouped(self) -> None:
        """TRL refuses groups of one; nothing else in it does. It sees a group that divides every batch."""
        known: Any = self
        self.num_generations_eval = known.num_generations_eval or 1
        rows = known.generation_batch_size or self.per_device_train_batch_size * (known.steps_per_generation or 1)
        if rows < 2:
            raise VariantError(
                "one row in a generation leaves nothing to whiten over: raise per_device_train_batch_size"
            )
        self.num_generations = rows
        try:
            super().__post_init__()
        finally:
            self.num_generations = 1

    # --- derived, as the old configuration had them --------------------------------------------------------------

    @property
    def local_batch_size(self) -> int:
        """Rows of a batch on one process."""
        return self.per_device_train_batch_size * self.steps_per_generation

    @property
    def micro_batch_size(self) -> int:
        """Rows of a micro-batch over all processes."""
        return self.per_device_train_batch_size * self.world_size

    @property
    def batch_size(self) -> int:
        """Rows of a batch over all processes."""
        return self.generation_batch_size

    @property
    def local_mini_batch_size(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def mini_batch_size(self) -> int:
        """Rows of an optimizer step over all processes."""
        return self.local_mini_batch_size * self.world_size

    @property
    def num_total_batches(self) -> int | None:
        return None if self.total_episodes is None else math.ceil(self.total_episodes / self.batch_size)

    # --- the method ---------------------------------------------------------------------------------------------

    def composition(self) -> Variant:
        """The numbers of this configuration as a Variant, with the rules of TRL 1.12's PPOTrainer.

        Raises:
            VariantError: a number outside its range.
        """
        rewards: list[Any] = []
        if self.missing_eos_penalty is not None:
            rewards.append({"missing_eos_penalty": {"penalty": self.missing_eos_penalty}})
        kl: dict[str, Any] = {"coef": self.kl_coef, "level": "token", "estimator": self.kl_estimator}
        if self.kl_target is not None:
            held = {**kl, "target": self.kl_target, "horizon": self.kl_horizon}
            rewards.append({"adaptive_kl_in_reward": held})
        elif self.kl_coef:
            rewards.append({"kl_in_reward": kl})
        critic = {
            "clip": self.cliprange_value,
            "coef": self.vf_coef,
            "epochs": self.num_ppo_epochs,
            "minibatches": self.num_mini_batches,
            "lr": self.value_learning_rate,
            "warmup": self.value_warmup,
            "weight_decay": self.weight_decay,
            "max_grad_norm": self.max_grad_norm,
            "body": self.value_body,
        }
        gae = {"gamma": self.gamma, "lam": self.lam, "whiten_rewards": self.whiten_rewards}
        return variant(
            {
                "name": "trl-ppo",
                "rewards": rewards,
                "advantage": {"gae": {**gae, "bootstrap": False, "score_after_end": True}},
                "ratio": "token",
                "clip": {"ppo": {"eps_low": self.cliprange, "eps_high": self.cliprange}},
                "aggregate": "token_mean",
                "learners": [{"critic": critic}],
            }
        )

    def refuse_replaced(self) -> None:
        """Raises VariantError for a number that has no effect beside a named variant, with what to edit instead."""
        defaults = {f.name: f.default for f in fields(VariantPPOConfig)}
        for name, instead in REPLACED.items():
            if getattr(self, name) != defaults[name]:
                raise VariantError(
                    f"{name}={getattr(self, name)!r} has no effect when a variant is named: set {instead}"
                )
