"""GPUs with peer access: the peer's KV is mapped by an IPC handle, and the GPU copies out of it.

CPU engines can take this path too, in tests: over a stand-in for the driver library whose device
memory is host memory. `ipc.cuda` sees no difference.
"""

from __future__ import annotations

from typing import ClassVar

from ipc.copy import plan
from ipc.cuda.copy import CudaCopier
from ipc.cuda.device import Device, device_of
from ipc.cuda.memory import CudaRegion, close_dead
from ipc.errors import PeerGone
from ipc.records import KVLayout
from pdnode.connector.metadata import Load, PrefixLoad
from pdnode.connector.paths.base import Home, KvPath
from pdnode.connector.paths.movers import COPY_S, DRAIN_S, engine_stream


class MappedRegion:
    """A peer's memory; or this worker's own, which CUDA will not map a second time."""

    def __init__(self, region: CudaRegion, layout: KVLayout, boot_id: int, *, own: bool) -> None:
        self.region, self.layout = region, layout
        self._boot_id, self._own = boot_id, own

    def close(self) -> None:
        if not self._own:
            self.region.close()
            # Copies that still run keep the mapping open until they end.
            close_dead(self._boot_id, 0.0)


class CudaIpcPath(KvPath):
    kind: ClassVar[str] = "cuda-ipc"

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        self._device: Device = device_of(home.region.address)
        self._copier = CudaCopier(self._device)

    def _open(self, load: Load | PrefixLoad) -> MappedRegion:
        owner, boot_id = load.entry.owner, load.entry.boot_id
        record = self._home.record(owner, boot_id)
        settings = self._home.settings
        if owner == settings.slot:
            return MappedRegion(self._home.region, self._home.layout, boot_id, own=True)
        if not self._home.is_alive(owner, boot_id):
            raise PeerGone(
                f"the engine in slot {owner} is dead: its GPU memory is not read any more"
            )
        region = CudaRegion.attach(
            record, bytes.fromhex(settings.fingerprint), boot_id, device=self._device
        )
        return MappedRegion(region, record.layout, boot_id, own=False)

    def _copy(self, load: Load | PrefixLoad, peer: MappedRegion) -> int:
        pieces = plan(peer.layout, self._home.layout, load.src_blocks, load.dst_blocks)
        return self._copier.copy(
            pieces, peer.region, self._home.region, after=engine_stream(), timeout_s=COPY_S
        )

    def _gone(self, owner: int, boot_id: int, peer: MappedRegion) -> bool:
        # At once: a GPU's memory stays allocated for as long as anybody maps it.
        return not self._home.is_alive(owner, boot_id)

    def close(self) -> None:
        super().close()
        self._copier.close(DRAIN_S)
