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
      │ run pages, [owner][page], 512 bytes: next page, then 63 runs                 │ owner
      ├──────────────────────────────────────────────────────────────────────────────┤
      │ buckets, [bucket][owner]: all that a look-up needs, side by side             │
      │   tag line: 7 x u64, 0 = nothing here; then `moved`, u64                     │ owner
      │   ack lines, [reader]: 7 x u64 = generation << 2 | state                     │ reader
      │   records, [7], 128 bytes:                                                   │ owner
      │     0 seq │ 8 generation │ 16 lease ns │ 24 overflow page, crc               │
      │     32 digest (16) │ 48 boot id │ 56 tokens ready, total │ 64 first token    │
      │     72 blocks, runs │ 80 six runs of (first block, count)                    │
      └──────────────────────────────────────────────────────────────────────────────┘

A cell is a version word and two sides; the writer fills the side that is not current and then moves
the version on, so a death at any instruction leaves the previous value readable:

      0 version │ 64 side 0: crc, body │ 64 + span  side 1: crc, body        current = version & 1

An entry record has a sequence word, odd while its owner writes; its generation is odd while the
entry lives and even while the slot is free, so one store ends an entry for all readers. Counters
wrap: a damaged word that stands at its maximum must not stop its writer.

A transfer id lives in the first of two buckets that its digest chooses or, when six of that one's
seven places are taken, in the emptier of the two. `moved` of the first bucket says whether any of
its ids live elsewhere (0: none; else their number << 1 | 1), so a look-up reads one line of tags,
and a second one for six ids in a thousand of a full table. Nothing ever moves and there are no
tombstones. With three places for each entry that was asked for, both buckets are practically never
full. Tags, records and acknowledgements lie side by side because a look-up in a large table costs
what its cache and TLB misses cost: one page, and lines that a single copy fetches all at once.

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
VERSION = 3

PAGE = 4096
LINE = 64
RANKS = 8
WAYS = 7  # tags of one bucket; with `moved` they are one cache line
MOVED_AT = WAYS * 8  # in a tag line
CROWDED = 6  # tags in the first bucket from which on an id may live in its second
WORD_MAX = (1 << 64) - 1
GENERATION_MAX = (1 << 62) - 1  # leaves an acknowledgement word two bits for its state
NODE = -1  # "me" of the node itself: it has no table and no acknowledgement words

# magic, version, four sizes (Sizes), total bytes, node boot id, fingerprint and its length, crc
HEADER = struct.Struct("=8Q64sQQ")

CONTROL = struct.Struct("=32sIIQQ")  # engine id, role, state, boot id, restarts
CONTROL_BOOT_AT = 40  # of the boot id within the body: validate reads this word alone
LOAD = struct.Struct("=33Q")  # records.LOAD_FIELDS
REGION = struct.Struct("=64s10Q32sQ")  # RegionRecord: segment, 9 numbers, fingerprint length, ...

CELL_CRC_BYTES = 8
CONTROL_SPAN, LOAD_SPAN, REGION_SPAN = LINE, 5 * LINE, 4 * LINE
CONTROL_AT = 0
LOAD_AT = CONTROL_AT + LINE + 2 * CONTROL_SPAN
REGIONS_AT = LOAD_AT + LINE + 2 * LOAD_SPAN
REGION_CELL = LINE + 2 * REGION_SPAN
PREFIX_AT = REGIONS_AT + RANKS * REGION_CELL
ROW = PREFIX_AT + LINE

RECORD = 128
# Native, so that a word is read in one piece: seq, generation, lease, page, crc, then BODY, runs
WHOLE_RECORD = struct.Struct("@QQQII16sQIIqII48s")
BODY = struct.Struct("=16sQIIqII")  # digest, boot, ready, total, first, blocks, runs
LEASE_AT, PAGE_AT, BODY_AT, BOOT_AT, INLINE_AT = 16, 24, 32, 48, 80
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
        """Three places for each entry that is asked for, and at least 8 buckets."""
        buckets = max(8, -(-3 * entries // WAYS))
        return cls(engines, buckets, run_pages or max(256, entries // 4), entries)

    @cached_property
    def slots(self) -> int:
        return self.buckets * WAYS

    @cached_property
    def run_pages_at(self) -> int:
        return PAGE + _lines(self.engines * ROW)

    @cached_property
    def buckets_at(self) -> int:
        end = self.run_pages_at + self.engines * self.run_pages * RUN_PAGE
        return -(-end // PAGE) * PAGE

    @cached_property
    def records_at(self) -> int:
        """Within a table, after tags and acks: whole pairs of lines, as processors fetch those."""
        return -(-(1 + self.engines) * LINE // RECORD) * RECORD

    @cached_property
    def table_bytes(self) -> int:
        """What one owner has in one bucket."""
        return self.records_at + WAYS * RECORD

    @cached_property
    def bucket_bytes(self) -> int:
        return self.engines * self.table_bytes

    @cached_property
    def total(self) -> int:
        return self.buckets_at + self.buckets * self.bucket_bytes

    def row(self, engine: int) -> int:
        return PAGE + engine * ROW

    def region(self, engine: int, rank: int) -> int:
        return self.row(engine) + REGIONS_AT + rank * REGION_CELL

    def prefixes(self, engine: int) -> int:
        return self.row(engine) + PREFIX_AT

    def pages(self, owner: int) -> int:
        return self.run_pages_at + owner * self.run_pages * RUN_PAGE

    def table(self, bucket: int, owner: int) -> int:
        """Where its tag line begins."""
        return self.buckets_at + bucket * self.bucket_bytes + owner * self.table_bytes

    def tag(self, owner: int, slot: int) -> int:
        bucket, way = divmod(slot, WAYS)
        return self.table(bucket, owner) + way * 8

    def ack(self, reader: int, owner: int, slot: int) -> int:
        bucket, way = divmod(slot, WAYS)
        return self.table(bucket, owner) + (1 + reader) * LINE + way * 8

    def record(self, owner: int, slot: int) -> int:
        bucket, way = divmod(slot, WAYS)
        return self.table(bucket, owner) + self.records_at + way * RECORD


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
