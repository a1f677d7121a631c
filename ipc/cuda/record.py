"""What a CUDA region says of itself: one page in shared memory, under the name of the region.

    0 crc of the rest │ magic, version │ boot id, generation, nbytes │ fingerprint, its length
      exporter: pid, pid namespace, start time │ GPU: UUID, PCI bus id │ region id │ kind │ door
      body window: handle, range bytes, offset │ probe window: the same

A window is what one handle opens: a range of `range_bytes`, in which ours begins at `offset_bytes`.
The body is the KV. The probe holds a pattern that follows from the region id, so that a peer can
see whether what it reads is what the owner wrote. Fixed size, no pickle.
"""

import enum
import os
import struct
import zlib
from typing import NamedTuple

import numpy as np

from ipc.cuda.driver import HANDLE_BYTES
from ipc.errors import RegionRefused, SegmentForeign
from ipc.segment import Segment

MAGIC = int.from_bytes(b"pdnodecu", "little")
VERSION = 1
PROBE_BYTES = 4096
_CRC = struct.Struct("=Q")
_FIXED = struct.Struct("=5Q32sQ3Q16s32s16sQ32s")
_WINDOW = struct.Struct(f"={HANDLE_BYTES}sQQ")
RECORD_BYTES = _CRC.size + _FIXED.size + 2 * _WINDOW.size


class Kind(enum.IntEnum):
    """How the memory is handed over."""

    LEGACY = 1  # cuIpcGetMemHandle: memory of cuMemAlloc / cudaMalloc
    FABRIC = 2  # cuMemCreate memory, by a 64-byte handle
    POSIX_FD = 3  # cuMemCreate memory, by a file descriptor


class Exporter(NamedTuple):
    """The process that owns the memory. Two are the same when all three values are."""

    pid: int
    pid_namespace: int  # inode
    start_ticks: int  # of the process, since the machine started

    @classmethod
    def me(cls) -> "Exporter":
        with open("/proc/self/stat", "rb") as file:
            after_name = file.read().rpartition(b")")[2].split()
        return cls(os.getpid(), os.stat("/proc/self/ns/pid").st_ino, int(after_name[19]))


class Window(NamedTuple):
    """64 handle bytes (zeros for a descriptor), and where ours lies in what they open."""

    handle: bytes
    range_bytes: int
    offset_bytes: int


class CudaRecord(NamedTuple):
    """uuid: 16 bytes; region_id: 16 random bytes, new for each export; door: socket for fds."""

    boot_id: int
    generation: int
    nbytes: int
    fingerprint: bytes
    exporter: Exporter
    uuid: bytes
    pci: str
    region_id: bytes
    kind: Kind
    door: str
    body: Window
    probe: Window

    def pack(self) -> bytes:
        body = _FIXED.pack(
            MAGIC, VERSION, self.boot_id, self.generation, self.nbytes, self.fingerprint,
            len(self.fingerprint), *self.exporter, self.uuid, self.pci.encode(), self.region_id,
            self.kind, self.door.encode(),
        )  # fmt: skip
        body += _WINDOW.pack(*self.body) + _WINDOW.pack(*self.probe)
        return _CRC.pack(zlib.crc32(body)) + body

    @classmethod
    def unpack(cls, raw: bytes, name: str) -> "CudaRecord":
        """Raises SegmentForeign for anything but a whole record of this version."""
        at = _CRC.size
        magic, version, *fixed = _FIXED.unpack_from(raw, at)
        if (magic, version) != (MAGIC, VERSION):
            raise SegmentForeign(
                f"segment {name!r} is no CUDA region: magic {magic:#x} version {version}, "
                f"not {MAGIC:#x} version {VERSION}"
            )
        if _CRC.unpack_from(raw)[0] != zlib.crc32(raw[at:RECORD_BYTES]):
            raise SegmentForeign(f"the record of CUDA region {name!r} is torn: its crc is wrong")
        boot, generation, nbytes, fingerprint, length, *exporter, uuid, pci, ident = fixed[:11]
        kind, door = fixed[11:]
        if kind not in tuple(Kind):
            raise SegmentForeign(f"CUDA region {name!r} is handed over in an unknown way: {kind}")
        at += _FIXED.size
        windows = [Window(*_WINDOW.unpack_from(raw, at + i * _WINDOW.size)) for i in (0, 1)]
        return cls(
            boot, generation, nbytes, fingerprint[:length], Exporter(*exporter), uuid, _text(pci),
            ident, Kind(kind), _text(door), *windows,
        )  # fmt: skip


def read_record(name: str) -> CudaRecord:
    """Raises SegmentMissing, SegmentForeign."""
    segment = Segment.attach(name, readonly=True)
    try:
        return CudaRecord.unpack(segment.buf[:RECORD_BYTES], name)
    finally:
        segment.close()


def pattern(region_id: bytes) -> bytes:
    """The PROBE_BYTES bytes that the owner writes and a peer must read."""
    seed = int.from_bytes(region_id, "little")
    return np.random.default_rng(seed).bytes(PROBE_BYTES)


def must_be(what: str, expected: int | bytes, found: int | bytes, name: str) -> None:
    """Raises RegionRefused naming both values when they differ."""
    if expected != found:
        show = bytes.hex if isinstance(expected, bytes) else hex if what == "boot id" else str
        raise RegionRefused(
            f"KV region {name!r} refused: its {what} is {show(found)}, expected {show(expected)}"
        )


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("ascii", "replace")
