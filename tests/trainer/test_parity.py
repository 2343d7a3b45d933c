"""With no variant named, VariantGRPOTrainer is trl.GRPOTrainer: gradients, weight changes and metrics agree.

Gradients and weight changes are compared, not weights, and every setting must prove that it is live: the run
with it differs from the run without it by more than 1e-3 before the second generation (a clip range, `delta`,
SAPO's gate and most masks do nothing while the ratio is 1).
"""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
from peft import LoraConfig
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from tests.trainer import toy
from tests.trainer.toy import EOS, Outcome, apart, dataset, digits, early, tokenizer
from trl_variants import Variant, VariantGRPOConfig, VariantGRPOTrainer, variant
from trl_variants.trainer.memory import HookMemory

TOLERANCE, LIVE = 1e-5, 1e-3
TIMES = (
    "step_time",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "eval_runtime",
    "eval_samples_per_second",
    "eval_steps_per_second",
)
LEVEL = "importance_sampling_level"
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {},
    "dapo": {},
    "luspo": {},
    "cispo": {"epsilon_high": 5.0},
    "sapo": {},
    "vespo": {},
}
# in double precision, so that what differs is a rule and not the order of a sum
train = functools.partial(toy.train, dtype=torch.float64)
train_trl = functools.partial(toy.train_trl, dtype=torch.float64)
FIRST_GENERATION = 4  # optimizer steps of the toy that train on the first generation


@functools.cache
def _cached(settings: str) -> Outcome:
    return replace(train_trl(**json.loads(settings)), trainer=None)


def stock(**settings: Any) -> Outcome:
    """TRL's run, kept for every test that compares with it."""
    return _cached(json.dumps(settings, sort_keys=True))


def assert_same(ours: Outcome, theirs: Outcome, tolerance: float = TOLERANCE) -> None:
    assert_same_training(ours, theirs, tolerance)
    assert_same_metrics(ours.logs, theirs.logs)


def assert_same_training(ours: Outcome, theirs: Outcome, tolerance: float = TOLERANCE) -> None:
    assert len(ours.gradients) == len(theirs.gradients)
    assert sum(bool(g.any()) for g in theirs.gradients) >= 4, "too few steps have a signal"
    for step, (mine, other) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        if other.any() or mine.any():  # a step on which everything is clipped has none
            assert apart(mine, other) <= tolerance, f"gradient of step {step}"
    assert apart(ours.change, theirs.change) <= tolerance, "weight change"


