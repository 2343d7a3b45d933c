"""JSON over HTTP with time-outs and tries, for OpenAI-compatible servers: a teacher's log-probs, a judge's replies."""

from __future__ import annotations

import http.client
import json
import os
import threading
import urllib.error
import urllib.request
from typing import Any

from .errors import VariantError

AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}  # HTTP states after which a later try may succeed
LONGEST_WAIT = 30.0  # seconds between two tries


class JsonClient:
    """Every failure is one VariantError that names the URL and what to set.

    Args:
        url: with or without /v1. who: what the server is in messages. setting: prefix of the settings named there.
        timeout: seconds for one request. retries: further tries, each after twice the wait.
        api_key_env: environment variable that holds the key.
    """

    def __init__(
        self, url: str, who: str, setting: str, *, timeout: float, retries: int, api_key_env: str | None = None
    ):
        self.url, self.who, self.setting, self.timeout, self.retries = url, who, setting, timeout, retries
        self.root = url.rstrip("/").removesuffix("/v1")
        self.headers = {"Content-Type": "application/json"}
        if api_key_env is not None:
            key = os.environ.get(api_key_env)
            if not key:
                raise VariantError(
                    f"{setting}.api_key_env names the environment variable {api_key_env}, which is not set"
                )
            self.headers["Authorization"] = f"Bearer {key}"

    def served(self, wanted: str | None) -> tuple[str, str]:
        """(name of the model to ask, where the server has it from): the first it lists where none is wanted."""
        listed = self.get("/v1/models").get("data") or []
        names = [m["id"] for m in listed]
        if not names:
            raise VariantError(f"{self.who} {self.url} serves no model")
        name = wanted or names[0]
        if name not in names:
            raise VariantError(
                f"{self.who} {self.url} has no model {name!r}: set {self.setting}.model to one of {', '.join(names)}"
            )
        return name, str(listed[names.index(name)].get("root") or name)

    def get(self, path: str) -> dict[str, Any]:
        return self._tries(urllib.request.Request(self.root + path, headers=self.headers))

    def post(self, path: str, body: dict[str, Any], stop: threading.Event | None = None) -> dict[str, Any]:
        data = json.dumps(body).encode()
        return self._tries(urllib.request.Request(self.root + path, data=data, headers=self.headers), stop)

    def _tries(self, request: urllib.request.Request, stop: threading.Event | None = None) -> dict[str, Any]:
        stop = stop or threading.Event()
        pause, last = 0.5, ""
        for attempt in range(self.retries + 1):
            if attempt and stop.wait(pause):
                break
            pause = min(2 * pause, LONGEST_WAIT)
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    return json.loads(reply.read())
            except urllib.error.HTTPError as error:
                said = error.read().decode(errors="replace")
                if error.code not in AGAIN:
                    why = f"HTTP {error.code}: {_message(said)}"
                    raise Refused(
                        f"{self.who} {self.url} refuses the request ({why}){self.hint(error.code, said)}"
                    ) from None
                last = f"HTTP {error.code}"
                pause = max(pause, _asked_pause(error.headers))
            except (OSError, http.client.HTTPException, ValueError) as error:  # no connection, time-out, half a reply
                last = str(getattr(error, "reason", "") or error) or type(error).__name__
        raise VariantError(
            f"{self.who} {self.url} does not answer ({last}; {self.retries + 1} tries of {self.timeout:g} s at most): "
            f"start it, or set {self.setting}.url, {self.setting}.timeout or {self.setting}.retries"
        )

    def hint(self, code: int, said: str) -> str:
        """What to set after a refusal, for the end of its message."""
        return f": set {self.setting}.api_key_env" if code in (401, 403) else ""


class Refused(VariantError):
    """The server understood and said no: another try would not help."""


def _message(said: str) -> str:
    """The server's own words, from its JSON where it is JSON."""
    try:
        body = json.loads(said)
        said = (body.get("error") or body)["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return " ".join(said.split())[:300]


def _asked_pause(headers: Any) -> float:
    """Seconds of Retry-After, where it says so."""
    try:
        return min(float(headers.get("Retry-After") or 0.0), LONGEST_WAIT)
    except (TypeError, ValueError):
        return 0.0
