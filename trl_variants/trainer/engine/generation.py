"""TRL's vLLM generation for a policy with an adapter: each sync sends the adapter alone, under a name of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import uuid
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from ...errors import VariantError
from .compare import Agreement, Shift, mean_gap, of_sampler, of_trainer
from .llm import AdapterClient, AdapterLLM
from .servable import ranks, require_servable, served_rank
from .snapshot import Snapshot

PROBE = 96  # tokens of the prompt whose log-probs are compared
SAMPLES, SAMPLED = 4, 16  # completions and tokens of the start-up comparison


class AdapterGeneration(VLLMGeneration):
    """The base stays as the engine loaded it; each version of the adapter has a fresh name, number and folder.

    Raises:
        VariantError: an adapter that vLLM cannot serve, before the engine loads; an engine that computes something
            else, at the first generation; an adapter that did not arrive, after the sync.
    """

    def __init__(self, trainer: Any, model: Any, accelerator: Any, **settings: Any):
        self.trainer = trainer
        self.adapter = require_servable(model)
        self.rank = max(ranks(model.peft_config[self.adapter]))
        self.quantized = any("4bit" in type(m).__name__.lower() for m in model.modules())
        self.engine_quantized = False
        self.version = 0
        self.agreement: Agreement | None = None
        self._run = uuid.uuid4().hex[:8]
        self._fingerprint: str | None = None
        self._folders = _folder(settings.get("mode"), trainer.args.output_dir, self._run)
        self._remove = weakref.finalize(self, shutil.rmtree, self._folders, ignore_errors=True)  # at exit at the latest
        self._slept = bool(settings.get("enable_sleep_mode")) and settings.get("mode") == "colocate"
        self._unchecked = False
        self._probe: list[int] = []
        self._bases: tuple[torch.Tensor, torch.Tensor] = ()  # type: ignore[assignment]  # here, in the engine
        self._step = -1
        with self._engines():
            super().__init__(model=model, accelerator=accelerator, **settings)

    @contextlib.contextmanager
    def _engines(self) -> Iterator[None]:
        """TRL builds the engine inside; what it builds then serves adapters."""
        names = ("LLM", "VLLMClient")
        stock = {name: getattr(vllm_generation, name, None) for name in names}

        def llm(quantization: str | None = None, **settings: Any) -> AdapterLLM:
            if self.accelerator.device.type == "cpu":
                quantization = None  # vLLM has no bitsandbytes kernels there
            self.engine_quantized = quantization is not None
            size = served_rank(self.rank)
            lora = dict(enable_lora=True, max_lora_rank=size, max_loras=1, max_cpu_loras=1)
            return AdapterLLM(stock["LLM"](quantization=quantization, **lora, **settings))  # type: ignore[misc]

        client = type("Client", (AdapterClient,), {"rank": self.rank})
        vllm_generation.LLM, vllm_generation.VLLMClient = llm, client
        try:
            yield
        finally:
            for name in names:
                if stock[name] is not None:
                    setattr(vllm_generation, name, stock[name])

    @property
    def engine(self) -> Any:
        """What serves the adapter from this process; None on a process without one."""
        return self.llm if self.mode == "colocate" else getattr(self, "vllm_client", None)

    # --- sync -----------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Sends the adapter where it changed since the last time, or the engine has slept."""
        started = time.perf_counter()
        if self._sleeps:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        snapshot = Snapshot.of(self.model, self.adapter)
        fingerprint = snapshot.fingerprint
        changed = fingerprint != self._fingerprint
        self._note(changed)
        if changed or self._slept:
            self._slept = False
            self._together(lambda: self._send(snapshot))
            self._fingerprint, self._unchecked = fingerprint, True
        self._log("engine/sync_seconds", time.perf_counter() - started)

    @property
    def _sleeps(self) -> bool:
        return self.mode == "colocate" and self.enable_sleep_mode

    def _send(self, snapshot: Snapshot) -> None:
        self.version += 1
        if self.engine is None:
            return
        name = f"{self._run}-{self.version}"
        folder = os.path.join(self._folders, name)
        snapshot.write(folder)
        self.engine.serve(folder, name, self.version)
        shutil.rmtree(os.path.join(self._folders, f"{self._run}-{self.version - 1}"), ignore_errors=True)

    def _note(self, changed: bool) -> None:
        step, before = self.trainer.state.global_step, self._step
        self._step = step
        if not 0 <= before < step:
            return
        self._log("engine/adapter_changed", float(changed))
        logged = [line["learning_rate"] for line in self.trainer.state.log_history if "learning_rate" in line]
        if not changed and logged and logged[-1] > 0:
            warnings.warn(
                f"the adapter has not changed between optimizer steps {before} and {step}: no gradient reached it, or "
                "the update is below the precision of its weights",
                stacklevel=2,
            )

    def _log(self, name: str, value: float) -> None:
        self.trainer._metrics["train" if self.trainer.training else "eval"][name].append(value)

    def _together(self, act: Any) -> Any:
        """What `act` returns, or its error on every process."""
        answer, error, cause = None, None, None
        try:
            answer = act()
        except Exception as raised:
            error = str(raised) if isinstance(raised, VariantError) else f"the engine failed: {raised!r}"
            cause = raised
        self.trainer.fail_together(error, VariantError, cause)
        return answer

    # --- generation -----------------------------------------------------------------------------------------------

    def generate(self, prompts: list, images: Any, num_generations: int, profiler: Any = None) -> tuple:
        if self._sleeps:
            self.sync_weights()
            self.llm.wake_up(tags=["kv_cache"])
        if images is None and self._unchecked:
            if self.agreement is None:
                self._compare(prompts)
            self._check_delivery()
            self._unchecked = False
        try:
            return super().generate(prompts, images, num_generations, profiler)
        finally:
            self._slept = self._sleeps

    def _compare(self, prompts: list) -> None:
        """The start-up comparison, on the first process's first prompt."""
        shared: list[list[int]] = [max(prompts[:4], key=len, default=[])[-PROBE:]]
        broadcast_object_list(shared, from_process=0)
        prompt = shared[0]
        ids, said = self._shared(lambda: self._samples(prompt))
        self._probe = (prompt + max(ids, key=len))[:-1]  # the engine adds a token, and must have room for it
        self._bases = of_trainer(self.trainer, self._probe, base=True), self._from_engine(base=True)
        sampler = untruncated = raw = None
        if self._comparable:
            own = torch.tensor([x for row in said for x in row], dtype=torch.float64)
            full, part, plain = of_sampler(self.trainer, prompt, ids)
            kept = part.isfinite()  # rounding moves a token across the edge of what is kept
            untruncated, raw = mean_gap(full, own), mean_gap(plain, own)
            sampler = mean_gap(part[kept], own[kept]) if 2 * kept.sum() >= len(kept) else float("inf")
        lonely = self.quantized and not self._serves_quantized
        found = self.agreement = Agreement(mean_gap(*self._bases), sampler, untruncated, raw, lonely)
        settings = f"temperature {self.temperature}, top_p {self.top_p}, top_k {self.top_k}, min_p {self.min_p or 0.0}"
        corrected = bool(self.trainer.args.vllm_importance_sampling_correction)
        self._together(lambda: found.require(self.temperature, corrected, settings))
        for name in ("base", "sampler"):
            if (value := getattr(found, name)) is not None:
                self._log(f"engine/{name}_gap", value)
        if self.accelerator.is_main_process:
            print(self._line(found, settings, corrected), flush=True)

    @property
    def _serves_quantized(self) -> bool:
        """Whether the engine's base is in 4 bits too: by its own doing, or because the model's files are."""
        file = os.path.join(self.model.name_or_path, "config.json")
        if self.engine_quantized or not os.path.isfile(file):
            return self.engine_quantized
        with open(file) as config:
            return "quantization_config" in config.read()

    @property
    def _comparable(self) -> bool:
        """Whether the sampler's distribution follows from temperature, top-p, top-k and min-p alone."""
        return self.repetition_penalty == 1.0 and not self.generation_kwargs and not self.structured_outputs_regex

    def _line(self, found: Agreement, settings: str, corrected: bool) -> str:
        base = "the 4-bit base" if self._serves_quantized and self.quantized else "the base as its files have it"
        held = " (here it is in 4 bits)" if found.quantized_only_here else ""
        own = "" if found.sampler is None else f", of its own samples by {found.sampler:.3f}"
        return (
            f"engine: vLLM serves the adapter on {base}{held}; without the adapter log-probs differ from the trainer's "
            f"by {found.base:.3f} nats a token{own} ({settings}); importance correction {'on' if corrected else 'off'}"
        )

    def _check_delivery(self) -> None:
        """One prompt under the new version, beside the trainer's log-probs of it."""
        assert self.agreement is not None
        here, base_here = of_trainer(self.trainer, self._probe), self._bases[0]
        there, base_there = self._from_engine(), self._bases[1]
        shift, rounding = Shift.of(here, base_here, there, base_there), self.agreement.rounding
        self._log("engine/gap", mean_gap(here, there))
        self._log("engine/adapter_gap", shift.gap)
        self._log("engine/adapter_effect", shift.effect)
        wrong = None
        if not shift.arrived(rounding, not self.agreement.quantized_only_here):
            wrong = (
                f"the engine does not generate under version {self.version} of the adapter: it moves the log-probs of "
                f"one prompt by {shift.effect:.3f} nats a token here, and in the engine {shift.gap:.3f} differently "
                f"(rounding: {rounding:.3f})"
            )
        self.trainer.fail_together(wrong)

    def _from_engine(self, base: bool = False) -> torch.Tensor:
        found = self._shared(lambda: self.engine.prompt_log_probs(self._probe, base))
        return torch.tensor(found, dtype=torch.float64)

    def _shared(self, ask: Any) -> Any:
        """What the engine answers: each process's own, or the one server's, which the first process asks."""
        if self.mode == "colocate":
            return self._together(ask)
        answer = [self._together(lambda: ask() if self.accelerator.is_main_process else None)]
        broadcast_object_list(answer, from_process=0)
        return answer[0]

    def _samples(self, prompt: list[int]) -> tuple[list, list]:
        """(completions, their log-probs as the engine reports them) of a few short samples."""
        length = min(SAMPLED, self.max_completion_length)
        common: dict[str, Any] = dict(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)
        common |= dict(min_p=self.min_p or 0.0, repetition_penalty=self.repetition_penalty, max_tokens=length)
        common["logprobs"] = 0
        if self.mode == "server":
            said = self.vllm_client.generate([prompt], n=SAMPLES, **common)
            ids, logps = said["completion_ids"], said["logprobs"]
        else:
            from vllm import SamplingParams

            rows = [{"prompt_token_ids": prompt}] * SAMPLES
            outputs = self.llm.generate(rows, sampling_params=SamplingParams(**common), use_tqdm=False)
            ids = [list(row.outputs[0].token_ids) for row in outputs]
            logps = vllm_generation.extract_logprobs(outputs)[0]
        kept = [(list(i), [x[0] for x in lp]) for i, lp in zip(ids, logps, strict=True) if i]
        return [i for i, _ in kept], [lp for _, lp in kept]

    def remove_adapter(self) -> None:
        """What of this run lies on disk and at the server."""
        self._remove()
        if self.mode == "server" and self.engine is not None:
            with contextlib.suppress(Exception):  # a server that is gone has no adapter either
                self.engine.unload()


def _folder(mode: str | None, output_dir: str, run: str) -> str:
    if mode != "server":
        return tempfile.mkdtemp(prefix="trl-variants-engine-")
    return os.path.join(os.path.abspath(output_dir), f"engine-{run}")  # the server must see it
