"""The owner's end of the staged path: one thread in the worker, for all readers of its KV.

It sleeps on a socket until a reader knocks, sends one chunk a turn of every transfer in progress,
and never waits for a reader: a full ring is tried again later, so none can hold up another. A chunk
is read only while the entry pins its blocks, or while the prefix table says that they hold what they
did; the reader asks once more when it has them.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import torch

from ipc.copy import Strip, plan
from ipc.errors import IpcError, PipeError, WaitTimeout
from ipc.index import Index
from ipc.pipe import RECEIVE, SEND, KVPipe
from ipc.prefixes import Held
from ipc.records import Entry
from pdnode.connector.paths import wire
from pdnode.connector.paths.base import Home
from pdnode.connector.paths.movers import mover
from pdnode.connector.paths.staged import door_of, knock
from pdnode.kvpath import CHUNK_BYTES
from pdnode.vllm_compat import init_logger

logger = init_logger(__name__)

STUCK_S = 30.0
"""A reader that takes nothing for this long has lost its connection."""
LOOK_S = 1.0
"""How often an idle thread looks for readers that died."""
PUBLISHING_S = 0.005
"""An entry may be unreadable for the microseconds in which its owner writes it."""
SHORTEST_S, LONGEST_S = 50e-6, 1e-3
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


Frame = tuple[torch.Tensor | None, Entry | Held | None]
"""What to send next, and what must still hold its blocks when it is sent."""


class Source:
    """This worker's KV, as readers may have it."""

    def __init__(self, home: Home) -> None:
        settings = home.settings
        self._slot, self._boot_id = settings.slot, settings.boot_id
        # A view of its own: the worker's is used by the thread that loads.
        self._index = Index.attach(settings.index_name, me=settings.slot)
        self._region, self._layout = home.region, home.layout
        self._mover = mover(home)

    def buffer(self) -> torch.Tensor:
        """Room for one chunk."""
        return self._mover.buffer(max(CHUNK_BYTES, self._layout.page_bytes))

    def frames(self, request: wire.Request, buffer: torch.Tensor) -> Iterator[Frame]:
        """The answer to a request. A chunk lies in the KV itself, or in ``buffer`` until the next one
        is asked for.
        """
        asked = self._asked(request)
        refusal = self._refusal(request, asked)
        cuts = [] if refusal else [*self._cuts(request)]
        nbytes = self._layout.num_layers * self._layout.page_bytes * len(request.blocks)
        yield wire.Answer(request.number, refusal, len(cuts), nbytes).pack(), None
        for cut in cuts:
            assert asked is not None
            part = asked.part(*cut.span) if isinstance(asked, Held) else asked
            yield self._gathered(request, cut, buffer) if self.holds(part) else None, part

    def holds(self, asked: Entry | Held) -> bool:
        """May its blocks still be read?"""
        if isinstance(asked, Held):
            return self._index.prefixes.still(asked) == len(asked.blocks)
        return self._index.validate(asked)

    def _asked(self, request: wire.Request) -> Entry | Held | None:
        """None: no such entry."""
        if request.generations:
            return Held(self._slot, request.boot_id, request.blocks, request.generations)
        deadline = time.monotonic() + PUBLISHING_S
        while (entry := self._index.select(request.transfer_id, self._slot)) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(SHORTEST_S)
        return entry

    def _refusal(self, request: wire.Request, asked: Entry | Held | None) -> wire.Refusal:
        if request.boot_id != self._boot_id:
            return wire.Refusal.OTHER_BOOT
        by_entry = isinstance(asked, Entry)
        if asked is None or (by_entry and asked.generation != request.generation):
            return wire.Refusal.GIVEN_UP
        theirs = set(asked.block_ids) if by_entry else range(self._layout.num_blocks)
        if not request.blocks or not all(block in theirs for block in request.blocks):
            return wire.Refusal.OTHER_BLOCKS
        if request.page_bytes != self._layout.page_bytes:
            return wire.Refusal.OTHER_LAYOUT
        return wire.Refusal.NONE if self.holds(asked) else wire.Refusal.GIVEN_UP

    def _cuts(self, request: wire.Request) -> Iterator[wire.Chunk]:
        layout = self._layout
        return wire.chunks(layout.num_layers, layout.page_bytes, len(request.blocks))

    def _gathered(
        self, request: wire.Request, cut: wire.Chunk, buffer: torch.Tensor
    ) -> torch.Tensor:
        packed = cut.packed(self._layout.page_bytes)
        part = cut.part_of(self._layout)
        pieces = plan(part, packed, cut.of(request.blocks), range(cut.count))
        one_piece = len(pieces.strips) == 1 and pieces.strips[0].rows == 1
        if one_piece and self._mover.in_host_memory:
            return self._in_place(pieces.strips[0])
        self._mover.out(pieces, self._region, buffer)
        return buffer[: packed.extent_bytes]

    def _in_place(self, strip: Strip) -> torch.Tensor:
        """One piece needs no gathering: the pipe copies it out of the KV itself."""
        at = self._region.address + strip.src_off
        raw = (ctypes.c_char * strip.nbytes).from_address(at)
        return torch.frombuffer(raw, dtype=torch.uint8)

    def close(self) -> None:
        self._index.close()
        self._mover.close()


