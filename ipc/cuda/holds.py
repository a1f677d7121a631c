"""Who uses a piece of device memory, and when it may go.

To unmap memory that a copy still reads is undefined on a GPU, and copies end when the GPU says so.
So memory has references (objects that name it) and pins (copies that run). It goes with the last of
both; `doom` drops all references at once and lets no new copy in.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from ipc.errors import PeerGone, RegionRefused

_POLL_S = 0.0005


class Running(Protocol):
    """A copy: a Ticket. `done` looks at the GPU, and unpins when the copy has ended."""

    def done(self) -> bool: ...


class Hold:
    """`free` is called once, in the thread that ended the last use."""

    def __init__(self, what: str, free: Callable[[], None]):
        self._what, self._free = what, free
        self._lock = threading.Lock()
        self._references = 1
        self._pins: set[Running] = set()
        self._doomed = False
        self._freed = False

    @property
    def freed(self) -> bool:
        return self._freed

    @property
    def doomed(self) -> bool:
        return self._doomed

    def retain(self) -> bool:
        """One more reference; False when the memory is on its way out."""
        with self._lock:
            alive = self._references > 0
            self._references += alive
            return alive

    def release(self) -> None:
        with self._lock:
            self._references = max(0, self._references - 1)
        self._end()

    def doom(self) -> None:
        """The owner is gone: no references, no new pins. Running copies may end."""
        with self._lock:
            self._doomed, self._references = True, 0
        self._end()

    def pin(self, copy: Running) -> None:
        """Raises PeerGone after `doom`, RegionRefused after the last `release`."""
        with self._lock:
            if self._doomed:
                raise PeerGone(f"{self._what} was unmapped: its owner is gone")
            if not self._references:
                raise RegionRefused(f"{self._what} was closed by this process")
            self._pins.add(copy)

    def unpin(self, copy: Running) -> None:
        with self._lock:
            self._pins.discard(copy)
        self._end()

    def drain(self, deadline: float) -> bool:
        """Wait for the running copies until `time.monotonic()` is `deadline`; True: it is free."""
        while not self._freed:
            with self._lock:
                running = list(self._pins)
            for copy in running:
                copy.done()
            if not self._freed and time.monotonic() >= deadline:
                return False
            time.sleep(0 if self._freed else _POLL_S)
        return True

    def _end(self) -> None:
        with self._lock:
            last = not self._references and not self._pins and not self._freed
            self._freed = self._freed or last
        if last:
            self._free()