def assert_same_metrics(ours: list[dict], theirs: list[dict]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        for name, value in other.items():
            assert name in mine, f"TRL logs {name}, ours does not"
            if name in TIMES:
                continue
            if value is None or mine[name] is None:
                assert mine[name] is value, name
            else:
                close = math.isclose(mine[name], value, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
                assert close, f"{name} at step {other['step']}: {mine[name]} instead of {value}"


def assert_live(with_it: Outcome, without: Outcome) -> None:
    """The setting changes a gradient while both runs still train on the same completions."""
    pairs = list(zip(with_it.gradients[:FIRST_GENERATION], without.gradients, strict=False))
    assert max(apart(a, b) for a, b in pairs if b.any()) > LIVE, (
        "the setting is inert in this run, so parity proves nothing"
    )


def assert_parity(live_against: dict[str, Any] | None = None, **settings: Any) -> Outcome:
    theirs = stock(**settings)
    if live_against is not None:
        assert_live(theirs, stock(**live_against))
    ours = train(VariantGRPOTrainer, **settings)
    assert_same(ours, theirs)
    return ours


# --- losses and ratio levels ----------------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss", list(LOSSES))
def test_every_loss_at_every_level(loss, level):
    settings = {"loss_type": loss, LEVEL: level, **LOSSES[loss]}
    # the loss against another loss at the same level; the level against the other level of the same loss
    against = {"loss_type": "grpo" if loss == "dapo" else "dapo", LEVEL: level}
    ours = assert_parity(against, **settings)
    other_level = {"loss_type": loss, LEVEL: "token" if level == "sequence" else "sequence", **LOSSES[loss]}
    if loss == "vespo":  # has a ratio of its own
        assert apart(stock(**other_level).change, ours.change) <= TOLERANCE
    else:
        assert_live(stock(**settings), stock(**other_level))


@pytest.mark.parametrize("loss", ["grpo", "dapo", "bnpo", "dr_grpo", "luspo"])
def test_the_ratio_leaves_the_clip_range(loss):
    ours = train(loss_type=loss)
    assert max(ours.logged("clip_ratio/low_mean")) > 0.01 and max(ours.logged("clip_ratio/high_mean")) > 0.01


# --- one setting at a time ------------------------------------------------------------------------

ONE_SETTING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # what is switched on, what both runs have
    "epsilon": ({"epsilon": 0.05}, {}),
    "epsilon_high": ({"epsilon_high": 0.5}, {}),
    "epsilon_high grpo sequence": ({"epsilon_high": 0.01}, {"loss_type": "grpo", LEVEL: "sequence"}),
    "delta": ({"delta": 1.3}, {"loss_type": "grpo"}),
    "delta sequence": ({"delta": 1.05, "epsilon": 0.01}, {"loss_type": "dapo", LEVEL: "sequence"}),
    "cispo cap": ({"epsilon_high": 1.1}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "sapo temperatures": ({"sapo_temperature_pos": 3.0, "sapo_temperature_neg": 5.0}, {"loss_type": "sapo"}),
    "vespo constants": ({"vespo_k_pos": 1.0, "vespo_lambda_neg": 4.0}, {"loss_type": "vespo"}),
    "scale batch": ({"scale_rewards": "batch"}, {}),
    "scale none": ({"scale_rewards": "none"}, {}),
    "scale none, as a bool": ({"scale_rewards": False}, {"loss_type": "grpo"}),
    "beta without ratio": ({"beta": 0.1, "use_bias_correction_kl": False}, {"loss_type": "grpo"}),
    "beta with ratio": ({"beta": 0.1, "use_bias_correction_kl": True}, {"loss_type": "grpo"}),
    "beta dapo": ({"beta": 0.1, "use_bias_correction_kl": False}, {"loss_type": "dapo"}),
    "beta bnpo": ({"beta": 0.1}, {"loss_type": "bnpo"}),
    "beta luspo": ({"beta": 0.1}, {"loss_type": "luspo", LEVEL: "sequence"}),
    "beta sapo": ({"beta": 0.1}, {"loss_type": "sapo"}),
    "beta vespo": ({"beta": 0.1}, {"loss_type": "vespo"}),
    "bias correction": (
        {"use_bias_correction_kl": True},
        {"beta": 0.5, "use_bias_correction_kl": False, "loss_type": "dr_grpo"},
    ),
    "bias correction sequence": (
        {"use_bias_correction_kl": True},
        {"beta": 0.5, "use_bias_correction_kl": False, "loss_type": "grpo", LEVEL: "sequence"},
    ),
    "entropy quantile": ({"top_entropy_quantile": 0.5}, {"loss_type": "grpo"}),
    "entropy quantile dapo": ({"top_entropy_quantile": 0.5}, {"loss_type": "dapo", "beta": 0.1}),
    "entropy quantile luspo": ({"top_entropy_quantile": 0.5}, {"loss_type": "luspo", LEVEL: "sequence"}),
    "entropy bonus": ({"entropy_coef": 0.1}, {"loss_type": "dapo"}),
    "entropy bonus, chosen tokens": (
        {"entropy_coef": 0.1},
        {"loss_type": "bnpo", "top_entropy_quantile": 0.5},
    ),
    "entropy target": (
        {
            "use_adaptive_entropy": True,
            "entropy_coef": 0.1,
            "entropy_coef_delta": 0.05,
            "entropy_coef_max": 1.0,
            "entropy_target": 1.85,
        },
        {"loss_type": "grpo"},
    ),
    "entropy target against a constant": (
        {
            "use_adaptive_entropy": True,
            "entropy_coef_delta": 0.05,
            "entropy_coef_max": 1.0,
            "entropy_target": 5.0,
        },
        {"loss_type": "dapo", "entropy_coef": 0.1},
    ),
    "off-policy mask": ({"off_policy_mask_threshold": 0.01}, {"loss_type": "grpo"}),
    "off-policy mask dapo": ({"off_policy_mask_threshold": 0.01}, {"loss_type": "dapo", "beta": 0.1}),
    "truncated": ({"mask_truncated_completions": True}, {"loss_type": "grpo", "max_completion_length": 12}),
    "truncated dapo": ({"mask_truncated_completions": True}, {"max_completion_length": 12}),
    "truncated bnpo": (
        {"mask_truncated_completions": True},
        {"loss_type": "bnpo", "max_completion_length": 12, "entropy_coef": 0.1},
    ),
    "temperature": ({"temperature": 0.7}, {}),
    "gradient clip": ({"max_grad_norm": 0.1}, {}),
}


@pytest.mark.parametrize("case", list(ONE_SETTING))
def test_one_setting(case):
    switched, common = ONE_SETTING[case]
    assert_parity(common, **{**common, **switched})


def test_two_rewards_some_of_which_do_not_apply():
    def both(trainer_settings: dict[str, Any]) -> tuple[Outcome, Outcome]:
        shared = dict(rewards=[digits, early], reward_weights=[1.0, 0.5], **trainer_settings)
        return train(**shared), train_trl(**shared)

    outcomes = {}
    for aggregation in ("sum_then_normalize", "normalize_then_sum"):
        for scale in ("group", "none"):
            settings = {"multi_objective_aggregation": aggregation, "scale_rewards": scale}
            ours, theirs = both(settings)
            assert_same(ours, theirs)
            outcomes[aggregation, scale] = theirs
    assert_live(outcomes["normalize_then_sum", "group"], outcomes["sum_then_normalize", "group"])
    assert_live(outcomes["sum_then_normalize", "none"], outcomes["sum_then_normalize", "group"])
    assert_live(outcomes["sum_then_normalize", "group"], stock())


def test_rows_that_no_reward_scores():
    def sevens(completions, **_):
        return [None if "7" in text else value for text, value in zip(completions, digits(completions), strict=True)]

    ours, theirs = train(rewards=sevens), train_trl(rewards=sevens)
    assert_same(ours, theirs)
    assert_live(theirs, stock())
    assert max(ours.logged("advantage/unscorable")) > 0


# --- how generations, micro-batches and steps fit -------------------------------------------------

GEOMETRY: dict[str, dict[str, Any]] = {
    "one update per generation": {"gradient_accumulation_steps": 4, "num_iterations": 1},
    "several generations per step": {
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 2,
        "num_iterations": 1,
    },
    "3 of 2": {"gradient_accumulation_steps": 3, "steps_per_generation": 2},
    "3 of 4": {"gradient_accumulation_steps": 3, "steps_per_generation": 4},
    "3 of 2 at one iteration": {
        "gradient_accumulation_steps": 3,
        "steps_per_generation": 2,
        "num_iterations": 1,
    },
    "1 of 4": {"gradient_accumulation_steps": 1, "steps_per_generation": 4, "max_steps": 10},
    "4 of 1": {"gradient_accumulation_steps": 4, "steps_per_generation": 1, "num_iterations": 3},
    "epochs that end inside a window": {
        "gradient_accumulation_steps": 3,
        "max_steps": -1,
        "num_train_epochs": 2,
    },
    "small batches": {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 6,
    },
    "log every second step": {"logging_steps": 2},
}


@pytest.mark.parametrize("loss", ["grpo", "dapo", "bnpo"])
@pytest.mark.parametrize("geometry", list(GEOMETRY))
def test_geometry(geometry, loss):
    assert_parity(**GEOMETRY[geometry], loss_type=loss, beta=0.1)


@pytest.mark.parametrize("loss", ["cispo", "sapo", "vespo", "luspo"])
def test_a_window_of_parts_of_generations(loss):
    """Three micro-batches a step of generations of two and of four, with the rules that see micro-batches."""
    for per_generation in (2, 4):
        assert_parity(
            loss_type=loss,
            gradient_accumulation_steps=3,
            steps_per_generation=per_generation,
            entropy_coef=0.05,
            top_entropy_quantile=0.7,
            off_policy_mask_threshold=0.05,
            **LOSSES[loss],
        )


# --- model kinds, adapters, evaluation, logs ------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_lora(beta):
    def lora() -> dict[str, Any]:
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
        return {"peft_config": config}

    settings = dict(beta=beta, learning_rate=2e-2, loss_type="grpo")
    ours, theirs = (run(trainer_arguments=lora(), **settings) for run in (train, train_trl))
    assert_same(ours, theirs)
    assert max(ours.logged("clip_ratio/region_mean")) > 0
    assert len(ours.change) < len(stock().change)
    if beta:
        assert_live(theirs, train_trl(trainer_arguments=lora(), **{**settings, "beta": 0.0}))


def test_mixture_of_experts_auxiliary_loss():
    def both(
        **settings: Any,
    ) -> tuple[Outcome, Outcome]:  # grouped matrix products exist in single precision only
        return tuple(run(kind="moe", **settings) for run in (toy.train, toy.train_trl))

    ours, theirs = both(loss_type="grpo", router_aux_loss_coef=0.1)
    assert_same(ours, theirs)
    assert min(ours.logged("aux_loss")) > 0
    assert_live(theirs, toy.train_trl(kind="moe", loss_type="grpo"))
    assert_same(*both(loss_type="dapo", gradient_accumulation_steps=3, router_aux_loss_coef=0.1))


def test_llama_with_dropout():
    """A generation per step or less: the random numbers of sampling and dropout are drawn in TRL's order."""

    def dropped():
        made = toy.model("llama")
        for module in made.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.2
        made.config.attention_dropout = 0.2
        return made

    theirs = train_trl(model_given=dropped())
    assert_same(train(model_given=dropped()), theirs)
    assert_live(theirs, stock(kind="llama"))


@pytest.mark.parametrize("loss", list(LOSSES))
def test_evaluation(loss):
    settings = dict(
        loss_type=loss,
        eval_strategy="steps",
        eval_steps=3,
        per_device_eval_batch_size=4,
        num_generations_eval=2,
        beta=0.1,
        **LOSSES[loss],
    )
    evaluated = {"eval_dataset": dataset(["a", "22", "bc", "9"])}
    ours, theirs = (run(trainer_arguments=evaluated, **settings) for run in (train, train_trl))
    assert_same(ours, theirs)
    assert len(theirs.logged("eval_loss")) == 2


def test_evaluation_with_every_mask_and_bonus():
    settings = dict(
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=4,
        loss_type="bnpo",
        mask_truncated_completions=True,
        top_entropy_quantile=0.5,
        max_completion_length=12,
        entropy_target=1.85,
        use_adaptive_entropy=True,
        entropy_coef=0.1,
        off_policy_mask_threshold=0.01,
    )
    evaluated = {"eval_dataset": dataset(["a", "22", "bc", "9"])}
    ours, theirs = (run(trainer_arguments=evaluated, **settings) for run in (train, train_trl))
    assert_same(ours, theirs)


def test_completions_table():
    shared = dict(log_completions=True, rewards=[digits, early], max_steps=5, logging_steps=1)
    ours, theirs = train(**shared), train_trl(**shared)
    assert_same(ours, theirs)
    folders = [os.path.join(run.trainer.args.output_dir, "completions") for run in (ours, theirs)]
    assert os.listdir(folders[0]) and sorted(os.listdir(folders[0])) == sorted(os.listdir(folders[1]))
    for name in os.listdir(folders[0]):
        mine, other = (pd.read_parquet(os.path.join(f, name)) for f in folders)
        pd.testing.assert_frame_equal(mine, other, rtol=TOLERANCE, atol=TOLERANCE)


def test_masked_environment_tokens_of_a_rollout_function():
    """`env_mask` becomes TRL's tool mask: those tokens are attended to and never trained on."""

    def rollout(prompts, trainer):
        g = torch.Generator().manual_seed(len(prompts) + trainer.state.global_step)
        ids = [torch.randint(2, 23, (5,), generator=g).tolist() for _ in prompts]
        return {
            "prompt_ids": [tokenizer()(p)["input_ids"] for p in prompts],
            "completion_ids": ids,
            "logprobs": None,
            "env_mask": [[1, 1, 0, 0, 1] for _ in prompts],
        }

    def unmasked(prompts, trainer):
        return {k: v for k, v in rollout(prompts, trainer).items() if k != "env_mask"}

    for loss in ("grpo", "dapo", "bnpo"):
        settings = dict(loss_type=loss, entropy_coef=0.05, top_entropy_quantile=0.7)
        ours, theirs = (run(trainer_arguments={"rollout_func": rollout}, **settings) for run in (train, train_trl))
        assert_same(ours, theirs)
        assert_live(theirs, train_trl(trainer_arguments={"rollout_func": unmasked}, **settings))


# --- an engine whose log-probs are not the model's ------------------------------------------------


class Engine:
    """Stands for vLLM: random completions, log-probs near the model's, one token it could not score."""

    def __init__(self, trainer: Any, spread: float):
        self.trainer, self.spread, self.synced = trainer, spread, 0
        self.random = torch.Generator().manual_seed(11)

    def sync_weights(self) -> None:
        self.synced += 1

    def generate(self, prompts: list, **_: Any) -> tuple:
        completions = [
            torch.randint(2, 23, (int(n),), generator=self.random).tolist() + [EOS]
            for n in torch.randint(1, 5, (len(prompts),), generator=self.random)
        ]
        logprobs: list[list[list[float | None]]] = []
        for prompt, ids in zip(prompts, completions, strict=True):
            with torch.no_grad():
                logits = self.trainer.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            exact = logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
            noisy = exact + self.spread * torch.randn(len(ids), generator=self.random)
            logprobs.append([[float(v)] for v in noisy])
        logprobs[0][0] = [None]
        return None, completions, logprobs, None

    def rollout(self, prompts: list, trainer: Any) -> dict:
        ids = [tokenizer()(p)["input_ids"] for p in prompts]
        _, completions, logprobs, _ = self.generate(ids)
        return {
            "prompt_ids": ids,
            "completion_ids": completions,
            "logprobs": [[v[0] for v in r] for r in logprobs],
        }


def engine_on(spread: float = 0.3, by_rollout_function: bool = False):
    """Switches a built trainer to the engine; vLLM is not installed, so construction cannot name it."""

    def patch(trainer: Any) -> None:
        trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = (
            True,
            Engine(trainer, spread),
            -1,
        )
        if by_rollout_function:
            trainer.rollout_func = trainer.vllm_generation.rollout
        if isinstance(trainer, VariantGRPOTrainer):
            trainer.args.use_vllm = True
            trainer.variant = Variant.from_config(trainer.args)
            trainer.args.use_vllm = False
            trainer.memory = HookMemory(trainer.variant, trainer.args.seed)

    return patch


@functools.cache
def _cached_with_engine(settings: str) -> Outcome:
    return replace(train_trl(patch=engine_on(), **json.loads(settings)), trainer=None)


def stock_with_engine(**settings: Any) -> Outcome:
    if not settings.get("vllm_importance_sampling_correction", True):
        settings.pop("vllm_importance_sampling_mode", None)  # one run for every mode
    return _cached_with_engine(json.dumps(settings, sort_keys=True))


MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
TIGHT = {"vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.2}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", ["grpo", "dapo", "luspo"])
def test_sampler_correction(loss, mode):
    settings = {
        "loss_type": loss,
        "vllm_importance_sampling_mode": mode,
        "off_policy_mask_threshold": 0.3,
        **TIGHT,
    }
    ours, theirs = train(patch=engine_on(), **settings), stock_with_engine(**settings)
    assert_same(ours, theirs)
    assert ours.trainer.vllm_generation.synced > 0
    assert_live(theirs, stock_with_engine(**{**settings, "vllm_importance_sampling_correction": False}))
    other = MODES[MODES.index(mode) - 1]
    assert_live(theirs, stock_with_engine(**{**settings, "vllm_importance_sampling_mode": other}))


def test_sampler_correction_without_a_lower_bound_and_when_switched_off():
    for settings in (
        {},
        {"vllm_importance_sampling_correction": False},
        {"beta": 0.1, "top_entropy_quantile": 0.5},
    ):
        ours, theirs = (run(patch=engine_on(0.8), **settings) for run in (train, train_trl))
        assert_same(ours, theirs)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_sampler_correction_inside_vespo(mode):
    settings = {"loss_type": "vespo", "vllm_importance_sampling_mode": mode, **TIGHT}
    ours, theirs = (run(patch=engine_on(), **settings) for run in (train, train_trl))
    assert_same(ours, theirs)
    off = {**settings, "vllm_importance_sampling_correction": False}
    assert_live(theirs, train_trl(patch=engine_on(), **off))


def test_sampler_correction_from_a_rollout_function():
    settings = {"vllm_importance_sampling_mode": "token_truncate", **TIGHT}
    patch = engine_on(by_rollout_function=True)
    ours, theirs = (run(patch=patch, **settings) for run in (train, train_trl))
    assert_same(ours, theirs)
    assert_live(theirs, train_trl(patch=engine_on(0.0, by_rollout_function=True), **settings))


# --- GMPO, TRL's experimental trainer -------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"epsilon": 0.1, "epsilon_high": 0.2},
        {"beta": 0.1},
        {"top_entropy_quantile": 0.5},
        {"scale_rewards": "none"},
        {"gradient_accumulation_steps": 3},
    ],
    ids=str,
)
def test_gmpo(settings):
    theirs = train(GMPOTrainer, GMPOConfig, **settings)
    ours = train(VariantGRPOTrainer, GMPOConfig, **settings)
    assert ours.trainer.variant.name == "trl-gmpo"
    assert_same(ours, theirs)
    assert_live(theirs, train(GMPOTrainer, GMPOConfig) if settings else stock(loss_type="grpo"))


