"""Adapters to vLLM: what is refused, what is sent, under which name, and that it is proved to arrive."""

from __future__ import annotations

import inspect
import os

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from tests.trainer.fake_vllm import adapted_by, installed
from tests.trainer.forked import run_forked
from tests.trainer.toy import build, model, train
from trl_variants import VariantError
from trl_variants.trainer.engine.compare import Agreement, Shift, truncated
from trl_variants.trainer.engine.servable import require_servable, require_servable_config, served_rank
from trl_variants.trainer.engine.snapshot import Snapshot, require_complete, whole

TARGETS = ["q_proj", "v_proj", "down_proj"]


def lora(**changes):
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **changes})


def adapted(seed=0, **changes):
    torch.manual_seed(seed)
    peft = get_peft_model(model(), lora(**changes)).double()
    for name, p in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    return peft


def run(monkeypatch, peft_config=None, switches=None, **changes):
    """(what the run did, its one engine) of three steps, a generation each."""
    settings = dict(variant="dapo", num_iterations=1, steps_per_generation=2, max_steps=3, learning_rate=0.05)
    arguments = {"trainer_arguments": {"peft_config": peft_config or lora()}}
    with installed(monkeypatch, **(switches or {})) as engines:
        out = train(use_vllm=True, vllm_mode="colocate", **{**settings, **arguments, **changes})
        return out, engines[0]


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(use_dora=True), "DoRA"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save"),
        (dict(trainable_token_indices=[3]), "trainable token indices"),
        (dict(lora_bias=True), "LoRA bias"),
        (dict(bias="all"), "trained biases"),
        (dict(target_modules=["q_proj", "lm_head"]), "lm_head is a target"),
        (dict(target_modules=["embed_tokens"]), "embed_tokens is a target"),
        (dict(init_lora_weights="pissa_niter_4"), "changes the base weights"),
        (dict(target_parameters=["experts.up"]), "target_parameters"),
        (dict(r=600), "up to rank 512"),
        (dict(rank_pattern={"q_proj": 513}), "the adapter has 513"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_before_anything_loads(changes, says):
    with pytest.raises(VariantError, match=says) as error:
        build(use_vllm=True, model_given="/no/model", trainer_arguments={"peft_config": lora(**changes)})
    assert "vllm_adapter_sync: merge" in str(error.value)


def test_another_kind_of_adapter_and_several_at_once_are_refused():
    from peft import IA3Config

    with pytest.raises(VariantError, match="peft_config is IA3"):
        require_servable_config(IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    two = adapted()
    two.add_adapter("other", lora())
    assert require_servable(two) == "default"
    two.base_model.set_adapter(["default", "other"])
    with pytest.raises(VariantError, match="one adapter at a time and default, other are active"):
        require_servable(two)


def test_a_pattern_that_reaches_the_head_is_refused():
    peft = get_peft_model(model(), lora(target_modules=r".*(q_proj|lm_head)"))
    with pytest.raises(VariantError, match="lm_head is a target"):
        require_servable(peft)


def test_merging_into_a_4bit_base_is_refused():
    from transformers import BitsAndBytesConfig

    with pytest.raises(VariantError, match="4-bit base loses small updates"):
        build(
            use_vllm=True,
            vllm_adapter_sync="merge",
            model_given="/no/model",
            trainer_arguments={
                "peft_config": lora(use_dora=True),
                "quantization_config": BitsAndBytesConfig(load_in_4bit=True),
            },
        )
    with pytest.raises(VariantError, match="'adapter' or 'merge', got 'both'"):
        build(vllm_adapter_sync="both")


def test_ranks_are_rounded_up_to_what_vllm_takes():
    assert [served_rank(r) for r in (1, 2, 8, 9, 33, 321, 512)] == [1, 8, 8, 16, 64, 512, 512]


# --- what is sent -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [dict(), dict(use_rslora=True), dict(rank_pattern={"q_proj": 7}, alpha_pattern={"v_proj": 3, "down_proj": 32})],
)
def test_the_folder_sent_is_the_same_model_though_vllm_reads_one_alpha_and_one_r(changes, tmp_path):
    peft, ids = adapted(**changes), torch.arange(2, 12)[None]
    Snapshot.of(peft, "default").write(str(tmp_path / "a"))
    with torch.no_grad():
        expected, bare = peft.eval()(ids).logits, model().double()(ids).logits
        served = adapted_by(str(tmp_path / "a"), model().double())(ids).logits
    assert (expected - bare).abs().max() > 0.1
    torch.testing.assert_close(served, expected, atol=1e-5, rtol=0)  # B times its scaling is rounded once, in fp32


def test_the_fingerprint_changes_with_one_weight_and_with_nothing_else():
    peft = adapted()
    first = Snapshot.of(peft, "default")
    assert Snapshot.of(peft, "default").fingerprint == first.fingerprint
    weight = peft.get_submodule("base_model.model.model.layers.1.mlp.down_proj.lora_A.default").weight
    weight.data[0, 0] = torch.nextafter(weight.data[0, 0], torch.tensor(9.0, dtype=weight.dtype))
    assert Snapshot.of(peft, "default").fingerprint != first.fingerprint


def test_a_file_that_lacks_a_target_module_is_found(tmp_path):
    snapshot = Snapshot.of(adapted(), "default")
    assert len(snapshot.modules) == 2 * len(TARGETS)
    snapshot.write(str(tmp_path / "a"))
    with pytest.raises(VariantError, match=r"lacks model\.layers\.7\.q_proj"):
        require_complete(
            str(tmp_path / "a" / "adapter_model.safetensors"), (*snapshot.modules, "model.layers.7.q_proj")
        )


# --- whole runs on the fake engine --------------------------------------------------------------------------------


def test_each_version_has_a_fresh_name_and_number_and_the_one_before_is_removed(monkeypatch):
    out, engine = run(monkeypatch)
    assert [c for c in engine.calls if c.startswith(("add", "remove"))] == [
        "add 1",
        "remove 1",
        "add 2",
        "remove 2",
        "add 3",
    ]
    assert len(set(engine.names)) == 3
    assert (engine.settings["enable_lora"], engine.settings["max_lora_rank"], engine.settings["max_loras"]) == (
        True,
        8,
        1,
    )
    folders = out.trainer.vllm_generation._folders
    assert [f.endswith("-3") for f in os.listdir(folders)] == [True]
    assert "weights" not in engine.calls  # the base was never sent
    monkeypatch.setenv("WORLD_SIZE", "1")  # as TRL left it
    out.trainer.close()
    out.trainer.close()
    assert "WORLD_SIZE" not in os.environ
    assert engine.calls.count("shutdown") == 1 and not os.path.exists(folders)
    with pytest.raises(VariantError, match="the trainer was closed"):
        out.trainer.vllm_generation.llm.generate([])


def test_generation_after_each_sync_is_under_the_trainers_adapter(monkeypatch):
    out, _ = run(monkeypatch)
    # one micro-step a sync: what was sampled is what the policy says to fp32 rounding, so no version was late
    assert max(out.logged("sampling/sampling_logp_difference/max")) < 1e-4
    assert out.logged("engine/adapter_changed") == [1.0, 1.0]
    gaps, effects = out.logged("engine/adapter_gap"), out.logged("engine/adapter_effect")
    assert len(gaps) == 3 and max(gaps) < 1e-4
    assert effects[0] == 0.0 and min(effects[1:]) > 0.02  # a fresh adapter moves nothing
    assert out.change.norm() > 0


def test_an_adapter_that_did_not_arrive_stops_the_run(monkeypatch):
    def deafen(trainer):
        stock = trainer.vllm_generation.generate

        def generate(*given, **named):
            answer = stock(*given, **named)
            trainer.vllm_generation.llm._llm.deaf = True  # from now on it keeps the first version
            return answer

        trainer.vllm_generation.generate = generate

    with pytest.raises(VariantError, match="does not generate under version 2 of the adapter"):
        run(monkeypatch, patch=deafen)


def test_another_base_in_the_engine_is_refused(monkeypatch):
    other = model()
    with torch.no_grad():
        other.lm_head.weight.mul_(-1.0)
    with pytest.raises(VariantError, match="the engine's base model is not the trainer's"):
        run(monkeypatch, model_given=other)


def test_raw_log_probs_are_refused_and_processed_ones_compared_after_truncation(monkeypatch):
    shape = dict(temperature=0.6, top_p=0.7, top_k=9)
    out, _ = run(monkeypatch, **shape)
    assert out.logged("engine/sampler_gap")[0] < 1e-4
    with pytest.raises(VariantError, match="not those of its sampler .*--logprobs-mode processed_logprobs"):
        run(monkeypatch, switches={"raw": True}, **shape)
    with pytest.raises(VariantError, match="samples from a truncated policy"):
        run(monkeypatch, vllm_importance_sampling_correction=False, **shape)


def test_sleep_keeps_the_base_and_each_wake_sends_the_adapter_afresh(monkeypatch):
    out, engine = run(monkeypatch, vllm_enable_sleep_mode=True, max_steps=2)
    assert "sleep 2" not in engine.calls  # which would throw the base away
    order = [c for c in engine.calls if not c.startswith(("generate", "reset"))]
    assert order == [
        *("sleep 1", "wake weights", "add 1", "wake kv_cache", "sleep 1"),
        *("wake weights", "remove 1", "add 2", "wake kv_cache", "sleep 1"),
    ]
    assert max(out.logged("sampling/sampling_logp_difference/max")) < 1e-4


def test_an_adapter_that_stands_still_is_said_once_it_should_have_moved(monkeypatch):
    def freeze(trainer):
        for p in trainer.model.parameters():
            p.register_hook(torch.zeros_like) if p.requires_grad else None

    with pytest.warns(UserWarning, match="the adapter has not changed between optimizer steps 1 and 2"):
        out, engine = run(monkeypatch, patch=freeze, weight_decay=0.0)
    assert out.change.norm() == 0 and [c for c in engine.calls if c.startswith("add")] == ["add 1"]


def test_an_adapter_that_is_trained_on_is_there_from_the_start(monkeypatch):
    given = adapted().float()
    out, engine = run(monkeypatch, model_given=given, trainer_arguments={}, max_steps=1)
    assert engine.calls.count("add 1") == 1
    assert out.logged("engine/adapter_gap")[0] < 1e-4 and out.logged("engine/adapter_effect")[0] > 0.02
    assert out.logged("engine/base_gap")[0] < 1e-4


def test_what_cannot_be_served_is_merged_on_request(monkeypatch):
    dora = {"trainer_arguments": {"peft_config": lora(use_dora=True)}}
    out, engine = run(monkeypatch, vllm_adapter_sync="merge", **dora)
    assert engine.calls.count("weights") == 3 and "enable_lora" not in engine.settings
    assert max(out.logged("sampling/sampling_logp_difference/max")) < 1e-4


def test_the_comparisons_count_as_no_forwards_of_the_method(monkeypatch):
    out, _ = run(monkeypatch, max_steps=2)
    plain = train(
        variant="dapo", num_iterations=1, steps_per_generation=2, max_steps=2, trainer_arguments={"peft_config": lora()}
    )
    scored = 1.0  # for the correction the old log-probs are computed
    assert out.logged("plan/forwards_per_row")[-1] == plain.logged("plan/forwards_per_row")[-1] + scored


def test_full_fine_tuning_keeps_the_weight_sync_of_trl(monkeypatch):
    out, engine = run(monkeypatch, trainer_arguments={}, learning_rate=1e-3)
    assert engine.calls.count("weights") == 3 and "enable_lora" not in engine.settings
    assert max(out.logged("sampling/sampling_logp_difference/max")) < 1e-4
    with out.trainer as trainer:
        assert trainer is out.trainer
    assert engine.calls[-1] == "shutdown"


def _two_processes(rank, monkeypatch, broken=None):
    def patch(trainer):
        if rank == broken:
            trainer.vllm_generation.llm.serve = lambda *given: 1 / 0

    out, engine = run(monkeypatch, patch=patch, max_steps=2)
    return engine.names, engine.settings["seed"], out.logged("engine/adapter_gap"), out.change


def test_two_processes_have_an_engine_each_and_both_get_every_version(monkeypatch):
    first, second = run_forked(lambda rank: _two_processes(rank, monkeypatch), ranks=2)
    assert len(first[0]) == len(second[0]) == 2 and (first[1], second[1]) == (0, 1)
    assert max(first[2]) < 1e-4 and torch.equal(first[3], second[3])


def test_an_engine_that_fails_on_one_process_stops_both(monkeypatch):
    def rank_fails(rank):
        with pytest.raises(VariantError, match="process 1: the engine failed: ZeroDivisionError"):
            _two_processes(rank, monkeypatch, broken=1)

    run_forked(rank_fails, ranks=2)


def _shards(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo")
    value = torch.arange(10.0).reshape(5, 2)
    shard = torch.nn.Parameter(distribute_tensor(value, init_device_mesh("cpu", (2,)), [Shard(0)]))
    return len(shard.to_local()), whole(shard)


def test_fsdp2_shards_are_put_together_and_zero3_shards_refused():
    for rank, (rows, value) in enumerate(run_forked(_shards, ranks=2)):
        assert rows == (3, 2)[rank] and torch.equal(value, torch.arange(10.0).reshape(5, 2))
    partitioned = torch.nn.Parameter(torch.empty(0))
    partitioned.ds_id = 3
    with pytest.raises(VariantError, match="ZeRO-3 shards cannot reach vLLM: use zero2, fsdp2 or multi_gpu"):
        whole(partitioned)


def test_what_trl_calls_its_engine_is_what_is_replaced():
    own = lambda method: list(inspect.signature(getattr(VLLMGeneration, method)).parameters)  # noqa: E731
    assert own("sync_weights") == ["self"]
    assert own("generate") == ["self", "prompts", "images", "num_generations", "profiler"]
    assert grpo_trainer.VLLMGeneration is VLLMGeneration  # and put back after each trainer
    source = inspect.getsource(vllm_generation)
    assert "self.llm = LLM(" in source and "self.vllm_client = VLLMClient(" in source


# --- the comparisons ----------------------------------------------------------------------------------------------


def test_a_quantized_base_under_an_unquantized_engine_needs_the_correction():
    found = Agreement(base=0.6, sampler=0.6, untruncated=0.6, quantized_only_here=True)
    found.require(1.0, corrected=True, settings="")
    with pytest.raises(VariantError, match="0.600 nats a token apart.: set vllm_importance_sampling_correction"):
        found.require(1.0, corrected=False, settings="")
    with pytest.raises(VariantError, match="base model is not the trainer's"):
        Agreement(base=0.6, sampler=0.6, untruncated=0.6).require(1.0, corrected=True, settings="")


def test_raw_log_probs_are_told_from_noise():
    Agreement(base=0.3, sampler=0.3, untruncated=0.3, raw=0.25).require(0.5, corrected=True, settings="")
    with pytest.raises(VariantError, match="not those of its sampler"):  # though 0.1 is inside the limit of 0.13
        Agreement(base=0.01, sampler=0.1, untruncated=0.1, raw=0.01).require(0.4, corrected=True, settings="")


@pytest.mark.parametrize(
    "gap, effect, answer, arrived",
    [
        (0.04, 0.0, 0.04, True),
        (0.3, 2.0, 1.8, True),
        (0.3, 0.3, 0.0, False),
        (1.9, 2.0, 0.5, False),
        (float("nan"), 2.0, float("nan"), False),
    ],
)
def test_an_adapter_arrived_within_the_noise_or_far_nearer_than_the_base(gap, effect, answer, arrived):
    assert Shift(gap, effect, answer).arrived(rounding=0.05, same_base=True) is arrived


def test_on_another_base_the_engine_must_have_moved():
    assert Shift(gap=0.9, effect=1.0, answer=0.6).arrived(rounding=0.05, same_base=False)
    assert not Shift(gap=1.0, effect=1.0, answer=0.0).arrived(rounding=0.05, same_base=False)


def test_the_two_bases_cancel_in_the_shift():
    here, base_here = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.5])
    there, base_there = torch.tensor([-2.0, -3.0]), torch.tensor([-2.5, -2.7])
    shift = Shift.of(here, base_here, there, base_there)
    assert (shift.effect, shift.answer) == (pytest.approx(0.5), pytest.approx(0.4))
    assert shift.gap == pytest.approx((0.0 + 0.2) / 2)


def test_truncation_by_hand():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    kept = lambda **limits: truncated(logits, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **limits}).exp()  # noqa: E731
    torch.testing.assert_close(kept(), logits.exp())
    torch.testing.assert_close(kept(top_k=2), torch.tensor([0.625, 0.375, 0, 0], dtype=torch.float64))
    # 0.5 does not reach 0.6, so 0.3 comes with it
    torch.testing.assert_close(kept(top_p=0.6), torch.tensor([0.625, 0.375, 0, 0], dtype=torch.float64))
    torch.testing.assert_close(kept(min_p=0.25), torch.tensor([10, 6, 3, 0], dtype=torch.float64) / 19)
