"""The command line: what a user types, what is printed, and how a mistake reads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from trl_variants import VariantError, variants
from trl_variants.cli import main, recipe, sources, train
from trl_variants.cli.overrides import put, read_recipe, read_value, split_words

ROOT = Path(__file__).parents[1]
BASE = {
    "task": "arithmetic",
    "variant": "dapo",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "num_threads": 1,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 5,
    "max_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture
def recipe_file(tmp_path):
    def write(**changes) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({**BASE, "output_dir": str(tmp_path / "run"), **changes}))
        return str(path)

    return write


def mistake(capsys, *words) -> str:
    """Runs a command that must fail as a user's mistake does, and returns the sentence."""
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


# --- words and YAML ---


@pytest.mark.parametrize(
    "text, value",
    [("1e-3", 1e-3), ("3", 3), ("0.5", 0.5), ("-1", -1), (".5", 0.5), ("1.5E+2", 150.0), ("true", True),
     ("no", "no"), ("null", None), ("gspo", "gspo"), ("{a: 1e-4}", {"a": 1e-4}), ("[1, 2]", [1, 2]),
     ("1.2.3", "1.2.3"), ("a: b: c", "a: b: c")],
)  # fmt: skip
def test_values_are_read_as_yaml_1_2(text, value):
    assert read_value(text) == value and type(read_value(text)) is type(value)


def test_split_words():
    words = ["--a", "1", "2", "--b=c=d", "--flag", "--n", "-1"]
    assert split_words(words) == [("a", ["1", "2"]), ("b", ["c=d"]), ("flag", []), ("n", ["-1"])]


@pytest.mark.parametrize(
    "tree, keys, value, expected",
    [
        ({}, "generation_kwargs.top_k", 5, {"generation_kwargs": {"top_k": 5}}),
        ({"task": "arithmetic"}, "task.seed", 3, {"task": {"name": "arithmetic", "seed": 3}}),
        ({"variant": "dapo"}, "variant.clip", "sapo", {"variant": {"name": "dapo", "clip": "sapo"}}),
        ({}, "hooks.clip.ppo.eps_high", 0.3, {"hooks": {"clip": {"ppo": {"eps_high": 0.3}}}}),
        (
            {"hooks": {"clip": {"ppo": {"eps_low": 0.1}}}},
            "hooks.clip.ppo.eps_high",
            0.3,
            {"hooks": {"clip": {"ppo": {"eps_low": 0.1, "eps_high": 0.3}}}},
        ),
        # one hook fits the seam: another name replaces it
        ({"hooks": {"clip": "sapo"}}, "hooks.clip.ppo.a", 0.3, {"hooks": {"clip": {"ppo": {"a": 0.3}}}}),
        # several fit: another name is added
        ({"hooks": {"regularizers": "kl"}}, "hooks.regularizers.entropy.coef", 0.1,
         {"hooks": {"regularizers": [{"kl": {}}, {"entropy": {"coef": 0.1}}]}}),
    ],
)  # fmt: skip
def test_dotted_keys(tree, keys, value, expected):
    put(tree, keys.split("."), value)
    assert tree == expected


def test_a_dotted_key_into_a_number_is_a_mistake():
    with pytest.raises(VariantError, match="max_steps is 3"):
        put({"max_steps": 3}, ["max_steps", "x"], 1)


def test_a_key_written_twice_is_a_mistake(tmp_path):
    (tmp_path / "r.yaml").write_text("variant: dapo\nmax_steps: 3\nvariant: gspo\n")
    with pytest.raises(VariantError, match="variant is written twice"):
        read_recipe(tmp_path / "r.yaml")


# --- recipes ---


def test_the_command_line_beats_the_file(recipe_file):
    words = [
        "--variant",
        "gspo",
        "--max_steps",
        "7",
        "--learning-rate=1e-4",
        "--hooks.clip.ppo.eps_high",
        "0.3",
    ]
    spec = recipe.load(recipe_file(learning_rate=1e-3, max_steps=5), words)
    assert spec.config.variant == "gspo" and spec.config.hooks == {"clip": {"ppo": {"eps_high": 0.3}}}
    assert spec.config.max_steps == 7 and spec.config.learning_rate == 1e-4
    assert spec.config.num_generations == 4  # from the file


