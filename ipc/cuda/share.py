"""Memory that somebody allocated -> a handle that another process can open, or a refusal.

What works depends on how the memory was made, and the driver tells (CUDA driver API, "Unified
Addressing", CUpointer_attribute). The order is that of UCX (cuda_ipc_md.c): legacy IPC, fabric,
file descriptor. cudaMallocAsync memory has none of them and is refused.
"""

import os
from dataclasses import dataclass

from ipc.cuda import driver, vmm
from ipc.cuda.device import Device
from ipc.cuda.errors import CudaCallFailed, NotExportable
from ipc.cuda.record import Kind, Window

_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
_HANDLE_TYPES = {Kind.FABRIC: driver.FABRIC, Kind.POSIX_FD: driver.POSIX_FD}
_ADVICE = (
    "allocate the KV cache with the default allocator (no sleep mode, no async pool), or take "
    "--kv-path staged"
)


@dataclass
class Share:
    """One exported range. Lives as long as peers may open it."""

    kind: Kind
    handle: bytes
    base: int
    range_bytes: int
    fd: int | None = None
    _allocation: int | None = None

    def window(self, address: int) -> Window:
        return Window(self.handle, self.range_bytes, address - self.base)

    def close(self) -> None:
        """No new peer; those that have mapped the range keep it."""
        fd, self.fd = self.fd, None
        allocation, self._allocation = self._allocation, None
        if fd is not None:
            os.close(fd)
        if allocation is not None:
            driver.vmm_release(allocation)


def share(address: int, nbytes: int) -> Share:
    """A handle that covers [address, address + nbytes). Needs the context of its device.

    Raises NotExportable with what was probed and what to do.
    """
    where = f"{nbytes:,} bytes at {address:#x}"
    if _ask(driver.MEMORY_TYPE, address) != _DEVICE_MEMORY:
        raise NotExportable(f"{where} are not device memory of this context; {_ADVICE}")
    base, range_bytes = _range(address)
    if not base <= address <= address + nbytes <= base + range_bytes:
        raise NotExportable(
            f"{where} lie in more than one allocation: the first one has {range_bytes:,} bytes at "
            f"{base:#x}, and a handle opens one; allocate the KV cache in one piece (no expandable "
            "segments)"
        )
    if _ask(driver.LEGACY_IPC_CAPABLE, address):
        return Share(Kind.LEGACY, driver.ipc_get(base), base, range_bytes)
    return _share_created(address, base, range_bytes, where)


def memory_like(kind: Kind, nbytes: int, device: Device):
    """(address, free) of new memory that is handed over in the same way."""
    if kind == Kind.LEGACY:
        address = driver.mem_alloc(nbytes)
        return address, lambda: driver.mem_free(address)
    return vmm.allocate(nbytes, device, _HANDLE_TYPES[kind])


def _share_created(address: int, base: int, range_bytes: int, where: str) -> Share:
    """Memory of cuMemCreate. Fabric first: it needs no socket, but may need what is not there."""
    allowed, refusals = _ask(driver.ALLOWED_HANDLE_TYPES, address), []
    for kind, bit in _HANDLE_TYPES.items():
        if allowed & bit:
            try:
                return _exported(kind, address, base, range_bytes)
            except CudaCallFailed as error:
                refusals.append(str(error))
    raise NotExportable(
        f"{where} cannot be given to another process: no legacy IPC, allowed handle types "
        f"{allowed:#x} ({'; '.join(refusals) or 'neither fabric nor posix fd'}); {_ADVICE}"
    )


def _exported(kind: Kind, address: int, base: int, range_bytes: int) -> Share:
    # Kept until `close`: a fabric handle alone holds no reference to the memory.
    allocation = driver.vmm_retain(address)
    try:
        if kind == Kind.FABRIC:
            handle, fd = driver.vmm_export_fabric(allocation), None
        else:
            handle, fd = bytes(driver.HANDLE_BYTES), driver.vmm_export_fd(allocation)
    except BaseException:
        driver.vmm_release(allocation)
        raise
    return Share(kind, handle, base, range_bytes, fd, allocation)


def _range(address: int) -> tuple[int, int]:
    """What one handle covers. RANGE_* speak of the mapping, where cuMemMap made it of pieces."""
    base, size = driver.address_range(address)
    start, mapped = _ask(driver.RANGE_START, address), _ask(driver.RANGE_SIZE, address)
    if not start or not mapped:
        return base, size
    begin, end = max(base, start), min(base + size, start + mapped)
    return begin, end - begin


def _ask(attribute: int, address: int) -> int:
    """0 when the driver does not know the address, or the attribute."""
    try:
        return driver.pointer_attribute(attribute, address)
    except CudaCallFailed:
        return 0
