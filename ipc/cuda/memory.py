"""A KV region in GPU memory: made here, or exported for whoever made it, and mapped by peers.

    GPU       ┌───────────────────────────────┬───────┐
              │ KV: nbytes at `address`       │ probe │  one allocation (`create`), or somebody's
              └───────────────────────────────┴───────┘  KV and a small one of ours (`export`)
                        ^ handle                ^ handle
    /dev/shm  ┌─────────┴───────────────────────┴─────┐
              │ record.py: one page, `name`           │
              └───────────────────────────────────────┘

The same calls as `ipc.memory.HostRegion`, so a worker can take either. Order of death: peers close
before the owner frees; for a peer, memory that its owner freed under it is undefined. An owner that
dies is harmless: the pages stay until the last peer has called `close` or `close_dead`.
"""

import contextlib
import ctypes
import secrets
from collections.abc import Callable, Iterator

from ipc.cuda import driver, probe
from ipc.cuda.device import Device, find, uuid_text
from ipc.cuda.device import device as find_device
from ipc.cuda.door import Door
from ipc.cuda.errors import CudaNoContext, CudaOutOfMemory, NoDeviceMemory, PeerUnreadable
from ipc.cuda.holds import Hold
from ipc.cuda.mapping import Mapping, close_dead, open_mapping
from ipc.cuda.record import (
    PROBE_BYTES,
    CudaRecord,
    Exporter,
    Kind,
    must_be,
    pattern,
    read_record,
)  # fmt: skip
from ipc.cuda.share import Share, memory_like, share
from ipc.errors import RegionRefused
from ipc.records import RegionRecord
from ipc.segment import PAGE_BYTES, Segment, unlink

__all__ = ["CudaRegion", "close_dead", "cuda_zeros_in_new"]

# A handle opens whole 2 MiB pages; smaller allocations would share theirs with other data.
_UNIT_BYTES = 2 << 20
FAKE_DEVICE = "pdnode fake device"  # The name of a device whose memory is host memory: tests only.


class CudaRegion:
    """`nbytes` bytes of KV at device address `address`. Any thread may use it.

    name: of its record in /dev/shm; device: the GPU that copies; uuid: the GPU that holds the
    bytes.
    """

    def __init__(
        self, name: str, nbytes: int, address: int, device: Device, uuid: bytes, hold: Hold
    ):
        self.name, self.nbytes, self.device, self.uuid = name, nbytes, device, uuid
        self.hold = hold
        self._address, self._closed = address, False

    @property
    def address(self) -> int:
        """Raises RegionRefused after `close`."""
        if self._closed:
            raise RegionRefused(f"KV region {self.name!r} was closed by this process")
        return self._address

    @property
    def same_gpu(self) -> bool:
        """The bytes are in the memory of the GPU that copies them."""
        return self.uuid == self.device.uuid

    @classmethod
    def create(
        cls, name: str, nbytes: int, *, flag: str, boot_id: int = 0, generation: int = 0,
        fingerprint: bytes = b"", device: Device | None = None,
    ) -> "CudaRegion":  # fmt: skip
        """Zeroed memory of our own. Raises SegmentExists, NoDeviceMemory naming `flag`."""
        gpu = device or find_device()
        with gpu.use():
            size = _rounded(nbytes) + _UNIT_BYTES
            try:
                address = driver.mem_alloc(size)
            except CudaOutOfMemory:
                raise NoDeviceMemory(name, size, driver.mem_info()[0], flag) from None
            free = contextlib.ExitStack()
            free.callback(driver.mem_free, address)
            with _undone(free):
                probe.zero(address, size)
                stamp, probe_at = (boot_id, generation, fingerprint), address + _rounded(nbytes)
                return cls._share(name, nbytes, address, probe_at, gpu, stamp, free)

    @classmethod
    def export(
        cls, name: str, address: int, nbytes: int, *, boot_id: int = 0, generation: int = 0,
        fingerprint: bytes = b"", device: Device | None = None,
    ) -> "CudaRegion":  # fmt: skip
        """Memory that somebody else allocated and keeps for longer than this region.

        [address, address + nbytes) may begin anywhere in its allocation. Raises NotExportable with
        what was probed, SegmentExists.
        """
        gpu = device or find_device()
        with gpu.use():
            free = contextlib.ExitStack()
            with _undone(free):
                kind = _kind_of(address, nbytes)
                probe_at, free_probe = memory_like(kind, _UNIT_BYTES, gpu)
                free.callback(free_probe)
                stamp = (boot_id, generation, fingerprint)
                return cls._share(name, nbytes, address, probe_at, gpu, stamp, free)

    @classmethod
    def _share(
        cls, name: str, nbytes: int, address: int, probe_at: int, gpu: Device, stamp: tuple,
        free: contextlib.ExitStack,
    ) -> "CudaRegion":  # fmt: skip
        """Write pattern and record. `free` is added to, and run when the region ends."""
        region_id = secrets.token_bytes(16)
        probe.write(probe_at, pattern(region_id))
        body = _kept(share(address, nbytes), free)
        probing = _kept(share(probe_at, PROBE_BYTES), free)
        door = _door([body, probing], free)
        record = CudaRecord(
            stamp[0], stamp[1], nbytes, stamp[2], Exporter.me(), gpu.uuid, gpu.pci, region_id,
            body.kind, door, body.window(address), probing.window(probe_at),
        )  # fmt: skip
        _write(name, record)
        hold = Hold(f"KV region {name!r}", _on(gpu, free))
        return cls(name, nbytes, address, gpu, gpu.uuid, hold)

    @classmethod
    def attach(
        cls, record: RegionRecord, expect_fingerprint: bytes, expect_boot: int,
        expect_generation: int | None = None, *, device: Device | None = None,
    ) -> "CudaRegion":  # fmt: skip
        """Map a peer's region for `device` (default: the thread's GPU), after a copy of its probe.

        `expect_*`: what this process and the index agree on. What the region's own record leaves 0
        or empty is not compared with it. Raises RegionRefused naming both values, PeerUnreadable,
        SegmentMissing, SegmentForeign, PeerGone.
        """
        must_be("fingerprint", expect_fingerprint, record.fingerprint, record.segment)
        must_be("boot id", expect_boot, record.boot_id, record.segment)
        if expect_generation is not None:
            must_be("generation", expect_generation, record.generation, record.segment)
        told = read_record(record.segment)
        _check(told, record)
        gpu = device or find_device()
        with gpu.use():
            _check_reachable(told, gpu)
            mapping = _map(told, record.boot_id, gpu, record.segment)
        return cls(record.segment, record.nbytes, mapping.address, gpu, told.uuid, mapping.hold)

    def close(self) -> None:
        """Owner: free what is ours, once running copies are done. Peer: give up this reference."""
        if not self._closed:
            self._closed = True
            self.hold.release()

    def unlink(self) -> bool:
        """Take the name away; peers that mapped it keep it. False when it was gone already."""
        return unlink(self.name)

    def tensor(self, nbytes: int | None = None):
        """An int8 CPU tensor over the first bytes. Only over the fake driver of the tests.

        The memory must not be closed while the tensor is used. Raises RegionRefused on a real GPU.
        """
        if not self.device.name.startswith(FAKE_DEVICE):
            raise RegionRefused(f"a CPU tensor over memory of {self.device} would be a crash")
        import torch

        count = self.nbytes if nbytes is None else nbytes
        memory = (ctypes.c_char * count).from_address(self.address)
        return torch.frombuffer(memory, dtype=torch.int8)