def test_types_are_the_fields_own(recipe_file):
    path = recipe_file(run_name=5, lora_target_modules="all-linear", use_peft=True, lr_scheduler_kwargs={"a": 1})
    spec = recipe.load(path, ["--learning_rate", "3", "--log_completions", "--generation_kwargs.top_k", "5"])
    assert spec.config.learning_rate == 3.0 and isinstance(spec.config.learning_rate, float)
    assert spec.config.run_name == "5" and spec.config.log_completions is True
    assert spec.config.lr_scheduler_kwargs == {"a": 1} and spec.config.generation_kwargs == {"top_k": 5}
    assert spec.model.lora_target_modules == "all-linear" and spec.model.lora_dropout == 0.0


def test_env_is_exported(recipe_file, monkeypatch):
    monkeypatch.setenv("TRL_VARIANTS_TEST", "before")
    recipe.load(recipe_file(env={"TRL_VARIANTS_TEST": 3}), [])
    assert os.environ["TRL_VARIANTS_TEST"] == "3"


@pytest.mark.parametrize("place", ["first", "last", "config"])
def test_where_the_recipe_stands(place):
    words = {
        "first": ["r.yaml", "--variant", "gspo"],
        "last": ["--variant", "gspo", "r.yaml"],
        "config": ["--variant", "gspo", "--config", "r.yaml"],
    }[place]
    assert recipe.take_recipe(words, "train") == ("r.yaml", ["--variant", "gspo"])


@pytest.mark.parametrize(
    "changes, words, sentence",
    [
        ({"variant": "gspoo"}, [], "did you mean gspo"),
        ({}, ["--variant", "dappo"], "dapo"),
        ({"learning_rat": 1}, [], "unknown setting 'learning_rat' (did you mean learning_rate"),
        ({}, ["--learning_rat", "1"], "unknown setting 'learning_rat' (did you mean learning_rate"),
        ({}, ["--hoks.clip.ppo.eps_high", "1"], "unknown setting 'hoks' (did you mean hooks"),
        ({}, ["--hooks.clip.ppo.eps_hig", "1"], "did you mean eps_high"),
        ({}, ["--hooks.clipp.ppo.eps_high", "1"], "did you mean clip"),
        ({}, ["--hooks.clip.ppo.eps_high", "much"], "eps_high must be float"),
        ({"max_steps": "many"}, [], "max_steps: invalid int value: 'many'"),
        ({"max_steps": 1.5}, [], "max_steps: invalid int value: '1.5'"),
        ({"max_steps": [1]}, [], "max_steps must be int, got a list"),
        ({"max_steps": {"a": 1}}, [], "max_steps must be int, got a mapping"),
        ({"use_cpu": None}, [], "use_cpu must be bool, got null"),
        ({"use_cpu": "perhaps"}, [], "use_cpu: Truthy value expected"),
        ({}, ["--max_steps", "many"], "max_steps: invalid int value: 'many'"),
        ({}, ["--max_steps"], "max_steps: expected one argument"),
        ({"dtype": "float17"}, [], "dtype: invalid choice: 'float17'"),
        ({"task": "aritmetic"}, [], "did you mean arithmetic"),
        ({"task": None}, [], "a recipe needs a task"),
        ({"num_generations": 3}, [], "divisible"),
        ({"model": "a", "model_name_or_path": "b"}, [], "two different models"),
        ({}, ["stray"], "'stray' is no option"),
        ({"warm_up": 4}, [], "warm_up must be a mapping with steps"),
        ({"warm_up": {"column": "solution"}}, [], "warm_up must be a mapping with steps"),
        ({"warm_up": {"steps": 0}}, [], "warm_up.steps must be a whole number above 0, got 0"),
        ({"warm_up": {"steps": 1, "learning_rate": -1}}, [], "warm_up.learning_rate must be a number above 0"),
        ({}, ["--warm_up.steps", "2", "--warm_up.colum", "a"], "warm_up has no 'colum' (did you mean column"),
    ],
)
def test_mistakes_in_a_recipe(changes, words, sentence, recipe_file, capsys):
    assert sentence in mistake(capsys, "check", recipe_file(**changes), *words)


def test_a_missing_recipe_names_those_there_are(capsys, recipe_file):
    other = recipe_file()
    assert other in mistake(capsys, "train", str(Path(other).with_name("quikstart.yaml")))


@pytest.mark.parametrize("text, sentence", [("a: [1", "not valid YAML at line"), ("- a", "must be a YAML mapping")])
def test_broken_yaml(text, sentence, tmp_path, capsys):
    (tmp_path / "r.yaml").write_text(text)
    assert sentence in mistake(capsys, "check", str(tmp_path / "r.yaml"))


