"""Where CPU engines come from: one process that has vLLM imported, and forks.

Importing vLLM takes most of an engine's start, and a spawned engine core and its spawned worker each
do it anew. The launcher does it once and forks the nursery before it has a loop or a thread of its
own; every engine's processes are forked from that one, at the start and after a death.

Some things count only when a program starts: the node's mark, by which the reaper knows a process,
the hash seed, and LD_PRELOAD, by which vLLM puts its allocator and OpenMP runtime into CPU workers. So
the launcher starts itself again with them, before it imports vLLM. What vLLM will ask to be preloaded is
known when it has read its configuration; what it asked for last time is remembered, and where that
was wrong a nursery is started as a program of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import secrets
import select
import signal
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
from pdnode.reaper import MARK

if TYPE_CHECKING:
    from pdnode.vllm_compat import VllmConfig

PRELOAD = "LD_PRELOAD"
RESTARTED = "PDNODE_RESTARTED"
BEFORE = "PDNODE_LD_PRELOAD_BEFORE"
"""What the user preloads himself."""
LEVEL = "VLLM_LOGGING_LEVEL"
HASH_SEED = "PYTHONHASHSEED"
"""vLLM's block hashes start from this; left out, some algorithms draw a seed per process, and no engine
would find what another one has."""
LENGTH = struct.Struct("=Q")
CLOSE_S = 2.0


def restart_marked() -> str:
    """The node's boot id; on the first call, this program starts again under it and does not return."""
    pid = str(os.getpid())
    boot_id, _, marked_pid = os.environ.pop(RESTARTED, "").partition(" ")
    if marked_pid == pid:
        return boot_id
    boot_id = secrets.token_hex(4)
    own = os.environ.get(PRELOAD, "")
    marks = {MARK: boot_id, RESTARTED: f"{boot_id} {pid}", BEFORE: own, PRELOAD: _remembered(own)}
    os.environ.setdefault(HASH_SEED, str(secrets.randbelow(1 << 32)))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **marks})


class _Fork:
    """As much of ``subprocess.Popen`` as is needed here, for a child without a program of its own."""

    def __init__(self, pid: int) -> None:
        self._pid, self._pidfd = pid, os.pidfd_open(pid)
        self.returncode: int | None = None

    def wait(self, timeout_s: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired(f"pid {self._pid}", timeout_s)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            os.close(self._pidfd)
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def kill(self) -> None:
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


class Nursery:
    """The launcher's end. The first ``launch`` waits for the imports that are left."""

    def __init__(self) -> None:
        """Forks: only while this process has no thread of its own."""
        self._lock = threading.Lock()
        self._closed = False
        self._preload = os.environ.get(PRELOAD, "")
        self._process: _Fork | subprocess.Popen = self._fork()

    def _fork(self) -> _Fork:
        from pdnode.nursery_process import main

        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        launcher = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            return _Fork(pid)
        try:
            self._control.close()
            null = os.open(os.devnull, os.O_RDWR)
            for fd in range(3):
                os.dup2(null, fd)
            main(theirs.detach(), launcher)
        finally:
            os._exit(0)

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
        if self._closed:
            raise RuntimeError("the node is ending and starts no more engines")
        alive = self._process.poll() is None
        if alive and preload == self._preload:
            return
        self._end()
        if preload != self._preload:
            self._preload = preload
            _remember(os.environ.get(BEFORE, ""), preload)
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
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
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


def _remembered(own: str) -> str:
    """What vLLM made of ``own`` last time. A library that has gone since is no longer asked for."""
    with contextlib.suppress(OSError):
        before, _, after = _memory().read_text().partition("\n")
        if before == own and all(Path(library).exists() for library in after.split(":") if library):
            return after
    return own


def _remember(own: str, preload: str) -> None:
    # A cache that cannot be written costs time at each start, nothing else.
    with contextlib.suppress(OSError):
        path = _memory()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{own}\n{preload}")
