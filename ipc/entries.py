"""The owner's half of the entries: insert, publish, renew, released, remove.

One process writes one engine's table, so the free run pages, the leases and the tickets are kept in
that process; the segment holds what others must see. The two orders that matter:

    insert   record (sequence odd, fill, sequence even), THEN the tag that lets readers find it
    remove   tag, THEN the generation; only after that may the caller reuse the blocks
"""

import struct
import time
import zlib
from collections.abc import Sequence

import numpy as np

from ipc import layout
from ipc.cells import Shared
from ipc.errors import EntryExists, IndexFull, LookupFault, NotOwner, StaleRead
from ipc.keys import Key, key_of
from ipc.records import Ticket

Runs = list[tuple[int, int]]
_INLINE_BYTES = layout.INLINE_RUNS * 8
_PAGE_BYTES = layout.PAGE_RUNS * 8
_PAGE_CRC = struct.Struct("=II")
_TAGS = struct.Struct(f"={layout.WAYS}Q")


class _Live:
    """What the owner remembers of one live entry."""

    __slots__ = ("boot_id", "deadline_ns", "first_token", "key", "pages", "ticket", "tokens_total")

    def __init__(self, ticket: Ticket, key: Key, boot_id: int, total: int, first: int):
        self.ticket, self.key, self.boot_id = ticket, key, boot_id
        self.tokens_total, self.first_token = total, first
        self.pages: list[int] = []
        self.deadline_ns = 0


