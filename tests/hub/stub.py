"""A Hub in this process: the routes that huggingface_hub's pushes and downloads use, over real HTTP.

    with HubStub() as hub:
        hub.url, hub.repos["models/me/name"].files, hub.requests

Every file is uploaded inside its commit ("regular"), so neither LFS nor Xet is asked for.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

USER = "me"
KINDS = "models|datasets|spaces"


@dataclass
class Repo:
    """One repository: path -> bytes on its single branch, the commits that made it, whether it is private."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)

    @property
    def sha(self) -> str:
        return hashlib.sha1(str(len(self.commits)).encode()).hexdigest()


class HubStub:
    """Starts the server on a free port; `broken` answers 500 to commits, `unreadable` 403 to downloads."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.broken = self.unreadable = False
        self.lock = threading.Lock()
        stub = self

        class Handler(_Handler):
            hub = stub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self) -> HubStub:
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def put(self, repo: str, files: dict[str, bytes], private: bool = True) -> None:
        """A repository as somebody else made it, "models/me/name"."""
        self.repos[repo] = Repo(private, dict(files), ["by hand"])


class _Handler(BaseHTTPRequestHandler):
    hub: HubStub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._get()

    def do_GET(self) -> None:
        self._get()

    def do_POST(self) -> None:
        path = self._path()
        body = self._body()
        with self.hub.lock:
            if path == "/api/repos/create":
                return self._create(json.loads(body))
            if path == "/api/validate-yaml":
                return self._validate(json.loads(body))
            if found := re.fullmatch(rf"/api/({KINDS})/(.+)/preupload/([^/]+)", path):
                files = [
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                    for f in json.loads(body)["files"]
                ]
                return self._json({"files": files}) if self._repo(found) is not None else self._missing()
            if found := re.fullmatch(rf"/api/({KINDS})/(.+)/commit/([^/]+)", path):
                return self._commit(found, body)
        self._json({"error": f"no route {path}"}, 404)

    def _create(self, asked: dict) -> None:
        kind, name = asked.get("type", "model") + "s", asked["name"]
        owner = asked.get("organization") or USER
        key, url = f"{kind}/{owner}/{name}", f"{self.hub.url}/{owner}/{name}"
        if kind != "models":
            url = f"{self.hub.url}/{kind}/{owner}/{name}"
        known = key in self.hub.repos
        if not known:
            self.hub.repos[key] = Repo(asked.get("visibility") == "private")
        body = {"url": url, "name": f"{owner}/{name}", "id": f"{owner}/{name}"}
        self._json({**body, "error": "You already created this repo"} if known else body, 409 if known else 200)

    def _validate(self, asked: dict) -> None:
        head = yaml.safe_load(asked["content"].split("---")[1]) or {}
        bases = head.get("base_model", [])
        wrong = [
            b for b in ([bases] if isinstance(bases, str) else bases) if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", b)
        ]
        errors = [{"message": f'"base_model" with value "{b}" is not valid'} for b in wrong]
        self._json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def _commit(self, found: re.Match, body: bytes) -> None:
        if self.hub.broken:
            return self._json({"error": "the Hub is in trouble"}, 500)
        repo = self._repo(found)
        if repo is None:
            return self._missing()
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                repo.commits.append(line["value"]["summary"])
            elif line["key"] == "file":
                repo.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                repo.files.pop(line["value"]["path"], None)
            else:
                return self._json({"error": f"no such operation {line['key']}"}, 400)
        url = f"{self.hub.url}/{found[2]}/commit/{repo.sha}"
        self._json({"success": True, "commitOid": repo.sha, "commitUrl": url, "hookOutput": "", "pullRequestUrl": None})

    def _get(self) -> None:
        path = self._path()
        with self.hub.lock:
            if path == "/api/whoami-v2":
                return self._json({"type": "user", "name": USER, "orgs": [], "auth": {}})
            if found := re.fullmatch(rf"/api/({KINDS})/(.+?)/tree/([^/]+)(/.*)?", path):
                repo = self._repo(found)
                return self._json([_entry(n, b) for n, b in repo.files.items()]) if repo else self._missing()
            if found := re.fullmatch(rf"/api/({KINDS})/([^/]+/[^/]+)(/revision/[^/]+)?", path):
                repo = self._repo(found)
                if repo is None:
                    return self._missing()
                names = [{"rfilename": name} for name in repo.files]
                return self._json({"id": found[2], "sha": repo.sha, "private": repo.private, "siblings": names})
            if found := re.fullmatch(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                repo = self.hub.repos.get(f"{found[1] or 'models'}/{found[2]}")
                if repo is None:
                    return self._missing()
                if self.hub.unreadable:
                    return self._json({"error": "not now"}, 403)
                if found[4] not in repo.files:
                    return self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
                return self._file(repo, repo.files[found[4]])
        self._json({"error": f"no route {path}"}, 404)

    def _repo(self, found: re.Match) -> Repo | None:
        return self.hub.repos.get(f"{found[1]}/{found[2]}")

    def _missing(self) -> None:
        self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def _path(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        return path

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _file(self, repo: Repo, content: bytes) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", repo.sha)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def _json(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
