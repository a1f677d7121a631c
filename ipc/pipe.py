"""The KV pipe: tensors through a ring of fixed slots; one sender, one receiver, FIFO.

       0 ┌────────────────────────────────────────────────────────────┐
         │ magic, version, slots, slot bytes, frame limit, crc        │ creator
    4096 ├────────────────────────────────────────────────────────────┤
         │ head: slots published so far │ state                       │ sender
    4224 ├────────────────────────────────────────────────────────────┤
         │ tail: slots given back so far │ state                      │ receiver
    8192 ├────────────────────────────────────────────────────────────┤
         │ slot 0 │ slot 1 │ ...   a frame is a header, padded to 64  │ sender
         │ bytes, and the data; it starts in a new slot and spans     │
         │ as many as it needs                                        │
         └────────────────────────────────────────────────────────────┘

state: 0 nobody yet, 1 in use, 2 closed. Slots are filled, THEN head moves; slots are copied out,
THEN tail moves. Each end also holds a lock (alive.py) that the kernel drops when its process dies.

Frames of at most half the ring are published whole: a `WaitTimeout` leaves nothing behind, and the
sender fills one while the receiver empties another. Larger ones are published slot by slot.
"""

import ctypes
import struct
import zlib

import torch

from ipc import frames
from ipc.alive import Alive
from ipc.cells import Shared
from ipc.errors import (
    FrameTooLarge,
    PeerGone,
    PipeBusy,
    PipeClosed,
    PipeError,
    SegmentForeign,
    WaitTimeout,
)
from ipc.frames import Frame
from ipc.segment import PAGE_BYTES, Segment
from ipc.wait import Wait

MAGIC = int.from_bytes(b"pdnodepi", "little")
VERSION = 1
SEND, RECEIVE = 0, 1
_NAMES = ("sender", "receiver")
_LINES = (PAGE_BYTES, PAGE_BYTES + 128)  # of the sender, of the receiver: not neighbours in cache
_SLOTS_AT = 2 * PAGE_BYTES
_HEADER = struct.Struct("=5QQ")
_IN_USE, _CLOSED = 1, 2
_MIN_SLOT_BYTES = 1024  # any frame header fits


