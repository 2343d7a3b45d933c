"""What a user can get wrong: one sentence that names the mistake and, where there is one, the way out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.trainer.toy import (
    EOS,
    PROMPTS,
    build,
    dataset,
    digits,
    model,
    model_path,
    settings,
    tokenizer,
    train,
)
from trl_variants import VariantGRPOConfig, VariantGRPOTrainer, hook
from trl_variants.errors import MissingExtra, RewardError, VariantError
from trl_variants.hooks import base
from trl_variants.trainer import seam


def refuses(words: str | list[str], kind: type[Exception] = VariantError, run: Any = build, **given: Any) -> str:
    """The message of the error, after checking that it is one sentence with these words."""
    with pytest.raises(kind) as caught:
        run(**given)
    message = str(caught.value)
    for word in [words] if isinstance(words, str) else words:
        assert word in message, message
    assert "\n" not in message and message.count(". ") == 0, message
    return message


# --- compositions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"variant": "dappo"}, ["unknown variant 'dappo'", "dapo"]),
        ({"variant": 7}, "a variant is a catalog name, a mapping or a Variant, got 7"),
        ({"variant": "{not json"}, "must be a name or JSON"),
        ({"variant": {"clip": "ppo"}}, "without `name:` must say advantage, ratio, aggregate"),
        ({"hooks": {"clipp": "ppo"}}, ["no seam 'clipp'", "did you mean clip?"]),
        ({"hooks": {"clip": "pppo"}}, ["unknown clip hook 'pppo'", "did you mean ppo?"]),
        ({"hooks": {"clip": "sequence"}}, "'sequence' is a ratio hook"),
        (
            {"hooks": {"clip": {"ppo": {"eps_hihg": 0.3}}}},
            ["no parameter 'eps_hihg'", "did you mean eps_high?"],
        ),
        (
            {"variant": "dapo", "hooks": {"clip": {"ppo": {"eps_high": "wide"}}}},
            "ppo.eps_high must be float, got 'wide'",
        ),
        (
            {"variant": "dapo", "hooks": {"clip": {"ppo": {"eps_high": -1.0}}}},
            "ppo.eps_high must be >= 0.0, got -1.0",
        ),
        (
            {"hooks": {"weight": [{"sampler_correction": {"mode": "token"}}]}},
            "sampler_correction.mode must be one of",
        ),
        ({"loss_type": "dappo"}, ["unknown loss_type 'dappo'", "did you mean dapo"]),
        ({"importance_sampling_level": "tokens"}, "'token' or 'sequence', got 'tokens'"),
        ({"scale_rewards": "groups"}, "'group', 'batch' or 'none', got 'groups'"),
    ],
    ids=str,
)
def test_a_wrong_composition(settings, words):
    refuses(words, **settings)


def test_two_variants_that_disagree():
    refuses("name different methods; give one of them", variant="dapo", trainer_arguments={"variant": "gspo"})
    agreeing = build(variant="dapo", trainer_arguments={"variant": "dapo"})
    assert agreeing.variant.name == "dapo"


@pytest.mark.parametrize(
    ("setting", "value", "instead"),
    [
        ("epsilon", 0.1, "clip.eps_low (ppo"),
        ("epsilon_high", 0.3, "clip.eps_high (ppo"),
        ("delta", 2.0, "clip.delta (ppo)"),
        ("beta", 0.1, "kl.coef"),
        ("loss_type", "grpo", "clip and aggregate"),
        ("importance_sampling_level", "sequence", "ratio"),
        ("scale_rewards", "none", "advantage.std (grouped)"),
        ("top_entropy_quantile", 0.5, "entropy_quantile.keep"),
        ("entropy_coef", 0.1, "entropy_bonus.coef"),
        ("off_policy_mask_threshold", 0.5, "off_policy_mask.threshold"),
        ("mask_truncated_completions", True, "mask_truncated"),
    ],
)
def test_a_trl_setting_that_a_named_variant_replaces(setting, value, instead):
    words = [f"{setting}={value!r} has no effect when a variant is named (set ", f"{instead}", " instead)"]
    refuses(words, variant="dapo", **{setting: value})


# --- what this run cannot give --------------------------------------------------------------------


@pytest.fixture
def registered():
    """Registers a weight hook with a need, for one test."""
    names = []

    def register(need: str) -> str:
        @hook("weight", f"wants_{need}")
        @dataclass(frozen=True)
        class Wants:
            needs = frozenset({need})

            def __call__(self, batch):
                return torch.ones_like(batch.mask)

        names.append(f"wants_{need}")
        return names[-1]

    yield register
    for name in names:
        del base._REGISTRY["weight", name]


@pytest.mark.parametrize(
    ("need", "words"),
    [
        ("values", "dapo needs a learner that gives values (wants_values reads it)"),
        ("teacher_logps", "dapo needs a teacher (wants_teacher_logps reads its log-probs) and none is named"),
        (
            "rollout_logps",
            "dapo needs the sampler's own log-probs, which only vLLM or a rollout_func reports",
        ),
    ],
)
def test_a_hook_that_needs_what_this_run_cannot_give(registered, need, words):
    refuses(words, variant="dapo", hooks={"weight": [registered(need)]})


def test_a_rollout_function_gives_the_samplers_log_probs(registered):
    def rollout(prompts, trainer):
        return {
            "prompt_ids": [tokenizer()(p)["input_ids"] for p in prompts],
            "completion_ids": [[2, 3, 12, EOS]] * len(prompts),
            "logprobs": [[-1.0] * 4] * len(prompts),
        }

    hooks = {"weight": [registered("rollout_logps")]}
    run = train(variant="dapo", hooks=hooks, trainer_arguments={"rollout_func": rollout}, max_steps=1)
    assert len(run.gradients) == 1


def test_a_missing_extra():
    message = refuses('pip install "trl_variants[vllm]"', MissingExtra, use_vllm=True)
    assert "use_vllm" in message


def test_an_unsupported_trl():
    for version in ("1.15.0", "1.17.0"):
        refuses(
            [f"found trl {version}", 'pip install "trl>=1.16,<1.17"'],
            ImportError,
            seam.require_supported_trl,
            version=version,
        )
    seam.require_supported_trl("1.16.3")


# --- geometry and data ----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [None, "dapo"])
def test_a_group_of_one(variant):
    with pytest.raises(ValueError, match="at least 2 generations per prompt.* You provided 1"):  # TRL's words
        build(num_generations=1, variant=variant)


@pytest.mark.parametrize("variant", [None, "dapo"])
def test_a_batch_that_is_not_a_multiple_of_the_group(variant):
    refuses(
        "generation_batch_size (16) must be divisible by num_generations (3)",
        ValueError,
        num_generations=3,
        variant=variant,
    )


def test_a_data_set_without_prompts():
    other = dataset().select_columns("prompt").rename_column("prompt", "question")
    words = "the data set has no column `prompt` (it has question): rename the one that holds the prompts"
    refuses(words, data=other)
    refuses(words, trainer_arguments={"eval_dataset": other}, eval_strategy="steps", eval_steps=1)


def test_a_prompt_longer_than_the_model():
    words = [
        "a prompt of 125 tokens plus max_completion_length=6 exceeds the model's 128 positions",
        "shorten",
    ]
    refuses(words, run=train, data=dataset(["1" * 125] * 8))
    assert len(train(data=dataset(["1" * 122] * 8), max_steps=1).gradients) == 1  # just fits


# --- rewards --------------------------------------------------------------------------------------


def broken(completions, **_):
    return [1.0 / (len(completions) - 16)]


def rewards_that_are(value):
    def named(completions, **_):
        return value(completions) if callable(value) else value

    return named


@pytest.mark.parametrize("variant", [None, "dapo"])
@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (broken, ["reward function 'broken' failed", "ZeroDivisionError"]),
        (rewards_that_are([0.5]), "reward function 'named' failed: it returned 1 rewards for 16 completions"),
        (rewards_that_are("good"), "it returned 'good' instead of a list of numbers"),
        (rewards_that_are(None), "it returned None instead of a list of numbers"),
        (rewards_that_are(1.0), "it returned 1.0 instead of a list of numbers"),
        (
            rewards_that_are(lambda c: ["1.0"] * len(c)),
            "it returned the text '1.0' where a number or None is expected",
        ),
    ],
)
def test_a_broken_reward_function(reward, words, variant):
    refuses(words, RewardError, train, rewards=reward, variant=variant)


def test_a_broken_async_reward_function():
    async def slow(completions, **_):
        raise KeyError("answer")

    refuses(["reward function 'slow' failed", "KeyError('answer')"], RewardError, train, rewards=[digits, slow])


@pytest.mark.parametrize("value", [None, float("nan")])
@pytest.mark.parametrize("variant", [None, "dapo", "reinforce-pp", "rloo"])
def test_no_reward_applies_to_any_row(variant, value):
    """Training goes on without a signal, and the log says so."""
    run = train(rewards=rewards_that_are(lambda c: [value] * len(c)), variant=variant, max_steps=4, weight_decay=0.0)
    assert not any(bool(g.any()) for g in run.gradients[:1]) and bool(torch.isfinite(run.change).all())
    assert run.logged("advantage/unscorable") == [1.0] and run.logged("advantage/dead_groups") == [1.0]
    assert run.logged("advantage/dead_all_right") == run.logged("advantage/dead_all_wrong") == [0.0]
    assert all(a == 0 for a in run.tables[0]["advantages"])


# --- empty completions ----------------------------------------------------------------------------


def some_empty(which):
    def rollout(prompts, trainer):
        g = torch.Generator().manual_seed(trainer.state.global_step)
        ids = [[] if which(i) else torch.randint(2, 23, (5,), generator=g).tolist() for i in range(len(prompts))]
        return {
            "prompt_ids": [tokenizer()(p)["input_ids"] for p in prompts],
            "completion_ids": ids,
            "logprobs": [[-1.0] * len(row) for row in ids],
        }

    return {"rollout_func": rollout}


@pytest.mark.parametrize("variant", [None, "grpo", "gspo", "vespo", "reinforce-pp"])
def test_empty_completions_train_and_are_counted(variant):
    run = train(variant=variant, trainer_arguments=some_empty(lambda i: i % 4 == 1))
    assert run.logged("completions/empty")[0] == 0.25
    assert all(bool(torch.isfinite(g).all()) for g in run.gradients) and bool(run.gradients[0].any())


@pytest.mark.parametrize("variant", [None, "dapo"])
def test_only_empty_completions_give_no_signal(variant):
    run = train(variant=variant, trainer_arguments=some_empty(lambda i: True), max_steps=2, weight_decay=0.0)
    assert run.logged("completions/empty")[0] == 1.0
    assert not any(bool(g.any()) for g in run.gradients) and not bool(run.change.any())


def test_the_pad_token_that_stands_for_an_empty_completion_gets_no_gradient():
    """A row without tokens trains exactly as the same row with every token masked."""
    empty = some_empty(lambda i: i % 4 == 1)["rollout_func"]

    def masked(prompts, trainer):
        output = empty(prompts, trainer)
        masks = [[1] * len(row) or [0] for row in output["completion_ids"]]
        ids = [row or [0] for row in output["completion_ids"]]
        return {
            **output,
            "completion_ids": ids,
            "logprobs": [[-1.0] * len(r) for r in ids],
            "env_mask": masks,
        }

    a = train(trainer_arguments={"rollout_func": empty}, max_steps=4)
    b = train(trainer_arguments={"rollout_func": masked}, max_steps=4)
    assert torch.allclose(a.change, b.change, rtol=1e-4, atol=1e-8)


# --- models that are not here ---------------------------------------------------------------------


def trainer_of(chosen: Any, **changes: Any) -> VariantGRPOTrainer:
    """Without processing_class=, which `build` always gives."""
    args = VariantGRPOConfig(output_dir="unused", **settings(**changes))
    return VariantGRPOTrainer(model=chosen, reward_funcs=digits, args=args, train_dataset=dataset())


def without_path(path: str = ""):
    made = model()
    made.config._name_or_path = path
    return made


@pytest.mark.parametrize("name", ["acme/tiny-model", "tiny-model", "/nowhere/at/all"])
def test_a_model_that_is_not_on_disk(name):
    refuses(
        [
            f"the model {name!r} is not on this machine",
            "pass a folder with its config.json and weights, or a loaded model",
        ],
        run=trainer_of,
        chosen=name,
    )


def test_a_model_in_a_folder_needs_nothing_else():
    assert trainer_of(model_path(), beta=0.1).ref_model is not None


def test_a_tokenizer_that_is_not_on_disk():
    refuses(
        ["the tokenizer (the model has no path it came from)", "pass processing_class="],
        run=trainer_of,
        chosen=without_path(),
    )


@pytest.mark.parametrize("path", ["", "acme/gone"])
@pytest.mark.parametrize("changes", [{"beta": 0.1}, {"variant": "grpo"}], ids=str)
def test_a_reference_model_that_is_not_on_disk(changes, path):
    words = ["the reference model", "is not on this machine", "pass the model's folder as model="]
    refuses(words, model_given=without_path(path), **changes)
    assert build(model_given=without_path(path), variant="dapo").ref_model is None


def test_a_reward_model_that_is_not_on_disk():
    refuses(["the reward model 'acme/judge'", "or a Python function"], rewards=["acme/judge"])


# --- checkpoints of something else ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "then", "difference"),
    [
        ({"variant": "dapo"}, {"variant": "gspo"}, "ratio: 'token' -> 'sequence'"),
        ({"variant": "dapo"}, {"variant": "dapo", "hooks": {"clip": {"ppo": {"eps_high": 0.5}}}}, "clip: "),
        ({}, {"epsilon": 0.1}, "clip: "),
        ({}, {"variant": "dapo"}, "aggregate: {'token_mean': {'span': 'generation'}} -> 'token_mean'"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_composition(tmp_path, first, then, difference):
    out = str(tmp_path)
    train(**first, output_dir=out, max_steps=1, save_strategy="steps", save_steps=1)
    checkpoint = os.path.join(out, "checkpoint-1")
    with pytest.raises(VariantError) as caught:
        train(**then, output_dir=out, max_steps=2, resume=checkpoint)
    message = str(caught.value)
    assert "was trained with another composition" in message and difference in message, message
    assert len(train(**first, output_dir=out, max_steps=2, resume=checkpoint).gradients) == 1


def test_the_toy_has_the_prompts_it_says():
    assert len(PROMPTS) == 8 and build().train_dataset["prompt"] == list(PROMPTS)


def test_with_hooks_alone_trl_settings_are_the_method():
    """`hooks` without `variant` edits what TRL's settings say, so epsilon keeps its meaning."""
    trainer = build(VariantGRPOTrainer, epsilon=0.1, loss_type="grpo", hooks={"regularizers": [{"kl": {"coef": 0.1}}]})
    assert trainer.variant.clip.eps_low == 0.1 and trainer.variant.aggregate.hook_name == "sequence_mean"
    assert trainer.ref_model is not None


def test_a_hook_parameter_that_no_checkpoint_can_hold_is_refused_at_once():
    @hook("clip", "test_unwritable")
    def unwritable(log_ratio, advantage, batch, shape: Any = None):
        return log_ratio.exp() * advantage

    with pytest.raises(VariantError, match="clip test_unwritable has a parameter that no checkpoint"):
        build(VariantGRPOTrainer, variant="dapo", hooks={"clip": unwritable(shape=lambda x: x)})