class Entries:
    """One engine's table, for the only process that writes it. Nothing here blocks."""

    def __init__(self, shared: Shared, geometry: layout.Geometry, owner: int):
        self._shared, self._geometry, self._owner = shared, geometry, owner
        self._live: dict[str, _Live] = {}
        self._free_pages: list[int] | None = None  # None until this process has written

    def insert(
        self, transfer_id: str, boot_id: int, block_ids: Sequence[int],
        tokens_ready: int, tokens_total: int, first_token: int, lease_s: float,
    ) -> Ticket:  # fmt: skip
        if self._free_pages is None:
            self._take_over(boot_id)
        self._check_new(transfer_id)
        runs = runs_of(block_ids)
        _check_progress(tokens_ready, tokens_total)
        key = key_of(transfer_id, self._geometry.buckets)
        slot = self._free_slot(key)
        pages = self._take_pages(runs)
        ticket = Ticket(slot, self._next_generation(slot), transfer_id)
        live = _Live(ticket, key, boot_id, tokens_total, first_token)
        self._fill(live, runs, pages, tokens_ready)
        self._live[transfer_id] = live
        self.renew(ticket, lease_s)
        if slot // layout.WAYS != key.first:
            self._add_moved(key.first, 1)
        self._shared.words[self._geometry.tag(self._owner, slot) >> 3] = key.tag_word
        return ticket

    def publish(
        self, ticket: Ticket, block_ids: Sequence[int], tokens_ready: int, first_token: int | None
    ) -> None:
        """Replace blocks and progress; on IndexFull the entry stays as it was."""
        live = self._owned(ticket)
        runs = runs_of(block_ids)
        _check_progress(tokens_ready, live.tokens_total)
        old, pages = live.pages, self._take_pages(runs)
        if first_token is not None:
            live.first_token = first_token
        self._fill(live, runs, pages, tokens_ready)
        self._free_pages += old

    def renew(self, ticket: Ticket, lease_s: float) -> None:
        live = self._owned(ticket)
        live.deadline_ns = time.monotonic_ns() + int(lease_s * 1e9)
        # For people who look; the owner compares its own copy.
        self._shared.words[(self._at(ticket.slot_index) + layout.LEASE_AT) >> 3] = live.deadline_ns

    def released(self, ticket: Ticket) -> str | None:
        live = self._live.get(ticket.transfer_id)
        if live is None or live.ticket != ticket:
            return "removed"
        dropped = ticket.generation << 2 | layout.DROPPED
        words, geometry = self._shared.words, self._geometry
        first = geometry.ack(0, self._owner, ticket.slot_index)
        for at in range(first, first + geometry.engines * layout.LINE, layout.LINE):
            if words[at >> 3] == dropped:
                return "taken"
        return "expired" if time.monotonic_ns() >= live.deadline_ns else None

    def remove(self, ticket: Ticket) -> bool:
        live = self._live.get(ticket.transfer_id)
        if live is None or live.ticket != ticket:
            return False
        end_entry(self._shared, self._geometry, self._owner, ticket.slot_index)
        if ticket.slot_index // layout.WAYS != live.key.first:
            self._add_moved(live.key.first, -1)
        del self._live[ticket.transfer_id]
        self._free_pages += live.pages
        return True

    def live(self) -> list[Ticket]:
        return [live.ticket for live in self._live.values()]

    def _take_over(self, boot_id: int) -> None:
        """The first write of this process: end what an earlier boot left."""
        for slot in unclean_slots(self._shared, self._geometry, self._owner):
            if self._boot_of(slot) == boot_id:
                raise NotOwner(
                    f"table of slot {self._owner} has live entries of boot {boot_id:#x} from "
                    "another writer: one process writes one engine's table"
                )
            end_entry(self._shared, self._geometry, self._owner, slot)
        nobody_moved(self._shared, self._geometry, self._owner)
        self._free_pages = list(range(self._geometry.run_pages))

    def _check_new(self, transfer_id: str) -> None:
        if transfer_id in self._live:
            raise EntryExists(f"transfer {transfer_id!r} is live already in slot {self._owner}")
        if len(self._live) >= self._geometry.entries:
            raise self._full(f"no slot for transfer {transfer_id!r}")

    def _free_slot(self, key: Key) -> int:
        """In the key's first bucket; when that is crowded, in the emptier of the two."""
        bucket, tags = key.first, self._tags(key.first)
        if tags.count(0) <= layout.WAYS - layout.CROWDED:
            others = self._tags(key.second)
            if others.count(0) > tags.count(0):
                bucket, tags = key.second, others
        if 0 not in tags:
            raise self._full("both buckets of this id are full")
        return bucket * layout.WAYS + tags.index(0)

    def _add_moved(self, bucket: int, change: int) -> None:
        """One id more, or less, whose first bucket this is lives in its second one."""
        at = (self._geometry.table(bucket, self._owner) + layout.MOVED_AT) >> 3
        count = max(0, (self._shared.words[at] >> 1) + change)
        self._shared.words[at] = (count << 1 | 1) & layout.WORD_MAX if count else 0

    def _tags(self, bucket: int) -> tuple[int, ...]:
        return _TAGS.unpack_from(self._shared.mm, self._geometry.table(bucket, self._owner))

    def _take_pages(self, runs: Runs) -> list[int]:
        count = -(-max(0, len(runs) - layout.INLINE_RUNS) // layout.PAGE_RUNS)
        if count > len(self._free_pages):
            raise self._full(
                f"{len(runs)} block runs need {count} run pages, {len(self._free_pages)} of "
                f"{self._geometry.run_pages} are free"
            )
        return [self._free_pages.pop() for _ in range(count)]

    def _fill(self, live: _Live, runs: Runs, pages: list[int], tokens_ready: int) -> None:
        raw = struct.pack(f"={2 * len(runs)}I", *(number for run in runs for number in run))
        self._write_pages(raw[_INLINE_BYTES:], pages)
        body = layout.BODY.pack(
            live.key.digest, live.boot_id, tokens_ready, live.tokens_total, live.first_token,
            sum(count for _, count in runs), len(runs),
        )  # fmt: skip
        crc = record_crc(live.ticket.generation, body + raw)
        head = _PAGE_CRC.pack(pages[0] if pages else layout.NO_PAGE, crc)
        self._write_record(live.ticket, head + body + raw[:_INLINE_BYTES])
        live.pages = pages

    def _write_pages(self, raw: bytes, pages: list[int]) -> None:
        """Run pages nobody refers to yet: no sequence needed."""
        base = self._geometry.pages(self._owner)
        for nth, page in enumerate(pages):
            following = pages[nth + 1] if nth + 1 < len(pages) else layout.NO_PAGE
            part = raw[nth * _PAGE_BYTES : (nth + 1) * _PAGE_BYTES]
            at = base + page * layout.RUN_PAGE
            self._shared.mm[at : at + 8 + len(part)] = following.to_bytes(8, "little") + part

    def _write_record(self, ticket: Ticket, raw: bytes) -> None:
        words, mm, at = self._shared.words, self._shared.mm, self._at(ticket.slot_index)
        odd = words[at >> 3] | 1
        words[at >> 3] = odd
        words[(at + 8) >> 3] = ticket.generation
        mm[at + layout.PAGE_AT : at + layout.PAGE_AT + len(raw)] = raw
        words[at >> 3] = (odd + 1) & layout.WORD_MAX

    def _owned(self, ticket: Ticket) -> _Live:
        live = self._live.get(ticket.transfer_id)
        if live is None or live.ticket != ticket:
            raise StaleRead(f"{ticket} is not live in slot {self._owner}: it was removed")
        return live

    def _next_generation(self, slot: int) -> int:
        """Odd, and never the one that was there."""
        word = self._shared.words[(self._at(slot) + 8) >> 3]
        return (word + 1 | 1) & layout.GENERATION_MAX

    def _boot_of(self, slot: int) -> int:
        return self._shared.words[(self._at(slot) + layout.BOOT_AT) >> 3]

    def _at(self, slot: int) -> int:
        return self._geometry.record(self._owner, slot)

    def _full(self, what: str) -> IndexFull:
        return IndexFull(what, len(self._live), self._geometry.entries)


def runs_of(block_ids: Sequence[int]) -> Runs:
    """Block ids (0 to 2^32 - 1, in the order of the tokens) as (first, count) runs."""
    if len(block_ids) > layout.MAX_ENTRY_BLOCKS:
        raise LookupFault(
            f"{len(block_ids)} blocks in one entry, at most {layout.MAX_ENTRY_BLOCKS}"
        )
    runs: list[list[int]] = []
    following = None
    for block in block_ids:
        if block == following:
            runs[-1][1] += 1
        else:
            runs.append([int(block), 1])
        following = block + 1
    for first, count in runs:
        if first < 0 or first + count > 1 << 32:
            raise LookupFault(f"block ids {first} to {first + count - 1}: not in 0 to 2^32 - 1")
    return [(first, count) for first, count in runs]


def record_crc(generation: int, content: bytes) -> int:
    """Over everything a reader uses: the body and all runs."""
    return zlib.crc32(content, (generation ^ generation >> 32) & 0xFFFFFFFF)


def unclean_slots(shared: Shared, geometry: layout.Geometry, owner: int) -> list[int]:
    """Slots with a live entry, or with one that its writer died in."""
    shape, strides = (geometry.buckets, layout.WAYS, 2), (geometry.bucket_bytes, layout.RECORD, 8)
    heads = np.ndarray(shape, np.uint64, shared.mm, geometry.record(owner, 0), strides)
    return np.flatnonzero((heads[..., 0] | heads[..., 1]) & 1).tolist()


def nobody_moved(shared: Shared, geometry: layout.Geometry, owner: int) -> None:
    """When all entries of a table have ended."""
    at = geometry.table(0, owner) + layout.MOVED_AT
    np.ndarray((geometry.buckets,), np.uint64, shared.mm, at, (geometry.bucket_bytes,))[:] = 0


def end_entry(shared: Shared, geometry: layout.Geometry, owner: int, slot: int) -> None:
    """Make an entry end for every reader, at whatever instruction its last writer stopped."""
    words, at = shared.words, geometry.record(owner, slot)
    words[geometry.tag(owner, slot) >> 3] = 0
    odd = words[at >> 3] | 1
    words[at >> 3] = odd
    words[(at + 8) >> 3] = (words[(at + 8) >> 3] + 1) & ~1 & layout.GENERATION_MAX
    words[at >> 3] = (odd + 1) & layout.WORD_MAX


def _check_progress(ready: int, total: int) -> None:
    if not 0 <= ready <= total <= 0xFFFFFFFF:
        raise LookupFault(f"tokens_ready {ready} and tokens_total {total}: 0 <= ready <= total")
