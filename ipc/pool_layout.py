"""The pool segment: every offset, once.

       0 ┌───────────────────────────────────────────────────────────────────────────┐
         │ header, one page: magic, version, shares, share bytes, crc                │ node
    4096 ├───────────────────────────────────────────────────────────────────────────┤
         │ shares, [owner], all of one size:                                         │
         │   share cell      page bytes, layers, pages, fingerprint                  │ owner
         │   drops           [reader], 64 bytes: how many so far, the last 7 pages   │ reader
         │   buckets         [bucket], 128 bytes: 8 tags, then 8 page numbers (u32)  │ owner
         │   records         [page], 64 bytes: generation, stamp, key and its length │ owner
         │   marks           [page][reader]: last used ns, dropped generation        │ reader
         │   values          [page]: one block, all layers                           │ owner
         └───────────────────────────────────────────────────────────────────────────┘

A generation is odd while the page holds a value and even while it is free or being filled, so one
store makes an entry, one store ends it, and a death in between leaves a free page. All else in a
record is written under an even generation only: who reads the same odd one before and after has
read one entry.

The node cannot know how large a block is before an engine has loaded its model, so each owner lays
out its own share; the cell's version word tells readers that it was laid out anew.
"""

import struct
from functools import cached_property
from typing import NamedTuple

from ipc.layout import CELL_CRC_BYTES, LINE, PAGE

MAGIC = int.from_bytes(b"pdnodepl", "little")
VERSION = 1
HEADER = struct.Struct("=5Q")  # magic, version, shares, share bytes, crc
CELL = struct.Struct("=4Q32sQ")  # page bytes, layers, pages, spare, fingerprint and its length
CELL_SPAN = 2 * LINE
CELL_BYTES = LINE + 2 * CELL_SPAN
assert CELL.size + CELL_CRC_BYTES <= CELL_SPAN

BUCKET = 2 * LINE
RECORD = LINE
STAMP_AT, LENGTH_AT, KEY_AT = 8, 16, 24  # in a record, behind its generation
MAX_KEY_BYTES = RECORD - KEY_AT
MARK = 16
DROPPED_AT = 8  # in a mark, behind the time of last use
DROP_RING = 7
WORD_MAX = (1 << 64) - 1
WAYS = 8  # tags of one bucket: one cache line


class ShareSizes(NamedTuple):
    at: int  # of the share in the segment
    readers: int  # as many as there are shares
    page_bytes: int  # of one layer of one block
    layers: int
    pages: int


class ShareGeometry(ShareSizes):
    """Sizes of one share, and from them every offset (bytes from the start of the segment)."""

    @classmethod
    def within(
        cls, at: int, share_bytes: int, readers: int, page_bytes: int, layers: int
    ) -> "ShareGeometry":
        """As many pages as fit; 0 when not even one does."""
        sizes = cls(at, readers, page_bytes, layers, 0)
        most = (share_bytes - CELL_BYTES - readers * LINE) // sizes.cost_bytes
        pages = next((n for n in range(most, 0, -1) if sizes.of(n).end <= at + share_bytes), 0)
        return sizes.of(pages)

    def of(self, pages: int) -> "ShareGeometry":
        return ShareGeometry(*self[:4], pages)

    @property
    def cost_bytes(self) -> int:
        """Of one page with its record, its marks and its two ways."""
        return self.block_bytes + RECORD + self.readers * MARK + 2 * BUCKET // WAYS

    @cached_property
    def block_bytes(self) -> int:
        return -(-self.page_bytes * self.layers // LINE) * LINE

    @cached_property
    def buckets(self) -> int:
        """Twice the ways that are needed: two buckets of 8, half full, practically never both
        overflow."""
        return max(8, -(-2 * self.pages // WAYS))

    @cached_property
    def drops_at(self) -> int:
        return self.at + CELL_BYTES

    @cached_property
    def buckets_at(self) -> int:
        return self.drops_at + self.readers * LINE

    @cached_property
    def records_at(self) -> int:
        return self.buckets_at + self.buckets * BUCKET

    @cached_property
    def marks_at(self) -> int:
        return self.records_at + self.pages * RECORD

    @cached_property
    def values_at(self) -> int:
        return -(-(self.marks_at + self.pages * self.readers * MARK) // PAGE) * PAGE

    @cached_property
    def end(self) -> int:
        return self.values_at + self.pages * self.block_bytes

    def bucket(self, number: int) -> int:
        return self.buckets_at + number * BUCKET

    def record(self, page: int) -> int:
        return self.records_at + page * RECORD

    def marks(self, page: int) -> int:
        return self.marks_at + page * self.readers * MARK

    def value(self, page: int) -> int:
        return self.values_at + page * self.block_bytes
