"""A GPU: named by its UUID, because ordinals mean something else in every process.

`Device.use` makes the primary context (the one torch uses too) current for a block of code and puts
back what was there. Every thread that calls the driver needs that; a new thread has no context.
"""

import contextlib
import functools
import uuid as uuids
from collections.abc import Iterator
from dataclasses import dataclass

from ipc.cuda import driver
from ipc.cuda.errors import CudaUnavailable


@dataclass(frozen=True)
class Device:
    """uuid: 16 bytes; pci: "0000:17:00.0"; context: the primary context of this process."""

    ordinal: int
    uuid: bytes
    pci: str
    name: str
    context: int

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Calls inside go to this device, in this thread."""
        driver.push_context(self.context)
        try:
            yield
        finally:
            driver.pop_context()

    @property
    def compute_capability(self) -> int:
        """90 for sm_90."""
        major = driver.device_attribute(driver.COMPUTE_MAJOR, self.ordinal)
        return 10 * major + driver.device_attribute(driver.COMPUTE_MINOR, self.ordinal)

    def __str__(self) -> str:
        return f"{self.name} {uuid_text(self.uuid)} at {self.pci}"


def uuid_text(uuid: bytes) -> str:
    """As nvidia-smi prints it."""
    return f"GPU-{uuids.UUID(bytes=uuid)}"


def device(uuid: bytes | None = None) -> Device:
    """The GPU with this UUID; None: that of the thread's context, else the first visible one.

    Raises CudaUnavailable when no driver, no GPU, or not this GPU is visible to the process.
    """
    driver.init()
    if uuid is None:
        return _device(driver.current_ordinal() or 0)
    ordinal = find(uuid)
    if ordinal is None:
        seen = ", ".join(uuid_text(driver.device_uuid(i)) for i in range(driver.device_count()))
        raise CudaUnavailable(
            f"{uuid_text(uuid)} is not visible to this process, which sees {seen or 'no GPU'}; "
            "check CUDA_VISIBLE_DEVICES"
        )
    return _device(ordinal)


def device_of(address: int) -> Device:
    """The GPU that holds this memory. Raises CudaCallFailed when the driver does not know it."""
    driver.init()
    gpu = device()
    with gpu.use():
        return _device(driver.pointer_attribute(driver.DEVICE_ORDINAL, address))


def find(uuid: bytes) -> int | None:
    """The ordinal of a GPU in this process, None when it is hidden."""
    ordinals = range(driver.device_count())
    return next((i for i in ordinals if driver.device_uuid(i) == uuid), None)


@functools.cache
def _device(ordinal: int) -> Device:
    if ordinal >= driver.device_count():
        raise CudaUnavailable("no GPU is visible to this process; check CUDA_VISIBLE_DEVICES")
    return Device(
        ordinal, driver.device_uuid(ordinal), driver.device_pci(ordinal),
        driver.device_name(ordinal), driver.retain_primary(ordinal),
    )  # fmt: skip
