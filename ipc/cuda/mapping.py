"""A peer's memory in this process: opened once, counted, closed once, and at once when the peer
died.

A driver gives the same pointer for a second open of one handle and counts by itself; it may also
give byte-identical handles for different memory, before and after a re-allocation. So mappings are
found by the region's random id, never by handle or address, and one that is in the way of a new one
(208, CUDA_ERROR_ALREADY_MAPPED) is closed first, as UCX does in its cuda_ipc cache.
"""

import os
import threading
import time
from collections.abc import Callable

from ipc.cuda import door, driver, vmm
from ipc.cuda.device import Device
from ipc.cuda.errors import CudaAlreadyMapped
from ipc.cuda.holds import Hold
from ipc.cuda.record import CudaRecord, Kind, Window

_DOOR_S = 5.0
_STALE_DRAIN_S = 1.0

_opening = threading.Lock()  # Held while a handle is opened, which may wait for a door.
_table_lock = threading.Lock()  # Never held while waiting.
_table: dict[tuple[bytes, bytes], "Mapping"] = {}  # (region id, importing GPU)


class Mapping:
    """address: of the KV in this process. `hold` counts its users."""

    def __init__(self, record: CudaRecord, boot_id: int, device: Device, address: int, close):
        self.record, self.boot_id, self.device, self.address = record, boot_id, device, address
        self._close = close
        self.hold = Hold(f"the KV region of boot {boot_id:#x}", self._unmap)

    def _unmap(self) -> None:
        with _table_lock:
            key = (self.record.region_id, self.device.uuid)
            if _table.get(key) is self:
                del _table[key]
        with self.device.use():
            self._close()


def open_mapping(
    record: CudaRecord, boot_id: int, device: Device, check: Callable[[int], None]
) -> Mapping:
    """Map a region for `device`, or add a reference to the mapping that is there.

    `check(address)` is given the peer's probe on the first open; what it raises is passed on.
    Needs the context of `device`. Raises PeerGone, WaitTimeout, CudaCallFailed.
    """
    key = (record.region_id, device.uuid)
    with _opening:
        with _table_lock:
            known = _table.get(key)
        if known is not None and known.hold.retain():
            return known
        address, close = _open_checked(record, device, check)
        made = Mapping(record, boot_id, device, address, close)
        with _table_lock:
            _table[key] = made
        return made


def close_dead(boot_id: int, drain_s: float = 0.5) -> int:
    """Unmap all memory of an engine that died; its pages stay allocated until this.

    New copies raise PeerGone at once; running ones get `drain_s` seconds (together) to end. Returns
    how many mappings still wait for a copy; each goes with its last one.
    """
    with _table_lock:
        dead = [mapping for mapping in _table.values() if mapping.boot_id == boot_id]
    return _doom(dead, drain_s)


def open_count(boot_id: int | None = None) -> int:
    """Mappings of this process, of one boot or of all."""
    with _table_lock:
        return sum(boot_id is None or m.boot_id == boot_id for m in _table.values())


def _doom(mappings: list[Mapping], drain_s: float) -> int:
    for mapping in mappings:
        mapping.hold.doom()
    deadline = time.monotonic() + drain_s
    return sum(not mapping.hold.drain(deadline) for mapping in mappings)


def _open_checked(record: CudaRecord, device: Device, check: Callable[[int], None]):
    """The probe first: nobody gets an address that does not read right."""
    fds = door.fetch(record.door, 2, _DOOR_S) if record.kind == Kind.POSIX_FD else [-1, -1]
    try:
        return _open_both(record, fds, device, check)
    finally:
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def _open_both(record: CudaRecord, fds: list[int], device: Device, check: Callable[[int], None]):
    probe, close_probe = _open(record, record.probe, fds[1], device)
    try:
        check(probe)
        return _open(record, record.body, fds[0], device)
    finally:
        close_probe()


def _open(record: CudaRecord, window: Window, fd: int, device: Device):
    """(address of ours, close) of one window; stale mappings of that process make way."""
    try:
        base, close = _open_range(record.kind, window, fd, device)
    except CudaAlreadyMapped:
        if _doom(_stale(record), _STALE_DRAIN_S):
            raise
        base, close = _open_range(record.kind, window, fd, device)
    return base + window.offset_bytes, close


def _open_range(kind: Kind, window: Window, fd: int, device: Device):
    if kind == Kind.LEGACY:
        base = driver.ipc_open(window.handle)
        return base, lambda: driver.ipc_close(base)
    fabric = kind == Kind.FABRIC
    imported = driver.vmm_import_fabric(window.handle) if fabric else driver.vmm_import_fd(fd)
    return vmm.map_allocation(imported, window.range_bytes, device)


def _stale(record: CudaRecord) -> list[Mapping]:
    """Other regions of the GPU that the same pid exported: its earlier ones, or a predecessor's."""
    with _table_lock:
        return [
            mapping
            for mapping in _table.values()
            if mapping.record.region_id != record.region_id
            and mapping.record.exporter[:2] == record.exporter[:2]
            and mapping.record.uuid == record.uuid
        ]
