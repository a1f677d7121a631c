"""The reader's end of the staged path: ask the owner's worker for blocks, receive them by a ring.

    reader                                    owner (serving.py)
      make both pipes, knock with their name ->  open them, greet
      take the names out of /dev/shm         <-
      request ------------------------------->   are the blocks still the entry's, or as found?
      scatter chunk by chunk            <------  answer, then one chunk after the other

One connection per owner and rank, made at its first load (for every planned pair: the self-test). A
death on either side is seen by the pipe at once; a peer that is only silent costs ``SILENCE_S``, is
then left alone for ``REST_S``, and the load fails. After any failure the connection is made anew,
because the rest of the old answer may still come.

A prefix is asked for in the same way, by its blocks' generations. It is a convenience: for it a silent
peer costs ``PREFIX_SILENCE_S``, and hand-offs from that peer go on being asked for.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import ClassVar

import torch

from ipc.copy import plan
from ipc.errors import CopyRefused, IpcError, PeerGone, PipeError, StaleRead, WaitTimeout
from ipc.pipe import RECEIVE, SEND, KVPipe
from ipc.records import KVLayout
from pdnode.connector.metadata import Load, PrefixLoad
from pdnode.connector.paths import wire
from pdnode.connector.paths.base import Home, KvPath
from pdnode.connector.paths.movers import mover
from pdnode.kvpath import (
    CHUNK_BYTES,
    PIPE_SLOT_BYTES,
    PIPE_SLOTS,
    REQUEST_SLOT_BYTES,
    REQUEST_SLOTS,
)

SILENCE_S = 5.0
PREFIX_SILENCE_S = 0.5
"""Who reads makes no step meanwhile."""
REST_S = 10.0


def patience_s(load: Load | PrefixLoad) -> float:
    return PREFIX_SILENCE_S if isinstance(load, PrefixLoad) else SILENCE_S


def door_of(segment: str) -> str:
    """Where the worker that owns this KV listens: a name that goes with its process."""
    return f"\0{segment}.staged"


class Connection:
    """Two pipes to one owner. ``layout``: of the owner's KV."""

    def __init__(self, requests: KVPipe, data: KVPipe, door: str, layout: KVLayout) -> None:
        self._requests, self._data, self._door = requests, data, door
        self._count = 0
        self.layout = layout
        self.patience_s = SILENCE_S
        """For the owner's next message."""

    def greet(self, name: str) -> None:
        """Returns when the owner has opened both pipes. Raises PeerGone, WaitTimeout."""
        knock(self._door, name.encode(), self.patience_s)
        self._receive()

    def ask(self, load: Load | PrefixLoad, page_bytes: int) -> wire.Answer:
        """Raises what the owner's refusal means."""
        self._count += 1
        request = _request(load, self._count, page_bytes)
        self._requests.send_tensor(request.pack(), self.patience_s)
        knock(self._door, b"")
        answer = wire.Answer.unpack(self._receive())
        if answer.number != self._count:
            raise PipeError(f"answer {answer.number} to request {self._count}: out of step")
        if answer.refusal:
            error, reason = wire.REASONS[wire.Refusal(answer.refusal)]
            raise error(f"no KV of {_name(load)}: {reason}")
        return answer

    def chunk(self, out: torch.Tensor) -> torch.Tensor:
        """Fills ``out``, uint8 [bytes of the chunk].

        Raises StaleRead when the owner gave the entry up meanwhile, TensorUnsupported when what it
        sends is no such chunk.
        """
        tensor = self._receive(out)
        if tensor is None:
            raise StaleRead("the owner gave the blocks up while it was sending them")
        return tensor

    def _receive(self, out: torch.Tensor | None = None) -> torch.Tensor | None:
        return self._data.recv_tensor(self.patience_s, out=out)

    def close(self) -> None:
        self._requests.close()
        self._data.close()


