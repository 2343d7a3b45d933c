"""`Variant.from_config` against TRL's own `_compute_loss` on the same tensors: value, gradient and metrics.

TRL's method is called unbound on a stand-in that holds only what it reads, so no model is built. Advantages
are given, and three micro-batches make a window.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import MethodType, SimpleNamespace

import pytest
import torch
from trl import GRPOConfig

from tests.batches import assert_close, build, gradient, inputs, leaves_of, split
from trl_variants import Variant, VariantError, variant
from trl_variants.hooks.weight import SamplerCorrection
from trl_variants.objective import evaluate

ROWS, STEPS = 12, 3  # four rows in each of three micro-batches
SETTINGS = [
    {"loss_type": "grpo"},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    {"loss_type": "bnpo", "epsilon_high": 0.28},
    {"loss_type": "dr_grpo", "max_completion_length": 19},
    {"loss_type": "dapo", "delta": 1.5},
    {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3},
    {"loss_type": "luspo"},
    {"loss_type": "cispo", "epsilon_high": 1.1},
    {"loss_type": "cispo"},
    {"loss_type": "sapo", "sapo_temperature_neg": 2.0},
    {"loss_type": "vespo"},
    {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 0.5},
    {"loss_type": "dapo", "beta": 0.1},
    {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
    {"loss_type": "luspo", "beta": 0.1, "importance_sampling_level": "sequence"},
    {"loss_type": "vespo", "beta": 0.1, "importance_sampling_level": "sequence"},
    {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.1, "importance_sampling_level": "sequence"},
    {"loss_type": "dapo", "off_policy_mask_threshold": 0.02},
    {"loss_type": "dapo", "top_entropy_quantile": 0.3},
    {"loss_type": "dapo", "entropy_coef": 0.2},
    {"loss_type": "grpo", "top_entropy_quantile": 0.3, "entropy_coef": 0.2, "beta": 0.1},
    {"loss_type": "bnpo", "use_adaptive_entropy": True, "entropy_coef": 0.2, "entropy_target": 9.0},
    {"loss_type": "bnpo", "use_adaptive_entropy": True, "entropy_coef": 0.2, "entropy_target": 0.01},
    *(
        {
            "loss_type": t,
            "use_vllm": True,
            "vllm_importance_sampling_mode": m,
            "vllm_importance_sampling_clip_max": 1.2,
            "off_policy_mask_threshold": 0.02,
        }
        for t, m in [
            ("dapo", "token_truncate"),
            ("grpo", "token_mask"),
            ("dr_grpo", "sequence_truncate"),
            ("luspo", "sequence_mask"),
        ]
    ),
    {
        "loss_type": "vespo",
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_clip_max": 1.3,
    },
    {
        "loss_type": "grpo",
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_min": 0.9,
    },
]


def config(**settings) -> GRPOConfig:
    return GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, **({"max_completion_length": 11} | settings))


def stand_in(args: GRPOConfig, logps, entropy, coef, last):
    from trl.trainer.grpo_trainer import GRPOTrainer

    accelerator = SimpleNamespace(
        num_processes=1,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        sync_gradients=False,
        reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, dim, pad_index: x,
    )
    me = SimpleNamespace(
        args=args,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        top_entropy_quantile=args.top_entropy_quantile,
        off_policy_mask_threshold=args.off_policy_mask_threshold,
        importance_sampling_level=args.importance_sampling_level,
        beta=args.beta,
        loss_type=args.loss_type,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        max_completion_length=args.max_completion_length,
        use_vllm=args.use_vllm,
        vllm_importance_sampling_correction=args.vllm_importance_sampling_correction,
        current_gradient_accumulation_steps=STEPS,
        use_adaptive_entropy=args.use_adaptive_entropy,
        entropy_coef=coef,
        _last_world_entropy=last,
        _entropy_window_stats=None,
        _entropy_bonus_enabled=args.entropy_coef != 0.0 or args.use_adaptive_entropy,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *a, **k: (logps, entropy, None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )
    me.get_high_entropy_mask = MethodType(GRPOTrainer.get_high_entropy_mask, me)
    return me, lambda given: GRPOTrainer._compute_loss(me, None, given)


def window(v: Variant, on_policy: bool):
    """Twelve rows of two generations whose token counts differ; a row without tokens among them."""
    given = {k: x[:ROWS] if isinstance(x, torch.Tensor) and k != "reward_weights" else x for k, x in inputs(21).items()}
    given |= {"divergences": {}, "origin": None}  # TRL knows neither
    given |= {
        "rewards": None,
        "reward_weights": None,
        "advantage": torch.randn(ROWS, generator=torch.Generator().manual_seed(2)).double(),
    }
    batch = build(given, old_logps=None if on_policy else given["old_logps"])
    batch.advantage[4] = 0.0
    return replace(
        batch,
        generation_tokens=torch.tensor([float(batch.mask[:8].sum())] * 8 + [float(batch.mask[8:].sum()) * 2] * 4),
    )


@pytest.mark.parametrize("on_policy", [False, True], ids=["off-policy", "on-policy"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: ", ".join(f"{k}={x}" for k, x in s.items()))
def test_equals_trl_s_own_loss(settings, on_policy):
    args = config(steps_per_generation=STEPS, **settings)
    v = Variant.from_config(args)
    batch = window(v, on_policy)
    batch.run = replace(batch.run, max_completion_length=args.max_completion_length)
    coef, last = 0.2, 1.0
    states = {path: {"coef": coef, "last_entropy": last} for path in v.stateful}
    leaves = leaves_of(batch)
    ours, theirs, metrics = 0.0, 0.0, defaultdict(list)
    mode = args.vllm_importance_sampling_mode
    for piece in split(batch, [range(0, 4), range(4, 8), range(8, 12)]):
        result = evaluate(v, piece, states)
        ours = ours + result.loss
        b, t = piece.mask.shape
        given = {
            "prompt_ids": torch.zeros(b, 1),
            "prompt_mask": torch.ones(b, 1),
            "completion_ids": torch.zeros(b, t),
            "completion_mask": piece.mask,
            "advantages": piece.advantage.squeeze(1),
            "num_items_in_batch": piece.generation_tokens[0],
            "old_per_token_logps": piece.old_logps,
            "ref_per_token_logps": piece.ref_logps,
        }
        if args.use_vllm:
            weights = SamplerCorrection(
                mode, args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
            )(piece)
            given |= {"sampling_per_token_logps": piece.rollout_logps, "importance_sampling_ratio": weights}
        elif "off_policy_mask_threshold" in settings:
            given["sampling_per_token_logps"] = piece.rollout_logps
        me, compute = stand_in(args, piece.logps, piece.entropy, coef, last)
        theirs = theirs + compute(given)
        for name, values in me._metrics["train"].items():
            if name in result.metrics:
                metrics[name].append((result.metrics[name], values[0]))
    assert_close(ours, theirs, "loss")
    grads = gradient(ours, leaves)
    assert_close(grads, gradient(theirs, leaves), "gradient")
    assert grads["logps"].abs().max() > 1e-4
    for name, pairs in metrics.items():
        assert [a for a, _ in pairs] == pytest.approx([b for _, b in pairs], rel=1e-5, nan_ok=True), name


def test_a_wrong_denominator_would_be_seen(monkeypatch):
    from trl_variants.hooks.aggregate import TokenMean

    monkeypatch.setattr(TokenMean, "__call__", lambda self, x, b: (x * b.mask).sum() / b.window.tokens)
    with pytest.raises(AssertionError, match="loss"):
        test_equals_trl_s_own_loss({"loss_type": "dapo"}, False)


def test_names_and_hooks_of_trl_s_defaults():
    v = Variant.from_config(config())
    assert v.name == "trl-dapo" and v.about is None
    assert (v.ratio.hook_name, v.clip.hook_name, v.aggregate.span, v.regularizers) == (
        "token",
        "ppo",
        "generation",
        (),
    )
    assert v.advantage == variant("grpo").advantage
    masked = Variant.from_config(config(mask_truncated_completions=True, scale_rewards="batch"))
    assert [h.hook_name for h in masked.select] == ["mask_truncated"] and masked.advantage.std == "batch"


def test_gmpo_config_gives_gmpo():
    from trl.experimental.gmpo import GMPOConfig

    args = GMPOConfig(output_dir="unused", use_cpu=True, bf16=False, beta=0.1, importance_sampling_level="sequence")
    v = Variant.from_config(args)
    assert v.name == "trl-gmpo" and v.clip.hook_name == "geometric_mean" and v.ratio.hook_name == "token"
    assert (v.clip.eps_low, v.aggregate.hook_name, v.regularizers[0].weight) == (
        args.epsilon,
        "sequence_mean",
        "none",
    )


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"loss_type": "dapoo"}, r"unknown loss_type 'dapoo' \(did you mean dapo"),
        ({"scale_rewards": "prompt"}, "scale_rewards is 'group', 'batch' or 'none', got 'prompt'"),
        (
            {"importance_sampling_level": "answer"},
            "importance_sampling_level is 'token' or 'sequence', got 'answer'",
        ),
    ],
)
def test_unknown_settings(settings, message):
    args = config()
    for name, value in settings.items():
        setattr(args, name, value)
    with pytest.raises(VariantError, match=message):
        Variant.from_config(args)
