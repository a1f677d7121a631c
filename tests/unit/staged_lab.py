"""Owner and reader of a staged path without engines, for test_staged.py.

``own`` is an owner in a process of its own, whose index is there already; it offers all its blocks
as transfer ``t``, shows block n as prefix ``key(n)``, and says when it serves.
"""

from __future__ import annotations

import os
import threading
from dataclasses import asdict
from multiprocessing.connection import Connection

import numpy as np

from ipc.index import Index
from ipc.memory import HostRegion
from ipc.records import KVLayout, RegionRecord, Role, State
from pdnode.connector.metadata import Load, PrefixLoad
from pdnode.connector.paths.base import Home
from pdnode.connector.paths.serving import Server
from pdnode.connector.paths.staged import StagedPath
from pdnode.connector.settings import ConnectorSettings

BOOT = 0x1234567
OWNER, READER = 0, 1
OWNER_BLOCKS, READER_BLOCKS = 200, 150
LAYERS, PAGE = 3, 24 << 10
LAYOUTS = {
    "LB": lambda blocks: KVLayout(blocks, LAYERS, PAGE, PAGE, blocks * PAGE),
    "BL": lambda blocks: KVLayout(blocks, LAYERS, PAGE, LAYERS * PAGE, PAGE),
}


def key(content: object) -> bytes:
    return f"content {content}".encode()


def make_index(prefix: str) -> Index:
    node = Index.create(f"{prefix}.index", engine_slots=3, node_boot_id=1)
    for slot in (OWNER, READER):
        announce(node, slot, State.READY)
    return node


def announce(node: Index, slot: int, state: State) -> None:
    node.set_control(
        slot, engine_id=f"e{slot}", role=Role.BOTH, state=state, boot_id=BOOT, restarts=0
    )


class Half:
    """One engine's worker: its index view, its KV, its end of the path."""

    def __init__(self, prefix: str, slot: int, layout: KVLayout) -> None:
        self.slot, self.layout = slot, layout
        self.index = Index.attach(f"{prefix}.index", me=slot)
        self.settings = ConnectorSettings(
            node_pid=os.getpid(),
            index_name=self.index.name,
            segment_prefix=f"{prefix}.e{slot}",
            engine_id=f"e{slot}",
            slot=slot,
            boot_id=BOOT,
            lease_s=10.0,
            fingerprint="ab" * 32,
        )
        self.region = HostRegion.create(f"{prefix}.e{slot}.kv0", layout.extent_bytes, flag="--kv")
        self.bytes = self.region.tensor().numpy().view(np.uint8)
        self.index.set_region(slot, 0, self._record())
        self.home = Home(self.settings, 0, self.index, self.region, layout)

    def _record(self) -> RegionRecord:
        return RegionRecord(
            segment=self.region.name,
            nbytes=self.region.nbytes,
            **asdict(self.layout),
            boot_id=BOOT,
            generation=1,
            fingerprint=bytes.fromhex(self.settings.fingerprint),
        )

    def serve(self) -> Server:
        self.bytes[:] = np.random.default_rng(0).integers(0, 256, self.region.nbytes, np.uint8)
        self.index.prefixes.own(blocks=self.layout.num_blocks, boot_id=BOOT, flag="--kv")
        return Server(self.home, self.region.name)

    def show(self, blocks: list[int]) -> None:
        for block in blocks:
            self.index.prefixes.publish(key(block), block)

    def offer(self, name: str, blocks: list[int]):
        return self.index.insert(
            name,
            boot_id=BOOT,
            block_ids=blocks,
            tokens_ready=len(blocks),
            tokens_total=len(blocks),
            lease_s=60.0,
        )

    def path(self) -> StagedPath:
        return StagedPath(self.home)

    def wanted(self, name: str, src: list[int], dst: list[int]) -> Load:
        entry = self.index.select(name, OWNER)
        assert entry is not None
        return Load(name, entry, tuple(src), tuple(dst), len(src))

    def found(self, contents: list, dst: list[int]) -> PrefixLoad:
        held = self.index.prefixes.take([key(content) for content in contents], OWNER)
        assert len(held.blocks) == len(dst)
        return PrefixLoad("r", held, tuple(dst), len(dst))

    def block(self, number: int) -> bytes:
        """All layers of one block."""
        first = self.layout.base_offset_bytes + number * self.layout.block_stride_bytes
        starts = [first + layer * self.layout.layer_stride_bytes for layer in range(LAYERS)]
        return b"".join(self.bytes[at : at + PAGE].tobytes() for at in starts)


def own(prefix: str, order: str, serving: Connection) -> None:
    """Never returns: the process is there to be killed."""
    owner = Half(prefix, OWNER, LAYOUTS[order](OWNER_BLOCKS))
    server = owner.serve()
    owner.offer("t", list(range(OWNER_BLOCKS)))
    owner.show(list(range(OWNER_BLOCKS)))
    serving.send("serving")
    threading.Event().wait()
    server.close()
