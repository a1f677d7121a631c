"""Where CPU engines come from: one process that has vLLM imported, and forks.

Importing vLLM takes most of an engine's start, and a spawned engine core and its spawned worker each
do it anew. The nursery does it once, beside the launcher's own import, single-threaded and without
ever running an engine; every engine's processes are forked from it, at the start and after a death.

The preloaded libraries (vLLM asks for its allocator and OpenMP runtime by LD_PRELOAD, which counts
only when a program starts) are known after vLLM has read its configuration, and the nursery starts
before. What was asked for last time is therefore remembered; a wrong guess costs one more start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pdnode import default_model

if TYPE_CHECKING:
    from pdnode.vllm_compat import VllmConfig

PRELOAD = "LD_PRELOAD"
LEVEL = "VLLM_LOGGING_LEVEL"
LENGTH = struct.Struct("=Q")
CLOSE_S = 2.0


class Nursery:
    """The launcher's end. ``start`` returns at once; the first ``launch`` waits for the imports."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._preload = _remembered()
        self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        level = os.environ.get("PDNODE_ENGINE_LOGGING_LEVEL", "INFO")
        code = (
            "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
            "from pdnode.nursery_process import main; main(int(sys.argv[2]))"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(sys.path), str(theirs.fileno())],
                env={**os.environ, LEVEL: level, PRELOAD: self._preload},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def _ready_for(self, preload: str) -> None:
        """Make sure that it lives and was started with these libraries."""
        alive = self._process.poll() is None
        if alive and preload == self._preload:
            return
        self.close()
        if preload != self._preload:
            self._preload = preload
            _remember(preload)
        self._start()

    @contextlib.contextmanager
    def launch(
        self, vllm_config: VllmConfig, environ: dict[str, str], log_path: Path, **options: Any
    ) -> Iterator[SimpleNamespace]:
        """As ``vllm_compat.spawn_engine_core``: yields once the engine core's process exists,
        leaving waits until it serves, and raises RuntimeError if it ends before that."""
        order = {
            "environ": environ,
            "log_path": str(log_path),
            "vllm_config": bytes(ForkingPickler.dumps(vllm_config)),
            "options": options,
        }
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                self._ready_for(environ.get(PRELOAD, ""))
                socket.send_fds(self._control, [b"engine"], [theirs.fileno()])
            send(ours, order)
            pid = _answer(ours)["pid"]
            yield SimpleNamespace(processes=[SimpleNamespace(pid=pid)])
            _answer(ours)

    def close(self) -> None:
        """Forks no more. Engines that were forked live on."""
        self._control.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _answer(connection: socket.socket) -> dict[str, Any]:
    answer = receive(connection)
    if answer is None:
        raise RuntimeError("the process that starts engines ended")
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


def send(connection: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """None: the other end is gone. Both ends are one program: what comes is trusted."""
    head = _exactly(connection, LENGTH.size)
    data = head and _exactly(connection, LENGTH.unpack(head)[0])
    return pickle.loads(data) if data else None


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        piece = connection.recv(min(count - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return data


# --- what vLLM wanted preloaded last time --------------------------------------------------------


def _memory() -> Path:
    environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    return default_model.cache_dir() / f"preload-{environment}"


def _remembered() -> str:
    """What the user preloads, after what vLLM added to it; a library that is gone is not waited for."""
    own = os.environ.get(PRELOAD, "")
    with contextlib.suppress(OSError):
        before, _, after = _memory().read_text().partition("\n")
        if before == own and all(Path(library).exists() for library in after.split(":") if library):
            return after
    return own


def _remember(preload: str) -> None:
    # A cache that cannot be written costs a second or two at each start, nothing else.
    with contextlib.suppress(OSError):
        path = _memory()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{_before_vllm}\n{preload}")


_before_vllm = os.environ.get(PRELOAD, "")
