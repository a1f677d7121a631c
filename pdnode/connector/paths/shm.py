"""CPU engines: the peer's KV segment is mapped, and one copy takes the blocks out of it."""

from __future__ import annotations

import os
from typing import ClassVar

from ipc.copy import HostCopier, plan
from ipc.memory import HostRegion
from ipc.records import KVLayout
from ipc.segment import SHM_DIR
from pdnode.connector.metadata import Load
from pdnode.connector.paths.base import Home, KvPath


class MappedSegment:
    def __init__(self, region: HostRegion, layout: KVLayout) -> None:
        self.region = region
        self.layout = layout

    def close(self) -> None:
        self.region.close()


class ShmPath(KvPath):
    kind: ClassVar[str] = "shm"

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        self._copier = HostCopier()

    def _open(self, owner: int, boot_id: int) -> MappedSegment:
        record = self._home.record(owner, boot_id)
        fingerprint = bytes.fromhex(self._home.settings.fingerprint)
        return MappedSegment(HostRegion.attach(record, fingerprint, boot_id), record.layout)

    def _copy(self, load: Load, peer: MappedSegment) -> int:
        pieces = plan(peer.layout, self._home.layout, load.src_blocks, load.dst_blocks)
        return self._copier.copy(pieces, peer.region, self._home.region)

    def _gone(self, owner: int, boot_id: int, peer: MappedSegment) -> bool:
        # Not as soon as the owner is dead: requests that ran there still copy from its memory. The
        # node takes the name away when the last of them has, and then only mappings hold the pages.
        named = os.path.exists(f"{SHM_DIR}/{peer.region.name}")
        return not named or not self._home.is_same_boot(owner, boot_id)
