"""Shared bytes: words that cannot be torn, and cells whose value survives their writer's death."""

import mmap
import zlib

from ipc import layout
from ipc.errors import LookupFault, SegmentForeign, StaleRead
from ipc.segment import Segment

_RETRIES = 64


class Shared:
    """The bytes of a segment in two views: `mm` for ranges, `words` for aligned u64."""

    __slots__ = ("mm", "segment", "words")

    def __init__(self, segment: Segment):
        self.segment = segment
        self.mm: mmap.mmap = segment.buf
        self.words = memoryview(self.mm).cast("Q")

    def close(self) -> None:
        self.words.release()
        self.segment.close()


def write_cell(shared: Shared, at: int, span: int, body: bytes) -> None:
    """Replace the value of the cell at byte `at`. One writer process and thread per cell."""
    assert len(body) + layout.CELL_CRC_BYTES <= span, "the body outgrew its cell"
    # 0 would say that nothing was written; 2 has the same side.
    version = (shared.words[at >> 3] + 1) & layout.WORD_MAX or 2
    side = at + layout.LINE + (version & 1) * span
    raw = zlib.crc32(body).to_bytes(layout.CELL_CRC_BYTES, "little") + body
    shared.mm[side : side + len(raw)] = raw
    shared.words[at >> 3] = version


def read_cell(shared: Shared, at: int, span: int, nbytes: int) -> bytes | None:
    """The `nbytes` bytes last written, None when nothing was. Raises StaleRead."""
    for _ in range(_RETRIES):
        version = shared.words[at >> 3]
        if version == 0:
            return None
        side = at + layout.LINE + (version & 1) * span
        raw = shared.mm[side : side + layout.CELL_CRC_BYTES + nbytes]
        body = raw[layout.CELL_CRC_BYTES :]
        sound = zlib.crc32(body) == int.from_bytes(raw[: layout.CELL_CRC_BYTES], "little")
        if sound and shared.words[at >> 3] == version:
            return body
    raise StaleRead(f"the cell at byte {at} of {shared.segment.name!r} has no sound value")


def write_header(
    shared: Shared, geometry: layout.Geometry, node_boot_id: int, fingerprint: bytes
) -> None:
    """Fill the header page; the magic goes last, so a half-made index is never attached."""
    if len(fingerprint) > 64:
        raise LookupFault(f"a fingerprint of {len(fingerprint)} bytes, at most 64")
    raw = layout.HEADER.pack(
        0, layout.VERSION, *geometry, geometry.total, node_boot_id, fingerprint,
        len(fingerprint), 0,
    )  # fmt: skip
    crc = zlib.crc32(raw[8:-8])
    shared.mm[: len(raw)] = raw[:-8] + crc.to_bytes(8, "little")
    shared.words[0] = layout.MAGIC


def read_header(shared: Shared) -> tuple[layout.Geometry, int, bytes]:
    """(sizes, node boot id, fingerprint). Raises SegmentForeign with what was found."""
    name, raw = shared.segment.name, shared.mm[: layout.HEADER.size]
    magic, version, *sizes, total, node_boot_id, fingerprint, length, crc = layout.HEADER.unpack(
        raw
    )
    if magic != layout.MAGIC:
        raise SegmentForeign(f"{name!r} is not an index: magic {magic:#x}, not {layout.MAGIC:#x}")
    if version != layout.VERSION:
        raise SegmentForeign(f"{name!r} is an index of version {version}, not {layout.VERSION}")
    geometry = layout.Geometry(*sizes)
    sizes_fit = geometry.buckets >= 8 and geometry.engines >= 1
    if not sizes_fit or crc != zlib.crc32(raw[8:-8]) or total != geometry.total:
        raise SegmentForeign(f"{name!r}: the header of the index is damaged: {geometry}")
    if total > shared.segment.nbytes:
        raise SegmentForeign(
            f"{name!r} is cut off: {shared.segment.nbytes:,} bytes of {total:,} are there"
        )
    return geometry, node_boot_id, fingerprint[:length]
