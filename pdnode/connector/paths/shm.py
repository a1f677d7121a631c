"""CPU engines: the peer's KV segments are mapped, and one copy each takes the blocks out of it.

There are several when the two engines have different numbers of ranks: this rank's heads may then lie
with more than one of the owner's.
"""

from __future__ import annotations

import os
from typing import ClassVar

from ipc.copy import HostCopier, plan
from ipc.heads import HeadSlice
from ipc.memory import HostRegion
from ipc.records import KVLayout
from ipc.segment import SHM_DIR
from pdnode.connector.metadata import Load, PrefixLoad
from pdnode.connector.paths.base import Home, KvPath


class MappedSegment:
    """One rank of the owner, and the heads in it that this rank needs."""

    def __init__(self, region: HostRegion, layout: KVLayout, heads: HeadSlice | None) -> None:
        self.region = region
        self.layout = layout
        self.heads = heads


class MappedEngine:
    def __init__(self, segments: list[MappedSegment]) -> None:
        self.segments = segments

    def close(self) -> None:
        for segment in self.segments:
            segment.region.close()


class ShmPath(KvPath):
    kind: ClassVar[str] = "shm"

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        self._copier = HostCopier()

    def _open(self, load: Load | PrefixLoad) -> MappedEngine:
        owner, boot_id, engine = load.entry.owner, load.entry.boot_id, MappedEngine([])
        try:
            for rank, heads in self._home.reads(owner):
                engine.segments.append(self._map(owner, boot_id, rank, heads))
        except BaseException:
            engine.close()
            raise
        return engine

    def _map(self, owner: int, boot_id: int, rank: int, heads: HeadSlice | None) -> MappedSegment:
        record = self._home.record(owner, boot_id, rank)
        fingerprint = bytes.fromhex(self._home.settings.fingerprint)
        region = HostRegion.attach(record, fingerprint, boot_id)
        return MappedSegment(region, record.layout, heads)

    def _copy(self, load: Load | PrefixLoad, peer: MappedEngine) -> int:
        return sum(
            self._copier.copy(
                plan(s.layout, self._home.layout, load.src_blocks, load.dst_blocks, s.heads),
                s.region,
                self._home.region,
            )
            for s in peer.segments
        )

    def _gone(self, owner: int, boot_id: int, peer: MappedEngine) -> bool:
        # Not as soon as the owner is dead: requests that ran there still copy from its memory. The
        # node takes the name away when the last of them has, and then only mappings hold the pages.
        named = all(os.path.exists(f"{SHM_DIR}/{s.region.name}") for s in peer.segments)
        return not named or not self._home.is_same_boot(owner, boot_id)
