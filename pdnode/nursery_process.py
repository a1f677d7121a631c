"""The nursery's own process: import the engines' half of vLLM, then fork an engine whenever asked.

    launcher --fork--> nursery --fork--> midwife --fork--> engine core --fork--> workers

The midwife is what the launcher is for a spawned engine: it hands the engine core its configuration
over vLLM's handshake and is its parent. It costs nothing (its memory is the nursery's) and ends with
its engine. Nothing here may start a thread or run an OpenMP loop before it forks: a forked child
would wait for threads that it does not have.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from pdnode import openmp
from pdnode.nursery import receive, send
from pdnode.process_group import own_process_group
from pdnode.rundir import open_log

PR_SET_PDEATHSIG = 1
LOOK_S = 0.002
"""More than a worker waits between two steps under load, and much less than a step takes."""


def main(control_fd: int, parent: int = 0) -> None:
    """``parent``: the launcher's pid if its main thread started this, which then ends with it."""
    if parent:
        _end_with(parent)
    # The launcher gets a terminal's Ctrl-C too, and ends its engines in order.
    _deaf()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps midwives
    _import_everything()
    openmp.obey_in_children()
    with socket.socket(fileno=control_fd) as control:
        while True:
            message, fds, *_ = socket.recv_fds(control, 64, 1)
            if not message:
                return  # the launcher is gone or needs no more engines
            if os.fork() == 0:
                control.close()
                _midwife(socket.socket(fileno=fds[0]))
            os.close(fds[0])


def _end_with(parent: int) -> None:
    """The imports take seconds, in which nobody looks whether the launcher is still there. The
    launcher's reaper does, and is started after us."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _deaf() -> None:
    # Handlers and not SIG_IGN: vLLM's engine core puts its own in their place.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)


def _import_everything() -> None:
    from pdnode.vllm_compat import compile_logprobs, import_engine

    import_engine()
    import pdnode.connector.connector  # noqa: F401

    # For engines of one core; others compile it in their workers, where a failure is told of.
    with contextlib.suppress(Exception), openmp.one_thread():
        compile_logprobs()
    # What was imported lives for ever: collections in the children need not walk it, and so do not
    # copy its pages either.
    gc.collect()
    gc.freeze()


def _midwife(connection: socket.socket) -> None:
    code = 1
    try:
        own_process_group()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        order = receive(connection)
        if order is not None:
            code = _deliver(connection, order)
    finally:
        # Not sys.exit: the nursery's own stack is above this one.
        os._exit(code)


def _deliver(connection: socket.socket, order: dict[str, Any]) -> int:
    from pdnode.vllm_compat import sleep_soon, spawn_engine_core

    os.environ.clear()
    os.environ.update(order["environ"], VLLM_WORKER_MULTIPROC_METHOD="fork")
    _write_to(order["log_path"])
    sleep_soon(LOOK_S)
    try:
        vllm_config = pickle.loads(order["vllm_config"])
        with spawn_engine_core(vllm_config, **order["options"]) as manager:
            engine_core = manager.processes[0]
            send(connection, {"pid": engine_core.pid})
        send(connection, {"ready": True})
    except (RuntimeError, TimeoutError) as error:
        with contextlib.suppress(OSError):
            send(connection, {"error": str(error)})
        return 1
    connection.close()
    engine_core.join()
    return 0


def _write_to(log_path: str) -> None:
    log = open_log(Path(log_path))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)
