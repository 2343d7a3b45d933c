"""TRL's own settings as a Variant: what trl.GRPOTrainer computes, rule for rule.

Where TRL's rule depends on how a batch is split (bnpo, entropy bonus, entropy quantile) or averages per generation
batch
(dapo's denominator), the hook's `span` says so. `SETTINGS` also tells which hook parameter replaces which setting.
"""

from __future__ import annotations

from typing import Any

from .composition import Variant
from .errors import VariantError, did_you_mean

# TRL setting -> what to edit instead when a variant is named
SETTINGS = {
    "epsilon": "clip.eps_low (ppo, geometric_mean)",
    "epsilon_high": "clip.eps_high (ppo, geometric_mean) or clip.cap (cispo)",
    "delta": "clip.delta (ppo)",
    "beta": "regularizers: kl.coef",
    "use_bias_correction_kl": "regularizers: kl.weight",
    "loss_type": "clip and aggregate",
    "importance_sampling_level": "ratio",
    "scale_rewards": "advantage.std (grouped)",
    "multi_objective_aggregation": "advantage (grouped or normalize_each)",
    "sapo_temperature_pos": "clip.tau_pos (sapo)",
    "sapo_temperature_neg": "clip.tau_neg (sapo)",
    "vespo_k_pos": "clip.k_pos (gamma_weight)",
    "vespo_lambda_pos": "clip.lambda_pos (gamma_weight)",
    "vespo_k_neg": "clip.k_neg (gamma_weight)",
    "vespo_lambda_neg": "clip.lambda_neg (gamma_weight)",
    "top_entropy_quantile": "weight: entropy_quantile.keep",
    "entropy_coef": "regularizers: entropy_bonus.coef",
    "use_adaptive_entropy": "regularizers: adaptive_entropy",
    "entropy_coef_min": "regularizers: adaptive_entropy.min",
    "entropy_coef_max": "regularizers: adaptive_entropy.max",
    "entropy_coef_delta": "regularizers: adaptive_entropy.step",
    "entropy_target": "regularizers: adaptive_entropy.target",
    "off_policy_mask_threshold": "weight: off_policy_mask.threshold",
    "mask_truncated_completions": "select: mask_truncated",
    "vllm_importance_sampling_mode": "weight: sampler_correction.mode",
    "vllm_importance_sampling_clip_max": "weight: sampler_correction.max",
    "vllm_importance_sampling_clip_min": "weight: sampler_correction.min",
}

_PPO_LOSSES = {
    "grpo": "sequence_mean",
    "dapo": {"token_mean": {"span": "generation"}},
    "bnpo": {"token_mean": {"span": "micro-batch"}},
    "dr_grpo": "constant",
    "luspo": "sequence_sum",
}
_LOSSES = (*_PPO_LOSSES, "cispo", "sapo", "vespo")


def sampler_correction(config: Any) -> dict[str, Any] | None:
    """TRL's vLLM correction as a weight hook's spec; None when the run has none."""
    if not (config.use_vllm and config.vllm_importance_sampling_correction):
        return None
    return {
        "sampler_correction": {
            "mode": config.vllm_importance_sampling_mode,
            "min": config.vllm_importance_sampling_clip_min,
            "max": config.vllm_importance_sampling_clip_max,
        }
    }


def from_config(config: Any) -> Variant:
    """GRPOConfig -> Variant. A GMPOConfig (trl.experimental.gmpo) gives GMPO.

    Raises:
        VariantError: a loss type or setting TRL does not know.
    """
    gmpo = type(config).__name__ == "GMPOConfig"
    if config.loss_type not in _LOSSES:
        raise VariantError(f"unknown loss_type {config.loss_type!r}{did_you_mean(config.loss_type, _LOSSES)}")
    correction = sampler_correction(config)
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    clip, aggregate = _clip_and_aggregate(config, high, correction, gmpo)
    weight: list[Any] = []
    if config.off_policy_mask_threshold is not None and not gmpo:
        weight.append({"off_policy_mask": {"threshold": config.off_policy_mask_threshold}})
    if config.top_entropy_quantile < 1.0:
        weight.append({"entropy_quantile": {"keep": config.top_entropy_quantile, "span": "micro-batch"}})
    if correction and config.loss_type != "vespo" and not gmpo:
        weight.append(correction)
    return Variant(
        name="trl-gmpo" if gmpo else f"trl-{config.loss_type}",
        advantage=_advantage(config),
        ratio="token" if gmpo else _ratio(config),  # vespo's weight ignores it, its KL does not
        clip=clip,
        aggregate=aggregate,
        select=("mask_truncated",) if config.mask_truncated_completions else (),
        weight=tuple(weight),
        regularizers=_regularizers(config, gmpo),
    )


def _ratio(config: Any) -> str:
    if config.importance_sampling_level not in ("token", "sequence"):
        raise VariantError(
            f"importance_sampling_level is 'token' or 'sequence', got {config.importance_sampling_level!r}"
        )
    return config.importance_sampling_level


def _advantage(config: Any) -> Any:
    if config.multi_objective_aggregation == "normalize_then_sum":
        return "normalize_each"
    if config.scale_rewards not in ("group", "batch", "none"):
        raise VariantError(f"scale_rewards is 'group', 'batch' or 'none', got {config.scale_rewards!r}")
    return {"grouped": {"std": config.scale_rewards}}


def _clip_and_aggregate(config: Any, high: float, correction: Any, gmpo: bool) -> tuple[Any, Any]:
    if gmpo:
        return {"geometric_mean": {"eps_low": config.epsilon, "eps_high": high}}, "sequence_mean"
    if config.loss_type in _PPO_LOSSES:
        return {"ppo": {"eps_low": config.epsilon, "eps_high": high, "delta": config.delta}}, _PPO_LOSSES[
            config.loss_type
        ]
    if config.loss_type == "cispo":
        return {"cispo": {"cap": high}}, {"token_mean": {"span": "generation"}}
    if config.loss_type == "sapo":
        return {
            "sapo": {"tau_pos": config.sapo_temperature_pos, "tau_neg": config.sapo_temperature_neg}
        }, "sequence_mean"
    folded = {}
    if correction:
        body = correction["sampler_correction"]
        folded = {"sampler": body["mode"], "sampler_min": body["min"], "sampler_max": body["max"]}
    gamma = {k: getattr(config, f"vespo_{k}") for k in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}
    return {"gamma_weight": {**gamma, **folded}}, {"token_mean": {"span": "generation"}}


def _regularizers(config: Any, gmpo: bool) -> tuple:
    terms: list[Any] = []
    if config.beta != 0.0:
        live = config.use_bias_correction_kl and not gmpo
        terms.append({"kl": {"coef": config.beta, "weight": "live" if live else "none"}})
    if config.use_adaptive_entropy and not gmpo:
        terms.append(
            {
                "adaptive_entropy": {
                    "coef": config.entropy_coef,
                    "target": config.entropy_target,
                    "step": config.entropy_coef_delta,
                    "min": config.entropy_coef_min,
                    "max": config.entropy_coef_max,
                    "span": "micro-batch",
                }
            }
        )
    elif config.entropy_coef != 0.0 and not gmpo:
        terms.append({"entropy_bonus": {"coef": config.entropy_coef, "span": "micro-batch"}})
    return tuple(terms)
