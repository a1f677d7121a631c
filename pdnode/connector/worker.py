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
from ipc.heads import held
from ipc.index import Index
from ipc.records import KVLayout, RegionRecord
from pdnode.connector.generators import void_draws
from pdnode.connector.kv_memory import GENERATION, KvMemory, OwnMemory
from pdnode.connector.metadata import (
    Load,
    LoadDone,
    LoadFailed,
    LoadReport,
    PoolLoad,
    PrefixLoad,
    Store,
)
from pdnode.connector.paths.base import Home, KvPath
from pdnode.connector.paths.cuda_ipc import CudaIpcPath
from pdnode.connector.paths.serving import Server
from pdnode.connector.paths.shm import ShmPath
from pdnode.connector.paths.staged import StagedPath
from pdnode.connector.pool_worker import PoolWorker
from pdnode.connector.settings import ConnectorSettings
from pdnode.vllm_compat import init_logger

if TYPE_CHECKING:
    import torch

logger = init_logger(__name__)

PATHS: dict[str, type[KvPath]] = {path.kind: path for path in (ShmPath, StagedPath, CudaIpcPath)}
LOOK_S = 0.5
"""How often peers are looked after, also by an engine that has nothing to do."""


def layout_of(
    kv_caches: dict[str, torch.Tensor], base_address: int, num_blocks: int | None = None
) -> KVLayout:
    """The strides of vLLM's views ``[blocks, ...page]`` (one per layer) over the one KV buffer.

    ``num_blocks``: of the scheduler, whose numbers requests carry; the views may have a multiple of
    it, where a kernel wants smaller blocks. Raises ValueError for a model whose layers are not
    equally spaced pages of one size: such a cache has no single layout (sliding-window hybrids, MLA
    beside full attention).
    """
    views = sorted(kv_caches.values(), key=lambda t: t.data_ptr())
    first = views[0]
    page_bytes = first[0].numel() * first.element_size()
    strides = {
        (v.shape[0], v.stride(0) * v.element_size(), v[0].numel() * v.element_size()) for v in views
    }
    gaps = {b.data_ptr() - a.data_ptr() for a, b in itertools.pairwise(views)}
    if len(strides) != 1 or len(gaps) > 1 or not all(_is_dense(v[0]) for v in views):
        raise ValueError(
            f"the KV cache of this model has {len(strides)} page shapes and {len(gaps)} layer "
            "distances; pdnode hands over caches with one of each"
        )
    block_stride_bytes = first.stride(0) * first.element_size()
    num_blocks = num_blocks or first.shape[0]
    parts = first.shape[0] // num_blocks
    if parts * num_blocks != first.shape[0] or (parts > 1 and block_stride_bytes != page_bytes):
        raise ValueError(
            f"the KV cache has {first.shape[0]} pages of {page_bytes} bytes, {block_stride_bytes} "
            f"apart, for {num_blocks} blocks: a block is not one piece in each layer"
        )
    page_bytes *= parts
    return KVLayout(
        num_blocks=num_blocks,
        num_layers=len(views),
        page_bytes=page_bytes,
        block_stride_bytes=block_stride_bytes * parts,
        layer_stride_bytes=gaps.pop() if gaps else page_bytes,
        base_offset_bytes=first.data_ptr() - base_address,
    )


def _is_dense(page: torch.Tensor) -> bool:
    """No gaps, in whatever order the axes lie: heads before tokens, or tokens before heads."""
    span = 1
    for stride, size in sorted(zip(page.stride(), page.shape, strict=True)):
        if size > 1 and stride != span:
            return False
        span *= size
    return True


class WorkerHalf:
    def __init__(
        self, settings: ConnectorSettings, rank: int, num_blocks: int | None = None
    ) -> None:
        self._settings, self._num_blocks = settings, num_blocks
        self._rank = rank
        self._index = Index.attach(settings.index_name, me=settings.slot)
        self._memory = KvMemory(settings, rank)
        self._region: OwnMemory | None = None
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

    def kv_memory(self) -> AbstractContextManager | None:
        """Around vLLM's one KV allocation: on CPU its buffer is our segment from its first byte."""
        return self._memory.context()

    def publish(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._region = self._memory.region(kv_caches)
        if len(set(self._settings.ranks)) > 1:
            self._check_heads(next(iter(kv_caches.values())))
        layout = layout_of(kv_caches, self._region.address, self._num_blocks)
        layout.validate(self._region.nbytes)
        self._home = Home(self._settings, self._rank, self._index, self._region, layout)
        if StagedPath.kind in self._settings.kv_served:
            self._server = Server(self._home, self._region.name)
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

    def _check_heads(self, layer: torch.Tensor) -> None:
        """Raises ValueError for pages that are not made of heads: peers could not take some of them."""
        ranks, total = self._settings.ranks_of(self._settings.slot), self._settings.kv_heads
        heads = len(held(total, ranks, self._rank))
        if layer.ndim < 2 or layer.shape[1] != heads:
            raise ValueError(
                f"a KV page of this model has shape {tuple(layer.shape[1:])}, not {heads} heads "
                "first: make --prefill-tp and --decode-tp equal"
            )

    # --- peers' memory ------------------------------------------------------------------------

    def load(self, loads: list[Load | PrefixLoad | PoolLoad]) -> None:
        with self._peers_lock:
            for load in loads:
                try:
                    self._load(load)
                except IpcError as error:
                    if not (isinstance(load, Load) and load.ahead):
                        self._failed_blocks.update(load.dst_blocks)
                    self._report.failed.append(LoadFailed(load.request_id, load.tokens, str(error)))
        void_draws(self._failed_blocks)

    def _load(self, load: Load | PrefixLoad | PoolLoad) -> None:
        if isinstance(load, PoolLoad):
            assert self._pool is not None
            self._report.done.append(self._pool.load(load))
            return
        path = self._path_from(load.entry.owner)
        path.connect(load)
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

    def _check(self, load: Load | PrefixLoad) -> None:
        if isinstance(load, PrefixLoad):
            sound = self._index.prefixes.still(load.held)
            if sound < len(load.src_blocks):
                raise StaleRead(
                    f"block {sound} of {len(load.src_blocks)} to copy from slot {load.held.owner} "
                    "was given to another request before it was copied"
                )
        elif not self._index.validate(load.entry):
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
