from __future__ import annotations

from types import SimpleNamespace

import pytest
from trl import GRPOConfig

from trl_variants import Finding, Schedule, check, hook, variant
from trl_variants.parity import SETTINGS


def levels(v, config=None) -> list[str]:
    return [f.level for f in check(v, config)]


# edits of a variant, the level and a piece of the message that must be there
FINDINGS = [
    ("dapo", {"weight": ["sampler_correction", "sampler_correction"]}, "error", "corrected twice"),
    (
        "vespo",
        {"clip": {"gamma_weight": {"sampler": "token_mask"}}, "weight": ["sampler_correction"]},
        "error",
        "folds the sampler correction in",
    ),
    (
        "dapo",
        {"ratio": {"token": {"anchor": "rollout"}}, "weight": ["sampler_correction"]},
        "error",
        "anchored to the rollout policy",
    ),
    ("bnpo", {"weight": ["entropy_quantile"]}, "error", "span 'micro-batch' cannot be combined"),
    (
        "dapo",
        {"weight": ["entropy_quantile"], "regularizers": [{"entropy_bonus": {"span": "micro-batch"}}]},
        "error",
        "span 'micro-batch'",
    ),
    ("gmpo", {"ratio": "sequence"}, "error", "geometric_mean needs a token ratio, and the ratio is sequence"),
    ("disco", {"select": ["winners"]}, "error", "winners leaves no wrong answer for clip group_contrast"),
    (
        "grpo",
        {"rewards": [{"kl_in_reward": {"level": "token"}}]},
        "error",
        "ignores the per-token KL penalty",
    ),
    ("grpo", {"advantage": "normalize_each", "rewards": ["clip_reward"]}, "error", "clip_reward is ignored"),
    (
        "grpo",
        {"advantage": "normalize_each", "rewards": ["kl_in_reward"]},
        "error",
        "kl_in_reward is ignored",
    ),
    (
        "reinforce-pp",
        {"rewards": [{"kl_in_reward": {"level": "token"}}, "clip_reward"]},
        "error",
        "clip_reward after a per-token KL penalty",
    ),
    (
        "dapo",
        {"clip": {"ppo": {"eps_low": 3e-4, "eps_high": 4e-4}}},
        "warning",
        "a clip range of 0.0004 is a sequence-ratio range",
    ),
    (
        "dapo",
        {"clip": {"ppo": {"eps_low": Schedule(0.1, 1e-4), "eps_high": Schedule(0.1, 1e-4)}}},
        "warning",
        "sequence-ratio range",
    ),
    ("gspo", {"clip": "ppo"}, "warning", "never acts on a length-normalised sequence ratio"),
    ("gspo-token", {"clip": "ppo"}, "warning", "never acts"),
    ("vimpo", {"credit": [{"implicit_value": {"beta": 1e-3}}]}, "warning", "z is not one value function"),
    ("gspo", {"aggregate": "token_mean"}, "warning", "weights answers by their length"),
    ("gspo", {"aggregate": "constant"}, "warning", "weights answers by their length"),
    ("rloo", {"aggregate": "token_mean"}, "warning", "repeat it on every token"),
    ("dapo", {"ratio": "on_policy"}, "warning", "the clip can never act"),
    ("dro", {"ratio": "on_policy"}, "warning", "squared_log_ratio is 0 for ever"),
    ("gspo", {"advantage": "token_whitened"}, "warning", "token advantages meet a per-sequence ratio"),
    ("gspo", {"credit": ["discount"]}, "warning", "a per-sequence ratio cannot tell apart"),
]


@pytest.mark.parametrize("name, edits, level, message", FINDINGS)
def test_couplings(name, edits, level, message):
    found = [f for f in check(variant(name, **edits)) if message in f.message]
    assert [f.level for f in found] == [level]
    assert found[0].hint and str(found[0]).startswith(f"{level}: ")


def test_what_is_fine_is_not_reported():
    assert check(variant("reinforce-pp", rewards=["clip_reward", {"kl_in_reward": {"level": "token"}}])) == []
    assert check(variant("dapo", weight=["sampler_correction", "off_policy_mask"])) == []
    assert check(variant("bnpo", weight=[{"entropy_quantile": {"span": "micro-batch"}}])) == []
    assert check(variant("dapo", ratio="on_policy", clip="none")) == []
    assert check(variant("gspo-token", credit=["discount"])) == []


