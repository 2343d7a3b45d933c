"""A teacher behind HTTP: vLLM's OpenAI-compatible server, asked for the log-probs of a given text (`prompt_logprobs`).

One request a row: the prompt's and completion's token ids as the prompt, one token generated and thrown away. The
answer has one entry for each token of that prompt: None for the first, else {token id: {logprob, rank, decoded_token}}
with the token itself and the K most likely ones. vLLM takes these from the raw logits, whatever temperature is asked.
"""

from __future__ import annotations

import os
import threading
import urllib.parse
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..divergence import Divergence
from ..errors import VariantError
from ..hooks.base import hook, param
from ..http_json import JsonClient, Refused
from .base import Answer, Question, Stateless, require_topk
from .cache import cached
from .compat import Fit, announce, compare, ends_of, same_tokens, tokenizer_at

if TYPE_CHECKING:
    from ..trainer.grpo import VariantGRPOTrainer


@hook("teacher", "server")
@dataclass(frozen=True)
class ServerTeacher:
    """A model that a vLLM server answers for, at temperature 1: a run at another one is refused.

    Args:
        url: of the server, with or without /v1. model: its name there; None: the first the server lists.
        top_k: most likely entries it answers with, for divergences over the teacher's own top_k. vLLM gives 20 at most
            unless it was started with a larger --max-logprobs.
        in_flight: requests under way at once from each process. timeout: seconds for one of them.
        retries: further tries of a request that met a busy or silent server, each after twice the wait.
        api_key_env: environment variable that holds the server's key.
        tokenizer: Hub name or folder of the model's tokenizer; None: the server's folder where it is on this machine,
            else the server is asked to encode a few texts.
        cache: file that keeps its answers about traces. Name a new one when the server's weights change under one name.
    """

    url: str
    model: str | None = None
    top_k: int = param(0, low=0)
    in_flight: int = param(32, low=1)
    timeout: float = param(120.0, above=0.0)
    retries: int = param(5, low=0)
    api_key_env: str | None = None
    tokenizer: str | None = None
    cache: str | None = None

    math = "pi_T = the model at {url}"

    def __post_init__(self):
        if urllib.parse.urlsplit(self.url).scheme not in ("http", "https"):
            raise VariantError(f"server.url must begin with http:// or https://, got {self.url!r}")

    def build(self, trainer: VariantGRPOTrainer) -> Any:
        if trainer.temperature != 1.0:
            raise VariantError(
                f"a server's prompt_logprobs ignore temperature and the run samples at {trainer.temperature}: set "
                "temperature: 1.0, or load the teacher here with teacher: {model: {path: ...}}"
            )
        client = Client(self)
        model, root = client.model()
        fit = self._fit(trainer, client, model, self.tokenizer or (root if os.path.isdir(root) else None))
        return cached(trainer, Server(trainer, self, client, model, fit), self.cache, ["server", self.url, model, root])

    def _fit(self, trainer: VariantGRPOTrainer, client: Client, model: str, path: str | None) -> Fit:
        policy, speaks = trainer._tokenizer, trainer.accelerator.is_main_process
        if path is not None:
            tokenizer = tokenizer_at(path)
            if tokenizer is None:
                raise VariantError(f"server.tokenizer {path!r} holds no tokenizer: name another, or leave it out")
            ends = ends_of(path, tokenizer)
            fit = compare(policy, tokenizer, self.url, policy_ends=trainer.eos_token_ids, teacher_ends=ends)
            announce(self.url, fit.notes, speaks)
            return fit
        if client.encode(model, "a") is None:
            notes = ["the server does not encode texts, so its tokens were not compared: name server.tokenizer"]
        else:
            same_tokens(policy, self.url, lambda text: client.encode(model, text) or [])
            notes = ["its end tokens were not compared with the policy's: name server.tokenizer"]
        announce(self.url, notes, speaks)
        return Fit()


