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
_BUCKET = struct.Struct("=8Q")


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
        self._records = geometry.records(owner)
        self._acks = [geometry.acks(reader, owner) for reader in range(geometry.engines)]
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
        words, offset = self._shared.words, ticket.slot_index * 8
        for acks in self._acks:
            if words[(acks + offset) >> 3] == dropped:
                return "taken"
        return "expired" if time.monotonic_ns() >= live.deadline_ns else None

    def remove(self, ticket: Ticket) -> bool:
        live = self._live.get(ticket.transfer_id)
        if live is None or live.ticket != ticket:
            return False
        end_entry(self._shared, self._geometry, self._owner, ticket.slot_index)
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
        self._free_pages = list(range(self._geometry.run_pages))

    def _check_new(self, transfer_id: str) -> None:
        if transfer_id in self._live:
            raise EntryExists(f"transfer {transfer_id!r} is live already in slot {self._owner}")
        if len(self._live) >= self._geometry.entries:
            raise self._full(f"no slot for transfer {transfer_id!r}")

    def _free_slot(self, key: Key) -> int:
        """A free slot in the emptier of the key's two buckets."""
        buckets = ((self._tags(bucket), bucket) for bucket in (key.first, key.second))
        tags, bucket = max(buckets, key=lambda pair: pair[0].count(0))
        if 0 not in tags:
            raise self._full("both buckets of this id are full")
        return bucket * layout.WAYS + tags.index(0)

    def _tags(self, bucket: int) -> tuple[int, ...]:
        at = self._geometry.tag(self._owner, bucket * layout.WAYS)
        return _BUCKET.unpack_from(self._shared.mm, at)

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
            sum(count for _, count in runs), len(runs), pages[0] if pages else layout.NO_PAGE, 0,
        )  # fmt: skip
        crc = record_crc(live.ticket.generation, body, raw)
        self._write_record(live.ticket, body[:-4] + crc.to_bytes(4, "little"), raw[:_INLINE_BYTES])
        live.pages = pages

    def _write_pages(self, raw: bytes, pages: list[int]) -> None:
        """Run pages nobody refers to yet: no sequence needed."""
        base = self._geometry.pages(self._owner)
        for nth, page in enumerate(pages):
            following = pages[nth + 1] if nth + 1 < len(pages) else layout.NO_PAGE
            part = raw[nth * _PAGE_BYTES : (nth + 1) * _PAGE_BYTES]
            at = base + page * layout.RUN_PAGE
            self._shared.mm[at : at + 8 + len(part)] = following.to_bytes(8, "little") + part

    def _write_record(self, ticket: Ticket, body: bytes, inline: bytes) -> None:
        words, mm, at = self._shared.words, self._shared.mm, self._at(ticket.slot_index)
        odd = words[at >> 3] | 1
        words[at >> 3] = odd
        words[(at + 8) >> 3] = ticket.generation
        mm[at + layout.BODY_AT : at + layout.BODY_AT + len(body)] = body
        mm[at + layout.INLINE_AT : at + layout.INLINE_AT + len(inline)] = inline
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
        return self._shared.words[(self._at(slot) + layout.BODY_AT + 16) >> 3]

    def _at(self, slot: int) -> int:
        return self._records + slot * layout.RECORD

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


def record_crc(generation: int, body: bytes, runs: bytes) -> int:
    """Over everything a reader uses; `body` may carry its own crc, which is left out."""
    seed = (generation ^ generation >> 32) & 0xFFFFFFFF
    return zlib.crc32(runs, zlib.crc32(body[:-4], seed))


def unclean_slots(shared: Shared, geometry: layout.Geometry, owner: int) -> list[int]:
    """Slots with a live entry, or with one that its writer died in."""
    at, n = geometry.records(owner), geometry.slots
    heads = np.ndarray((n, 2), np.uint64, shared.mm, at, (layout.RECORD, 8))
    return np.flatnonzero((heads[:, 0] | heads[:, 1]) & 1).tolist()


def end_entry(shared: Shared, geometry: layout.Geometry, owner: int, slot: int) -> None:
    """Make an entry end for every reader, at whatever instruction its last writer stopped."""
    words, at = shared.words, geometry.records(owner) + slot * layout.RECORD
    words[geometry.tag(owner, slot) >> 3] = 0
    odd = words[at >> 3] | 1
    words[at >> 3] = odd
    words[(at + 8) >> 3] = (words[(at + 8) >> 3] + 1) & ~1 & layout.GENERATION_MAX
    words[at >> 3] = (odd + 1) & layout.WORD_MAX


def _check_progress(ready: int, total: int) -> None:
    if not 0 <= ready <= total <= 0xFFFFFFFF:
        raise LookupFault(f"tokens_ready {ready} and tokens_total {total}: 0 <= ready <= total")
