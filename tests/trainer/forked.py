"""Runs a function in forked processes, alone or as a gloo group: a kill test without paying the imports again."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

_FORK = multiprocessing.get_context("fork")


class Killed:
    """What a process that died by SIGKILL returned."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Killed)

    __hash__ = None  # type: ignore[assignment]


def run_forked(function: Callable[[int], Any], ranks: int = 1, timeout: float = 180.0) -> list[Any]:
    """Calls `function(rank)` in `ranks` forked processes and returns their results, in rank order.

    Raises:
        RuntimeError: with the traceback of a process that failed, or when one did not end in time.
    """
    port = _free_port()
    started = []
    for rank in range(ranks):
        here, there = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_child, args=(function, rank, ranks, port, there))
        process.start()
        there.close()
        started.append((process, here))
    answers: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + timeout
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(started)}
    while waiting and (ready := wait(list(waiting), max(deadline - time.monotonic(), 0.0))):
        for pipe in ready:
            rank = waiting.pop(pipe)
            answers[rank] = _answer(*started[rank])
        if any(kind == "error" for kind, _ in answers.values()):
            break  # the others would wait for the failed one
    for rank, (process, _) in enumerate(started):
        if rank not in answers:
            answers[rank] = ("error", f"rank {rank} gave no answer")
            process.kill()
        process.join()
    failures = [answers[rank][1] for rank in range(ranks) if answers[rank][0] == "error"]
    if failures:
        raise RuntimeError("\n".join(failures))
    return [Killed() if kind == "killed" else value for kind, value in (answers[rank] for rank in range(ranks))]


def _answer(process: Any, pipe: Any) -> tuple[str, Any]:
    try:
        return _unpack(pipe.recv_bytes())
    except EOFError:
        process.join()
        return ("killed", None) if process.exitcode == -signal.SIGKILL else ("error", f"exit code {process.exitcode}")


def _child(function: Callable[[int], Any], rank: int, ranks: int, port: int, pipe: Any) -> None:
    import torch
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):  # the parent's singletons
        state._shared_state.clear()
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            ACCELERATE_USE_CPU="true",
        )
    try:
        answer = ("ok", function(rank))
    except BaseException:
        answer = ("error", f"rank {rank}:\n{traceback.format_exc()}")
    # as bytes: torch would pass tensors through shared memory that dies with this process
    packed = io.BytesIO()
    torch.save(answer, packed)
    pipe.send_bytes(packed.getvalue())
    pipe.close()
    os._exit(0)  # no atexit: the process group and the parent's fixtures are not ours to end


def _unpack(packed: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(packed), weights_only=False)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def kill_self() -> None:
    """Dies as a pre-empted job does: no clean-up, no exception."""
    os.kill(os.getpid(), signal.SIGKILL)
