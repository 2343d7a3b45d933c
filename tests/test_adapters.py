"""QLoRA from the command line: train, go on from the adapter, merge it; and what `check` says before."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import yaml

from tests.trainer import toy
from trl_variants import VariantError, merge_adapter
from trl_variants.cli import main
from trl_variants.report import run_folder

pytest.importorskip("bitsandbytes")

TINY = {
    "task": {"name": "arithmetic", "eval_size": 8, "train_size": 64},
    "variant": "dapo",
    "hooks": {"regularizers": [{"kl": {"coef": 0.1}}]},
    "use_cpu": True,
    "bf16": False,
    "load_in_4bit": True,
    "use_peft": True,
    "lora_r": 4,
    "lora_target_modules": "all-linear",
    "per_device_train_batch_size": 16,
    "num_generations": 8,
    "max_completion_length": 4,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "per_device_eval_batch_size": 8,
    "report_to": "none",
    "self_test": False,
}


@pytest.fixture(scope="module")
def qlora_run(tmp_path_factory):
    """A run folder of two steps, with an evaluation after each and a merged model."""
    folder = tmp_path_factory.mktemp("qlora")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(TINY))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "learning_curve_png", lambda *args, **kwargs: None)
        words = ["train", str(folder / "recipe.yaml"), "--output_dir", str(folder / "run")]
        assert main([*words, "--merge_adapter", "bfloat16"]) == 0
    return SimpleNamespace(folder=folder / "run", recipe=str(folder / "recipe.yaml"))


def logged(folder, name: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def logps(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits.float().log_softmax(-1)


def test_it_trains_between_evaluations(qlora_run):
    assert all(norm > 0 for norm in logged(qlora_run.folder, "grad_norm"))
    assert len(logged(qlora_run.folder, "eval_loss")) == 2
    assert (qlora_run.folder / "adapter_model.safetensors").is_file()


def test_the_merged_model_is_plain_and_says_what_the_adapter_says(qlora_run):
    """On the same 16-bit base; in bfloat16 a sum of weights is off by its last bit."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_variants.tasks import tiny_model_path

    merged = AutoModelForCausalLM.from_pretrained(qlora_run.folder / "merged", dtype="auto")
    assert merged.dtype == torch.bfloat16 and not (qlora_run.folder / "merged" / "adapter_config.json").exists()
    base = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.bfloat16)
    ids = torch.tensor([AutoTokenizer.from_pretrained(qlora_run.folder / "merged")("12+34=46")["input_ids"]])
    alone = logps(base, ids)
    beside = logps(PeftModel.from_pretrained(base, str(qlora_run.folder)), ids)
    moved, off = (alone - beside).abs().mean(), (logps(merged, ids) - beside).abs().mean()
    assert moved > 0.02 and off < 0.2 * moved


def test_in_float32_the_merge_is_exact(qlora_run, tmp_path):
    done = merge_adapter(qlora_run.folder, tmp_path / "whole", dtype="float32")
    assert done.difference < 1e-4 and done.path == str(tmp_path / "whole")
    with pytest.raises(VariantError, match="not empty"):
        merge_adapter(qlora_run.folder, tmp_path / "whole")
    assert main(["merge", str(qlora_run.folder), "--out", str(tmp_path / "whole"), "--overwrite"]) == 0


@pytest.mark.parametrize("key", ["adapter", "model"])
def test_a_run_goes_on_from_an_adapter(qlora_run, tmp_path, key, monkeypatch):
    """The KL to the adapter it began with is zero at its first step, and its weights are the old ones, moved."""
    from safetensors.torch import load_file

    monkeypatch.setattr(run_folder, "learning_curve_png", lambda *args, **kwargs: None)
    more = ["--max_steps", "1", "--eval_strategy", "no", "--learning_rate", "1e-5", "--use_peft", "false"]
    words = ["train", qlora_run.recipe, f"--{key}", str(qlora_run.folder), "--output_dir", str(tmp_path), *more]
    assert main(words) == 0
    assert logged(tmp_path, "kl") == [0.0]
    old, new = (load_file(f / "adapter_model.safetensors") for f in (qlora_run.folder, tmp_path))
    assert old.keys() == new.keys()
    assert all((old[name].float() - new[name].float()).abs().max() < 1e-3 for name in old)


def test_the_python_trainer_goes_on_from_a_folder(qlora_run):
    from peft import LoraConfig

    from trl_variants.tasks import load_task

    task = load_task("arithmetic")
    given = dict(rewards=task.reward_funcs, data=task.train_dataset, model_given=str(qlora_run.folder), max_steps=1)
    without_tokenizer = {"processing_class": None}
    out = toy.train(**given, variant="grpo", trainer_arguments=without_tokenizer)
    assert out.change.norm() > 0 and out.trainer.has_adapters
    with pytest.raises(VariantError, match="leave peft_config out"):
        toy.build(**given, trainer_arguments={"peft_config": LoraConfig(r=2)})