class Line:
    """The owner's end of one reader's connection, and the answer it is in the middle of."""

    def __init__(self, name: str, source: Source) -> None:
        """Raises IpcError."""
        self._source, self._buffer = source, source.buffer()
        self._requests = KVPipe.attach(f"{name}q", end=RECEIVE)
        try:
            self._data = KVPipe.attach(f"{name}d", end=SEND)
        except IpcError:
            self._requests.close()
            raise
        self._frames: Iterator[Frame] = iter([(None, None)])  # the greeting
        self._moved_s = time.monotonic()
        self._take_next()

    @property
    def busy(self) -> bool:
        return self._sending

    def turn(self, look: bool) -> bool:
        """Send one frame, or begin with the next request: True when there was something to do.

        ``look``: find out whether the reader is still there. Raises IpcError when it is not.
        """
        if not self._sending and not self._begin(look):
            return False
        tensor, asked = self._frame
        if asked is not None and not self._source.holds(asked):
            tensor, self._frames = None, iter(())  # given up, perhaps while the ring was full
        try:
            self._data.send_tensor(tensor, 0)
        except WaitTimeout:
            if time.monotonic() - self._moved_s > STUCK_S:
                raise
            return False
        self._moved_s = time.monotonic()
        self._take_next()
        return True

    def _begin(self, look: bool) -> bool:
        try:
            # A pipe asks whether its other end lives only when it has waited a little.
            tensor = self._requests.recv_tensor(SHORTEST_S * 4 if look else 0)
        except WaitTimeout:
            return False
        self._frames = self._source.frames(wire.Request.unpack(tensor), self._buffer)
        self._moved_s = time.monotonic()
        self._take_next()
        return True

    def _take_next(self) -> None:
        frame = next(self._frames, None)
        self._sending = frame is not None
        self._frame: Frame = frame or (None, None)

    def close(self) -> None:
        self._requests.close()
        self._data.close()


class Server:
    """The thread. ``segment``: name of the KV region whose readers it serves."""

    def __init__(self, home: Home, segment: str) -> None:
        self._source = Source(home)
        self._names = home.settings.index_name.removesuffix("index")
        self._door = door_of(segment)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(self._door)
        self._lines: list[Line] = []
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="pdnode-kv-sender", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        with suppress(IpcError):
            knock(self._door, b"")
        self._thread.join(LOOK_S * 2)

    def _serve(self) -> None:
        try:
            self._take_turns()
        finally:
            # Also after a bug of ours: a reader is better refused than left waiting.
            self._socket.close()
            for line in self._lines:
                line.close()
            self._source.close()

    def _take_turns(self) -> None:
        pause_s = LOOK_S
        while not self._closing:
            self._open_door(pause_s)
            moved = [self._turn(line, look=pause_s == LOOK_S) for line in [*self._lines]]
            if any(moved):
                pause_s = 0.0
            elif any(line.busy for line in self._lines):
                pause_s = min(max(pause_s * 1.5, SHORTEST_S), LONGEST_S)
            else:
                pause_s = LOOK_S

    def _turn(self, line: Line, look: bool) -> bool:
        try:
            return line.turn(look)
        except IpcError as error:
            logger.info("a reader of this KV is gone: %s", error)
            self._lines.remove(line)
            line.close()
            return True

    def _open_door(self, pause_s: float) -> None:
        """Take all knocks that are there; wait ``pause_s`` for the first."""
        if pause_s < LOOK_S:
            time.sleep(pause_s)  # A socket's timeout is rounded up to a millisecond.
            pause_s = 0.0
        self._socket.settimeout(pause_s)
        with suppress(TimeoutError, BlockingIOError):
            while True:
                message = self._knock()
                if message:
                    self._connect(message.decode("ascii", "replace"))
                self._socket.settimeout(0.0)

    def _knock(self) -> bytes:
        message, extra, _, _ = self._socket.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
        uids = [_CREDENTIALS.unpack(data[: _CREDENTIALS.size])[1] for _, _, data in extra]
        # Abstract names have no owner: anybody on this machine may knock.
        return message if uids == [os.getuid()] else b""

    def _connect(self, name: str) -> None:
        try:
            if not name.startswith(self._names):
                raise PipeError(f"{name!r} is not a name of this node")
            self._lines.append(Line(name, self._source))
        except IpcError as error:
            logger.warning("no connection for a reader of this KV: %s", error)
