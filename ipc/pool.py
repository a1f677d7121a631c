"""The pool: a lookup buffer of KV blocks, by content hash, in a segment that the node owns.

    insert       copy a block in, unless somebody has; the oldest make room     (the share's owner)
    reserve, publish   the same in two steps, for who copies many at once       (the share's owner)
    select       where the block is, or None; it counts as used now             (any process)
    read         copy it out; refused when it was replaced meanwhile            (any process)
    drop_select  wait for it, copy it out, and take it away from all others     (any process)

Every engine owns a share of the bytes (pool_share.py) and evicts only from that; all look in all
shares. No call waits for another process, but for `drop_select` within its budget. Values outlive
the process that wrote them: an engine that starts again finds its share as it left it. A death in
the middle of an insert leaves a free page (pool_layout.py says why).

A Pool belongs to one thread of one process. Of the processes of engine `me`, one may own its share
(`own`) and one may read; the two may be the same.
"""

import fcntl
import os
import struct
import time
import zlib
from typing import NamedTuple

from ipc import layout, pool_layout
from ipc.cells import Shared
from ipc.errors import LookupFault, NotOwner, SegmentForeign, StaleRead, WaitTimeout
from ipc.pool_keys import key_of
from ipc.pool_layout import ShareGeometry
from ipc.pool_share import Share, ShareCell
from ipc.records import KVLayout
from ipc.segment import PAGE_BYTES, SHM_DIR, Segment
from ipc.wait import Wait

GRACE_S = 1.0
"""A page that a reader has just found stays this long at least: the reader copies it now."""

_FLOCK = struct.Struct("@hhqqi4x")  # type, whence, start, length, pid


class Hit(NamedTuple):
    """One consistent look at one block. True then; `Pool.validate` says whether it still is."""

    owner: int
    page: int
    generation: int
    version: int  # of the owner's share


class _View:
    """Another engine's share as this process knows it."""

    __slots__ = ("cell", "geometry", "version")

    def __init__(self):
        self.version, self.cell, self.geometry = 0, None, None