def cuda_zeros_in_new(
    make_region: Callable[[int], CudaRegion],
) -> contextlib.AbstractContextManager[None]:
    """As `ipc.memory.zeros_in_new`, for a CPU engine on the fake driver, whose memory is host
    memory.

    Not for a real GPU: there the engine allocates, and `CudaRegion.export` takes what it has.
    """
    from ipc.memory import zeros_in_new

    return zeros_in_new(make_region)


def _kind_of(address: int, nbytes: int) -> Kind:
    found = share(address, nbytes)
    found.close()
    return found.kind


def _kept(shared: Share, free: contextlib.ExitStack) -> Share:
    free.callback(shared.close)
    return shared


def _door(shares: list[Share], free: contextlib.ExitStack) -> str:
    fds = [shared.fd for shared in shares if shared.fd is not None]
    if not fds:
        return ""
    door = Door(fds)
    free.callback(door.close)
    return door.name


def _write(name: str, record: CudaRecord) -> None:
    packed = record.pack()
    segment = Segment.create(
        name, PAGE_BYTES, purpose="the record of a CUDA region", flag="the number of engines"
    )
    segment.buf[: len(packed)] = packed
    segment.close()


def _check(told: CudaRecord, record: RegionRecord) -> None:
    must_be("size", record.nbytes, told.nbytes, record.segment)
    for what, expected, found in (
        ("boot id", record.boot_id, told.boot_id),
        ("generation", record.generation, told.generation),
        ("fingerprint", record.fingerprint, told.fingerprint),
    ):
        if found:
            must_be(what, expected, found, record.segment)
    me = Exporter.me()
    if told.exporter == me:
        raise RegionRefused(
            f"KV region {record.segment!r} is this process's own: CUDA opens no handle in the "
            "process that made it; use the region itself"
        )
    if told.exporter.pid == me.pid:
        raise RegionRefused(
            f"KV region {record.segment!r} is of a process in another pid namespace that also has "
            f"pid {me.pid}, and CUDA takes the two for one; run both in one pid namespace"
        )


def _check_reachable(told: CudaRecord, gpu: Device) -> None:
    """A hidden GPU cannot be asked about; then the probe is the test."""
    peer = find(told.uuid)
    if peer is not None and peer != gpu.ordinal and not driver.can_access_peer(gpu.ordinal, peer):
        raise PeerUnreadable(
            f"{gpu} has no peer access to {uuid_text(told.uuid)} at {told.pci}; "
            "take --kv-path staged"
        )


def _map(told: CudaRecord, boot_id: int, gpu: Device, name: str) -> Mapping:
    def check(address: int) -> None:
        if probe.read_through(address, PROBE_BYTES) != pattern(told.region_id):
            raise PeerUnreadable(
                f"KV region {name!r}: {gpu} maps {uuid_text(told.uuid)} at {told.pci}, but "
                "reads other bytes than its owner wrote; take --kv-path staged"
            )

    try:
        return open_mapping(told, boot_id, gpu, check)
    except CudaNoContext as error:
        raise RegionRefused(
            f"KV region {name!r}: CUDA takes process {told.exporter.pid} for this one ({error}); "
            "run both in one pid namespace"
        ) from None


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _UNIT_BYTES) * _UNIT_BYTES


def _on(gpu: Device, free: contextlib.ExitStack) -> Callable[[], None]:
    def run() -> None:
        with gpu.use():
            free.close()

    return run


@contextlib.contextmanager
def _undone(free: contextlib.ExitStack) -> Iterator[None]:
    try:
        yield
    except BaseException:
        free.close()
        raise