# --- named methods against TRL's settings ---------------------------------------------------------

ONE_GENERATION = {"gradient_accumulation_steps": 4, "steps_per_generation": 4, "num_iterations": 2}
NAMED: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    "dr-grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "clip-higher": {"loss_type": "dapo", "epsilon_high": 0.28},  # dapo without its sampling, which TRL has not
    "bnpo": {"loss_type": "bnpo"},
    "gspo": {"loss_type": "grpo", LEVEL: "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "luspo": {"loss_type": "luspo", LEVEL: "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "two-sided-clip": {"loss_type": "dapo", "delta": 4.0, "beta": 0.001, "use_bias_correction_kl": False},
}


@pytest.mark.parametrize("name", list(NAMED))
def test_a_named_method_is_trls_when_a_window_is_one_generation(name):
    named = train(variant=name, **ONE_GENERATION)
    theirs = stock(**ONE_GENERATION, **NAMED[name])
    assert_same_training(named, theirs)


@pytest.mark.parametrize("name", list(NAMED))
def test_settings_and_names_give_the_same_composition(name):
    config = VariantGRPOConfig(output_dir="unused", **toy.settings(**NAMED[name]))
    mine, named = (v.to_mapping() for v in (Variant.from_config(config), variant(name)))
    differing = {k for k in mine if k not in ("name", "aggregate") and mine.get(k) != named.get(k)}
    assert not differing, {k: (mine.get(k), named.get(k)) for k in differing}
    if named["aggregate"] == "token_mean":
        assert mine["aggregate"] == {"token_mean": {"span": "generation"}}
    else:
        assert mine["aggregate"] == named["aggregate"]


def test_gmpo_by_name_is_trls_but_for_the_advantage_epsilon():
    named = train(hooks={"advantage": {"grouped": {"eps": 1e-4}}}, variant="gmpo")
    theirs = train(GMPOTrainer, GMPOConfig)
    assert apart(named.change, theirs.change) <= TOLERANCE


def test_hooks_alone_edit_trls_composition():
    edited = train(hooks={"clip": {"ppo": {"eps_high": 0.5}}}, **ONE_GENERATION)
    theirs = stock(**ONE_GENERATION, epsilon_high=0.5)
    assert apart(edited.change, theirs.change) <= TOLERANCE
    assert_live(theirs, stock(**ONE_GENERATION))
