"""One engine's prefix table, a segment of its own: which KV block holds which block hash.

    0 ┌──────────────────────────────────────────────────────────────────────────────┐
      │ header, one page: magic, version, blocks, boot id, salt, crc                 │
 4096 ├──────────────────────────────────────────────────────────────────────────────┤
      │ words, [slots + 63]: u64 = 40 bits of the mixed hash << 24 | block + 1;      │
      │   0 = nothing here. A hash stands in one of the 64 words from its position on│
      ├──────────────────────────────────────────────────────────────────────────────┤
      │ records, [block], 64 bytes:                                                  │
      │   0 generation │ 8 mixed hash │ 16 hash (40, zero-padded) │ 56 unused        │
      └──────────────────────────────────────────────────────────────────────────────┘

Everything is written by the engine's scheduler. A generation is odd while the block holds the
record's hash and even otherwise; every change of what a block holds moves it on.

    publish    record, generation odd, THEN the word that lets readers find it
    withdraw   word, THEN generation even; only after that may the block get other bytes

The segment is sized by the engine's KV blocks, and made when they are known; its name carries the
boot id, and the engine's row in the index says when it is ready. So a restarted engine begins with
an empty table, and a dead one's stays readable until its memory is gone.

With at least 4 words a block nine hashes in ten stand at their own position. 64 words without a free
one do not happen to hashes that are spread evenly; to hashes that somebody has chosen they cannot
easily, as the position is salted with the random boot id of the node.
"""

import struct
import zlib
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ipc.cells import Shared
from ipc.errors import SegmentForeign
from ipc.layout import PAGE, WORD_MAX

MAGIC = int.from_bytes(b"pdnodepx", "little")
VERSION = 1
HEADER = struct.Struct("=6Q")  # magic, version, blocks, boot id, salt, crc

WINDOW = 64
RECORD = 64
MIXED_AT, HASH_AT = 8, 16
MAX_HASH_BYTES = 40  # vLLM's 32, and room for the number of a KV cache group
BLOCK_BITS = 24
BLOCK_MASK = (1 << BLOCK_BITS) - 1
TAG_MASK = WORD_MAX ^ BLOCK_MASK
MAX_BLOCKS = BLOCK_MASK - 1

_SPREAD, _STEP, _LAST = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FOLD, _LAST_FOLD = 29, 32


class _Sizes(NamedTuple):
    blocks: int


class PrefixGeometry(_Sizes):
    """Sizes and offsets (bytes) of one table."""

    @cached_property
    def slots(self) -> int:
        """A power of two, at least 4 a block."""
        return 1 << max(6, (4 * self.blocks - 1).bit_length())

    @cached_property
    def records_at(self) -> int:
        return PAGE + (self.slots + WINDOW) * 8

    @property
    def total(self) -> int:
        return self.records_at + self.blocks * RECORD


def segment_name(index_name: str, slot: int, boot_id: int) -> str:
    return f"{tables_of(index_name, slot)}{boot_id:016x}"


def tables_of(index_name: str, slot: int | None = None) -> str:
    """The beginning of the names of an engine's tables, or of everybody's."""
    start = f"{index_name}.prefix"
    return start if slot is None else f"{start}{slot}."


def write_header(shared: Shared, geometry: PrefixGeometry, boot_id: int, salt: int) -> None:
    raw = HEADER.pack(MAGIC, VERSION, geometry.blocks, boot_id, salt, 0)
    shared.mm[: len(raw)] = raw[:-8] + zlib.crc32(raw[:-8]).to_bytes(8, "little")


def read_header(shared: Shared) -> tuple[PrefixGeometry, int, int]:
    """(sizes, boot id, salt). Raises SegmentForeign."""
    name, raw = shared.segment.name, shared.mm[: HEADER.size]
    magic, version, blocks, boot_id, salt, crc = HEADER.unpack(raw)
    if (magic, version) != (MAGIC, VERSION):
        raise SegmentForeign(
            f"{name!r} is no prefix table: magic {magic:#x} version {version}, not {MAGIC:#x} "
            f"version {VERSION}"
        )
    geometry = PrefixGeometry(blocks)
    if crc != zlib.crc32(raw[:-8]) or geometry.total > shared.segment.nbytes:
        raise SegmentForeign(
            f"{name!r} is damaged or cut off: a prefix table of {blocks} blocks in "
            f"{shared.segment.nbytes:,} bytes"
        )
    return geometry, boot_id, salt


def mix(content: bytes, salt: int) -> int:
    """A hash's 64 bits: all of position, tag, and the check in the record."""
    mixed = (salt ^ len(content) * _SPREAD) & WORD_MAX
    for at in range(0, len(content), 8):
        mixed = (mixed ^ int.from_bytes(content[at : at + 8], "little")) * _STEP & WORD_MAX
        mixed ^= mixed >> _FOLD
    mixed = mixed * _LAST & WORD_MAX
    return mixed ^ mixed >> _LAST_FOLD


def mix_many(words: np.ndarray, length: int, salt: int) -> np.ndarray:
    """`mix` of many contents of `length` bytes, given as u64 [n, length / 8]."""
    mixed = np.full(len(words), (salt ^ length * _SPREAD) & WORD_MAX, np.uint64)
    for column in words.T:
        mixed ^= column
        mixed *= np.uint64(_STEP)
        mixed ^= mixed >> np.uint64(_FOLD)
    mixed *= np.uint64(_LAST)
    return mixed ^ mixed >> np.uint64(_LAST_FOLD)
