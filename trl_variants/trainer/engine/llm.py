"""The two engines that serve an adapter: vLLM in this process, and a vLLM server over HTTP.

Both answer to the same calls:

    serve(folder, name, number)      from now on generate under this adapter; the one before is removed
    prompt_log_probs(ids, base)      of one sequence at temperature 1, under the adapter or the bare base
"""

from __future__ import annotations

from typing import Any

from trl.generation.vllm_client import VLLMClient

from ...errors import VariantError
from .servable import MERGE, served_rank

SERVE = (
    "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-lora-rank {} "
    "--logprobs-mode processed_logprobs"
)


class AdapterLLM:
    """A vllm.LLM whose every request goes under the adapter served last; what is not here is the LLM's own.

    Sleeping keeps the base weights in main memory (level 1): level 2 throws them away, and nothing sends them again.
    """

    def __init__(self, llm: Any):
        self._llm = llm
        self._request: Any = None
        self._asleep: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def serve(self, folder: str, name: str, number: int) -> None:
        from vllm.lora.request import LoRARequest

        engine, request = self._llm.llm_engine, LoRARequest(name, number, folder)
        if self._request is not None:
            engine.remove_lora(self._request.lora_int_id)
        self._request = None
        if not engine.add_lora(request) or number not in engine.list_loras():
            raise VariantError(f"vLLM did not take the adapter {name}")
        self._request = request
        self._llm.reset_prefix_cache()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._llm.generate(*args, **{"lora_request": self._request, **kwargs})

    def prompt_log_probs(self, ids: list[int], base: bool = False) -> list[float]:
        from vllm import SamplingParams

        asked = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)
        under = {"lora_request": None} if base else {}
        [answer] = self.generate([{"prompt_token_ids": ids}], sampling_params=asked, use_tqdm=False, **under)
        return [position[token].logprob for token, position in zip(ids[1:], answer.prompt_logprobs[1:], strict=True)]

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        self._llm.sleep(level=1)
        self._asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str] | None = None) -> None:
        for tag in sorted(self._asleep.intersection(tags or self._asleep), reverse=True):  # weights first
            self._llm.wake_up(tags=[tag])
            self._asleep.discard(tag)


class AdapterClient(VLLMClient):
    """TRL's client of a vLLM server that loads adapters from a folder both machines see. No weights are broadcast."""

    rank = 0  # of the adapter to come
    base: str = ""
    model: str

    def init_communicator(self, device: Any = 0) -> None:
        """Asks whether the server takes adapters; there is no weight transfer to prepare."""
        self.base = self.model
        settings = self.get_server_info().get("lora_config")
        command = SERVE.format(served_rank(self.rank))
        if not settings:
            raise VariantError(f"the vLLM server at {self.base_url} was started without LoRA: {command}")
        if (most := settings.get("max_lora_rank")) is not None and int(most) < self.rank:
            raise VariantError(f"the vLLM server serves rank {most} at most and the adapter has {self.rank}: {command}")
        if self.session.post(f"{self.base_url}/v1/unload_lora_adapter", json={}).status_code == 404:
            raise VariantError(f"the vLLM server at {self.base_url} takes no adapters while it runs: {command}")

    def close_communicator(self) -> None:
        """Nothing was opened."""

    def serve(self, folder: str, name: str, number: int) -> None:
        before = self.model
        self._ask("load_lora_adapter", lora_name=name, lora_path=folder)
        self.model = name
        if before != self.base:
            self._ask("unload_lora_adapter", lora_name=before)

    def unload(self) -> None:
        """Back to the bare base."""
        if self.base and self.model != self.base:
            name, self.model = self.model, self.base
            self._ask("unload_lora_adapter", lora_name=name)

    def prompt_log_probs(self, ids: list[int], base: bool = False) -> list[float]:
        answer = self.session.post(
            f"{self.base_url}/v1/completions",
            json={
                "model": self.base if base else self.model,
                "prompt": [ids],
                "max_tokens": 1,
                "temperature": 1.0,
                "prompt_logprobs": 0,
            },
        )
        self._require(answer, "log-probs of a prompt")
        said = answer.json()["choices"][0]["prompt_logprobs"]
        return [position[str(token)]["logprob"] for token, position in zip(ids[1:], said[1:], strict=True)]

    def _ask(self, route: str, **body: Any) -> None:
        self._require(self.session.post(f"{self.base_url}/v1/{route}", json=body), route)

    def _require(self, answer: Any, what: str) -> None:
        if answer.status_code != 200:
            raise VariantError(
                f"the vLLM server at {self.base_url} refused {what}: {answer.text[:300]} (it must see the folder "
                f"output_dir of this run; {MERGE})"
            )
