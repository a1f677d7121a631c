"""What may happen to a node's engines, on a seeded schedule.

engine   SIGKILL of an engine core
worker   SIGKILL of one of its workers
stop     SIGSTOP of a worker: alive, and of no use
term     SIGTERM of an engine core: vLLM ends what it runs, and restarts nothing
fill     /dev/shm is full but for a little, for a while
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import psutil

KINDS = ("engine", "worker", "stop", "term", "fill")
SHM = Path("/dev/shm")
LEFT_BYTES = 2 * 2**20
"""What a fill leaves: too little for an engine's KV, enough for the rings of a running one."""
FILL_S = 5.0

Status = Callable[[], Awaitable[dict]]


class Faults:
    """``status``: the node's /pd/status. Two engines are left to choose from, or nothing is done."""

    def __init__(self, status: Status, kinds: list[str], rng: random.Random) -> None:
        self._status = status
        self._kinds = kinds
        self._rng = rng
        self.done: Counter[str] = Counter()
        self.at: list[tuple[float, str]] = []
        """When each was done to an engine, and its kind."""

    @property
    def times_s(self) -> list[float]:
        return [at_s for at_s, _ in self.at]

    async def one(self) -> None:
        kind = self._rng.choice(self._kinds)
        if kind == "fill":
            await self._fill()
            return
        ready = [e for e in (await self._status())["engines"] if e["state"] == "ready"]
        # A fault on the last engine is a pause for everybody; allowed, but not what is measured.
        if len(ready) < 2:
            self.done["none, one engine left"] += 1
            return
        engine = self._rng.choice(ready)
        worker = engine["worker_pids"][0] if engine["worker_pids"] else engine["pid"]
        pid, number = {
            "engine": (engine["pid"], signal.SIGKILL),
            "worker": (worker, signal.SIGKILL),
            "stop": (worker, signal.SIGSTOP),
            "term": (engine["pid"], signal.SIGTERM),
        }[kind]
        self.at.append((time.monotonic(), kind))
        os.kill(pid, number)
        self.done[f"{kind} {engine['role']}"] += 1
        print(f"  {kind} of {engine['id']} (pid {pid})", flush=True)

    async def _fill(self) -> None:
        nbytes = fillable()
        if not nbytes:
            self.done["fill not possible"] += 1
            return
        print(f"  fill of {SHM} with {nbytes >> 20} MiB for {FILL_S:g} s", flush=True)
        with ExitStack() as stack:
            path = SHM / f"pdnode-bench-fill.{os.getpid()}"
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            stack.callback(os.close, fd)
            # Without a name it goes with us, however we end.
            path.unlink()
            await asyncio.to_thread(os.posix_fallocate, fd, 0, nbytes)
            self.done["fill"] += 1
            await asyncio.sleep(FILL_S)


def fillable() -> int:
    """Bytes that fill /dev/shm. 0: it is full, or larger than half of what memory is free."""
    stat = os.statvfs(SHM)
    free = stat.f_bavail * stat.f_frsize - LEFT_BYTES
    return max(0, free) if free < psutil.virtual_memory().available // 2 else 0


def in_small_shm(gib: float, command: list[str]) -> None:
    """Become ``command`` in a mount namespace whose /dev/shm has ``gib`` GiB. Needs root."""
    if os.getuid():
        sys.exit(f"--shm-gib {gib:g} mounts a /dev/shm of its own, which only root may")
    script = f'mount -t tmpfs -o size={int(gib * 2**30)},mode=1777 tmpfs {SHM} && exec "$@"'
    os.execvp("unshare", ["unshare", "--mount", "sh", "-c", script, "sh", *command])