def test_own_hooks_pass_through_check(monkeypatch):
    from trl_variants.hooks import base

    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    hook("clip", "plain")(lambda log_ratio, advantage, batch: log_ratio.exp() * advantage)
    hook("advantage", "raw")(lambda scored: scored.reward)
    assert check(variant("dapo", clip="plain", advantage="raw")) == []


def grpo_config(**settings) -> GRPOConfig:
    defaults = {
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 4,
    }
    return GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, **(defaults | settings))


def test_an_off_policy_run_of_a_named_method_is_clean():
    config = grpo_config()
    config.variant = "dapo"
    assert check(variant("dapo"), config) == []


@pytest.mark.parametrize(
    "setting, value",
    [
        ("epsilon", 0.3),
        ("epsilon_high", 0.3),
        ("beta", 0.1),
        ("loss_type", "grpo"),
        ("scale_rewards", "none"),
        ("top_entropy_quantile", 0.2),
        ("entropy_coef", 0.1),
        ("mask_truncated_completions", True),
        ("off_policy_mask_threshold", 0.5),
        ("delta", 3.0),
        ("importance_sampling_level", "sequence"),
    ],
)
def test_a_setting_that_a_hook_replaces(setting, value):
    config = grpo_config(**{setting: value})
    assert check(variant("dapo"), config) == [], "without a named variant TRL's settings are the method"
    config.variant = "dapo"
    [found] = [f for f in check(variant("dapo"), config) if f.level == "error"]
    assert f"{setting}={value!r} has no effect" in found.message and SETTINGS[setting] in found.hint


def test_every_setting_that_is_replaced_exists_in_trl():
    assert set(SETTINGS) <= {f for f in vars(grpo_config())}


def test_runs_that_cannot_be_what_they_say():
    config = grpo_config()
    rollout = variant("dapo", ratio={"token": {"anchor": "rollout"}})
    assert "error" in levels(rollout, config)
    config.use_vllm = True
    assert levels(rollout, config) == []
    on_policy = grpo_config(steps_per_generation=1)
    assert any("never acts" in f.message for f in check(variant("dapo"), on_policy))
    assert check(variant("dapo", ratio="on_policy", clip="none"), on_policy) == []
    assert any(
        "ratio is 1 by definition" in f.message for f in check(variant("dapo", ratio="on_policy", clip="none"), config)
    )


def test_batches_that_cannot_be_grouped():
    one = SimpleNamespace(
        num_generations=1,
        generation_batch_size=4,
        use_vllm=False,
        gradient_accumulation_steps=1,
        steps_per_generation=2,
        num_iterations=1,
    )
    assert any("needs at least two completions" in f.message for f in check(variant("dapo"), one))
    one.num_generations = 3
    assert any("of 4 rows is not a multiple of num_generations=3" in f.message for f in check(variant("dapo"), one))
    one.num_generations = 4
    assert levels(variant("dapo"), one) == []


def test_findings_print():
    assert (
        str(Finding("error", "what", "how")) == "error: what (how)"
        and str(Finding("warning", "what")) == "warning: what"
    )


def test_a_critic_that_no_hook_reads_is_named():
    [finding] = check(variant("dapo", learners=["critic"]))
    assert finding.level == "warning" and "no hook reads its values" in finding.message
    assert "advantage: gae" in finding.hint
    assert check(variant("dapo", learners=["critic"], advantage="gae")) == []


def test_what_only_a_learner_gives_is_named():
    config = grpo_config()
    for name, learner, given in (
        ("ppo", "critic", "values (gae reads it)"),
        ("remax", "greedy_answer", "greedy_reward (greedy_baseline reads it)"),
        ("prime", "implicit_reward", "process_rewards (process_and_outcome reads it)"),
        ("clipo", "contrastive_head", "contrastive_loss (contrastive_bonus reads it)"),
    ):
        [finding] = [f for f in check(variant(name, learners=[]), config) if f.level == "error"]
        assert finding.message == f"{name} needs a learner that gives {given}" and learner in finding.hint
        assert not [f for f in check(variant(name), config) if f.level == "error"]
