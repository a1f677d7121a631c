"""What moves bytes between this worker's KV and host memory: the CPU, or the worker's own GPU.

The staged path is the same over both. ``buffer`` is host memory that the mover reaches; a GPU
reaches pinned memory only.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Protocol

import torch

from ipc.copy import CopyPlan, HostCopier, Span
from ipc.cuda import driver
from ipc.cuda.copy import CudaCopier
from ipc.cuda.device import Device, device_of
from pdnode.connector.paths.base import Home

COPY_S = 30.0
"""A copy that takes longer is a fault of the machine: the load fails, its pages stay mapped."""
DRAIN_S = 1.0


class Mover(Protocol):
    in_host_memory: bool
    """Whether the CPU may touch the KV itself."""

    def buffer(self, nbytes: int) -> torch.Tensor: ...

    def out(self, plan: CopyPlan, kv: Span, buffer: torch.Tensor) -> int:
        """From the KV into a buffer: the bytes moved, all there on return. Raises IpcError."""

    def into(self, plan: CopyPlan, buffer: torch.Tensor, kv: Span) -> int:
        """From a buffer into the KV, after all earlier steps of this engine. Raises IpcError."""

    def close(self) -> None: ...


class HostMover:
    in_host_memory = True

    def __init__(self) -> None:
        self._copier = HostCopier()

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def out(self, plan: CopyPlan, kv: Span, buffer: torch.Tensor) -> int:
        return self._copier.copy(plan, kv, buffer.data_ptr(), dst_nbytes=buffer.numel())

    def into(self, plan: CopyPlan, buffer: torch.Tensor, kv: Span) -> int:
        return self._copier.copy(plan, buffer.data_ptr(), kv, src_nbytes=buffer.numel())

    def close(self) -> None:
        """Nothing is open."""


class GpuMover:
    in_host_memory = False

    def __init__(self, gpu: Device) -> None:
        self._gpu, self._copier = gpu, CudaCopier(gpu, max_in_flight=1)

    def buffer(self, nbytes: int) -> torch.Tensor:
        with self._gpu.use():
            address = driver.host_alloc(nbytes)
        memory = (ctypes.c_char * nbytes).from_address(address)
        # Not when the interpreter ends: the driver goes with the process, perhaps before.
        weakref.finalize(memory, _free_host, self._gpu, address).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def out(self, plan: CopyPlan, kv: Span, buffer: torch.Tensor) -> int:
        return self._copier.copy(
            plan, kv.address, buffer.data_ptr(), src_nbytes=kv.nbytes, dst_nbytes=buffer.numel(),
            timeout_s=COPY_S,
        )  # fmt: skip

    def into(self, plan: CopyPlan, buffer: torch.Tensor, kv: Span) -> int:
        return self._copier.copy(
            plan, buffer.data_ptr(), kv.address, src_nbytes=buffer.numel(), dst_nbytes=kv.nbytes,
            after=engine_stream(), timeout_s=COPY_S,
        )  # fmt: skip

    def close(self) -> None:
        self._copier.close(DRAIN_S)


def mover(home: Home) -> Mover:
    """For one thread."""
    return GpuMover(device_of(home.region.address)) if home.settings.gpu else HostMover()


def engine_stream() -> int:
    """The stream that this thread's torch uses, as vLLM's steps do; without CUDA the default one."""
    return torch.cuda.current_stream().cuda_stream if torch.cuda.is_initialized() else 0


def _free_host(gpu: Device, address: int) -> None:
    with gpu.use():
        driver.host_free(address)
