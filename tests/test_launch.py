"""`--accelerate_config`: names, refusals, the commands that are started, and two processes through one of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trl_variants import VariantError
from trl_variants.cli import launch, main

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))


def test_the_shipped_configurations_say_what_they_support():
    assert {c.stem for c in CONFIGS} == {"ddp2-cpu", "fsdp2", "multi_gpu", "zero2", "zero3"}
    for config in CONFIGS:
        comments = "".join(line for line in config.read_text().splitlines() if line.startswith("#"))
        assert "CPU" in comments or "GPU" in comments
        assert "Supported" in comments or "Meant for" in comments
        assert launch.resolve(config.stem) == config


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.stem)
def test_accelerate_reads_them(config):
    from accelerate.commands.config.config_args import load_config_from_file

    read = load_config_from_file(str(config))
    assert read.num_processes == yaml.safe_load(config.read_text())["num_processes"] > 1


def test_a_file_comes_first_and_trls_names_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("use_cpu: true\n")
    assert launch.resolve("mine.yaml") == Path("mine.yaml")
    assert launch.resolve("single_gpu").parts[-3:] == ("trl", "accelerate_configs", "single_gpu.yaml")
    with pytest.raises(VariantError, match=r"no accelerate configuration 'fsdp' \(did you mean .*fsdp2"):
        launch.resolve("fsdp")


def test_gpus_go_through_accelerate_and_cpus_through_torchrun():
    words = ["train", "r.yaml", "--resume"]
    config = str(ROOT / "recipes" / "accelerate" / "fsdp2.yaml")
    assert launch.command("fsdp2", ["--num_processes", "4"], words) == [
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", "4"),
        *("-m", "trl_variants.cli", *words),
    ]
    assert launch.command("ddp2-cpu", [], words) == [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        *("-m", "trl_variants.cli", *words),
    ]
    assert "3" in launch.command("ddp2-cpu", ["--num_processes", "3"], words)
    assert launch.environment("ddp2-cpu")["ACCELERATE_USE_CPU"] == "true"


def test_what_cannot_run_here_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "call", lambda *a, **k: pytest.fail("nothing is to be started"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "cpu.yaml").write_text("distributed_type: FSDP\nuse_cpu: true\n")
    for words, says in (
        (["r.yaml", "--accelerate_config"], "--accelerate_config needs a value"),
        (["r.yaml", "--accelerate_config", "zero3"], "zero3 needs DeepSpeed: pip install deepspeed"),
        (["r.yaml", "--accelerate_config", str(tmp_path / "cpu.yaml")], "replaces FSDP by plain data parallel"),
        (["r.yaml", "--accelerate_config=ddp2-cpu", "--machine_rank", "1"], "processes of one machine"),
    ):
        assert main(["train", *words]) == 2
        assert says in capsys.readouterr().err


def test_two_processes_train_through_the_command_line(tmp_path):
    words = "--max_steps 1 --per_device_train_batch_size 8 --task.eval_size 8 --task.train_size 16 --self_test false"
    words += f" --num_threads 1 --logging_steps 1 --accelerate_config ddp2-cpu --output_dir {tmp_path}"
    command = [sys.executable, "-m", "trl_variants.cli", "train", str(ROOT / "recipes" / "quickstart.yaml")]
    done = subprocess.run([*command, *words.split()], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["processes"], result["steps"]) == (2, 1)
