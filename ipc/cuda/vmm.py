"""Memory made in two steps, cuMemCreate and cuMemMap: our own, or imported from a peer.

vLLM's sleep mode allocates like this. Such memory has no legacy IPC handle; what it has depends on
the handle type that was asked for at its creation.
"""

from collections.abc import Callable

from ipc.cuda import driver
from ipc.cuda.device import Device


def allocate(nbytes: int, device: Device, handle_type: int) -> tuple[int, Callable[[], None]]:
    """(address, free) of memory that can be exported as `handle_type` (0: not at all).

    Needs the context of `device`. Raises CudaCallFailed: fabric handles need an IMEX channel.
    """
    unit = driver.vmm_granularity(device.ordinal, handle_type)
    size = -(-nbytes // unit) * unit
    return map_allocation(driver.vmm_create(size, device.ordinal, handle_type), size, device)


def map_allocation(
    allocation: int, nbytes: int, device: Device
) -> tuple[int, Callable[[], None]]:  # fmt: skip
    """(address, unmap). The mapping keeps the memory; `allocation` is released here."""
    try:
        address = driver.vmm_reserve(nbytes)
        try:
            driver.vmm_map(address, nbytes, allocation, device.ordinal)
        except BaseException:
            driver.vmm_unreserve(address, nbytes)
            raise
    finally:
        driver.vmm_release(allocation)

    def unmap() -> None:
        driver.vmm_unmap(address, nbytes)
        driver.vmm_unreserve(address, nbytes)

    return address, unmap
