"""A stand-in for vLLM's server: the routes, statuses and JSON of vLLM 0.31, answered by a tiny model in this process.

Recorded from the real one: prompt_logprobs lists None for the first token, then {token id as text: {logprob, rank,
decoded_token}} with the token itself first and the K most likely after it (K entries where it is among them).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

MAX_LOGPROBS = 20


class Stub(ThreadingHTTPServer):
    """`with Stub(model, tokenizer) as stub: stub.url`.

    Args:
        fault: (number of the request from 0, its path) -> None, an HTTP status, "drop" (the connection ends), "half"
            (a reply that is cut), or seconds to sleep first.
        key: the API key asked for.
        edit: changes the reply before it is sent.
    """

    daemon_threads = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        fault: Callable[[int, str], Any] = lambda number, path: None,
        key: str | None = None,
        edit: Callable[[dict], dict] = lambda reply: reply,
        tokenizes: bool = True,
        pause: float = 0.0,
    ):
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.tokenizer, self.fault, self.key, self.edit = model, tokenizer, fault, key, edit
        self.tokenizes, self.pause = tokenizes, pause
        self.bodies: list[dict] = []  # of completions
        self.requests = self.now = self.most = 0  # most: completions being answered at once
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Stub:
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body: bytes) -> None:
        stub = self.server
        with stub.lock:
            number, stub.requests = stub.requests, stub.requests + 1
        fault = stub.fault(number, self.path)
        if fault == "drop":
            self.close_connection = True
            return
        if isinstance(fault, float):
            time.sleep(fault)
        if stub.key is not None and self.headers.get("Authorization") != f"Bearer {stub.key}":
            self._send(401, {"error": {"message": "Unauthorized"}})
        elif isinstance(fault, int):
            self._send(fault, {"error": {"message": "busy", "code": fault}})
        else:
            self._send(*self._route(json.loads(body) if body else {}), half=fault == "half")

    def _route(self, body: dict) -> tuple[int, dict]:
        stub = self.server
        if self.path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "tiny", "object": "model", "root": "/models/tiny"}]}
        if body.get("model") != "tiny":
            return _no(404, f"The model `{body.get('model')}` does not exist.")
        if self.path == "/tokenize" and stub.tokenizes:
            tokens = stub.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
            return 200, {"count": len(tokens), "max_model_len": 128, "tokens": tokens, "token_strs": None}
        if self.path != "/v1/completions":
            return 404, {"detail": "Not Found"}
        with stub.lock:
            stub.bodies.append(body)
            stub.now += 1
            stub.most = max(stub.most, stub.now)
        time.sleep(stub.pause)
        with stub.lock:
            stub.now -= 1
        if body["prompt_logprobs"] > MAX_LOGPROBS:
            return _no(
                400,
                f"Requested prompt logprobs of {body['prompt_logprobs']}, which is greater than max allowed: "
                f"{MAX_LOGPROBS} (parameter=prompt_logprobs, value={body['prompt_logprobs']})",
            )
        choice = {
            "index": 0,
            "text": "",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": None,
            "prompt_logprobs": self._prompt_logprobs(body["prompt"], body["prompt_logprobs"]),
            "prompt_token_ids": None,
        }
        reply = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "tiny", "choices": [choice]}
        return 200, stub.edit(reply)

    def _prompt_logprobs(self, ids: list[int], k: int) -> list[dict | None]:
        stub = self.server
        with stub.lock, torch.no_grad():  # raw logits, whatever temperature the request names
            logps = stub.model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
        listed: list[dict | None] = [None]
        for place, token in zip(logps[:-1], ids[1:], strict=True):
            best = place.topk(k).indices.tolist() if k else []
            ranks = place.argsort(descending=True).argsort() + 1
            listed.append(
                {
                    str(i): {
                        "logprob": float(place[i]),
                        "rank": int(ranks[i]),
                        "decoded_token": stub.tokenizer.decode([i]) if i < len(stub.tokenizer) else "",
                    }
                    for i in dict.fromkeys([token, *best])
                }
            )
        return listed

    def _send(self, status: int, body: dict, half: bool = False) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if half else data)


def _no(status: int, message: str) -> tuple[int, dict]:
    return status, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}