# --- commands ---


def test_list_json_holds_every_entry(capsys):
    assert main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in rows] == [v.name for v in variants]
    for row in rows:
        assert set(row) == {"id", "name", "family", "kind", "side", "seams", "paper", "idea"}
        assert row["name"] and row["idea"]


def test_list_is_a_table(capsys):
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^{re.escape(v.name)} ", text, re.MULTILINE) for v in variants)


def test_list_filters(capsys):
    assert "invalid choice: 'parts'" in mistake(capsys, "list", "--kind", "parts")
    assert "the families are " in mistake(capsys, "list", "--family", "no-such")
    assert main(["list", "--json", "--kind", "part"]) == 0
    assert {row["kind"] for row in json.loads(capsys.readouterr().out)} <= {"part"}


def test_show(capsys):
    assert main(["show", "gspo"]) == 0
    text = capsys.readouterr().out
    assert "arxiv.org/abs/2507.18071" in text and "eps_high=0.0004" in text


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["show", "gspoo"], "did you mean gspo"),
        (["shw"], "did you mean show"),
        (["show"], "name"),
        (["list", "--jsn"], "--jsn"),
        (["train"], "train needs a recipe"),
        (["card", "recipes"], "recipes is no run folder"),
        (["push", "recipes"], "recipes is no run folder"),
        (["compare", "recipes/quickstart.yaml", "--seeds", "0"], "--seeds must be at least 1"),
    ],
)
def test_mistakes_on_the_command_line(words, sentence, capsys):
    assert sentence in mistake(capsys, *words)


@pytest.mark.parametrize("words", [["card"], ["push"], ["compare"], ["eval"]])
def test_commands_without_their_first_word(words, capsys):
    assert "required" in mistake(capsys, *words)


@pytest.mark.parametrize("words", [[], ["-h"], ["train", "-h"], ["check", "--help"], ["--version"]])
def test_help(words, capsys):
    assert main(words) == 0
    assert "trl" in capsys.readouterr().out


def test_debug_shows_the_traceback():
    with pytest.raises(VariantError):
        main(["show", "gspoo", "--debug"])


def test_check_exits_2_on_an_error(recipe_file, capsys):
    assert main(["check", recipe_file(loss_type="grpo")]) == 2
    assert "error: loss_type='grpo' has no effect" in capsys.readouterr().out