class Pool:
    """One process's view of the pool. `me`: its engine, 0 to shares - 1."""

    def __init__(self, segment: Segment, me: int, fingerprint: bytes):
        self._shared = Shared(segment)
        self.shares, self._share_bytes = _read_header(self._shared)
        if not 0 <= me < self.shares:
            raise LookupFault(f"engine {me} of a pool with {self.shares} shares")
        self.name, self.me, self._fingerprint = segment.name, me, fingerprint
        self._views = [_View() for _ in range(self.shares)]
        self._share: Share | None = None
        self._lock_fd = -1

    @classmethod
    def create(cls, name: str, nbytes: int, *, shares: int, flag: str = "--kv-pool-gib") -> Segment:
        """The node: make the segment, `nbytes` divided evenly. It keeps the segment's handle.

        Raises SegmentExists, NoSharedMemory naming `flag`.
        """
        segment = Segment.create(name, nbytes, purpose="the KV pool", flag=flag)
        share_bytes = (segment.nbytes - PAGE_BYTES) // shares // PAGE_BYTES * PAGE_BYTES
        raw = pool_layout.HEADER.pack(0, pool_layout.VERSION, shares, share_bytes, 0)
        crc = zlib.crc32(raw[8:-8])
        segment.buf[: len(raw)] = raw[:-8] + crc.to_bytes(8, "little")
        segment.buf[:8] = pool_layout.MAGIC.to_bytes(8, "little")
        return segment

    @classmethod
    def attach(cls, name: str, *, me: int, fingerprint: bytes) -> "Pool":
        """Map the pool. `fingerprint` (at most 32 bytes): what engines that share KV agree on;
        shares with another one are as good as empty. Raises SegmentMissing, SegmentForeign."""
        segment = Segment.attach(name)
        try:
            return cls(segment, me, fingerprint)
        except BaseException:
            segment.close()
            raise

    def own(self, page_bytes: int, layers: int, grace_s: float = GRACE_S) -> None:
        """Be the writer of share `me`, for blocks of `layers` pages of `page_bytes` bytes.

        What an earlier process left there is kept when it is of this kind. Raises PoolTooSmall.
        """
        self._share = Share(
            self._shared, self._share_at(self.me), self._share_bytes, self.shares,
            page_bytes, layers, self._fingerprint, grace_s,
        )  # fmt: skip

    def populate(self) -> None:
        """Touch every page of this mapping now, not in the first copy. May take seconds."""
        self._shared.segment.populate(write=True)

    def close(self) -> None:
        self._shared.close()
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    # --- as memory ---------------------------------------------------------------------------

    @property
    def address(self) -> int:
        return self._shared.segment.address

    @property
    def nbytes(self) -> int:
        return self._shared.segment.nbytes

    def kv_layout(self, owner: int) -> KVLayout:
        """Where the pages of a share lie, counted from `address`. Raises StaleRead."""
        geometry = self._geometry(owner)
        if geometry is None:
            raise StaleRead(f"pool {self.name!r}: share {owner} is not laid out for this KV")
        return KVLayout(
            num_blocks=geometry.pages, num_layers=geometry.layers, page_bytes=geometry.page_bytes,
            block_stride_bytes=geometry.block_bytes, layer_stride_bytes=geometry.page_bytes,
            base_offset_bytes=geometry.values_at,
        )  # fmt: skip

    # --- owner -------------------------------------------------------------------------------

    @property
    def own_share(self) -> Share:
        if self._share is None:
            raise NotOwner(f"this process does not own share {self.me} of pool {self.name!r}")
        return self._share

    def insert(self, key: bytes, value: bytes | bytearray | memoryview) -> bool:
        """Copy a block of page_bytes * layers bytes in. Never waits.

        False: it is in the pool already, or every page was used by a reader a moment ago.
        """
        geometry, data = self.own_share.geometry, memoryview(value).cast("B")
        if len(data) != geometry.page_bytes * geometry.layers:
            raise LookupFault(
                f"a value of {len(data):,} bytes for a pool of {geometry.layers} x "
                f"{geometry.page_bytes:,}"
            )
        page = self.reserve(key)
        if page is None:
            return False
        at = geometry.value(page)
        self._shared.mm[at : at + len(data)] = data
        self.publish(key, page)
        return True

    def reserve(self, key: bytes) -> int | None:
        """A page of the own share for the value of `key`, see `kv_layout`. None: as `insert`.

        Follow with `publish`, or `give_back` when it could not be filled.
        """
        share = self.own_share
        present = self.select(key) is not None or share.holds(key)
        return None if present else share.reserve()

    def publish(self, key: bytes, page: int) -> None:
        self.own_share.publish(key, page)

    def give_back(self, page: int) -> None:
        self.own_share.give_back(page)

    # --- reader ------------------------------------------------------------------------------

    def select(self, key: bytes) -> Hit | None:
        """Where the block is; None when no share has it. Looking counts as use."""
        for owner in range(self.shares):
            hit = self._find(owner, key)
            if hit is not None:
                mark = self._mark(hit)
                self._shared.words[mark >> 3] = time.monotonic_ns()
                return hit
        return None

    def validate(self, hit: Hit) -> bool:
        """True while the page still holds what was found. Two loads."""
        words, geometry = self._shared.words, self._views[hit.owner].geometry
        return (
            words[self._share_at(hit.owner) >> 3] == hit.version
            and words[geometry.record(hit.page) >> 3] == hit.generation
        )

    def read(self, hit: Hit) -> bytes:
        """The block, page_bytes * layers bytes. Raises StaleRead when it was replaced."""
        value = None
        if self.validate(hit):
            geometry = self._views[hit.owner].geometry
            at, size = geometry.value(hit.page), geometry.page_bytes * geometry.layers
            value = self._shared.mm[at : at + size]
        if value is None or not self.validate(hit):
            raise StaleRead(f"pool {self.name!r}: page {hit.page} of share {hit.owner} was reused")
        return value

    def drop_select(self, key: bytes, *, timeout_s: float | None) -> bytes:
        """Wait until the block is there, copy it out, and end it: nobody else gets it.

        The owner has its pages back at its next insert. `timeout_s`: None waits for ever, 0 tries
        once. Raises WaitTimeout.
        """
        wait = Wait(timeout_s)
        while (value := self._take(key)) is None:
            if not wait.nap():
                raise WaitTimeout(f"pool {self.name!r}: no block {key.hex()} after {timeout_s} s")
        return value

    def _take(self, key: bytes) -> bytes | None:
        """Two takers of one key exclude each other by a lock that the kernel drops at death.

        It is only ever tried, so a taker that was stopped delays nobody but other takers of `key`.
        """
        if self.select(key) is None or not self._lock(key, fcntl.F_WRLCK):
            return None
        try:
            hits = [hit for owner in range(self.shares) if (hit := self._find(owner, key))]
            value = self.read(hits[0]) if hits else None
            for hit in hits:
                self._drop(hit)
            return value
        except StaleRead:
            return None
        finally:
            self._lock(key, fcntl.F_UNLCK)

    def _drop(self, hit: Hit) -> None:
        words, geometry = self._shared.words, self._views[hit.owner].geometry
        words[(self._mark(hit) + pool_layout.DROPPED_AT) >> 3] = hit.generation
        line = (geometry.drops_at + self.me * layout.LINE) >> 3
        words[line + 1 + words[line] % pool_layout.DROP_RING] = hit.page
        words[line] = (words[line] + 1) & pool_layout.WORD_MAX

    def _lock(self, key: bytes, kind: int) -> bool:
        if self._lock_fd < 0:
            self._lock_fd = os.open(f"{SHM_DIR}/{self.name}", os.O_RDWR | os.O_CLOEXEC)
        # Of the key, not of the page: two shares may hold it. Behind the end of any file.
        byte = 1 << 62 | key_of(key, 1 << 20).tag_word >> 2
        try:
            fcntl.fcntl(self._lock_fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, 0, byte, 1, 0))
        except BlockingIOError:
            return False
        return True

    def _find(self, owner: int, key: bytes) -> Hit | None:
        geometry = self._geometry(owner)
        if geometry is None:
            return None
        spot, mm = key_of(key, geometry.buckets), self._shared.mm
        for bucket in (spot.first, spot.second):
            at = geometry.bucket(bucket)
            tags = mm[at : at + layout.LINE]
            found = tags.find(spot.tag)
            while found >= 0:
                number = at + layout.LINE + (found >> 3) * 4
                page = int.from_bytes(mm[number : number + 4], "little")
                hit = self._check(owner, geometry, key, page) if not found & 7 else None
                if hit is not None:
                    return hit
                found = tags.find(spot.tag, found + 1)
        return None

    def _check(self, owner: int, geometry: ShareGeometry, key: bytes, page: int) -> Hit | None:
        """The page's record, if it is of this key, alive, and nobody has dropped it."""
        if page >= geometry.pages:
            return None
        words, at = self._shared.words, geometry.record(page)
        generation = words[at >> 3]
        start = at + pool_layout.KEY_AT
        same = self._shared.mm[start : start + len(key)] == key
        sized = words[(at + pool_layout.LENGTH_AT) >> 3] == len(key)
        if not (generation & 1 and same and sized) or words[at >> 3] != generation:
            return None
        marks = geometry.marks(page) >> 3
        if generation in words[marks + 1 : marks + 2 * geometry.readers : 2].tolist():
            return None
        return Hit(owner, page, generation, self._views[owner].version)

    def _geometry(self, owner: int) -> ShareGeometry | None:
        """None: nobody has laid the share out, or for another kind of KV."""
        view = self._views[owner]
        version = self._shared.words[self._share_at(owner) >> 3]
        if version != view.version:
            view.cell = ShareCell.read(self._shared, self._share_at(owner))
            view.geometry = self._sound(owner, view.cell)
            view.version = version
        return view.geometry

    def _sound(self, owner: int, cell: ShareCell | None) -> ShareGeometry | None:
        if cell is None or not all(cell[:3]) or cell.fingerprint != self._fingerprint:
            return None
        at = self._share_at(owner)
        geometry = ShareGeometry(at, self.shares, cell.page_bytes, cell.layers, cell.pages)
        return geometry if geometry.end <= at + self._share_bytes else None

    def _mark(self, hit: Hit) -> int:
        return self._views[hit.owner].geometry.marks(hit.page) + self.me * pool_layout.MARK

    def _share_at(self, owner: int) -> int:
        return PAGE_BYTES + owner * self._share_bytes


def _read_header(shared: Shared) -> tuple[int, int]:
    """(shares, bytes of each). Raises SegmentForeign with what was found."""
    name, raw = shared.segment.name, shared.mm[: pool_layout.HEADER.size]
    magic, version, shares, share_bytes, crc = pool_layout.HEADER.unpack(raw)
    if (magic, version) != (pool_layout.MAGIC, pool_layout.VERSION) or crc != zlib.crc32(raw[8:-8]):
        raise SegmentForeign(f"{name!r} is no pool of version {pool_layout.VERSION}: {magic:#x}")
    if PAGE_BYTES + shares * share_bytes > shared.segment.nbytes:
        raise SegmentForeign(
            f"{name!r} is cut off: {shared.segment.nbytes:,} bytes for {shares} x {share_bytes:,}"
        )
    return shares, share_bytes
