"""A vLLM made of transformers and PEFT: the calls TRL's colocate mode and the adapter engine make, and a log of them.

with installed() as fakes:
    run = train(..., use_vllm=True)
    fakes[0].calls
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation

from tests.trainer.toy import folder
from trl_variants.trainer.engine.compare import truncated


class SamplingParams(SimpleNamespace):
    pass


class LoRARequest:
    def __init__(self, lora_name: str, lora_int_id: int, lora_path: str):
        self.lora_name, self.lora_int_id, self.lora_path = lora_name, lora_int_id, lora_path


@torch.no_grad()
def adapted_by(folder: str, base: Any) -> Any:
    """The base with an adapter's folder read as vLLM reads it: W + alpha / r B A, one alpha and one r for all."""
    with open(os.path.join(folder, "adapter_config.json")) as config:
        settings = json.load(config)
    tensors, changed = load_file(os.path.join(folder, "adapter_model.safetensors")), copy.deepcopy(base)
    for key, a in tensors.items():
        if key.endswith(".lora_A.weight"):
            b = tensors[key.replace("lora_A", "lora_B")]
            weight = changed.get_submodule(key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")).weight
            weight += settings["lora_alpha"] / settings["r"] * (b.to(weight) @ a.to(weight))
    return changed


class FakeLLM:
    """`raw`: reported log-probs ignore temperature and truncation, as with logprobs_mode raw_logprobs; `deaf`: a new
    adapter is answered for by the one before."""

    made: list[FakeLLM] = []

    def __init__(self, model: str, **settings: Any):
        self.settings, self.raw, self.deaf = settings, False, False
        self.calls: list[str] = []
        self.names: list[str] = []
        self._base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._adapters: dict[int, Any] = {}
        self._draw = torch.Generator().manual_seed(settings["seed"])
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=self._load_weights)))
        self.llm_engine = SimpleNamespace(
            add_lora=self._add,
            remove_lora=self._remove,
            list_loras=lambda: set(self._adapters),
            model_config=SimpleNamespace(max_model_len=settings["max_model_len"] or 128),
            model_executor=SimpleNamespace(driver_worker=worker),
            engine_core=SimpleNamespace(shutdown=lambda: self.calls.append("shutdown")),
        )
        FakeLLM.made.append(self)

    def _add(self, request: LoRARequest) -> bool:
        self.calls.append(f"add {request.lora_int_id}")
        self.names.append(request.lora_name)
        if not self.deaf:
            self._last = adapted_by(request.lora_path, self._base)
        self._adapters[request.lora_int_id] = self._last
        return True

    def _remove(self, number: int) -> bool:
        self.calls.append(f"remove {number}")
        return self._adapters.pop(number, None) is not None

    @torch.no_grad()
    def _load_weights(self, weights: list) -> None:
        own = dict(self._base.named_parameters())
        for name, value in weights:
            own[name].copy_(value)
        if self.calls[-1:] != ["weights"]:
            self.calls.append("weights")

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset cache")

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags[0]}")

    @torch.no_grad()
    def generate(self, prompts: list, sampling_params: Any, use_tqdm: bool, lora_request: Any = None) -> list:
        under = self._base if lora_request is None else self._adapters[lora_request.lora_int_id]
        self.calls.append(f"generate {lora_request and lora_request.lora_int_id}")
        return [self._answer(under, prompt["prompt_token_ids"], sampling_params) for prompt in prompts]

    def _answer(self, model: Any, ids: list[int], asked: Any) -> Any:
        said = [None]
        logps = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        said += [
            {token: SimpleNamespace(logprob=float(row[token]))} for row, token in zip(logps, ids[1:], strict=False)
        ]
        new, reported = [], []
        for _ in range(asked.max_tokens):
            logits = model(torch.tensor([ids + new])).logits[0, -1]
            limits = (getattr(asked, "top_k", 0), getattr(asked, "top_p", 1.0), getattr(asked, "min_p", 0.0))
            drawn_from = truncated(logits / asked.temperature, *limits)
            token = int(torch.multinomial(drawn_from.exp(), 1, generator=self._draw))
            shown = logits.log_softmax(-1) if self.raw else drawn_from
            new.append(token)
            reported.append({token: SimpleNamespace(logprob=float(shown[token]), rank=1)})
            if token == self._base.config.eos_token_id:
                break
        output = SimpleNamespace(token_ids=new, logprobs=reported)
        return SimpleNamespace(prompt_token_ids=ids, prompt_logprobs=said, outputs=[output])


@contextlib.contextmanager
def installed(monkeypatch: Any, **switches: Any) -> Iterator[list[FakeLLM]]:
    """While inside, `vllm` is this module's; yields the engines built. `switches` are attributes of each."""
    vllm = types.ModuleType("vllm")
    parts = {name: types.ModuleType(f"vllm.{name}") for name in ("lora", "lora.request", "distributed")}
    parts["distributed.parallel_state"] = types.ModuleType("vllm.distributed.parallel_state")
    state: Any = parts["distributed.parallel_state"]
    state.destroy_model_parallel = state.destroy_distributed_environment = lambda: None
    vllm.SamplingParams, parts["lora.request"].LoRARequest = SamplingParams, LoRARequest  # type: ignore[attr-defined]
    for name, module in {"": vllm, **parts}.items():
        monkeypatch.setitem(sys.modules, f"vllm.{name}".rstrip("."), module)

    class LLM(FakeLLM):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            for name, value in switches.items():
                setattr(self, name, value)

    for name, value in (("LLM", LLM), ("SamplingParams", SamplingParams), ("is_vllm_available", lambda: True)):
        monkeypatch.setattr(vllm_generation, name, value, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", folder())  # adapters go where the toy's models go
    before, FakeLLM.made = FakeLLM.made, []
    environment = dict(os.environ)  # TRL adds what a process group would have set
    try:
        yield FakeLLM.made
    finally:
        FakeLLM.made = before
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
