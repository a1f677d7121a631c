"""The index segment: every offset, once.

    0 ┌──────────────────────────────────────────────────────────────────────────────┐
      │ header, one page: magic, version, sizes, node boot id, fingerprint           │ node
 4096 ├──────────────────────────────────────────────────────────────────────────────┤
      │ engine rows, [engine]:                                                       │
      │   control cell    engine id, role, state, boot id, restarts                  │ node
      │   load cell       pid, heartbeat, gauges, counters                           │ scheduler
      │   region cells    [8 ranks]: segment, sizes, strides, boot, fingerprint      │ that worker
      │   prefix word     boot id whose prefix table is ready, see prefix_layout.py  │ scheduler
      ├──────────────────────────────────────────────────────────────────────────────┤
      │ tags, [bucket][owner][8]: u64, 0 = nothing here. One bucket of one owner is  │
      │   one cache line; one bucket of all owners is read at once                   │ owner
      ├──────────────────────────────────────────────────────────────────────────────┤
      │ records, [owner][bucket * 8 + way], 128 bytes:                               │ owner
      │   0 seq │ 8 generation │ 16 digest (16) │ 32 boot id │ 40 tokens ready,total │
      │   48 first token │ 56 blocks, runs │ 64 overflow page, crc │ 72 lease ns     │
      │   80 six runs of (first block, count)                                        │
      ├──────────────────────────────────────────────────────────────────────────────┤
      │ run pages, [owner][page], 512 bytes: next page, then 63 runs                 │ owner
      ├──────────────────────────────────────────────────────────────────────────────┤
      │ acknowledgements, [reader][owner][slot]: u64 = generation << 2 | state       │ reader
      └──────────────────────────────────────────────────────────────────────────────┘

A cell is a version word and two sides; the writer fills the side that is not current and then moves
the version on, so a death at any instruction leaves the previous value readable:

      0 version │ 64 side 0: crc, body │ 64 + span  side 1: crc, body        current = version & 1

An entry record has a sequence word, odd while its owner writes; its generation is odd while the
entry lives and even while the slot is free, so one store ends an entry for all readers. Counters
wrap: a damaged word that stands at its maximum must not stop its writer.

A transfer id lives in one of two buckets, both chosen by its digest, in the emptier one. Nothing
ever moves and there are no tombstones: a look-up reads two buckets, full or empty table, and 64
bytes each.

What is assumed of the machine: an aligned 8-byte store or load is not torn, stores of one thread
are seen in order, and loads happen in order (x86-64). Single words go through a memoryview of u64,
which is one 8-byte copy; `struct.pack_into` is not used on shared bytes because CPython zeroes the
target first. On weaker machines (ARM) the crc still catches torn records, but "the generation is
old, hence the bytes I copied before I looked are good" would need a load barrier there.
"""

import struct
from functools import cached_property
from typing import NamedTuple

MAGIC = int.from_bytes(b"pdnodeix", "little")
VERSION = 2

PAGE = 4096
LINE = 64
RANKS = 8
WAYS = 8  # tags of one bucket: one cache line
WORD_MAX = (1 << 64) - 1
GENERATION_MAX = (1 << 62) - 1  # leaves an acknowledgement word two bits for its state
NODE = -1  # "me" of the node itself: it has no table and no acknowledgement words

# magic, version, four sizes (Sizes), total bytes, node boot id, fingerprint and its length, crc
HEADER = struct.Struct("=8Q64sQQ")

CONTROL = struct.Struct("=32sIIQQ")  # engine id, role, state, boot id, restarts
CONTROL_BOOT_AT = 40  # of the boot id within the body: validate reads this word alone
LOAD = struct.Struct("=21Q")  # records.LOAD_FIELDS
REGION = struct.Struct("=64s10Q32sQ")  # RegionRecord: segment, 9 numbers, fingerprint length, ...

CELL_CRC_BYTES = 8
CONTROL_SPAN, LOAD_SPAN, REGION_SPAN = LINE, 3 * LINE, 4 * LINE
CONTROL_AT = 0
LOAD_AT = CONTROL_AT + LINE + 2 * CONTROL_SPAN
REGIONS_AT = LOAD_AT + LINE + 2 * LOAD_SPAN
REGION_CELL = LINE + 2 * REGION_SPAN
PREFIX_AT = REGIONS_AT + RANKS * REGION_CELL
ROW = PREFIX_AT + LINE

RECORD = 128
# Between generation and lease: digest, boot, ready, total, first, blocks, runs, page, crc
BODY = struct.Struct("=16sQIIqIIII")
BODY_AT, LEASE_AT, INLINE_AT = 16, 72, 80
INLINE_RUNS = 6
RUN_PAGE = 512
PAGE_RUNS = 63
NO_PAGE = 0xFFFFFFFF
MAX_ENTRY_BLOCKS = 1 << 24  # of one entry: a sanity bound for readers, 2 G tokens at 128 a block

# States of an acknowledgement word; the rest of the word is the generation it speaks of.
WANT, CLAIMED, DROPPED = 1, 2, 3


class Sizes(NamedTuple):
    """What the header says."""

    engines: int
    buckets: int
    run_pages: int  # per engine
    entries: int  # per engine, what the flag said


class Geometry(Sizes):
    """Sizes of one index, and from them every offset (bytes)."""

    @classmethod
    def of(cls, engines: int, entries: int, run_pages: int | None) -> "Geometry":
        """Twice the slots that are asked for: two buckets of 8, half full, practically never both
        overflow, and at least 8 buckets so that tiny tables cannot."""
        buckets = max(8, -(-2 * entries // WAYS))
        return cls(engines, buckets, run_pages or max(256, entries // 4), entries)

    @cached_property
    def slots(self) -> int:
        return self.buckets * WAYS

    @cached_property
    def tags_at(self) -> int:
        return PAGE + _lines(self.engines * ROW)

    @cached_property
    def records_at(self) -> int:
        return self.tags_at + self.buckets * self.engines * LINE

    @cached_property
    def run_pages_at(self) -> int:
        return self.records_at + self.engines * self.slots * RECORD

    @cached_property
    def acks_at(self) -> int:
        return self.run_pages_at + self.engines * self.run_pages * RUN_PAGE

    @cached_property
    def total(self) -> int:
        return self.acks_at + self.engines * self.engines * self.slots * 8

    def row(self, engine: int) -> int:
        return PAGE + engine * ROW

    def region(self, engine: int, rank: int) -> int:
        return self.row(engine) + REGIONS_AT + rank * REGION_CELL

    def prefixes(self, engine: int) -> int:
        return self.row(engine) + PREFIX_AT

    def records(self, owner: int) -> int:
        return self.records_at + owner * self.slots * RECORD

    def pages(self, owner: int) -> int:
        return self.run_pages_at + owner * self.run_pages * RUN_PAGE

    def acks(self, reader: int, owner: int) -> int:
        return self.acks_at + (reader * self.engines + owner) * self.slots * 8

    def tag(self, owner: int, slot: int) -> int:
        bucket, way = divmod(slot, WAYS)
        return self.tags_at + (bucket * self.engines + owner) * LINE + way * 8


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