def test_check_imports_no_trainer(recipe_file):
    code = (
        "import sys; from trl_variants.cli import main; code = main(['check', sys.argv[1]]);"
        "print([m for m in sys.modules if m.endswith('grpo_trainer')]); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, recipe_file()], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


# --- training ---


def test_train_writes_the_run_folder(recipe_file, tmp_path, capsys):
    assert main(["train", recipe_file(), "--variant", "gspo", "--task.eval_size", "20"]) == 0
    text = capsys.readouterr().out
    assert "accuracy" in text and "step 2/2" in text
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["variant"] == "gspo" and result["steps"] == 2 and result["train_seconds"] > 0
    assert 0 <= result["accuracy_before"] <= 1 and 0 <= result["accuracy_after"] <= 1
    assert result["settings"]["task"] == {"name": "arithmetic", "eval_size": 20}
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert {"log.jsonl", "composition.txt", "curve.png", "model.safetensors"} <= names
    assert (tmp_path / "run" / "composition.txt").read_text().startswith("gspo")


def test_train_with_lora_and_own_data_and_reward(recipe_file, tmp_path, monkeypatch, capsys):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(16)))
    (tmp_path / "my_rewards.py").write_text(
        "def short(completions, **_): return [-float(len(c)) for c in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from trl_variants.tasks import tiny_model_path

    path = recipe_file(
        task=None,
        dataset_name=str(tmp_path / "rows.jsonl"),
        reward_funcs=["my_rewards.short"],
        model=tiny_model_path(),
        use_peft=True,
        lora_target_modules="all-linear",
    )
    assert main(["train", path]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["accuracy_before"] is None and result["reward_last"] < 0
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    assert "reward" in capsys.readouterr().out


def test_resume_continues_from_the_last_checkpoint(recipe_file, tmp_path, capsys):
    path = recipe_file(save_strategy="steps", save_steps=1, task={"name": "arithmetic", "eval_size": 10})
    assert main(["train", path]) == 0
    assert main(["train", path, "--max_steps", "3", "--resume"]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["steps"] == 3 and result["resumed_from"].endswith("checkpoint-2")
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert steps[:3] == [1, 2, 3]


def test_last_checkpoint_by_number(tmp_path):
    for step in (9, 10, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    (tmp_path / "checkpoint-11").mkdir()  # the run was killed while it saved
    spec = SimpleNamespace(config=SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint=None))
    assert train._checkpoint(spec, True) == str(tmp_path / "checkpoint-10")
    assert train._checkpoint(spec, False) is None


@pytest.mark.parametrize(
    "changes, words, sentence",
    [
        ({}, ["--resume"], "no checkpoint to resume from"),
        ({}, ["--resume_from_checkpoint", "/no/such/folder"], "/no/such/folder is no checkpoint"),
        ({"model": "no/such-model"}, [], "cannot load the model 'no/such-model'"),
        ({"model": "/no/such/folder"}, [], "cannot load the model '/no/such/folder'"),
        ({"task": None, "dataset_name": "x.jsonl"}, [], "needs reward_funcs"),
        (
            {"task": None, "dataset_name": "no/data", "reward_funcs": ["accuracy_reward"]},
            [],
            "cannot load the dataset",
        ),
        ({"reward_funcs": ["acuracy_reward"]}, [], "did you mean accuracy_reward"),
        ({"reward_funcs": ["json.nothing"]}, [], "cannot import the reward function 'json.nothing'"),
        ({"task": {"name": "arithmetic", "sizes": 3}}, [], "sizes"),
        ({"task": {"name": "arithmetic", "eval_size": 0}}, [], "eval_size must be in 1..500"),
    ],
)
def test_mistakes_before_training(changes, words, sentence, recipe_file, capsys):
    assert sentence in mistake(capsys, "train", recipe_file(**changes), *words)


def test_data_without_prompts(recipe_file, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1="}\n')
    path = recipe_file(
        task=None, dataset_name=str(tmp_path / "rows.jsonl"), reward_funcs=["accuracy_reward"], model="x"
    )
    assert "has no `prompt` column, only question" in mistake(capsys, "train", path)


def test_four_bit_without_bitsandbytes_names_the_extra(recipe_file, monkeypatch, capsys):
    find_spec = sources.importlib.util.find_spec
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda n: None if n == "bitsandbytes" else find_spec(n))
    assert 'pip install "trl_variants[quantization]"' in mistake(
        capsys, "train", recipe_file(load_in_4bit=True, use_peft=True)
    )


def test_a_recipe_imports_the_module_of_an_own_hook(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_hooks_for_test.py").write_text(
        "from trl_variants import hook\n\n"
        "@hook('clip', 'own_clip_for_test')\n"
        "def own(log_ratio, advantage, batch, width=0.2):\n"
        "    return log_ratio.clamp(-width, width).exp() * advantage\n"
    )
    recipe = tmp_path / "own.yaml"
    recipe.write_text(
        "imports: [own_hooks_for_test]\ntask: arithmetic\nvariant: dapo\nuse_cpu: true\nbf16: false\n"
        "hooks: {clip: {own_clip_for_test: {width: 0.3}}}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["check", str(recipe)]) == 0
    recipe.write_text(recipe.read_text().replace("own_hooks_for_test]", "not_there]"))
    assert main(["check", str(recipe)]) == 2
    assert "imports: not_there cannot be imported" in capsys.readouterr().err


# --- a teacher and a warm-up ---


def test_the_tasks_own_teacher_is_named_by_one_word():
    from trl_variants.tasks import load_task, scratchpad_teacher_path

    data = SimpleNamespace(teacher_path=load_task("scratchpad", train_size=1).teacher_path)
    own = {"model": {"path": scratchpad_teacher_path()}}
    named = {
        "task": own,
        "live": "live",
        "some/model": "some/model",
    }
    for given, meant in named.items():
        assert sources.with_task_teacher(given, data) == meant
    given = {"model": {"path": "task", "dtype": "float32"}}
    assert sources.with_task_teacher(given, data) == {"model": {"path": scratchpad_teacher_path(), "dtype": "float32"}}
    # `task` is also the name of a column
    given = {"privileged": {"of": "task", "column": "task"}}
    assert sources.with_task_teacher(given, data) == {"privileged": {"of": own, "column": "task"}}


@pytest.mark.parametrize("place", ["recipe", "words"])
def test_train_with_the_tasks_teacher(place, recipe_file, tmp_path):
    changes = {"variant": "kdrl", "task": {"name": "scratchpad", "train_size": 32, "eval_size": 8}}
    words = ["--teacher", "task"] if place == "words" else []
    path = recipe_file(**changes, **({} if words else {"teacher": "task"}), max_completion_length=24)
    assert main(["train", path, *words]) == 0
    logs = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert logs[0]["teacher/kl"] > 0.1 and logs[0]["teacher/rows"] == 1.0


def test_a_task_without_a_teacher_is_one_sentence(recipe_file, capsys):
    said = mistake(capsys, "train", recipe_file(variant="kdrl", teacher="task"))
    assert "teacher: task: task arithmetic has no teacher of its own" in said


def test_warm_up_then_run_then_resume(recipe_file, tmp_path, capsys):
    """The run begins at the warmed-up weights; --resume does not warm up again."""
    from transformers import AutoModelForCausalLM

    path = recipe_file(
        task={"name": "arithmetic", "eval_size": 100},
        warm_up={"steps": 30, "learning_rate": 3e-4, "batch_size": 32},
        save_strategy="steps",
        save_steps=1,
        learning_rate=0.0,
    )
    assert main(["train", path]) == 0
    assert "warm-up: 30 steps" in capsys.readouterr().out
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    warm = result["warm_up"]
    assert warm["loss_last"] < warm["loss_first"] and warm["accuracy_after"] > warm["accuracy_before"] + 0.1
    assert result["accuracy_before"] == result["accuracy_after"] == warm["accuracy_after"]  # learning rate 0
    weights = [AutoModelForCausalLM.from_pretrained(tmp_path / "run" / f) for f in ("warm_up", "checkpoint-2")]
    assert all((a == b).all() for a, b in zip(*(w.parameters() for w in weights), strict=True))
    before = (tmp_path / "run" / "warm_up" / "model.safetensors").stat().st_mtime_ns
    assert main(["train", path, "--max_steps", "3", "--resume"]) == 0
    assert (tmp_path / "run" / "warm_up" / "model.safetensors").stat().st_mtime_ns == before
    assert "warm_up" not in json.loads((tmp_path / "run" / "result.json").read_text())


def test_warm_up_with_lora_goes_on_with_the_same_adapter_and_reference(recipe_file, tmp_path):
    path = recipe_file(
        variant="grpo",  # its KL is to where the run began: the warmed-up adapter
        warm_up={"steps": 10, "learning_rate": 1e-2, "batch_size": 32},
        use_peft=True,
        lora_target_modules="all-linear",
        learning_rate=0.0,
        task={"name": "arithmetic", "eval_size": 20},
    )
    assert main(["train", path]) == 0
    logs = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert logs[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    from safetensors.torch import load_file

    warm, end = (load_file(tmp_path / "run" / f / "adapter_model.safetensors") for f in ("warm_up", "."))
    assert warm.keys() == end.keys() and all((warm[k] == end[k]).all() for k in warm)
    assert any(v.abs().sum() > 0 for k, v in warm.items() if "lora_B" in k)


def test_warm_up_reads_messages_lists_and_gaps():
    from datasets import Dataset

    from trl_variants.cli.warm_up import examples

    answer = [{"role": "assistant", "content": "2"}]
    ask = [{"role": "user", "content": "1+1"}]
    cases = [
        ({"prompt": ["1+1="] * 2, "s": ["2", ""]}, [("1+1=", "2")]),
        ({"prompt": ["1+1="], "s": [["2", "two"]]}, [("1+1=", "2")]),
        ({"prompt": [ask], "s": ["2"]}, [(ask, answer)]),
        ({"prompt": [ask], "s": [answer]}, [(ask, answer)]),
        ({"prompt": ["1+1="], "s": [answer]}, [("1+1=", "2")]),
    ]
    for columns, wanted in cases:
        found = examples(Dataset.from_dict(columns), "s")
        assert [(r["prompt"], r["completion"]) for r in found] == wanted
    with pytest.raises(VariantError, match="the data has only prompt, s"):
        examples(Dataset.from_dict({"prompt": ["a"], "s": ["b"]}), "t")
    with pytest.raises(VariantError, match="empty in every row"):
        examples(Dataset.from_dict({"prompt": ["a"], "s": [""]}), "s")
