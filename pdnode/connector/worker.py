"""Worker half: runs in each worker process. Owns the KV memory, maps peers' memory, copies blocks.

It knows block numbers, addresses and generations; no requests' meaning, no scheduling.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ipc.copy import HostCopier, plan
from ipc.errors import IpcError, StaleRead
from ipc.index import Index
from ipc.memory import HostRegion, zeros_in_new
from ipc.records import KVLayout, RegionRecord
from pdnode.connector.metadata import Load, LoadDone, LoadFailed, LoadReport
from pdnode.connector.settings import ConnectorSettings
from pdnode.vllm_compat import init_logger

if TYPE_CHECKING:
    import torch

logger = init_logger(__name__)


def layout_of(kv_caches: dict[str, torch.Tensor], base_address: int) -> KVLayout:
    """The strides of vLLM's views ``[blocks, ...page]`` (one per layer) over the one KV buffer.

    Raises ValueError for a model whose layers are not equally spaced pages of one size: such a cache
    has no single layout (sliding-window hybrids, MLA beside full attention).
    """
    views = sorted(kv_caches.values(), key=lambda t: t.data_ptr())
    first = views[0]
    page_bytes = first[0].numel() * first.element_size()
    strides = {
        (v.shape[0], v.stride(0) * v.element_size(), v[0].numel() * v.element_size()) for v in views
    }
    gaps = {b.data_ptr() - a.data_ptr() for a, b in zip(views, views[1:], strict=False)}
    if len(strides) != 1 or len(gaps) > 1 or not all(v[0].is_contiguous() for v in views):
        raise ValueError(
            f"the KV cache of this model has {len(strides)} page shapes and {len(gaps)} layer "
            "distances; pdnode hands over caches with one of each"
        )
    return KVLayout(
        num_blocks=first.shape[0],
        num_layers=len(views),
        page_bytes=page_bytes,
        block_stride_bytes=first.stride(0) * first.element_size(),
        layer_stride_bytes=gaps.pop() if gaps else page_bytes,
        base_offset_bytes=first.data_ptr() - base_address,
    )


class WorkerHalf:
    def __init__(self, settings: ConnectorSettings, rank: int) -> None:
        self._settings = settings
        self._rank = rank
        self._index = Index.attach(settings.index_name, me=settings.slot)
        self._region: HostRegion | None = None
        self._layout: KVLayout | None = None
        self._peers: dict[int, tuple[int, HostRegion, KVLayout]] = {}
        self._copier = HostCopier()
        self._report = LoadReport()
        self._failed_blocks: set[int] = set()

    # --- own memory ---------------------------------------------------------------------------

    def kv_memory(self) -> AbstractContextManager:
        """Around vLLM's one KV allocation: the buffer is our segment from its first byte."""
        return zeros_in_new(self._make_region)

    def _make_region(self, nbytes: int) -> HostRegion:
        name = f"{self._settings.segment_prefix}.{self._settings.boot_id:016x}.kv{self._rank}"
        self._region = HostRegion.create(name, nbytes, flag=self._settings.kv_flag)
        return self._region

    def publish(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._region is not None, "the KV cache was allocated outside get_mem_pool_context()"
        self._layout = layout_of(kv_caches, self._region.address)
        self._layout.validate(self._region.nbytes)
        self._index.set_region(
            self._settings.slot,
            self._rank,
            RegionRecord(
                segment=self._region.name,
                nbytes=self._region.nbytes,
                **asdict(self._layout),
                boot_id=self._settings.boot_id,
                generation=1,
                fingerprint=bytes.fromhex(self._settings.fingerprint),
                worker_pid=os.getpid(),
            ),
        )

    # --- peers' memory ------------------------------------------------------------------------

    def _peer(self, owner: int, boot_id: int) -> tuple[HostRegion, KVLayout]:
        known = self._peers.get(owner)
        if known is not None and known[0] == boot_id:
            return known[1], known[2]
        if known is not None:
            known[1].close()
            del self._peers[owner]
        record = self._index.region(owner, self._rank)
        region = HostRegion.attach(
            record,
            expect_fingerprint=bytes.fromhex(self._settings.fingerprint),
            expect_boot=boot_id,
        )
        self._peers[owner] = (boot_id, region, record.layout)
        return region, record.layout

    def load(self, loads: list[Load]) -> None:
        for load in loads:
            try:
                self._load(load)
            except IpcError as error:
                self._failed_blocks.update(load.dst_blocks)
                self._report.failed.append(LoadFailed(load.request_id, load.tokens, str(error)))

    def _load(self, load: Load) -> None:
        assert self._region is not None and self._layout is not None
        region, layout = self._peer(load.entry.owner, load.entry.boot_id)
        self._check(load)
        copy = plan(layout, self._layout, load.src_blocks, load.dst_blocks)
        begin_ns = time.monotonic_ns()
        nbytes = self._copier.copy(copy, region, self._region)
        duration_ns = time.monotonic_ns() - begin_ns
        # Again, now that the bytes are here: had P given the blocks to another prompt meanwhile,
        # these bytes may be that prompt's.
        self._check(load)
        self._report.done.append(LoadDone(load.request_id, load.entry.owner, nbytes, duration_ns))

    def _check(self, load: Load) -> None:
        if not self._index.validate(load.entry):
            raise StaleRead(
                f"the KV of transfer {load.entry.transfer_id} was given up by its owner (slot "
                f"{load.entry.owner}, generation {load.entry.generation}) before it was copied"
            )

    # --- reports ------------------------------------------------------------------------------

    def take_report(self) -> LoadReport | None:
        report, self._report = self._report, LoadReport()
        return report if report.done or report.failed else None

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        for _, region, _ in self._peers.values():
            region.close()
        self._index.close()
        if self._region is not None:
            self._region.unlink()