class StagedPath(KvPath):
    kind: ClassVar[str] = "staged"

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        self._mover = mover(home)
        self._buffer = self._mover.buffer(max(CHUNK_BYTES, home.layout.page_bytes))
        self._resting: dict[tuple[int, float], float] = {}
        """(boot, patience that it has used up) -> when it may be asked again."""

    def _open(self, load: Load | PrefixLoad) -> Connection:
        owner, boot_id = load.entry.owner, load.entry.boot_id
        self._refuse_resting(load)
        record = self._home.record(owner, boot_id)
        settings = self._home.settings
        name = f"{settings.segment_prefix}.{settings.boot_id:016x}.{self._home.rank}{owner:x}"
        # A frame above half the ring could not be tried again later: a page must fit well.
        slot_bytes = max(PIPE_SLOT_BYTES, self._home.layout.page_bytes // 4)
        with _pair(name, slot_bytes, settings.kv_flag) as pipes, self._noting_silence(load):
            made = Connection(*pipes, door_of(record.segment), record.layout)
            made.patience_s = patience_s(load)
            made.greet(name)
        return made

    def _copy(self, load: Load | PrefixLoad, peer: Connection) -> int:
        peer.patience_s = patience_s(load)
        try:
            with self._noting_silence(load):
                return self._receive(load, peer)
        except IpcError:
            self.close_peer(load.entry.owner)
            raise

    def _receive(self, load: Load | PrefixLoad, peer: Connection) -> int:
        page_bytes = self._home.layout.page_bytes
        answer = peer.ask(load, page_bytes)
        cuts = [*wire.chunks(self._home.layout.num_layers, page_bytes, len(load.src_blocks))]
        if len(cuts) != answer.chunks:
            raise CopyRefused(
                f"the owner sends {answer.chunks} chunks, this engine expects {len(cuts)}: they "
                "differ in the number of layers"
            )
        return sum(self._scatter(load, cut, peer) for cut in cuts)

    def _scatter(self, load: Load | PrefixLoad, cut: wire.Chunk, peer: Connection) -> int:
        packed = cut.packed(self._home.layout.page_bytes)
        chunk = peer.chunk(self._buffer[: packed.extent_bytes])
        own = cut.part_of(self._home.layout)
        pieces = plan(packed, own, range(cut.count), cut.of(load.dst_blocks))
        return self._mover.into(pieces, chunk, self._home.region)

    def close(self) -> None:
        super().close()
        self._mover.close()

    def _gone(self, owner: int, boot_id: int, peer: Connection) -> bool:
        return not self._home.is_alive(owner, boot_id)

    @contextlib.contextmanager
    def _noting_silence(self, load: Load | PrefixLoad) -> Iterator[None]:
        try:
            yield
        except WaitTimeout:
            now = time.monotonic()
            self._resting = {peer: until for peer, until in self._resting.items() if until > now}
            self._resting[load.entry.boot_id, patience_s(load)] = now + REST_S
            raise

    def _refuse_resting(self, load: Load | PrefixLoad) -> None:
        now, patient_s = time.monotonic(), patience_s(load)
        for (boot_id, waited_s), until in self._resting.items():
            # Silent for longer than this load would wait.
            if boot_id == load.entry.boot_id and waited_s >= patient_s and until > now:
                raise PeerGone(
                    f"slot {load.entry.owner} sent nothing for {waited_s:.1f} s; it is asked again in "
                    f"{until - now:.0f} s"
                )


def _request(load: Load | PrefixLoad, number: int, page_bytes: int) -> wire.Request:
    held = isinstance(load, PrefixLoad)
    return wire.Request(
        number=number,
        boot_id=load.entry.boot_id,
        generation=0 if held else load.entry.generation,
        page_bytes=page_bytes,
        transfer_id="" if held else load.entry.transfer_id,
        blocks=load.src_blocks,
        generations=load.held.generations if held else (),
    )


def _name(load: Load | PrefixLoad) -> str:
    if isinstance(load, PrefixLoad):
        return f"{len(load.src_blocks)} blocks of slot {load.held.owner}"
    return f"transfer {load.entry.transfer_id}"


def knock(door: str, message: bytes, timeout_s: float = 0.0) -> None:
    """Wake the thread behind the door. Raises PeerGone, WaitTimeout."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.sendto(message, door)
        except BlockingIOError:
            pass  # So many knocks are waiting there already that it will look at every pipe.
        except TimeoutError:
            raise WaitTimeout(f"the owner took no connection for {timeout_s:.1f} s") from None
        except OSError as error:
            raise PeerGone(f"the owner's worker is not there to send KV ({error})") from None


@contextlib.contextmanager
def _pair(name: str, slot_bytes: int, flag: str) -> Iterator[tuple[KVPipe, KVPipe]]:
    """(requests, data), for as long as the owner needs to open them; closed when it does not."""
    requests = KVPipe.create(f"{name}q", REQUEST_SLOTS, REQUEST_SLOT_BYTES, end=SEND, flag=flag)
    with _nameless_after(requests):
        data = KVPipe.create(f"{name}d", PIPE_SLOTS, slot_bytes, end=RECEIVE, flag=flag)
        with _nameless_after(data):
            yield requests, data


@contextlib.contextmanager
def _nameless_after(pipe: KVPipe) -> Iterator[None]:
    """Once both ends are open, or never will be, a name could only be left behind."""
    try:
        yield
    except BaseException:
        pipe.close()
        raise
    finally:
        pipe.unlink()
