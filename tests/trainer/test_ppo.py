"""VariantPPOTrainer: the old constructor and configuration, models beside the policy, rewards per token, saving."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, DataCollatorWithPadding

from trl_variants import VariantError, VariantPPOConfig, VariantPPOTrainer, variant

from . import toy
from .forked import run_forked

OLD_METRICS = """objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores
policy/approxkl_avg policy/clipfrac_avg loss/policy_avg loss/value_avg val/clipfrac_avg policy/entropy_avg val/ratio
val/ratio_var val/num_eos_tokens lr episode eps""".split()


def config(**changes) -> VariantPPOConfig:
    settings = dict(
        output_dir=tempfile.mkdtemp(dir=toy.folder()),
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        self_test=False,
        seed=3,
        learning_rate=1e-3,
        adam_epsilon=1e-4,
        max_grad_norm=1e6,
        response_length=6,
        num_ppo_epochs=2,
        num_mini_batches=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        total_episodes=32,
    )
    return VariantPPOConfig(**{**settings, **changes})


def build(args=None, **given) -> VariantPPOTrainer:
    torch.manual_seed(0)
    arguments = dict(
        args=args or config(),
        processing_class=toy.tokenizer(),
        model=toy.model(),
        ref_model=None,
        train_dataset=toy.dataset(toy.PROMPTS * 4),
    )
    if "reward_model" not in given:
        arguments["reward_funcs"] = toy.digits
    return VariantPPOTrainer(**{**arguments, **given})


def reward_model(seed: int = 5):
    torch.manual_seed(seed)
    made = AutoModelForSequenceClassification.from_pretrained(toy.model_path(), num_labels=1)
    made.config.pad_token_id = toy.PAD
    return made


def flat(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ---------------------------------------------------------------- the configuration


def test_the_old_names_say_how_a_batch_is_used():
    args = config()
    assert (args.num_generations, args.num_iterations, args.max_completion_length) == (1, 2, 6)
    assert (args.steps_per_generation, args.gradient_accumulation_steps, args.generation_batch_size) == (4, 2, 16)
    assert args.max_steps == 2 * 2 * 2, "two batches, two epochs, two mini-batches"
    assert (args.batch_size, args.local_batch_size, args.mini_batch_size, args.num_total_batches) == (16, 16, 8, 2)
    assert config(num_ppo_epochs=3, num_mini_batches=1, total_episodes=17).max_steps == 2 * 3


def test_the_defaults_are_those_of_trl_1_12():
    args = VariantPPOConfig("out", use_cpu=True, bf16=False)
    wanted = dict(learning_rate=3e-6, temperature=0.7, response_length=53, num_ppo_epochs=4, num_mini_batches=1)
    wanted |= dict(
        kl_coef=0.05, kl_estimator="k1", cliprange=0.2, vf_coef=0.1, cliprange_value=0.2, gamma=1.0, lam=0.95
    )
    wanted |= dict(whiten_rewards=False, missing_eos_penalty=None, total_episodes=None, stop_token=None)
    assert {name: getattr(args, name) for name in wanted} == wanted
    composed = args.composition()
    assert composed == variant(composed.to_mapping()) and composed.name == "trl-ppo"
    assert composed.learners[0].epochs == 4 and composed.advantage.score_after_end and not composed.advantage.bootstrap


def test_every_number_of_the_method_reaches_its_hook():
    args = config(
        kl_coef=0.3, kl_estimator="k3", cliprange=0.1, vf_coef=0.7, cliprange_value=0.4, gamma=0.9, lam=0.8,
        whiten_rewards=True, missing_eos_penalty=2.0, value_learning_rate=1e-2, value_warmup=1, value_body="trunk",
    )  # fmt: skip
    made = args.composition()
    assert [h.hook_name for h in made.rewards] == ["missing_eos_penalty", "kl_in_reward"]
    assert (made.rewards[0].penalty, made.rewards[1].coef, made.rewards[1].estimator) == (2.0, 0.3, "k3")
    assert (made.clip.eps_low, made.clip.eps_high) == (0.1, 0.1)
    assert (made.advantage.gamma, made.advantage.lam, made.advantage.whiten_rewards) == (0.9, 0.8, True)
    critic = made.learners[0]
    assert (critic.coef, critic.clip, critic.lr, critic.warmup, critic.body) == (0.7, 0.4, 1e-2, 1, "trunk")
    assert (critic.epochs, critic.minibatches) == (2, 2)
    held = config(kl_target=6.0, kl_horizon=100.0).composition().rewards[0]
    assert (held.hook_name, held.target, held.horizon, held.level) == ("adaptive_kl_in_reward", 6.0, 100.0, "token")
    assert config(kl_coef=0.0).composition().rewards == ()


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(num_mini_batches=3), "gradient_accumulation_steps=4 micro-batches do not split into num_mini_batches=3"),
        (dict(stop_token="eos", stop_token_id=5), "contradict each other"),
        (dict(missing_eos_penalty=-1.0), "must be positive, got -1.0"),
        (dict(steps_per_generation=4), "both say how a batch is split"),
        (
            dict(per_device_train_batch_size=1, gradient_accumulation_steps=1, num_mini_batches=1),
            "nothing to whiten over",
        ),
    ],
)
def test_contradictions_in_the_configuration(changes, words):
    with pytest.raises(VariantError, match=words):
        config(**changes)


def test_a_named_variant_takes_the_place_of_the_numbers():
    trainer = build(config(variant="vapo", num_generations=4, hooks={"learners": [{"critic": {"warmup": 1}}]}))
    assert trainer.variant.name == "vapo" and trainer.variant.learners[0].warmup == 1
    before = flat(trainer.model)
    trainer.train()  # one window objective: its NLL counts the tokens of right answers over the window
    assert float((flat(trainer.model) - before).norm()) > 0
    moved = [line["policy/approxkl_avg"] for line in trainer.state.log_history if "policy/approxkl_avg" in line]
    assert len(moved) == 4 and moved[0] == 0.0 and moved[-1] > 0, "the first batch was warm-up"
    with pytest.raises(
        VariantError, match="kl_coef=0.1 has no effect when a variant is named: set rewards: kl_in_reward.coef"
    ):
        build(config(variant="vapo", kl_coef=0.1))
    with pytest.raises(VariantError, match="a group needs at least two completions"):
        build(config(variant="dapo"))


# ---------------------------------------------------------------- an old script


def test_an_old_script_trains_and_logs_the_old_names():
    data = Dataset.from_dict({"input_ids": [toy.tokenizer()(p).input_ids for p in toy.PROMPTS * 4]})
    trainer = VariantPPOTrainer(
        config(missing_eos_penalty=1.0),
        toy.tokenizer(),
        toy.model(),
        toy.model(),
        reward_model(),
        data,
        reward_model(),
        data_collator=DataCollatorWithPadding(toy.tokenizer()),
        eval_dataset=data,
    )
    before = flat(trainer.model)
    trainer.train()
    logs = {k: v for line in trainer.state.log_history for k, v in line.items()}
    assert not [name for name in OLD_METRICS if name not in logs]
    assert trainer.state.global_step == 8 and logs["episode"] == 32 and "frac_reward_zero_std" not in logs
    assert float((flat(trainer.model) - before).norm()) > 0
    first = trainer.state.log_history[0]
    assert first["objective/kl"] == 0.0 and first["val/ratio"] == 1.0 and first["policy/approxkl_avg"] == 0.0
    assert first["objective/rlhf_reward"] == first["objective/scores"] + first["objective/non_score_reward"]
    last = next(line for line in reversed(trainer.state.log_history) if "objective/kl" in line)
    assert last["objective/kl"] != 0.0 and last["objective/non_score_reward"] == pytest.approx(
        -0.05 * last["objective/kl"]
    )
    assert any(line["policy/approxkl_avg"] > 0 for line in trainer.state.log_history if "policy/approxkl_avg" in line)


def test_input_ids_reach_the_model_as_they_are():
    ids = [
        [2, 3, 4],
        [toy.EOS, 5],
        [toy.PAD, 6],
    ]  # an end of text inside a prompt does not survive a round trip as text
    data = Dataset.from_dict(
        {"input_ids": [[toy.PAD, *i] for i in ids], "attention_mask": [[0, *[1] * len(i)] for i in ids]}
    )
    seen = []

    def watch(prompts, completions, **_):
        return [0.0] * len(prompts)

    trainer = build(
        config(num_mini_batches=1, gradient_accumulation_steps=1, per_device_train_batch_size=3, total_episodes=3),
        train_dataset=data,
        reward_funcs=watch,
    )
    generate = trainer._generate_single_turn

    def spy(prompt_ids, *args, **kwargs):
        seen.extend(map(tuple, prompt_ids))
        return generate(prompt_ids, *args, **kwargs)

    trainer._generate_single_turn = spy
    trainer.train()
    assert set(seen) == {tuple(i) for i in ids}


def test_another_token_may_end_an_answer():
    stop = 7
    trainer = build(config(stop_token_id=stop))
    assert trainer.generation_config.eos_token_id == stop and trainer.eos_token_ids == [stop]
    kept = []
    trainer.reward_funcs = [lambda completion_ids, **_: kept.extend(completion_ids) or [0.0] * len(completion_ids)]
    trainer.train()
    ended = [ids for ids in kept if stop in ids]
    assert ended and all(ids.index(stop) == len(ids) - 1 for ids in ended)
    assert all(len(ids) == 6 for ids in kept if stop not in ids), "the usual end of text does not end it"


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(model=None), "needs a model"),
        (dict(data_collator=lambda rows: rows), "no data_collator"),
        (dict(ptx_dataset=Dataset.from_dict({"text": ["a"]})), "ptx_coef and ptx_dataset go together"),
    ],
)
def test_wrong_arguments(given, words):
    with pytest.raises(VariantError, match=words):
        build(**given)


def test_the_policy_is_not_its_own_reference():
    model = toy.model()
    with pytest.raises(VariantError, match="same object"):
        build(model=model, ref_model=model)


# ---------------------------------------------------------------- models beside the policy


def test_the_reference_is_a_copy_of_the_policy_or_the_one_given():
    model = toy.model()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01)  # no folder holds this policy
    copied = build(model=model)
    assert torch.equal(flat(copied.ref_model), flat(model)) and copied.ref_model is not copied.model
    other = toy.model()
    given = build(ref_model=other)
    assert given.accelerator.unwrap_model(given.ref_model) is other
    assert build(config(kl_coef=0.0)).ref_model is None
    copied.train()
    assert copied.state.log_history[0]["objective/kl"] == pytest.approx(0.0, abs=1e-5)
    assert not any(p.requires_grad for p in copied.ref_model.parameters())


def test_the_value_model_starts_as_the_reward_model():
    scorer = reward_model()
    trainer = build(reward_model=scorer, reward_funcs=[toy.digits])
    [worker] = trainer.team.workers.values()
    assert worker.body.kind == "model" and torch.equal(flat(worker.body.model), flat(scorer))
    assert worker.body.model is not scorer
    before = flat(scorer)
    trainer.train()
    assert torch.equal(flat(scorer), before) and not torch.equal(flat(worker.body.model), before)
    logs = trainer.state.log_history[0]
    names = [k for k in logs if k.startswith("rewards/") and k.endswith("/mean")]
    assert len(names) == 2 and logs["reward"] == pytest.approx(sum(logs[n] for n in names), abs=1e-5)


def test_with_an_adapter_there_is_no_second_model():
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = build(reward_model=reward_model(), peft_config=lora)
    [worker] = trainer.team.workers.values()
    assert worker.body.kind == "adapter" and trainer.ref_model is None
    trainer.train()
    assert trainer.state.log_history[0]["objective/kl"] == pytest.approx(0.0, abs=1e-5)
    assert trainer.model.active_adapters == ["default"]


# ---------------------------------------------------------------- rewards per token


def per_token(completion_ids, **_):
    return [[0.1 * t for t in range(len(ids))] for ids in completion_ids]


def test_rewards_per_token_reach_the_advantage():
    records = []
    trainer = build(config(kl_coef=0.0, num_mini_batches=1), reward_funcs=[per_token, toy.digits])
    trainer.args.reward_weights = None
    before = trainer.team.after
    trainer.team.after = lambda scored, rows, advantage: records.append(scored) or before(scored, rows, advantage)
    trainer.train()
    scored = records[0]
    mask, steps = scored.tokens["mask"], scored.tokens["mask"].cumsum(1) - 1
    digits = scored.rewards[:, 1]
    last = (steps == mask.sum(1, keepdim=True) - 1) & (mask > 0)
    wanted = 0.1 * steps * mask + digits.unsqueeze(1) * last
    torch.testing.assert_close(scored.token_rewards, wanted.float())
    torch.testing.assert_close(scored.rewards[:, 0], (0.1 * steps * mask).sum(1).float())
    returns = trainer.variant.advantage.value_targets(scored, 1.0)[0]
    torch.testing.assert_close(returns[:, 0], scored.reward)


def test_rewards_per_token_say_what_is_wrong():
    with pytest.raises(Exception, match=r"returned \d values for a completion of \d tokens"):
        build(reward_funcs=lambda completion_ids, **_: [[0.0] * (len(i) + 1) for i in completion_ids]).train()
    with pytest.raises(VariantError, match="rewards hook clip_reward edits their sum"):
        build(config(variant="ppo", hooks={"rewards": ["clip_reward"]}), reward_funcs=per_token).train()


def test_rewards_on_tool_tokens_move_to_the_policy_s_last_token_before_them():
    from trl_variants.trainer.token_rewards import _onto_policy

    x = torch.tensor([[1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 4.0, 0.0]])
    policy = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0]])
    assert _onto_policy(x, policy).tolist() == [[3.0, 0.0, 12.0, 0.0], [0.0, 3.0, 4.0, 0.0]]


# ---------------------------------------------------------------- the pre-training term

TEXTS = Dataset.from_dict({"text": ["0123", "4567 abc", "a", "ab", "jihgf", "99 88", "c", "d1"] * 2})


def test_the_pretraining_term_is_the_mean_over_its_tokens():
    trainer = build(config(ptx_coef=0.5, ptx_batch_size=6), ptx_dataset=TEXTS)
    dealt = trainer.ptx.deal(2)
    texts, tokens = [t for part, _ in dealt for t in part], dealt[0][1]
    assert len(texts) == 6 and tokens == sum(len(t) - 1 for t in texts)
    got = sum(float(trainer.ptx.loss(trainer.model, part) or 0.0) for part in dealt)
    total = 0.0
    for ids in texts:
        logits = toy.model()(input_ids=torch.tensor([ids])).logits[0].detach()
        total -= sum(float(logits[t].log_softmax(-1)[ids[t + 1]]) for t in range(len(ids) - 1))
    assert got == pytest.approx(0.5 * total / tokens, rel=1e-5)


def test_the_pretraining_term_enters_the_gradient_whatever_the_split():
    def gradients(coef, rows, steps):
        args = config(
            ptx_coef=coef, ptx_batch_size=6, num_ppo_epochs=1, num_mini_batches=1, total_episodes=16,
            per_device_train_batch_size=rows, gradient_accumulation_steps=steps, kl_coef=0.0,
        )  # fmt: skip
        trainer = build(
            args, ptx_dataset=TEXTS if coef else None, reward_funcs=lambda prompts, **_: [0.0] * len(prompts)
        )
        record = toy._Record(trainer)
        trainer.add_callback(record)
        trainer.team.workers["learners.0"].head.bias.data.fill_(0.0)
        trainer.train()
        return record.gradients[0]

    one, many = gradients(0.5, 16, 1), gradients(0.5, 4, 4)
    assert float(one.norm()) > 0.1 and toy.apart(many, one) < 1e-5
    assert toy.apart(gradients(1.0, 16, 1), one) > 0.5


# ---------------------------------------------------------------- saving


@pytest.mark.parametrize("peft", [False, True])
def test_policy_and_critic_are_saved_apart_and_the_policy_loads_with_plain_transformers(peft, tmp_path):
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if peft else None
    trainer = build(config(output_dir=str(tmp_path), save_strategy="steps", save_steps=4), peft_config=lora)
    trainer.train()
    trainer.save_model()
    top = set(os.listdir(tmp_path))
    assert "critic" not in top and "_learners" in top
    for folder in (tmp_path, tmp_path / "checkpoint-8"):
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        probe = torch.tensor([[2, 3, 4]])
        torch.testing.assert_close(loaded(probe).logits, trainer.model(probe).logits)
    own = tmp_path / "_learners" / "critic"
    [worker] = trainer.team.workers.values()
    from safetensors.torch import load_file

    assert torch.equal(load_file(own / "heads.safetensors")["value.weight"], worker.head.weight)
    if peft:
        saved = load_file(own / "critic" / "adapter_model.safetensors")
        assert any(float(x.abs().max()) > 0 for n, x in saved.items() if "lora_B" in n)
    else:
        from transformers import AutoModel

        torch.testing.assert_close(flat(AutoModel.from_pretrained(own)), flat(worker.body.model))


def test_what_a_push_uploads_holds_no_critic(tmp_path, monkeypatch):
    """transformers' own list of what it leaves out, against the names of our folders."""
    import fnmatch
    import inspect

    from transformers import Trainer

    source = inspect.getsource(Trainer.push_to_hub)
    assert '"_*"' in source
    assert fnmatch.fnmatch("_learners/critic/model.safetensors", "_*")
    assert not fnmatch.fnmatch("adapter_model.safetensors", "_*")


