"""The owner's half of the pool: one share, filled and evicted by one process.

Which pages are free, and their order of use, is kept in this process and rebuilt from the segment
when a new process takes the share over. The orders that matter:

    insert   the value, then key and stamp, THEN the generation odd, then the tag
    evict    the tag, THEN the generation even; only after that may the page be filled again

Order of use: a heap of (stamp when last looked at, page, generation). Stamps only grow, so a page
whose stamp is still the one in the heap is the oldest of all; one that was used since goes back
with its new stamp; one of another generation is skipped. No scan, whatever the number of pages.
"""

import heapq
import time
from typing import NamedTuple

from ipc import layout, pool_layout
from ipc.cells import Shared, read_cell, write_cell
from ipc.errors import LookupFault, PoolTooSmall, StaleRead
from ipc.pool_keys import PoolKey, key_of
from ipc.pool_layout import ShareGeometry


class ShareCell(NamedTuple):
    """What an owner says of its share. fingerprint: at most 32 bytes."""

    page_bytes: int
    layers: int
    pages: int
    fingerprint: bytes

    def pack(self) -> bytes:
        size = len(self.fingerprint)
        return pool_layout.CELL.pack(*self[:3], 0, self.fingerprint, size)

    @classmethod
    def read(cls, shared: Shared, at: int) -> "ShareCell | None":
        """None where no owner has been, or the cell is damaged."""
        try:
            body = read_cell(shared, at, pool_layout.CELL_SPAN, pool_layout.CELL.size)
        except StaleRead:
            return None
        if body is None:
            return None
        page_bytes, layers, pages, _, fingerprint, length = pool_layout.CELL.unpack(body)
        return cls(page_bytes, layers, pages, fingerprint[:length])


