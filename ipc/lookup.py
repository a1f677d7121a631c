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

_RUN, _BODY_BYTES = struct.Struct("=II"), layout.INLINE_AT - layout.BODY_AT
_BOOT, _GENERATION = Entry._fields.index("boot_id"), Entry._fields.index("generation")
_new = tuple.__new__  # Half the time of the constructor, which only checks the number of fields.
_NOBODY_MOVED = bytes(8)
_RETRIES = 64  # about 50 us: longer than a writer in a hurry, shorter than a scheduler step


class Lookup:
    """What `me` (an engine's slot, or NODE: look only) reads and acknowledges."""

    def __init__(
        self, shared: Shared, geometry: layout.Geometry, me: int, boot_of: Callable[[int], int]
    ):
        self._shared, self._geometry, self._me = shared, geometry, me
        self._boot_of = boot_of  # slot -> boot id in the control line
        self._tables = [geometry.table(0, owner) for owner in range(geometry.engines)]
        self._bucket_bytes, self._table_bytes = geometry.bucket_bytes, geometry.table_bytes
        self._records_at = geometry.records_at
        self._my_acks_at = None if me == layout.NODE else (1 + me) * layout.LINE
        self._fence = threading.Lock()

    def select(self, transfer_id: str, owner: int | None) -> Entry | None:
        """The entry, or None: absent, of an earlier boot, dropped by me, or unreadable just now."""
        key = key_of(transfer_id, self._geometry.buckets)
        if owner is not None:
            # The whole table of the bucket, though only tags are used of it: what is read next lies
            # in the cache then, and misses that are one after another cost more than one copy.
            return self._in_table(transfer_id, key, owner, self._table_bytes)
        for owner in range(self._geometry.engines):
            entry = self._in_table(transfer_id, key, owner, layout.LINE)
            if entry is not None:
                return entry
        return None

    def validate(self, entry: Entry) -> bool:
        """True while the entry has not ended and its owner is still the same boot. Two loads."""
        at = self._geometry.record(entry.owner, entry.slot_index) + 8
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
            return self._dropped_by(entry)
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
        acks = ack_words(self._shared, self._geometry, reader)
        state = acks & 3
        acks[(state == layout.WANT) | (state == layout.CLAIMED)] = 0

    def _dropped_by(self, entry: Entry) -> int | None:
        """A reader that let go of it: the owner may free the blocks, whoever has claimed them."""
        dropped = entry.generation << 2 | layout.DROPPED
        for reader in range(self._geometry.engines):
            if self._shared.words[self._ack(reader, entry)] == dropped:
                return reader
        return None

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

    def _in_table(self, transfer_id: str, key: Key, owner: int, span: int) -> Entry | None:
        for bucket in (key.first, key.second):
            at = self._tables[owner] + bucket * self._bucket_bytes
            tags = self._shared.mm[at : at + span]
            found = tags.find(key.tag, 0, layout.MOVED_AT)
            while found >= 0:
                if not found & 7:  # Else eight bytes across two tags that happen to look like ours.
                    entry = self._at_tag(transfer_id, key.digest, owner, bucket, found >> 3, at)
                    if entry is not None:
                        return entry
                found = tags.find(key.tag, found + 1, layout.MOVED_AT)
            if tags[layout.MOVED_AT : layout.LINE] == _NOBODY_MOVED:
                return None
        return None

    def _at_tag(
        self, transfer_id: str, digest: bytes, owner: int, bucket: int, way: int, table: int
    ) -> Entry | None:
        slot, at = bucket * layout.WAYS + way, table + self._records_at + way * layout.RECORD
        entry = self._read(transfer_id, digest, owner, slot, at)
        if entry is None or entry[_BOOT] != self._boot_of(owner):
            return None
        if self._my_acks_at is not None:
            ack = self._shared.words[(table + self._my_acks_at + way * 8) >> 3]
            if ack == entry[_GENERATION] << 2 | layout.DROPPED:
                return None
        return entry

    def _read(
        self, transfer_id: str, wanted: bytes, owner: int, slot: int, at: int
    ) -> Entry | None:
        """One consistent copy of a record, or None after a bounded number of tries."""
        words, mm = self._shared.words, self._shared.mm
        for _ in range(_RETRIES):
            seq = words[at >> 3]
            if seq & 1:
                continue
            raw = mm[at : at + layout.RECORD]
            fields = layout.WHOLE_RECORD.unpack(raw)
            _, generation, _, page, crc, digest, boot, ready, total, token, _, count, _ = fields
            if not generation & 1 or digest != wanted:
                if words[at >> 3] == seq:
                    return None
                continue
            content = self._content(owner, raw, count, page)
            if words[at >> 3] != seq:
                continue
            damaged = content is None or generation > layout.GENERATION_MAX
            if damaged or crc != record_crc(generation, content):
                return None
            runs = tuple(_RUN.iter_unpack(content[_BODY_BYTES:]))
            return _new(
                Entry, (owner, slot, generation, boot, transfer_id, runs, ready, total, token)
            )
        return None

    def _content(self, owner: int, raw: bytes, count: int, page: int) -> bytes | None:
        """Body and `count` runs of 8 bytes: those in the record, then those in its run pages."""
        if count <= layout.INLINE_RUNS:
            return raw[layout.BODY_AT : layout.INLINE_AT + count * 8]
        base, pages = self._geometry.pages(owner), self._geometry.run_pages
        left, parts = count - layout.INLINE_RUNS, [raw[layout.BODY_AT :]]
        if left > pages * layout.PAGE_RUNS:
            return None
        while left > 0:
            if page >= pages:
                return None
            at, here = base + page * layout.RUN_PAGE, min(left, layout.PAGE_RUNS)
            part = self._shared.mm[at : at + 8 + here * 8]
            page, left = int.from_bytes(part[:4], "little"), left - here
            parts.append(part[8:])
        return b"".join(parts)

    def _ack(self, reader: int, entry: Entry) -> int:
        if reader == layout.NODE:
            raise NotOwner("the node has no acknowledgement words: attach with me=<engine slot>")
        return self._geometry.ack(reader, entry.owner, entry.slot_index) >> 3


def ack_words(shared: Shared, geometry: layout.Geometry, reader: int) -> np.ndarray:
    """A reader's words in every bucket of every owner: u64 [owner, bucket, way], not a copy."""
    shape = (geometry.engines, geometry.buckets, layout.WAYS)
    strides = (geometry.table_bytes, geometry.bucket_bytes, 8)
    return np.ndarray(shape, np.uint64, shared.mm, geometry.ack(reader, 0, 0), strides)