# ---------------------------------------------------------------- processes and resume


def test_two_processes_are_one():
    def weights(rank, rows=8):
        from tests.learners.test_critic import fixed_rollouts

        args = config(per_device_train_batch_size=rows, gradient_accumulation_steps=2, total_episodes=32)
        trainer = build(args)
        fixed_rollouts(trainer)
        trainer.train()
        return flat(trainer.model) - flat(toy.model()), flat(trainer.team.workers["learners.0"].body.model)

    toy.model()
    [(change, critic)] = run_forked(lambda r: weights(r))
    two = run_forked(lambda r: weights(r, 4), ranks=2)
    assert torch.equal(two[0][0], two[1][0]) and torch.equal(two[0][1], two[1][1])
    assert toy.apart(two[0][1], critic) < 1e-5


def test_resume_inside_a_batch_is_the_run_that_was_not_stopped(tmp_path):
    def run(rank, folder, resume=None):
        args = config(
            output_dir=str(folder), save_strategy="steps", save_steps=1, value_warmup=1, ptx_coef=0.1, ptx_batch_size=4
        )
        trainer = build(args, ptx_dataset=TEXTS)
        trainer.train(resume_from_checkpoint=resume)
        return flat(trainer.model), flat(trainer.team.workers["learners.0"].body.model)

    toy.model()
    [whole] = run_forked(lambda r: run(r, tmp_path))
    for at in (2, 5):  # inside the warm-up, and inside the second batch
        [resumed] = run_forked(lambda r, at=at: run(r, tmp_path, str(tmp_path / f"checkpoint-{at}")))
        assert torch.equal(whole[0], resumed[0]) and torch.equal(whole[1], resumed[1])
