"""Runs pushed to a Hub over HTTP, and what comes back from it."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer import toy
from trl_variants import VariantError
from trl_variants.cli import main

SAVING = dict(save_strategy="steps", save_steps=1, max_steps=2, variant="dapo")


def pushed(hub, tmp_path, **changes):
    arguments = {**SAVING, "push_to_hub": True, "hub_model_id": "me/run", "output_dir": str(tmp_path / "run")}
    return toy.train(**{**arguments, **changes}).trainer


def lora() -> dict:
    return {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}


def head_of(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


def fetched(hub, repo: str, where, prefix: str = ""):
    from huggingface_hub import HfApi

    return HfApi(endpoint=hub.url).snapshot_download(repo, local_dir=where) + prefix


def test_a_full_model_comes_back_and_generates(hub, tmp_path, capsys):
    trainer = pushed(hub, tmp_path)
    assert trainer.push_to_hub() is not None and trainer.push_failures == []
    repo = hub.repos["models/me/run"]
    assert repo.private
    assert repo.commits[-1] == "End of training"
    for name in ("model.safetensors", "README.md", "run.json", "log.jsonl", "curve.png", "tokenizer.json"):
        assert name in repo.files, name
    kept_here = ("checkpoint", "training_args", "optimizer", "variant", "_")
    assert not [name for name in repo.files if name.startswith(kept_here)]
    head = head_of(repo.files["README.md"].decode())
    assert "base_model" not in head and {"trl-variants", "dapo"} <= set(head["tags"])

    folder = fetched(hub, "me/run", tmp_path / "back")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("a1", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]
    trained = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


def test_an_adapter_is_pushed_as_an_adapter_without_the_learners(hub, tmp_path):
    trainer = pushed(hub, tmp_path, variant="ppo", trainer_arguments=lora(), hub_strategy="end", max_steps=1)
    trainer.save_learners()
    assert (tmp_path / "run" / "_learners").is_dir()
    trainer.push_to_hub()
    files = hub.repos["models/me/run"].files
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    assert not [name for name in files if "_learners" in name]
    card = files["README.md"].decode()
    assert "PeftModel.from_pretrained" in card and head_of(card)["library_name"] == "peft"

    folder = fetched(hub, "me/run", tmp_path / "back")
    base = AutoModelForCausalLM.from_pretrained(toy.model_path("qwen3"))
    model, tokenizer = PeftModel.from_pretrained(base, folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("a1", return_tensors="pt").input_ids
    assert model.generate(input_ids=ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


def test_pushed_checkpoint_resumes_on_another_machine_and_pushes_again(hub, tmp_path):
    whole = toy.train(**{**SAVING, "max_steps": 4, "output_dir": str(tmp_path / "whole")})
    first = pushed(hub, tmp_path, hub_strategy="checkpoint", hub_always_push=True, max_steps=4, patch=stop_after(2))
    first._finish_current_push()
    repo = hub.repos["models/me/run"]
    assert {"last-checkpoint/optimizer.pt", "last-checkpoint/variant.json", "model.safetensors"} <= set(repo.files)
    folder = fetched(hub, "me/run", tmp_path / "other", "/last-checkpoint")
    before = len(repo.commits)
    second = pushed(
        hub, tmp_path, hub_strategy="checkpoint", max_steps=4, resume=folder, output_dir=str(tmp_path / "other")
    )
    second.push_to_hub()
    assert len(repo.commits) > before
    a, b = (t.accelerator.unwrap_model(t.model).state_dict() for t in (whole.trainer, second))
    assert all(torch.equal(a[name], b[name]) for name in a)


def stop_after(step: int):
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop |= state.global_step >= step

    return lambda trainer: trainer.add_callback(Stop())


def test_failed_pushes_are_said_and_the_run_ends_well(hub, tmp_path, capsys):
    def break_it(trainer):
        hub.broken = True

    trainer = pushed(hub, tmp_path, patch=break_it)
    assert trainer.state.global_step == 2
    assert trainer.push_to_hub() is None
    said = capsys.readouterr().out
    assert len(trainer.push_failures) == 3  # two checkpoints and the end
    assert said.count("a push to the Hub failed and the run goes on") == 3 and "in trouble" in said
    assert (tmp_path / "run" / "model.safetensors").is_file()

    hub.broken = False
    assert main(["push", str(tmp_path / "run"), "--hub_model_id", "me/later"]) == 0
    assert "model.safetensors" in hub.repos["models/me/later"].files and hub.repos["models/me/later"].private


def test_a_readme_on_the_hub_is_kept(hub, tmp_path, capsys):
    hub.put("models/me/run", {"README.md": b"# Mine\n"}, private=False)
    pushed(hub, tmp_path).push_to_hub()
    files = hub.repos["models/me/run"].files
    assert files["README.md"] == b"# Mine\n"
    assert "## Method" in files["README.trl_variants.md"].decode()
    said = capsys.readouterr().out
    assert "has a README of its own, which is kept" in said and "already and is public" in said


def test_a_readme_written_meanwhile_is_kept(hub, tmp_path):
    trainer = pushed(hub, tmp_path)
    hub.repos["models/me/run"].files["README.md"] = b"# Mine by now\n"
    trainer.push_to_hub()
    assert hub.repos["models/me/run"].files["README.md"] == b"# Mine by now\n"


def test_a_readme_that_cannot_be_read_counts_as_somebody_elses(hub, tmp_path):
    hub.put("models/me/run", {"README.md": b"# Mine\n"})
    hub.unreadable = True
    with pytest.raises(VariantError, match="cannot make or reach the Hub repository"):
        toy.build(push_to_hub=True, hub_model_id="me/run", output_dir=str(tmp_path))
    assert hub.repos["models/me/run"].commits == ["by hand"]


def test_our_own_card_is_renewed(hub, tmp_path):
    trainer = pushed(hub, tmp_path)
    trainer.push_to_hub()
    trainer.push_to_hub(tags="second")
    files = hub.repos["models/me/run"].files
    assert "second" in head_of(files["README.md"].decode())["tags"] and "README.trl_variants.md" not in files


@pytest.mark.parametrize("private", [True, False])
def test_privacy_is_what_was_asked_for(hub, tmp_path, private):
    toy.build(push_to_hub=True, hub_model_id="me/run", hub_private_repo=private, output_dir=str(tmp_path))
    assert hub.repos["models/me/run"].private is private


def test_a_base_that_the_hub_refuses_stops_before_the_first_step(hub, tmp_path):
    with pytest.raises(VariantError, match="hub_base_model must be a Hub id"):
        toy.build(hub_base_model="/models/of mine", output_dir=str(tmp_path))


def test_a_named_base_reaches_card_and_adapter(hub, tmp_path):
    trainer = pushed(
        hub, tmp_path, trainer_arguments=lora(), hub_base_model="Qwen/Qwen3-0.6B", hub_strategy="end", max_steps=1
    )
    trainer.push_to_hub()
    files = hub.repos["models/me/run"].files
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "Qwen/Qwen3-0.6B"
    assert head_of(files["README.md"].decode())["base_model"] == "Qwen/Qwen3-0.6B"


def test_a_repository_that_cannot_be_made_is_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(VariantError, match="cannot make or reach the Hub repository 'me/run'"):  # offline
        toy.build(push_to_hub=True, hub_model_id="me/run", output_dir=str(tmp_path))


def test_completions_go_to_a_private_data_set(hub, tmp_path):
    changes = dict(log_completions=True, log_completions_hub_repo="me/said", hub_strategy="end", max_steps=1)
    trainer = pushed(hub, tmp_path, **changes)
    trainer.commit_scheduler.trigger().result()
    trainer.commit_scheduler.stop()
    repo = hub.repos["datasets/me/said"]
    assert repo.private and [name for name in repo.files if name.endswith(".parquet")]


def test_a_completions_repository_with_a_readme_of_its_own_is_refused(hub, tmp_path):
    hub.put("datasets/me/said", {"README.md": b"# Mine\n"})
    with pytest.raises(VariantError, match="has a README that TRL would replace"):
        toy.build(log_completions=True, log_completions_hub_repo="me/said", output_dir=str(tmp_path))


def test_a_recipe_pushes_from_the_command_line_without_its_token(hub, tmp_path):
    folder = tmp_path / "run"
    words = ["train", "recipes/quickstart.yaml", "--output_dir", str(folder), "--max_steps", "2"]
    words += ["--per_device_train_batch_size", "16", "--task.eval_size", "8", "--push_to_hub", "true"]
    assert main([*words, "--hub_model_id", "me/run", "--hub_token", "hf_secret"]) == 0
    files = hub.repos["models/me/run"].files
    card = files["README.md"].decode()
    assert "8 held-out problems" in card and "max_steps: 2" in card and "--hub_model_id me/run" in card
    assert head_of(card)["model-index"][0]["results"][0]["metrics"][0]["type"] == "accuracy"
    assert not [name for name, content in files.items() if b"hf_secret" in content]


def test_two_processes_push_once_and_fail_together(hub, tmp_path):
    from tests.trainer.forked import run_forked

    def both(rank):
        from huggingface_hub import constants

        constants.HF_HUB_OFFLINE = True
        with pytest.raises(VariantError, match="cannot make or reach the Hub repository") as caught:
            toy.build(push_to_hub=True, hub_model_id="me/none", output_dir=str(tmp_path / "none"))
        constants.HF_HUB_OFFLINE = False
        trainer = pushed(hub, tmp_path, max_steps=1)
        sent = trainer.push_to_hub()
        return str(caught.value), trainer.hub_model_id, sent is not None, trainer.push_failures

    first, second = run_forked(both, ranks=2)
    assert first[0].startswith("process 0: ") and first[0] == second[0]
    assert first[1:] == ("me/run", True, []) and second[1:] == ("me/run", False, [])
    assert hub.repos["models/me/run"].commits == ["Training in progress, step 1", "End of training"]