def test_a_warm_up_on_a_four_bit_base_learns(qlora_run, tmp_path, monkeypatch):
    """Accuracy is measured before it, which on a CPU would take the gradients away: most of B would stay zero."""
    from safetensors.torch import load_file

    monkeypatch.setattr(run_folder, "learning_curve_png", lambda *args, **kwargs: None)
    words = ["train", qlora_run.recipe, "--output_dir", str(tmp_path), "--max_steps", "1", "--eval_strategy", "no"]
    assert main([*words, "--warm_up.steps", "1", "--warm_up.batch_size", "8"]) == 0
    weights = load_file(tmp_path / "warm_up" / "adapter_model.safetensors")
    moved = [w.abs().max() > 0 for name, w in weights.items() if "lora_B" in name]
    assert moved and all(moved)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--use_peft false", "error: 4-bit weights are not trained themselves"),
        ("--merge_adapter int8", "error: merge_adapter is one of bfloat16"),
        ("--use_cpu false", "warning: 4-bit weights are multiplied in float32"),
        ("--fp16 true --dtype float16", "note: fp16 with loss scaling, on a CPU the run stays"),
        ("--fp16 true --dtype bfloat16", "warning: dtype is bfloat16 under fp16"),
        ("--fp16 true --attn_implementation flash_attention_2", "warning: flash attention needs an Ampere"),
        ("--fp16 true --dtype float16 --load_in_4bit false --use_peft false", "error: fp16 scales the loss"),
        ("--fp16 true --dtype float16 --variant ppo", "warning: a learner's loss is not scaled"),
        ("--adapter somewhere", "note: the run goes on from an adapter"),
    ],
)  # fmt: skip
def test_check_says(qlora_run, words, said, capsys):
    code = main(["check", qlora_run.recipe, *words.split()])
    out = capsys.readouterr().out
    assert any(line.startswith(said) for line in out.splitlines()), out
    assert (code == 2) == ("error:" in out)


@pytest.mark.parametrize("given", ["an empty folder", "no base"])
def test_what_cannot_be_merged(given, tmp_path, qlora_run):
    if given == "no base":
        config = json.loads((qlora_run.folder / "adapter_config.json").read_text())
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/gone"}))
    with pytest.raises(
        VariantError, match="has no adapter_config.json" if given != "no base" else "name a folder or Hub id"
    ):
        merge_adapter(tmp_path)


class Hub:
    """What `merge_adapter` asks of huggingface_hub."""

    def __init__(self, readme: bool = False, error: Exception | None = None):
        self.readme, self.error, self.said = readme, error, []

    def __call__(self):
        return self

    def create_repo(self, repo, **how):
        if self.error:
            raise self.error
        self.said.append(("create", repo, how))
        return SimpleNamespace(repo_id=f"me/{repo}")

    def file_exists(self, repo, name):
        return self.readme and (repo, name) == ("me/mine", "README.md")

    def upload_folder(self, **how):
        self.said.append(("upload", how["repo_id"], how))


def test_a_push_is_private_and_leaves_their_readme(qlora_run, tmp_path, monkeypatch, capsys):
    hub = Hub(readme=True)
    monkeypatch.setattr("huggingface_hub.HfApi", hub)
    assert main(["merge", str(qlora_run.folder), "--out", str(tmp_path / "a"), "--push", "mine"]) == 0
    assert "pushed to mine" in capsys.readouterr().out
    (_, _, made), (_, repo, sent) = hub.said
    assert made["private"] is True and made["exist_ok"] and repo == "me/mine"
    assert sent["ignore_patterns"] == ["README.md"] and str(sent["folder_path"]) == str(tmp_path / "a")
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", hub)
    assert main(["merge", str(qlora_run.folder), "--out", str(tmp_path / "b"), "--push", "mine", "--public"]) == 0
    assert hub.said[0][2]["private"] is False and hub.said[1][2]["ignore_patterns"] is None


def test_a_failed_push_leaves_the_merged_model(qlora_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.HfApi", Hub(error=RuntimeError("no route")))
    assert main(["merge", str(qlora_run.folder), "--out", str(tmp_path / "a"), "--push", "mine"]) == 2
    assert "but the push to mine failed: no route" in capsys.readouterr().err
    assert (tmp_path / "a" / "model.safetensors").is_file()


def test_the_card_names_no_folder_of_this_machine(qlora_run):
    from huggingface_hub import ModelCard

    card = ModelCard.load(qlora_run.folder / "merged" / "README.md")
    assert card.data.base_model is None and "trl-variants" in card.data.tags


@pytest.mark.parametrize(
    "kind",
    [
        {"use_dora": True},
        {"use_rslora": True, "rank_pattern": {"q_proj": 2}},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=lambda kind: next(iter(kind)),
)
def test_forms_of_lora(kind, tmp_path):
    """Merged in float32 they say what base and adapter say, also when loaded again by plain transformers."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    given = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM", **kind}
    torch.manual_seed(0)
    wrapped = get_peft_model(toy.model(), LoraConfig(**given))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "modules_to_save" in name and parameter.requires_grad:
                parameter.add_(0.1)
    wrapped.save_pretrained(tmp_path / "adapter")
    toy.tokenizer().save_pretrained(tmp_path / "adapter")
    done = merge_adapter(tmp_path / "adapter", dtype="float32")
    ids = torch.tensor([[2, 5, 9, 3, 7]])
    again = AutoModelForCausalLM.from_pretrained(done.path)
    assert done.difference < 1e-4
    assert (logps(again, ids) - logps(wrapped.eval(), ids)).abs().max() < 1e-4
    assert (logps(again, ids) - logps(toy.model(), ids)).abs().max() > 1e-2


def test_what_no_single_weight_can_hold(tmp_path):
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    forms = {
        "is a PROMPT_TUNING adapter: only LoRA is merged": PromptTuningConfig(num_virtual_tokens=2),
        "cannot be merged: .* the base layer has no bias": LoraConfig(target_modules=["q_proj"], lora_bias=True),
    }
    for i, (said, config) in enumerate(forms.items()):
        config.task_type = "CAUSAL_LM"
        get_peft_model(toy.model(), config).save_pretrained(tmp_path / str(i))
        toy.tokenizer().save_pretrained(tmp_path / str(i))
        with pytest.raises(VariantError, match=said):
            merge_adapter(tmp_path / str(i))
        assert not (tmp_path / str(i) / "merged").exists()
