"""The reader's half of the entries: select, validate, drop, claim. Any process, any time.

A reader writes one thing only: its own acknowledgement word of a slot, `generation << 2 | state`.

    WANT     I would like this entry for myself          (only inside `claim`)
    CLAIMED  it is mine: others look elsewhere, the owner keeps its blocks
    DROPPED  I have what I need: the owner may free the blocks

Two readers that claim one entry: each writes WANT, then looks at all the others. Since both wrote
before they looked, at least one sees the other. Who sees a lower slot's WANT, a CLAIMED or a
DROPPED gives way; who sees a higher slot's WANT waits for that one to give way. Nobody claims while
another word speaks of this generation, so there are never two, and nobody needs a lock.
"""

import struct
import threading
from collections.abc import Callable

import numpy as np

from ipc import layout
from ipc.cells import Shared
from ipc.entries import record_crc
from ipc.errors import NotOwner
from ipc.keys import Key, key_of
from ipc.records import Entry

_RETRIES = 64  # about 50 us: longer than a writer in a hurry, shorter than a scheduler step


class Lookup:
    """What `me` (an engine's slot, or NODE: look only) reads and acknowledges."""

    def __init__(
        self, shared: Shared, geometry: layout.Geometry, me: int, boot_of: Callable[[int], int]
    ):
        self._shared, self._geometry, self._me = shared, geometry, me
        self._boot_of = boot_of  # slot -> boot id in the control line
        self._records = [geometry.records(owner) for owner in range(geometry.engines)]
        self._tags_at, self._bucket_bytes = geometry.tags_at, geometry.engines * layout.LINE
        self._fence = threading.Lock()

    def select(self, transfer_id: str, owner: int | None) -> Entry | None:
        """The entry, or None: absent, of an earlier boot, dropped by me, or unreadable just now."""
        key = key_of(transfer_id, self._geometry.buckets)
        first = 0 if owner is None else owner * layout.LINE
        span = self._bucket_bytes if owner is None else layout.LINE
        mm = self._shared.mm
        for bucket in (key.first, key.second):
            at = self._tags_at + bucket * self._bucket_bytes + first
            tags = mm[at : at + span]
            found = tags.find(key.tag)
            while found >= 0:
                entry = self._at_tag(transfer_id, key, bucket, first + found)
                if entry is not None:
                    return entry
                found = tags.find(key.tag, found + 1)
        return None

    def validate(self, entry: Entry) -> bool:
        """True while the entry has not ended and its owner is still the same boot. Two loads."""
        at = self._records[entry.owner] + entry.slot_index * layout.RECORD + 8
        return (
            self._shared.words[at >> 3] == entry.generation
            and self._boot_of(entry.owner) == entry.boot_id
        )

    def drop(self, entry: Entry) -> None:
        self._shared.words[self._ack(self._me, entry)] = entry.generation << 2 | layout.DROPPED

    def claim(self, entry: Entry) -> int | None:
        """Try once to make the entry mine. None: it is. Else the slot that stands in the way."""
        words, mine = self._shared.words, self._ack(self._me, entry)
        if words[mine] == entry.generation << 2 | layout.CLAIMED:
            return None
        if words[mine] != entry.generation << 2 | layout.WANT:
            words[mine] = entry.generation << 2 | layout.WANT
            with self._fence:  # A locked instruction: my WANT is visible before I look at theirs.
                pass
        blocker, give_way = self._rival(entry)
        if blocker is None:
            words[mine] = entry.generation << 2 | layout.CLAIMED
        elif give_way:
            words[mine] = 0
        return blocker

    def unclaim(self, entry: Entry) -> None:
        """Take back a WANT or a CLAIMED of this generation, if it is there."""
        words, mine = self._shared.words, self._ack(self._me, entry)
        if words[mine] >> 2 == entry.generation and words[mine] & 3 != layout.DROPPED:
            words[mine] = 0

    def clear_claims(self, reader: int) -> None:
        """The node, for a dead reader: what it wanted or claimed is free for others again."""
        geometry = self._geometry
        at, count = geometry.acks(reader, 0), geometry.engines * geometry.slots
        acks = np.ndarray((count,), np.uint64, self._shared.mm, at)
        state = acks & 3
        acks[(state == layout.WANT) | (state == layout.CLAIMED)] = 0

    def _rival(self, entry: Entry) -> tuple[int | None, bool]:
        """(slot in the way or None, whether I must give way)."""
        waiting = None
        for reader in range(self._geometry.engines):
            word = self._shared.words[self._ack(reader, entry)]
            if reader == self._me or word >> 2 != entry.generation or word & 3 == 0:
                continue
            if word & 3 != layout.WANT or reader < self._me:
                return reader, True
            waiting = reader
        return waiting, False

    def _at_tag(self, transfer_id: str, key: Key, bucket: int, found: int) -> Entry | None:
        owner, offset = divmod(found, layout.LINE)
        if offset & 7:  # Eight bytes across two tags that happen to look like ours.
            return None
        slot = bucket * layout.WAYS + (offset >> 3)
        entry = self._read(transfer_id, key, owner, slot)
        if entry is None or entry.boot_id != self._boot_of(owner) or self._dropped(entry):
            return None
        return entry

    def _read(self, transfer_id: str, key: Key, owner: int, slot: int) -> Entry | None:
        """One consistent copy of a record, or None after a bounded number of tries."""
        words, mm = self._shared.words, self._shared.mm
        at = self._records[owner] + slot * layout.RECORD
        for _ in range(_RETRIES):
            seq = words[at >> 3]
            if seq & 1:
                continue
            raw = mm[at + 8 : at + layout.RECORD]
            generation = int.from_bytes(raw[:8], "little")
            body = raw[8:64]
            digest, boot, ready, total, token, _, count, page, crc = layout.BODY.unpack(body)
            if not generation & 1 or digest != key.digest:
                if words[at >> 3] == seq:
                    return None
                continue
            runs = self._runs(owner, raw[72:], count, page)
            if words[at >> 3] != seq:
                continue
            damaged = runs is None or generation > layout.GENERATION_MAX
            if damaged or crc != record_crc(generation, body, runs):
                return None
            pairs = tuple(struct.iter_unpack("=II", runs))
            return Entry(owner, slot, generation, boot, transfer_id, pairs, ready, total, token)
        return None

    def _runs(self, owner: int, inline: bytes, count: int, page: int) -> bytes | None:
        """`count` runs of 8 bytes: those in the record, then those in the chain of run pages."""
        if count <= layout.INLINE_RUNS:
            return inline[: count * 8]
        base, pages = self._geometry.pages(owner), self._geometry.run_pages
        left, parts = count - layout.INLINE_RUNS, [inline]
        if left > pages * layout.PAGE_RUNS:
            return None
        while left > 0:
            if page >= pages:
                return None
            at, here = base + page * layout.RUN_PAGE, min(left, layout.PAGE_RUNS)
            raw = self._shared.mm[at : at + 8 + here * 8]
            page, left = int.from_bytes(raw[:4], "little"), left - here
            parts.append(raw[8:])
        return b"".join(parts)

    def _dropped(self, entry: Entry) -> bool:
        if self._me == layout.NODE:
            return False
        return (
            self._shared.words[self._ack(self._me, entry)] == entry.generation << 2 | layout.DROPPED
        )

    def _ack(self, reader: int, entry: Entry) -> int:
        if reader == layout.NODE:
            raise NotOwner("the node has no acknowledgement words: attach with me=<engine slot>")
        return (self._geometry.acks(reader, entry.owner) >> 3) + entry.slot_index
