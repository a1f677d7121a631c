"""The node's KV pool as one worker uses it: blocks in, blocks out, by key.

The worker owns this engine's share of its rank's pool; the scheduler only looks.
"""

from __future__ import annotations

import threading
import time

from ipc.copy import HostCopier, plan
from ipc.errors import StaleRead
from ipc.pool import Hit, Pool
from pdnode.connector.metadata import LoadDone, PoolLoad, Store
from pdnode.connector.paths.base import Home

POOL = -1
"""In the place of a peer's slot, in reports."""


class PoolWorker:
    def __init__(self, home: Home) -> None:
        self._home = home
        self._slot = home.settings.slot
        self._pool = Pool.attach(
            home.settings.pool_of(home.rank),
            me=self._slot,
            fingerprint=bytes.fromhex(home.settings.fingerprint),
        )
        self._pool.own(home.layout.page_bytes, home.layout.num_layers)
        self._copier = HostCopier()
        # Seconds for a large pool, and first copies are only slower without it.
        threading.Thread(target=self._pool.populate, name="pdnode-pool", daemon=True).start()

    def load(self, load: PoolLoad) -> LoadDone:
        """Copy the blocks of the keys into ours. Raises IpcError: at least one is not there."""
        hits = [self._find(load, key) for key in load.keys]
        begin_ns = time.monotonic_ns()
        nbytes = sum(self._copy(load, hits, owner) for owner in {hit.owner for hit in hits})
        duration_ns = time.monotonic_ns() - begin_ns
        # Again, now that the bytes are here: a page may have got another block meanwhile.
        for hit in hits:
            if not self._pool.validate(hit):
                raise StaleRead(f"a block in pool share {hit.owner} was evicted while it was read")
        return LoadDone(load.request_id, POOL, nbytes, duration_ns, load.tokens)

    def _find(self, load: PoolLoad, key: bytes) -> Hit:
        hit = self._pool.select(key)
        if hit is None:
            raise StaleRead(f"block {key.hex()} of {load.request_id} left the pool before its load")
        return hit

    def _copy(self, load: PoolLoad, hits: list[Hit], owner: int) -> int:
        both = zip(hits, load.dst_blocks, strict=True)
        pairs = [(hit.page, block_id) for hit, block_id in both if hit.owner == owner]
        pages, blocks = zip(*pairs, strict=True)
        copy = plan(self._pool.kv_layout(owner), self._home.layout, pages, blocks)
        return self._copier.copy(copy, self._pool, self._home.region)

    def store(self, stores: list[Store]) -> int:
        """Copy our blocks into the own share, one copy for all; how many the pool did not have."""
        reserved = [(self._pool.reserve(key), key, block_id) for key, block_id in stores]
        pages = [page for page, _, _ in reserved if page is not None]
        blocks = [block_id for page, _, block_id in reserved if page is not None]
        copy = plan(self._home.layout, self._pool.kv_layout(self._slot), blocks, pages)
        self._copier.copy(copy, self._home.region, self._pool)
        for page, key, _ in reserved:
            if page is not None:
                self._pool.publish(key, page)
        return len(pages)

    def close(self) -> None:
        self._pool.close()
