"""What an installation depends on: one version, constraints that fit the requirements, files that ship."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import trl_variants

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def constraints() -> dict[str, str]:
    lines = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pin) == 2 for pin in pins), "every line of constraints.txt is name==version"
    return {canonicalize_name(name): version for name, version in pins}


def requirements() -> list[tuple[str, Requirement]]:
    found = [("runtime", Requirement(r)) for r in PROJECT["project"]["dependencies"]]
    found += [(extra, Requirement(r)) for extra, rs in EXTRAS.items() for r in rs]
    return [(extra, r) for extra, r in found if canonicalize_name(r.name) != "trl-variants"]


def test_the_version_is_written_once():
    version = PROJECT["project"]["version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    sources = "".join(path.read_text() for path in (ROOT / "trl_variants").rglob("*.py"))
    assert f'"{version}"' not in sources
    try:
        installed = metadata.version("trl_variants")
    except metadata.PackageNotFoundError:
        return
    assert trl_variants.__version__ == installed == version


@pytest.mark.parametrize("extra, requirement", requirements(), ids=lambda x: str(x))
def test_constraints_satisfy_the_requirements(extra, requirement):
    if extra == "vllm":
        pytest.skip("vllm pins its own torch")
    assert constraints()[canonicalize_name(requirement.name)] in requirement.specifier


def test_constraints_are_the_versions_that_run_here():
    pins = constraints()
    for name in ("torch", "trl", "transformers", "peft", "accelerate"):
        assert metadata.version(name).split("+")[0] == pins[name]


def test_every_extra_of_the_readme_exists():
    assert set(EXTRAS) == {"quantization", "vllm", "math", "tasks", "eval", "plots", "embeddings", "demo", "dev"}


def test_package_data_is_not_ignored():
    assert (ROOT / "trl_variants" / "py.typed").is_file()
    files = [
        "trl_variants/py.typed",
        "trl_variants/tasks/tiny/model.safetensors",
        "trl_variants/tasks/tiny/tokenizer.json",
        "trl_variants/tasks/scratchpad_tiny/model.safetensors",
        "trl_variants/tasks/scratchpad_tiny/tokenizer.json",
        "trl_variants/tasks/scratchpad_teacher/model.safetensors",
        "trl_variants/tasks/scratchpad_teacher/tokenizer.json",
    ]
    ignored = subprocess.run(["git", "check-ignore", *files], cwd=ROOT, capture_output=True, text=True)
    if ignored.returncode == 128:
        pytest.skip("no git checkout")
    # hatchling leaves out what .gitignore names
    assert ignored.stdout == ""


def test_the_license_is_apache_2():
    assert PROJECT["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111 and "make test" in script.read_text()


@pytest.mark.parametrize(
    "target", ["setup", "quickstart", "test", "slow", "lint", "types", "smollm2", "benchmark", "test-vllm"]
)
def test_make_knows_its_targets(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_every_recipe_names_its_hardware_first():
    for recipe in sorted((ROOT / "recipes").glob("*.yaml")):
        first = recipe.read_text().splitlines()[0]
        assert re.match(r"# .*(CPU|GPU)", first), recipe.name
