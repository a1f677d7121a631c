"""Where this worker's KV lies: put in the way of vLLM's allocation, or taken from vLLM afterwards.

CPU engine                   a POSIX segment, mapped by peers
CPU engine, tests            memory of a stand-in for NVIDIA's driver library
GPU engine                   vLLM's own buffer: exported, so that peers can map it
GPU engine, all pairs staged the same buffer, which no peer maps: its own thread sends from it
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ipc.cuda.device import device_of
from ipc.cuda.memory import CudaRegion
from ipc.memory import HostRegion, zeros_in_new
from pdnode.connector.settings import ConnectorSettings
from pdnode.kvpath import CUDA_IPC

if TYPE_CHECKING:
    import torch

GENERATION = 1
"""Of a worker's KV: it has one in its life."""


class OwnMemory(Protocol):
    """``name``: of this KV for peers, whether they map it or only knock at its door."""

    name: str
    address: int
    nbytes: int

    def unlink(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Unshared:
    """Memory that stays this process's alone."""

    name: str
    address: int
    nbytes: int

    def unlink(self) -> bool:
        return False


class KvMemory:
    """Of one worker. vLLM calls ``context`` around its one allocation, then ``region``."""

    def __init__(self, settings: ConnectorSettings, rank: int) -> None:
        self._settings = settings
        self._name = f"{settings.segment_prefix}.{settings.boot_id:016x}.kv{rank}"
        self._region: OwnMemory | None = None

    def context(self) -> AbstractContextManager | None:
        """None: allocate as always (on GPUs: with the allocator of sleep mode where that is on)."""
        return None if self._settings.gpu else zeros_in_new(self._make)

    def region(self, kv_caches: dict[str, torch.Tensor]) -> OwnMemory:
        """The memory that all these views lie in.

        Raises ValueError when they lie in several, RegionRefused when peers shall map it and CUDA
        gives no handle for it (the reason, and what to change, are in the text).
        """
        if self._settings.gpu:
            self._region = self._of_vllm(*one_buffer(kv_caches))
        assert self._region is not None, "the KV cache was allocated outside get_mem_pool_context()"
        return self._region

    def _make(self, nbytes: int) -> HostRegion | CudaRegion:
        create = CudaRegion.create if CUDA_IPC in self._settings.kv_served else HostRegion.create
        region = create(self._name, nbytes, flag=self._settings.kv_flag, **self._stamp())
        self._region = region
        return region

    def _of_vllm(self, address: int, nbytes: int) -> OwnMemory:
        if CUDA_IPC not in self._settings.kv_served:
            return Unshared(self._name, address, nbytes)
        gpu = device_of(address)
        return CudaRegion.export(self._name, address, nbytes, device=gpu, **self._stamp())

    def _stamp(self) -> dict:
        return {
            "boot_id": self._settings.boot_id,
            "generation": GENERATION,
            "fingerprint": bytes.fromhex(self._settings.fingerprint),
        }


def one_buffer(kv_caches: dict[str, torch.Tensor]) -> tuple[int, int]:
    """(address, bytes) of what vLLM allocated for all layers. Raises ValueError for several."""
    storages = {view.untyped_storage().data_ptr(): view for view in kv_caches.values()}
    if len(storages) != 1:
        raise ValueError(
            f"the KV cache of this model lies in {len(storages)} allocations; pdnode hands over "
            "caches that lie in one"
        )
    [(address, view)] = storages.items()
    return address, view.untyped_storage().nbytes()
