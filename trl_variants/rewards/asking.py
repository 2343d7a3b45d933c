"""Who answers a judge's questions: a model in this process, or an OpenAI-compatible server.

Both are `ask(questions: list[str], salt="") -> list[str | None]`: one reply a question, None where none came. The salt
tells repeated asks of one question apart in the cache.
"""

from __future__ import annotations

import hashlib
import json
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ..answers import AnswerFile
from ..errors import VariantError
from ..http_json import JsonClient
from .base import as_message, greedy_continuation

Ask = Callable[..., list[Any]]


class ReplyCache:
    """Replies by who was asked and what: in memory, and in a file where one is named."""

    def __init__(self, path: str | None, who: Any):
        self.who = json.dumps(who, sort_keys=True)
        self.memory: dict[str, str] = {}
        self.file = None if path is None else AnswerFile(path, "the judge's")

    def name(self, question: str, salt: str) -> str:
        return hashlib.sha256(json.dumps([self.who, question, salt]).encode()).hexdigest()

    def read(self, names: Iterable[str]) -> dict[str, str]:
        wanted = set(names)
        if self.file is not None and (rest := wanted - self.memory.keys()):
            self.memory |= {n: blob.decode() for n, blob in self.file.read(rest).items()}
        return {n: self.memory[n] for n in wanted & self.memory.keys()}

    def write(self, replies: dict[str, str]) -> None:
        self.memory |= replies
        if self.file is not None:
            self.file.write({n: text.encode() for n, text in replies.items()})


class Asking:
    """Base: each distinct question is asked once, and never again while the cache holds its reply."""

    cache: ReplyCache

    def __call__(self, questions: Sequence[str], salt: str = "") -> list[str | None]:
        names = [self.cache.name(q, salt) for q in questions]
        replies: dict[str, str] = self.cache.read(names)
        missing = {n: q for n, q in zip(names, questions, strict=True) if n not in replies}
        if missing:
            said = dict(zip(missing, self.answer(list(missing.values())), strict=True))
            fresh = {n: text for n, text in said.items() if text is not None}  # a failure may succeed next time
            self.cache.write(fresh)
            replies.update(fresh)
        return [replies.get(n) for n in names]

    def answer(self, questions: list[str]) -> list[str | None]:
        raise NotImplementedError


class ServerJudge(Asking):
    """An OpenAI-compatible server's /v1/chat/completions, at most `in_flight` requests at once from each process.

    A request that fails after its retries gives None for that question. A server that has never answered, or has left
    `give_up` questions in a row without an answer, is a VariantError: a wrong key must not train on nothing.

    Args:
        url: with or without /v1. model: its name there; None: the first the server lists.
        system: system message. temperature, max_tokens: of the judge's reply.
        timeout: seconds for one request. retries: further tries, each after twice the wait.
        api_key_env: environment variable that holds the key. cache: sqlite file that keeps replies over runs.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        system: str | None = None,
        temperature: float = 0.0,
        max_tokens: int = 256,
        in_flight: int = 16,
        timeout: float = 60.0,
        retries: int = 3,
        api_key_env: str | None = None,
        cache: str | None = None,
        give_up: int = 32,
    ):
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise VariantError(f"the judge's url must begin with http:// or https://, got {url!r}")
        self.client = JsonClient(url, "judge", "judge", timeout=timeout, retries=retries, api_key_env=api_key_env)
        self.model, self.system, self.in_flight = model, system, in_flight
        self.temperature, self.max_tokens = temperature, max_tokens
        self.cache = ReplyCache(cache, [url, model, system, temperature, max_tokens])
        self.give_up, self.answered, self.silent = give_up, False, 0

    def answer(self, questions: list[str]) -> list[str | None]:
        self.model = self.model or self.client.served(None)[0]
        errors: list[VariantError] = []

        def one(question: str) -> str | None:
            try:
                return self._reply(question)
            except VariantError as error:
                errors.append(error)
                return None

        with ThreadPoolExecutor(min(self.in_flight, len(questions))) as pool:
            replies = list(pool.map(one, questions))
        silent = len(errors) == len(questions)
        self.answered, self.silent = self.answered or not silent, self.silent + len(errors) if silent else 0
        if silent and (not self.answered or self.silent >= self.give_up):
            raise errors[0]
        return replies

    def _reply(self, question: str) -> str:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*messages, {"role": "user", "content": question}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        reply = self.client.post("/v1/chat/completions", body)
        try:
            return str(reply["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError):
            raise VariantError(f"judge {self.client.url} answers without choices[0].message.content") from None


class LocalJudge(Asking):
    """A causal language model in this process, greedy and in batches; its chat template is used where it has one."""

    def __init__(
        self, model: Any, tokenizer: Any, *, max_new_tokens: int = 256, batch_size: int = 8, cache: str | None = None
    ):
        self.model, self.tokenizer = model, tokenizer
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        where = getattr(getattr(model, "config", None), "_name_or_path", "")
        self.cache = ReplyCache(cache, [where, max_new_tokens])

    @torch.no_grad()
    def answer(self, questions: list[str]) -> list[str | None]:
        out: list[str | None] = []
        for i in range(0, len(questions), self.batch_size):
            texts = [as_message(self.tokenizer, q) for q in questions[i : i + self.batch_size]]
            said, width = greedy_continuation(self.model, self.tokenizer, texts, self.max_new_tokens)
            out += self.tokenizer.batch_decode(said[:, width:], skip_special_tokens=True)
        return out
