"""A vLLM server of the built-in task's model, in fp32, while a test module needs it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trl_variants.tasks import load_task

PYTHON = os.environ.get("VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
LONGEST = 64


@contextlib.contextmanager
def serving(folder: Path, options: Sequence[str] = (), switches: Mapping[str, str] | None = None) -> Iterator[str]:
    """Its URL; a minute to come up on two busy cores."""
    assert PYTHON is not None
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", load_task("arithmetic").model_path()]
    command += ["--served-model-name", "tiny", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", str(LONGEST), "--max-num-seqs", "16", *options]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(switches or {})}
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **settings}, cwd=folder, start_new_session=True
        )
        try:
            deadline = time.monotonic() + 300
            while True:
                assert server.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except OSError:
                    time.sleep(1)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)
