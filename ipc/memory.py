"""A KV region in a POSIX segment: made by the worker that owns it, mapped by its peers.

       0 ┌──────────────────────────────────────────────────────────────┐
         │ header, one page: magic, version, nbytes, boot id,           │
         │ generation, fingerprint                                      │
    4096 ├──────────────────────────────────────────────────────────────┤ <- address
         │ nbytes of KV: the one int8 buffer of the engine              │
         └──────────────────────────────────────────────────────────────┘

The owner cannot be made to use memory it did not allocate, and moving a tensor afterwards leaves
old pointers behind; so the region is put in its way at the allocation itself (`zeros_in`).
"""

import contextlib
import mmap
import struct
from collections.abc import Callable, Iterator

import torch
from torch.overrides import TorchFunctionMode

from ipc.errors import RegionRefused, SegmentForeign
from ipc.records import KVLayout, RegionRecord
from ipc.segment import PAGE_BYTES, Segment

__all__ = ["HostRegion", "KVLayout", "RegionRecord", "zeros_in", "zeros_in_new"]

MAGIC = int.from_bytes(b"pdnodekv", "little")
VERSION = 1
_HEADER = struct.Struct("=5QQ32s")  # magic, version, nbytes, boot, generation, fingerprint


class HostRegion:
    """`nbytes` bytes of KV at `address`, shared with every process that attaches.

    The mapping lives as long as this object or any tensor over it; the name until `unlink`, so the
    bytes outlive the process that wrote them.
    """

    def __init__(self, segment: Segment, nbytes: int):
        self.segment, self.nbytes = segment, nbytes
        self.name = segment.name

    @property
    def address(self) -> int:
        """Of the first byte of KV in this process. Raises RegionRefused after `close`."""
        self._buf()
        return self.segment.address + PAGE_BYTES

    @classmethod
    def create(
        cls, name: str, nbytes: int, *, flag: str, boot_id: int = 0, generation: int = 0,
        fingerprint: bytes = b"",
    ) -> "HostRegion":  # fmt: skip
        """A zeroed, populated region. Raises SegmentExists, NoSharedMemory naming `flag`."""
        segment = Segment.create(name, nbytes + PAGE_BYTES, purpose="the KV cache", flag=flag)
        segment.populate(write=True)
        header = _HEADER.pack(
            MAGIC, VERSION, nbytes, boot_id, generation, len(fingerprint), fingerprint
        )
        segment.buf[: len(header)] = header
        return cls(segment, nbytes)

    @classmethod
    def attach(
        cls, record: RegionRecord, expect_fingerprint: bytes, expect_boot: int,
        expect_generation: int | None = None,
    ) -> "HostRegion":  # fmt: skip
        """Map a peer's region, populated, to read. `expect_*`: what both sides must agree on.

        Raises RegionRefused naming both values, SegmentMissing, SegmentForeign. What the segment's
        own header leaves 0 or empty is not compared with it.
        """
        _same("fingerprint", expect_fingerprint, record.fingerprint, record.segment)
        _same("boot id", expect_boot, record.boot_id, record.segment)
        if expect_generation is not None:
            _same("generation", expect_generation, record.generation, record.segment)
        segment = Segment.attach(record.segment, readonly=True)
        try:
            _check_header(segment, record)
        except BaseException:
            segment.close()
            raise
        segment.populate(write=False)
        return cls(segment, record.nbytes)

    def tensor(self, nbytes: int | None = None) -> torch.Tensor:
        """An int8 tensor [nbytes] over the region; it keeps the mapping alive. Owner only."""
        if self.segment.readonly:
            raise RegionRefused(f"KV region {self.name!r} is a peer's: copy from it, no tensor")
        count = self.nbytes if nbytes is None else nbytes
        view = memoryview(self._buf())[PAGE_BYTES : PAGE_BYTES + count]
        return torch.frombuffer(view, dtype=torch.int8)

    def close(self) -> None:
        """Forget the mapping; it goes when the last tensor over it goes."""
        self.segment.close()

    def unlink(self) -> bool:
        return self.segment.unlink()

    def _buf(self) -> mmap.mmap:
        if self.segment.buf is None:
            raise RegionRefused(f"KV region {self.name!r} was closed by this process")
        return self.segment.buf