class KVPipe:
    """One end of a pipe. It belongs to one thread; the name stays until `unlink`."""

    def __init__(self, segment: Segment, end: int):
        assert end in (SEND, RECEIVE)
        self._shared, self._end = Shared(segment), end
        self.name = segment.name
        self.slots, self.slot_bytes, self.max_frame_bytes = _read_header(self._shared)
        self._alive = Alive(segment.name)
        self._numbers = [0, 0]  # my count of slots moved, of frames moved
        self._closed, self._frame = False, None
        self._enter()

    @classmethod
    def create(
        cls, name: str, slots: int, slot_bytes: int, *, end: int, flag: str = "--pipe-slots",
        max_frame_bytes: int = 1 << 36,
    ) -> "KVPipe":  # fmt: skip
        """Make the ring and be its `end` (SEND or RECEIVE).

        Sizes are rounded up: at least 2 slots of 1024 bytes. Raises SegmentExists, NoSharedMemory
        naming `flag`.
        """
        slots, slot_bytes = max(2, slots), -(-max(slot_bytes, _MIN_SLOT_BYTES) // 64) * 64
        segment = Segment.create(
            name, _SLOTS_AT + slots * slot_bytes, purpose="a KV pipe", flag=flag
        )
        segment.populate(write=True)
        numbers = _HEADER.pack(MAGIC, VERSION, slots, slot_bytes, max_frame_bytes, 0)[:-8]
        segment.buf[: len(numbers) + 8] = numbers + zlib.crc32(numbers).to_bytes(8, "little")
        return cls(segment, end)

    @classmethod
    def attach(cls, name: str, *, end: int) -> "KVPipe":
        """Be the other end. Raises SegmentMissing, SegmentForeign, PipeBusy."""
        segment = Segment.attach(name)
        segment.populate(write=True)
        return cls(segment, end)

    def send_tensor(self, tensor: torch.Tensor | None, timeout_s: float | None = None) -> None:
        """Copy a tensor (any dtype, shape and strides; gradients stay here) or None into the ring.

        Returns when it is all in the ring. Raises WaitTimeout: the ring stayed full; after a frame
        above half the ring this also closes the pipe, since a part cannot be taken back. PeerGone,
        PipeClosed, FrameTooLarge, TensorUnsupported.
        """
        self._require(SEND)
        frame = frames.outgoing(tensor)
        if frame.nbytes > self.max_frame_bytes:
            raise FrameTooLarge(frame.nbytes, self.max_frame_bytes)
        start = self._numbers[0]
        self._check_peer()
        try:
            self._send(frame, Wait(timeout_s))
        except WaitTimeout:
            if self._word(SEND) != start:
                self.close()
            self._numbers[0] = start
            raise
        self._numbers[1] += 1

    def recv_tensor(
        self, timeout_s: float | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """The next tensor, contiguous; None when None was sent.

        It lies in `out` where one is given (same shape and dtype, contiguous), else in fresh
        memory, whose first touch costs more than the copy. Raises WaitTimeout (nothing is lost: the
        next call goes on, with the memory of this one), TensorUnsupported when `out` does not fit
        (the tensor is still the next), PeerGone when the sender died, PipeClosed when it closed and
        everything was received; PipeError when the ring is damaged.
        """
        self._require(RECEIVE)
        wait = Wait(timeout_s)
        if self._frame is None:
            self._begin(wait, out)
        frame = self._frame
        while frame.left:
            self._await(wait)
            self._move(frame, 0)
            self._advance()
        self._frame = None
        self._numbers[1] += 1
        return frame.data

    def close(self) -> None:
        """Tell the other side. What was sent before can still be received. Any number of times."""
        if self._closed:
            return
        self._closed = True
        self._shared.words[_LINES[self._end] + 8 >> 3] = _CLOSED
        self._shared.close()
        self._alive.release()

    def unlink(self) -> bool:
        return self._shared.segment.unlink()

    def __enter__(self) -> "KVPipe":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _enter(self) -> None:
        """Become this end, or refuse: a pipe serves one pair of processes, once."""
        free = self._alive.hold(self._end)
        if not free or self._state(self._end):
            self._alive.release()
            self._shared.close()
            what = "has been used before" if free else "belongs to a living process"
            raise PipeBusy(f"the {_NAMES[self._end]} of pipe {self.name!r} {what}: make a new pipe")
        self._shared.words[_LINES[self._end] + 8 >> 3] = _IN_USE

    def _send(self, frame: Frame, wait: Wait) -> None:
        header = frames.encode(frame, self._numbers[1])
        whole = -(-(len(header) + frame.nbytes) // self.slot_bytes) <= self.slots // 2
        self._await(wait)
        at = self._slot_at()
        self._shared.mm[at : at + len(header)] = header
        self._move(frame, len(header))
        self._advance(publish=not whole)
        while frame.left:
            self._await(wait)
            self._move(frame, 0)
            self._advance(publish=not whole)
        self._shared.words[_LINES[SEND] >> 3] = self._numbers[0]

    def _begin(self, wait: Wait, out: torch.Tensor | None) -> None:
        self._await(wait)
        at = self._slot_at()
        raw = self._shared.mm[at : at + _MIN_SLOT_BYTES]
        frame, header = frames.decode(raw, self._numbers[1], self.max_frame_bytes, out)
        self._move(frame, header)
        self._frame = frame
        self._advance()

    def _move(self, frame: Frame, offset: int) -> None:
        """The part of the frame that fits in the current slot from `offset`; without the GIL."""
        nbytes = min(frame.left, self.slot_bytes - offset)
        if nbytes:
            slot = self._shared.segment.address + self._slot_at() + offset
            pair = (slot, frame.address) if self._end == SEND else (frame.address, slot)
            ctypes.memmove(*pair, nbytes)
            frame.moved += nbytes

    def _advance(self, publish: bool = True) -> None:
        self._numbers[0] += 1
        if publish:
            self._shared.words[_LINES[self._end] >> 3] = self._numbers[0]

    def _await(self, wait: Wait) -> None:
        """Until there is a slot to fill, or one to empty."""
        while not self._ready():
            if not wait.spinning:
                self._check_peer()
            if not wait.nap():
                full = "full" if self._end == SEND else "empty"
                raise WaitTimeout(
                    f"pipe {self.name!r}: {full} for {wait.timeout_s} s ({self.slots} slots of "
                    f"{self.slot_bytes:,} bytes, {self._word(SEND)} sent, "
                    f"{self._word(RECEIVE)} received)"
                )
        wait.reset()

    def _ready(self) -> bool:
        if self._end == SEND:
            return self._numbers[0] - self._word(RECEIVE) < self.slots
        return self._word(SEND) > self._numbers[0]

    def _check_peer(self) -> None:
        """Raise when the other side will not move any more; what it sent before still counts."""
        peer = 1 - self._end
        state = self._state(peer)
        dead = state == _IN_USE and not self._alive.held(peer) and self._state(peer) == _IN_USE
        if self._end == RECEIVE and self._ready():
            return
        if dead:
            raise PeerGone(f"pipe {self.name!r}: the {_NAMES[peer]} died{self._midway()}")
        if state == _CLOSED:
            raise PipeClosed(f"pipe {self.name!r}: the {_NAMES[peer]} closed it{self._midway()}")

    def _midway(self) -> str:
        frame = self._frame
        return f", {frame.moved:,} bytes into a frame of {frame.nbytes:,}" if frame else ""

    def _require(self, end: int) -> None:
        if end != self._end:
            raise PipeError(f"this is the {_NAMES[self._end]} of pipe {self.name!r}")
        if self._closed:
            raise PipeClosed(f"pipe {self.name!r}: this side closed it")

    def _slot_at(self) -> int:
        return _SLOTS_AT + self._numbers[0] % self.slots * self.slot_bytes

    def _word(self, end: int) -> int:
        return self._shared.words[_LINES[end] >> 3]

    def _state(self, end: int) -> int:
        return self._shared.words[_LINES[end] + 8 >> 3]


def _read_header(shared: Shared) -> tuple[int, int, int]:
    raw = shared.mm[: _HEADER.size]
    magic, version, slots, slot_bytes, limit, crc = _HEADER.unpack(raw)
    name, have = shared.segment.name, shared.segment.nbytes
    if (magic, version) != (MAGIC, VERSION) or crc != zlib.crc32(raw[:-8]):
        raise SegmentForeign(f"{name!r} is no pipe of version {VERSION}: magic {magic:#x}")
    if _SLOTS_AT + slots * slot_bytes > have:
        raise SegmentForeign(f"{name!r} is cut off: {have:,} bytes for {slots} x {slot_bytes:,}")
    return slots, slot_bytes, limit
