"""Worker half: runs in each worker process. Owns the KV memory, and has blocks loaded into it.

It knows block numbers, addresses and generations; no requests' meaning, no scheduling. How bytes
get here is a path's business (paths/).
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING

from ipc.errors import IpcError, StaleRead
from ipc.index import Index
from ipc.memory import HostRegion, zeros_in_new
from ipc.records import KVLayout, RegionRecord
from pdnode.connector.metadata import (
    Load,
    LoadDone,
    LoadFailed,
    LoadReport,
    PoolLoad,
    Store,
)
from pdnode.connector.paths import cuda_ipc
from pdnode.connector.paths.base import Home, KvPath
from pdnode.connector.paths.serving import Server
from pdnode.connector.paths.shm import ShmPath
from pdnode.connector.paths.staged import StagedPath
from pdnode.connector.pool_worker import PoolWorker
from pdnode.connector.settings import ConnectorSettings
from pdnode.vllm_compat import init_logger

if TYPE_CHECKING:
    import torch

logger = init_logger(__name__)

PATHS: dict[str, type[KvPath]] = {
    path.kind: path for path in (ShmPath, StagedPath, cuda_ipc.CudaIpcPath)
}
GENERATION = 1
"""Of a worker's KV region: it has one in its life."""
LOOK_S = 0.5
"""How often peers are looked after, also by an engine that has nothing to do."""


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
    gaps = {b.data_ptr() - a.data_ptr() for a, b in itertools.pairwise(views)}
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
        self._region: HostRegion | cuda_ipc.CudaRegion | None = None
        self._home: Home | None = None
        self._paths: dict[str, KvPath] = {}
        # Between loads, a thread lets go of peers that are gone.
        self._peers_lock = threading.Lock()
        self._closing = threading.Event()
        self._server: Server | None = None
        self._pool: PoolWorker | None = None
        self._report = LoadReport()
        self._failed_blocks: set[int] = set()

    # --- own memory ---------------------------------------------------------------------------

    def kv_memory(self) -> AbstractContextManager:
        """Around vLLM's one KV allocation: the buffer is our segment from its first byte."""
        return zeros_in_new(self._make_region)

    def _make_region(self, nbytes: int) -> HostRegion | cuda_ipc.CudaRegion:
        name = f"{self._settings.segment_prefix}.{self._settings.boot_id:016x}.kv{self._rank}"
        on_gpu = cuda_ipc.CudaIpcPath.kind in self._settings.kv_served
        create = cuda_ipc.CudaRegion.create if on_gpu else HostRegion.create
        self._region = create(
            name,
            nbytes,
            flag=self._settings.kv_flag,
            boot_id=self._settings.boot_id,
            generation=GENERATION,
            fingerprint=bytes.fromhex(self._settings.fingerprint),
        )
        return self._region

    def publish(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._region is not None, "the KV cache was allocated outside get_mem_pool_context()"
        layout = layout_of(kv_caches, self._region.address)
        layout.validate(self._region.nbytes)
        self._home = Home(self._settings, self._rank, self._index, self._region, layout)
        if StagedPath.kind in self._settings.kv_served:
            self._server = Server(self._settings, self._region.name, self._region, layout)
        if self._settings.pool_name:
            self._pool = PoolWorker(self._home)
        threading.Thread(target=self._look_after_peers, name="pdnode-peers", daemon=True).start()
        self._index.set_region(
            self._settings.slot,
            self._rank,
            RegionRecord(
                segment=self._region.name,
                nbytes=self._region.nbytes,
                **asdict(layout),
                boot_id=self._settings.boot_id,
                generation=GENERATION,
                fingerprint=bytes.fromhex(self._settings.fingerprint),
                worker_pid=os.getpid(),
            ),
        )

    # --- peers' memory ------------------------------------------------------------------------

    def load(self, loads: list[Load], pool_loads: list[PoolLoad]) -> None:
        with self._peers_lock:
            for load in (*loads, *pool_loads):
                try:
                    self._load(load)
                except IpcError as error:
                    self._failed_blocks.update(load.dst_blocks)
                    self._report.failed.append(LoadFailed(load.request_id, load.tokens, str(error)))

    def _load(self, load: Load | PoolLoad) -> None:
        if isinstance(load, PoolLoad):
            assert self._pool is not None
            self._report.done.append(self._pool.load(load))
            return
        path = self._path_from(load.entry.owner)
        path.connect(load.entry.owner, load.entry.boot_id)
        self._check(load)
        begin_ns = time.monotonic_ns()
        nbytes = path.load(load)
        duration_ns = time.monotonic_ns() - begin_ns
        # Again, now that the bytes are here: had P given the blocks to another prompt meanwhile,
        # these bytes may be that prompt's.
        self._check(load)
        self._report.done.append(
            LoadDone(load.request_id, load.entry.owner, nbytes, duration_ns, began_ns=begin_ns)
        )

    def _path_from(self, owner: int) -> KvPath:
        assert self._home is not None
        kind = self._settings.kv_path_from(owner)
        if kind not in self._paths:
            self._paths[kind] = PATHS[kind](self._home)
        return self._paths[kind]

    def _look_after_peers(self) -> None:
        """A thread: a surviving engine holds no dead one's memory, even when it has no work."""
        while not self._closing.wait(LOOK_S):
            with self._peers_lock:
                for path in self._paths.values():
                    path.close_gone()

    def _check(self, load: Load) -> None:
        if not self._index.validate(load.entry):
            raise StaleRead(
                f"the KV of transfer {load.entry.transfer_id} was given up by its owner (slot "
                f"{load.entry.owner}, generation {load.entry.generation}) before it was copied"
            )

    def store(self, stores: list[Store]) -> None:
        assert self._pool is not None
        self._report.stored += self._pool.store(stores)

    # --- reports ------------------------------------------------------------------------------

    def take_report(self) -> LoadReport | None:
        report, self._report = self._report, LoadReport()
        return report if report.done or report.failed or report.stored else None

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        self._closing.set()
        if self._server is not None:
            self._server.close()
        with self._peers_lock:
            for path in self._paths.values():
                path.close()
            self._paths.clear()
            self._index.close()
        if self._pool is not None:
            self._pool.close()
        if self._region is not None:
            self._region.unlink()