def zeros_in(region: HostRegion) -> contextlib.AbstractContextManager[None]:
    """The first `torch.zeros(n, dtype=int8)` on CPU with n <= region.nbytes lies in `region`.

    All other calls are untouched. For a region made for this: its bytes are taken as they are, and
    they are zero only while it is fresh.
    """
    return _substituting(lambda n: region if n <= region.nbytes else None)


def zeros_in_new(make_region: Callable[[int], HostRegion]) -> contextlib.AbstractContextManager:
    """As `zeros_in`, for a caller that learns the size only at the allocation.

    `make_region(n)` is called once, for the first `torch.zeros(n, dtype=int8)` on CPU.
    """
    return _substituting(make_region)


@contextlib.contextmanager
def _substituting(region_for: Callable[[int], HostRegion | None]) -> Iterator[None]:
    with _ZerosMode(region_for):
        yield


class _ZerosMode(TorchFunctionMode):
    def __init__(self, region_for: Callable[[int], HostRegion | None]):
        super().__init__()
        self._region_for: Callable[[int], HostRegion | None] | None = region_for

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.zeros and self._region_for and _plain_host_bytes(kwargs):
            tensor = self._supply(args, kwargs)
            if tensor is not None:
                return tensor
        return func(*args, **kwargs)

    def _supply(self, args: tuple, kwargs: dict) -> torch.Tensor | None:
        nbytes = _one_dimension(args, kwargs)
        region = None if nbytes is None else self._region_for(nbytes)
        if region is None:
            return None
        if region.nbytes < nbytes:
            raise RegionRefused(
                f"region {region.name!r} has {region.nbytes:,} bytes, {nbytes:,} are asked for"
            )
        self._region_for = None
        return region.tensor(nbytes)


def _plain_host_bytes(kwargs: dict) -> bool:
    device = torch.device(kwargs.get("device") or torch.get_default_device())
    special = kwargs.get("out") is not None or kwargs.get("requires_grad")
    return kwargs.get("dtype") is torch.int8 and device.type == "cpu" and not special


def _one_dimension(args: tuple, kwargs: dict) -> int | None:
    """n of zeros(n), zeros((n,)), zeros(size=(n,)); None for any other shape, and for n = 0."""
    size = args if args else kwargs.get("size", ())
    if len(args) == 1 and isinstance(args[0], (tuple, list)):
        size = args[0]
    return int(size[0]) if len(size) == 1 and int(size[0]) > 0 else None


def _check_header(segment: Segment, record: RegionRecord) -> None:
    magic, version, nbytes, boot_id, generation, length, fingerprint = _HEADER.unpack_from(
        segment.buf
    )
    if (magic, version) != (MAGIC, VERSION):
        raise SegmentForeign(
            f"segment {segment.name!r} is no KV region: magic {magic:#x} version {version}, "
            f"not {MAGIC:#x} version {VERSION}"
        )
    _same("size", record.nbytes, nbytes, segment.name)
    if segment.nbytes < nbytes + PAGE_BYTES:
        raise SegmentForeign(
            f"segment {segment.name!r} is cut off: {segment.nbytes:,} bytes of "
            f"{nbytes + PAGE_BYTES:,} are there"
        )
    if boot_id:
        _same("boot id", record.boot_id, boot_id, segment.name)
    if generation:
        _same("generation", record.generation, generation, segment.name)
    if length:
        _same("fingerprint", record.fingerprint, fingerprint[: min(length, 32)], segment.name)


def _same(what: str, expected: int | bytes, found: int | bytes, name: str) -> None:
    if expected != found:
        show = bytes.hex if isinstance(expected, bytes) else hex if what == "boot id" else str
        raise RegionRefused(
            f"KV region {name!r} refused: its {what} is {show(found)}, expected {show(expected)}"
        )