class Server(Stateless):
    """Asks for all rows at once, at most `in_flight` of them under way."""

    def __init__(self, trainer: VariantGRPOTrainer, spec: ServerTeacher, client: Client, model: str, fit: Fit):
        self.trainer, self.spec, self.client, self.model, self.fit = trainer, spec, client, model, fit

    @property
    def entries(self) -> int:  # type: ignore[override]
        return self.spec.top_k

    def require(self, specs: tuple[Divergence, ...]) -> None:
        require_topk(specs, self.spec.top_k, "server.top_k")

    def answer(self, question: Question) -> Answer:
        batch, k = question.batch, self.spec.top_k if question.distribution else 0
        if self.trainer.has_images(batch):
            raise VariantError(
                f"teacher server {self.spec.url} is asked with token ids, which hold no images: load the teacher here "
                "with teacher: {model: {path: ...}}"
            )
        rows = [
            [batch[f"{part}_ids"][i][batch[f"{part}_mask"][i] > 0].tolist() for part in ("prompt", "completion")]
            for i in range(len(question.rows))
        ]
        found = self._all(rows, k)
        ids = batch["completion_ids"]
        logps = torch.zeros(ids.shape, device=ids.device)
        top_ids = torch.full((*ids.shape, k), -1, device=ids.device)
        top_logps = torch.zeros(*ids.shape, k, device=ids.device)
        for i, (own, best_ids, best_logps) in enumerate(found):
            logps[i, : len(own)] = own.to(ids.device)
            top_ids[i, : len(own)], top_logps[i, : len(own)] = best_ids.to(ids.device), best_logps.to(ids.device)
        silent = torch.isin(ids, torch.tensor(sorted(self.fit.silent), dtype=ids.dtype, device=ids.device))
        topk = (top_ids, top_logps) if question.distribution else None
        return Answer(logps, (~silent).to(logps), topk=topk)

    def _all(self, rows: list[list[list[int]]], k: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """One answer a row, in order; the first that fails for good ends the others' tries."""
        stop = threading.Event()
        with ThreadPoolExecutor(min(self.spec.in_flight, len(rows))) as pool:
            asked = [pool.submit(self._one, prompt, completion, k, stop) for prompt, completion in rows]
            done, _ = wait(asked, return_when=FIRST_EXCEPTION)
            failed = next((f.exception() for f in asked if f in done and f.exception() is not None), None)
            if failed is not None:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise failed
            return [f.result() for f in asked]

    def _one(self, prompt: list[int], completion: list[int], k: int, stop: threading.Event) -> tuple:
        body = {
            "model": self.model,
            "prompt": prompt + completion,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": k,
            "add_special_tokens": False,
        }
        reply = self.client.post("/v1/completions", body, stop)
        return read_prompt_logprobs(reply, completion, k, self.trainer.run_facts.vocabulary, self.spec.url)


def read_prompt_logprobs(
    reply: Mapping[str, Any], completion: list[int], k: int, vocabulary: int, url: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(t,) log-probs of the completion's t tokens; ids and log-probs (t, k) of the most likely entries at each.

    The reply lists the whole prompt, of which the completion is the end. The token itself is always among a position's
    entries, beside the k most likely ones or among them. Entries from `vocabulary` on (padding of the teacher's
    embeddings) are left out; where fewer than k remain their ids are -1.

    Raises:
        VariantError: the reply holds something else.
    """
    try:
        listed = reply["choices"][0]["prompt_logprobs"]
    except (KeyError, IndexError, TypeError):
        listed = None
    if not listed:
        raise VariantError(f"teacher server {url} answers without prompt_logprobs: is it vLLM's, and a recent one?")
    places = listed[len(listed) - len(completion) :]
    if len(listed) <= len(completion) or any(
        place is None or str(token) not in place for place, token in zip(places, completion, strict=True)
    ):
        raise VariantError(
            f"teacher server {url} answers about other tokens than it was asked about ({len(listed)} positions for a "
            f"completion of {len(completion)}): is a proxy rewriting prompts, or the server truncating them?"
        )
    own = torch.tensor([place[str(token)]["logprob"] for place, token in zip(places, completion, strict=True)])
    ids, logps = torch.full((len(completion), k), -1), torch.zeros(len(completion), k)
    for t, place in enumerate(places if k else ()):
        entries = [(int(i), e["logprob"]) for i, e in place.items() if not vocabulary or int(i) < vocabulary]
        best = sorted(entries, key=lambda entry: (-entry[1], entry[0]))[:k]
        ids[t, : len(best)] = torch.tensor([i for i, _ in best])
        logps[t, : len(best)] = torch.tensor([x for _, x in best])
    return own, ids, logps


class Client(JsonClient):
    """The server's routes that a teacher asks."""

    def __init__(self, spec: ServerTeacher):
        super().__init__(
            spec.url,
            "teacher server",
            "server",
            timeout=spec.timeout,
            retries=spec.retries,
            api_key_env=spec.api_key_env,
        )
        self.spec = spec

    def model(self) -> tuple[str, str]:
        """The model to ask, and where the server has it from."""
        return self.served(self.spec.model)

    def encode(self, model: str, text: str) -> list[int] | None:
        """The server's tokens of a text; None where it does not tell."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            return self.post("/tokenize", body)["tokens"]
        except (Refused, KeyError):
            return None

    def hint(self, code: int, said: str) -> str:
        if "logprobs" in said:
            return ": start it with a larger --max-logprobs, or lower server.top_k"
        return super().hint(code, said)
