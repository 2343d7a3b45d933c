"""VariantPPOTrainer: TRL's removed PPOTrainer on today's TRL, with its arguments, names and metrics."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from transformers import DataCollatorWithPadding
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

from ..adapters import is_adapter
from ..errors import VariantError
from ..hooks.metrics import Mean
from ..hooks.regularizers import kl_estimate
from .grpo import VariantGRPOTrainer
from .ppo_config import VariantPPOConfig
from .ptx import PretrainingTerm
from .tokenized import with_prompts

# metrics that had another name in TRL's PPOTrainer
ALIASES = {
    "policy/clipfrac_avg": "clip_ratio/region_mean",
    "policy/entropy_avg": "entropy",
    "loss/policy_avg": "policy_loss",
    "loss/value_avg": "critic/loss",
    "val/clipfrac_avg": "critic/clip_fraction",
    "val/ratio": "ratio/mean",
}


class VariantPPOTrainer(VariantGRPOTrainer):
    """PPO with the arguments of TRL 1.12's PPOTrainer, and everything VariantGRPOTrainer has.

    Args:
        args: a VariantPPOConfig; with no variant named its numbers are the method.
        ref_model: the reference policy. None: the policy without its adapter, or a copy of it as it is now.
        reward_model: a sequence classifier, a path or a reward function: one more of `reward_funcs`. A classifier is
            given the policy's tokenizer.
        value_model: where the critic starts: a model with a `score` head, or a trunk. None: an adapter beside the
            policy's with PEFT, else a copy of `reward_model` where that is a classifier, else of the policy's trunk.
        train_dataset: with a column `prompt`, or `input_ids` as of old.
        ptx_dataset: texts for the pre-training term, with `text` or `input_ids`; `args.ptx_coef` switches it on.

    Raises:
        VariantError: arguments that contradict each other.
    """

    _tag_names = ["trl", "ppo", "trl-variants"]
    _name = "PPO"

    def __init__(
        self,
        args: Any = None,
        processing_class: Any = None,
        model: Any = None,
        ref_model: nn.Module | None = None,
        reward_model: Any = None,
        train_dataset: Any = None,
        value_model: nn.Module | None = None,
        data_collator: Any = None,
        eval_dataset: Any = None,
        optimizers: tuple = (None, None),
        callbacks: list | None = None,
        peft_config: Any = None,
        *,
        reward_funcs: Any = None,
        reward_processing_classes: Any = None,
        quantization_config: Any = None,
        tools: list | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        variant: Any = None,
        ptx_dataset: Any = None,
    ):
        args = VariantPPOConfig("ppo") if args is None else args
        _refuse(args, model, ref_model, data_collator, ptx_dataset)
        if variant is None and args.variant is None:
            variant = args.composition()
        elif isinstance(args, VariantPPOConfig):
            args.refuse_replaced()
        funcs, classes = _rewards(reward_model, reward_funcs, reward_processing_classes, processing_class)
        given = {}
        adapted = peft_config is not None or is_peft_model(model) or (isinstance(model, str) and is_adapter(model))
        if value_model is None and not adapted and _is_classifier(reward_model):
            value_model = (
                copy.deepcopy(reward_model) if getattr(args, "value_body", "auto") in ("auto", "model") else None
            )
        if value_model is not None:
            given["value_model"] = value_model
        self.given_models = given
        self._reference = ref_model
        in_memory = isinstance(model, nn.Module) and not adapted
        self._policy_to_copy = model if in_memory and not args.sync_ref_model else None
        self._known_ids: dict[str, list[int]] = {}
        if processing_class is not None:
            train_dataset, eval_dataset = (
                with_prompts(data, processing_class, self._known_ids, getattr(args, "dataset_num_proc", None))
                for data in (train_dataset, eval_dataset)
            )
        self._started = time.time()
        self._ptx_loss = 0.0  # of the window so far, on this process
        super().__init__(
            model=model,
            reward_funcs=funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
            variant=variant,
        )
        if getattr(args, "stop_token_id", None) is not None:
            self.eos_token_ids = [args.stop_token_id]
        self._install_reference()
        self.ptx: PretrainingTerm | None = None
        if ptx_dataset is not None:
            rows = args.ptx_batch_size or args.mini_batch_size
            self.ptx = PretrainingTerm(self, ptx_dataset, args.ptx_coef, rows)

    # --- the reference policy -----------------------------------------------------------------------------------

    def _derive_switches(self, args: Any) -> None:
        super()._derive_switches(args)
        policy, self._policy_to_copy, self._beta = self._policy_to_copy, None, args.beta
        if args.beta == 0.0:
            self._reference = None  # nothing asks for it
        elif self._reference is None and policy is not None:
            self._reference = copy.deepcopy(policy)
        if self._reference is not None:
            args.beta = 0.0  # else TRL loads another one from the policy's path

    def _install_reference(self) -> None:
        reference, self._reference = self._reference, None
        if reference is None:
            return
        self.args.beta = self.beta = self._beta
        reference.requires_grad_(False)
        disable_dropout_in_model(reference)
        add_fused_lm_head(
            reference,
            temperature=self.temperature,
            cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32,
            outputs=("log_probs", "entropy"),
        )
        self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)

    # --- data ---------------------------------------------------------------------------------------------------

    def _tokenize_prompts(self, prompts: list) -> Any:
        tokenized = super()._tokenize_prompts(prompts)
        if not self._known_ids:
            return tokenized
        ids = [
            self._known_ids.get(p, own) if isinstance(p, str) else own
            for p, own in zip(prompts, tokenized[0], strict=True)
        ]
        return (ids, *tokenized[1:])

    # --- the pre-training term ----------------------------------------------------------------------------------

    def window_batches(self, raw: list) -> list[dict]:
        batches = super().window_batches(raw)
        if self.ptx is not None and "frozen" not in batches[0]:
            for batch, texts in zip(batches, self.ptx.deal(len(batches)), strict=True):
                batch["ptx"] = texts
        return batches

    def micro_batch_loss(self, model: nn.Module, batch: dict) -> Tensor:
        texts = batch.pop("ptx", None)  # first: a micro-step without rows is an empty batch
        term = None if texts is None or self.ptx is None else self.ptx.loss(model, texts)
        if term is not None:
            self._ptx_loss += float(term.detach())
        if texts is not None and batch.get("last"):  # one page a window, on every process
            share = torch.tensor(1.0 / self.world, device=self.accelerator.device)
            self.book.add({"terms/ptx": Mean(torch.full_like(share, self._ptx_loss), share)})
            self._ptx_loss = 0.0
        loss = super().micro_batch_loss(model, batch)
        return loss if term is None else loss + term * self.world

    # --- the old names of metrics -------------------------------------------------------------------------------

    def _log_generation(self, scored: Any) -> None:
        super()._log_generation(scored)
        metrics = self._metrics["train" if self.training else "eval"]
        if self.num_generations == 1:
            metrics.pop("frac_reward_zero_std", None)
        scores = scored.reward[~torch.isnan(scored.reward)]
        if len(scores):
            metrics["objective/scores"].append(float(scores.mean()))
        mask, tokens = scored.tokens.get("mask"), scored.tokens
        if scored.truncated is not None:
            metrics["val/num_eos_tokens"].append(float((~scored.truncated.bool()).sum()))
        if mask is None or "old_logps" not in tokens:
            return
        metrics["objective/entropy"].append(float((-tokens["old_logps"] * mask).sum(1).mean()))
        if "ref_logps" in tokens:
            hook = next((h for h in self.variant.rewards if hasattr(h, "estimator")), None)
            gap = (tokens["old_logps"] - tokens["ref_logps"]) * mask
            kl = float((kl_estimate(gap, getattr(hook, "estimator", "k1")) * mask).sum(1).mean())
            coef = float(getattr(hook, "coef", 0.0)) if hook is not None else 0.0
            states = self.memory.states.values()
            coef = next((s["coef"] for s in states if isinstance(s, dict) and "coef" in s), coef)
            metrics["objective/kl"].append(kl)
            metrics["objective/non_score_reward"].append(-coef * kl)
            if len(scores):
                metrics["objective/rlhf_reward"].append(float(scores.mean()) - coef * kl)

    def own_parts(self, record: Any) -> dict:
        gap = (record.logps.detach() - record.anchor) * record.mask
        return {"policy/approxkl_avg": Mean.over(0.5 * gap**2, record.mask)}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.training else "eval"
        metrics = self._metrics[mode]
        for old, new in ALIASES.items():
            if metrics.get(new):
                metrics[old] = list(metrics[new])
        if metrics.get("ratio/mean") and metrics.get("ratio/ess"):
            pairs = zip(metrics["ratio/mean"], metrics["ratio/ess"], strict=True)
            metrics["val/ratio_var"] = [m * m / max(e, 1e-30) - m * m for m, e in pairs]
        if mode == "train" and "learning_rate" in logs:
            cycle = self.args.steps_per_generation * self.num_iterations
            episode = -(-self._step // cycle) * self.args.generation_batch_size
            speed = int(episode / max(time.time() - self._started, 1e-9))
            logs = {**logs, "lr": logs["learning_rate"], "episode": episode, "eps": speed}
        super().log(logs, start_time)


def _refuse(args: Any, model: Any, ref_model: Any, data_collator: Any, ptx_dataset: Any) -> None:
    if model is None:
        raise VariantError("the trainer needs a model: pass model=")
    if ref_model is not None and ref_model is model:
        raise VariantError("model and ref_model are the same object: pass a copy, or none (one is made)")
    if data_collator is not None and not isinstance(data_collator, DataCollatorWithPadding):
        raise VariantError("the trainer pads by itself and takes no data_collator of another kind: drop it")
    if bool(getattr(args, "ptx_coef", 0.0)) != (ptx_dataset is not None):
        raise VariantError("ptx_coef and ptx_dataset go together: set both, or neither")


def _is_classifier(model: Any) -> bool:
    return isinstance(model, nn.Module) and isinstance(getattr(model, "score", None), nn.Module)


def _rewards(reward_model: Any, reward_funcs: Any, classes: Any, tokenizer: Any) -> tuple[Any, Any]:
    """The reward functions with the reward model first among them, and their tokenizers."""
    if reward_model is None:
        return reward_funcs, classes
    others = [] if reward_funcs is None else reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    own = tokenizer if isinstance(reward_model, nn.Module) else None  # of old, it shared the policy's
    if not others:
        return [reward_model], [own] if classes is None else classes
    if classes is None:
        classes = [None] * len(others)
    return [reward_model, *others], [own, *(classes if isinstance(classes, list) else [classes])]