class Share:
    """One share, for the only process that writes it. Nothing here blocks."""

    def __init__(
        self, shared: Shared, at: int, share_bytes: int, readers: int,
        page_bytes: int, layers: int, fingerprint: bytes, grace_s: float,
    ):  # fmt: skip
        if len(fingerprint) > 32:
            raise LookupFault(f"a fingerprint of {len(fingerprint)} bytes, at most 32")
        self._shared = shared
        self.geometry = ShareGeometry.within(at, share_bytes, readers, page_bytes, layers)
        if not self.geometry.pages:
            raise PoolTooSmall(self.geometry.block_bytes, share_bytes)
        self._grace_ns = int(grace_s * 1e9)
        self._keys: dict[bytes, int] = {}
        self._heap: list[tuple[int, int, int]] = []
        self._free: list[int] = []
        self._drops: list[int] = []  # seen so far, by reader
        self.stored = self.evicted = self.busy = 0
        self._take_over(ShareCell(page_bytes, layers, self.geometry.pages, fingerprint))

    def holds(self, key: bytes) -> bool:
        self._forget_dropped()
        return key in self._keys

    def reserve(self) -> int | None:
        """A page that no reader can find, to be filled; or None: all were used a moment ago."""
        self._forget_dropped()
        return self._free.pop() if self._free else self._evict()

    def publish(self, key: bytes, page: int) -> None:
        """The page that was reserved holds the value of `key` now."""
        self._keys[key] = page
        spot, now = key_of(key, self.geometry.buckets), time.monotonic_ns()
        way = self._free_way(spot)
        words, mm, at = self._shared.words, self._shared.mm, self.geometry.record(page)
        words[(at + pool_layout.STAMP_AT) >> 3] = now
        words[(at + pool_layout.LENGTH_AT) >> 3] = len(key)
        mm[at + pool_layout.KEY_AT : at + pool_layout.KEY_AT + len(key)] = key
        words[at >> 3] += 1
        self._link(way, spot, page)
        self._remember(now, page)
        self.stored += 1

    def give_back(self, page: int) -> None:
        """The page that was reserved was not filled after all."""
        self._free.append(page)

    # --- take over ---------------------------------------------------------------------------

    def _take_over(self, cell: ShareCell) -> None:
        """Keep what an earlier process of this engine left, if it is of the same kind."""
        at = self.geometry.at
        if ShareCell.read(self._shared, at) != cell:
            # Without pages first: readers must not look where the new share has no entries yet.
            self._write(cell._replace(pages=0))
            self._shared.mm[self.geometry.drops_at : self.geometry.values_at] = bytes(
                self.geometry.values_at - self.geometry.drops_at
            )
            self._write(cell)
        self._drops = [self._drop_count(reader) for reader in range(self.geometry.readers)]
        self._rebuild()

    def _write(self, cell: ShareCell) -> None:
        write_cell(self._shared, self.geometry.at, pool_layout.CELL_SPAN, cell.pack())

    def _rebuild(self) -> None:
        """Tags may be missing or point to pages that were given up: make all of them anew."""
        start, stop = self.geometry.buckets_at, self.geometry.records_at
        self._shared.mm[start:stop] = bytes(stop - start)
        for page in range(self.geometry.pages - 1, -1, -1):
            key = self._key_at(page)
            if key is None or key in self._keys or self._is_dropped(page):
                self._end(page)
                self._free.append(page)
                continue
            self._keys[key] = page
            spot = key_of(key, self.geometry.buckets)
            self._link(self._free_way(spot), spot, page)
            self._remember(self._used_ns(page), page)

    def _key_at(self, page: int) -> bytes | None:
        words, at = self._shared.words, self.geometry.record(page)
        length = words[(at + pool_layout.LENGTH_AT) >> 3]
        if not words[at >> 3] & 1 or not 0 < length <= pool_layout.MAX_KEY_BYTES:
            return None
        return self._shared.mm[at + pool_layout.KEY_AT : at + pool_layout.KEY_AT + length]

    # --- evict -------------------------------------------------------------------------------

    def _evict(self) -> int | None:
        """The page that was not used for longest, ended."""
        while self._heap:
            stamp, page, generation = self._heap[0]
            if generation != self._generation(page):
                heapq.heappop(self._heap)
                continue
            used_ns = self._used_ns(page)
            if used_ns > stamp:
                heapq.heapreplace(self._heap, (used_ns, page, generation))
                continue
            if time.monotonic_ns() - used_ns < self._grace_ns and used_ns > self._stamp(page):
                # A reader is about to copy it.
                self.busy += 1
                return None
            heapq.heappop(self._heap)
            self._remove(page)
            self.evicted += 1
            return page
        self.busy += 1
        return None

    def _remember(self, stamp: int, page: int) -> None:
        heapq.heappush(self._heap, (stamp, page, self._generation(page)))
        if len(self._heap) > 2 * self.geometry.pages:
            # Full of entries that readers took away before anything had to be evicted.
            self._heap = [entry for entry in self._heap if entry[2] == self._generation(entry[1])]
            heapq.heapify(self._heap)

    def _generation(self, page: int) -> int:
        return self._shared.words[self.geometry.record(page) >> 3]

    def _remove(self, page: int) -> None:
        key = self._key_at(page)
        self._keys.pop(key, None)
        if key is not None:
            self._unlink(key_of(key, self.geometry.buckets), page)
        self._end(page)

    def _end(self, page: int) -> None:
        """Even, and another one than before: for every reader this entry is over."""
        words, at = self._shared.words, self.geometry.record(page)
        words[at >> 3] = (words[at >> 3] + 1) & ~1 & pool_layout.WORD_MAX

    def _stamp(self, page: int) -> int:
        return self._shared.words[(self.geometry.record(page) + pool_layout.STAMP_AT) >> 3]

    def _used_ns(self, page: int) -> int:
        """Of the last use by anybody. Never later than now, whatever a reader has written."""
        at, n = self.geometry.marks(page) >> 3, self.geometry.readers
        used = self._shared.words[at : at + 2 * n : 2].tolist()
        return min(max(self._stamp(page), *used), time.monotonic_ns())

    # --- drops -------------------------------------------------------------------------------

    def _forget_dropped(self) -> None:
        """Readers took entries away: their pages are free again. One word a reader if none did."""
        for reader, seen in enumerate(self._drops):
            if self._drop_count(reader) != seen:
                for page in self._dropped_since(reader, seen):
                    if page < self.geometry.pages and self._is_dropped(page):
                        self._remove(page)
                        self._free.append(page)

    def _dropped_since(self, reader: int, seen: int) -> list[int]:
        """Pages to look at: those the reader noted, or all when it has noted more than fit."""
        at = (self.geometry.drops_at + reader * layout.LINE) >> 3
        ring = self._shared.words[at + 1 : at + 1 + pool_layout.DROP_RING].tolist()
        # After the ring: had the reader gone around it meanwhile, the count says so.
        count = self._drops[reader] = self._drop_count(reader)
        if 0 < count - seen < pool_layout.DROP_RING:
            return [ring[n % pool_layout.DROP_RING] for n in range(seen, count)]
        return list(range(self.geometry.pages))

    def _drop_count(self, reader: int) -> int:
        return self._shared.words[(self.geometry.drops_at + reader * layout.LINE) >> 3]

    def _is_dropped(self, page: int) -> bool:
        generation, at = self._generation(page), self.geometry.marks(page) >> 3
        dropped = self._shared.words[at + 1 : at + 2 * self.geometry.readers : 2].tolist()
        return bool(generation & 1) and generation in dropped

    # --- buckets -----------------------------------------------------------------------------

    def _free_way(self, spot: PoolKey) -> tuple[int, int] | None:
        """(bucket, way) in the emptier of the key's two buckets. None: both are full."""
        tags = {number: self._tags(number) for number in (spot.first, spot.second)}
        bucket = max(tags, key=lambda number: tags[number].count(0))
        return (bucket, tags[bucket].index(0)) if 0 in tags[bucket] else None

    def _link(self, way: tuple[int, int] | None, spot: PoolKey, page: int) -> None:
        if way is None:  # One in millions: the page stays unfindable until it is evicted.
            return
        at = self.geometry.bucket(way[0])
        number = at + layout.LINE + way[1] * 4
        self._shared.mm[number : number + 4] = page.to_bytes(4, "little")
        self._shared.words[(at >> 3) + way[1]] = spot.tag_word

    def _unlink(self, spot: PoolKey, page: int) -> None:
        for bucket in (spot.first, spot.second):
            at = self.geometry.bucket(bucket)
            for way, tag in enumerate(self._tags(bucket)):
                number = at + layout.LINE + way * 4
                if tag == spot.tag_word and self._page_number(number) == page:
                    self._shared.words[(at >> 3) + way] = 0

    def _page_number(self, at: int) -> int:
        return int.from_bytes(self._shared.mm[at : at + 4], "little")

    def _tags(self, bucket: int) -> list[int]:
        at = self.geometry.bucket(bucket) >> 3
        return self._shared.words[at : at + pool_layout.WAYS].tolist()
