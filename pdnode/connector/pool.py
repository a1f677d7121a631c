"""The node's KV pool as the scheduler sees it: what to take from it, and what to put in.

    match      full blocks behind the local prefix that the pool holds, by vLLM's own block hashes
    allocated  the load: which keys go into which blocks, before this step's forward
    step       blocks that are full after this step's forward go on the list; some of it is stored
    loaded     a load that failed: nothing of what was computed meanwhile may go into the pool
    forget     the request ended or was preempted

A block is named for storing only while vLLM's block pool still carries its hash, and only while no
load is under way: a forward over a load that fails computes nonsense in every block behind it, and
the scheduler learns of that a step later (two with asynchronous scheduling). What could not be
stored at once waits for a later step; an idle engine takes none.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from ipc.pool import Pool
from pdnode.connector.metadata import LoadReport, PoolLoad, Store
from pdnode.connector.settings import ConnectorSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdnode.vllm_compat import BlockPool, Request

STORE_STEP_BYTES = 64 << 20
"""Copied into the pool after one step at most: milliseconds, where a prefill chunk costs more."""


class Running:
    """A request with blocks. ``offered``: how many of them were looked at for storing."""

    __slots__ = ("block_ids", "offered", "request")

    def __init__(self, request: Request, block_ids: list[int]) -> None:
        self.request = request
        self.block_ids = block_ids
        self.offered = 0


class NodePool:
    def __init__(self, settings: ConnectorSettings, ranks: int, block_size: int) -> None:
        self._slot = settings.slot
        self._block_size = block_size
        # Every rank has its part of each block in a pool of its own.
        self._ranks = [
            Pool.attach(
                settings.pool_of(rank),
                me=settings.slot,
                fingerprint=bytes.fromhex(settings.fingerprint),
            )
            for rank in range(ranks)
        ]
        self._blocks: BlockPool
        self._running: dict[str, Running] = {}
        self._matched: dict[str, tuple[int, list[bytes]]] = {}
        self._loads: list[PoolLoad] = []
        self._loading: set[str] = set()
        self._to_store: dict[bytes, int] = {}

    def bind_block_pool(self, blocks: BlockPool) -> None:
        self._blocks = blocks

    # --- take ---------------------------------------------------------------------------------

    def match(self, request: Request, local_tokens: int) -> int:
        """Tokens in full blocks beyond ``local_tokens`` that the pool holds, without a gap."""
        if request.skip_reading_prefix_cache:
            return 0
        # As vLLM's own prefix cache: at least one token, hence its whole block, is computed.
        first, last = (n // self._block_size for n in (local_tokens, request.num_tokens - 1))
        keys = list(takewhile(self._has, request.block_hashes[first:last]))
        self._matched[request.request_id] = (local_tokens, keys)
        return len(keys) * self._block_size

    def _has(self, key: bytes) -> bool:
        return all(pool.select(key) is not None for pool in self._ranks)

    def allocated(self, request: Request, block_ids: list[int], pool_tokens: int) -> None:
        """``pool_tokens``: of those that ``match`` found, how many vLLM gave blocks to."""
        request_id = request.request_id
        self._running[request_id] = Running(request, list(block_ids))
        local_tokens, keys = self._matched.pop(request_id, (0, []))
        first, count = local_tokens // self._block_size, pool_tokens // self._block_size
        if not count:
            return
        load = PoolLoad(
            request_id=request_id,
            keys=tuple(keys[:count]),
            dst_blocks=tuple(block_ids[first : first + count]),
            tokens=pool_tokens,
        )
        assert len(load.keys) == len(load.dst_blocks), load
        self._loads.append(load)
        self._loading.add(request_id)

    def grow(self, request_id: str, new_block_ids: list[int]) -> None:
        running = self._running.get(request_id)
        if running is not None:
            running.block_ids.extend(new_block_ids)

    def forget(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        self._matched.pop(request_id, None)

    # --- every step ---------------------------------------------------------------------------

    def step(
        self, scheduled_tokens: Mapping[str, int], *, peers_loading: bool
    ) -> tuple[list[PoolLoad], list[Store]]:
        """What this step's workers load before the forward, and store after it."""
        for request_id, tokens in scheduled_tokens.items():
            running = self._running.get(request_id)
            if running is not None:
                self._look(running, running.request.num_computed_tokens + tokens)
        loads, self._loads = self._loads, []
        unsure = peers_loading or self._loading or not scheduled_tokens
        return loads, [] if unsure else self._stores()

    def _look(self, running: Running, tokens: int) -> None:
        """``tokens``: computed once this step is done. The last of them may not be known yet."""
        hashes = running.request.block_hashes
        full = min(tokens // self._block_size, len(hashes), len(running.block_ids))
        for i in range(running.offered, full):
            # Held already counts as use: the pool keeps what the engines go on using.
            if not self._has(hashes[i]):
                self._to_store[hashes[i]] = running.block_ids[i]
        running.offered = max(running.offered, full)

    def _stores(self) -> list[Store]:
        """Oldest first, within the step's bytes; those whose block was reused are left out."""
        room, stores = self._room() if self._to_store else 0, []
        while self._to_store and len(stores) < room:
            key = next(iter(self._to_store))
            block_id = self._to_store.pop(key)
            held = self._blocks.blocks[block_id].block_hash
            if held is not None and held.startswith(key):
                stores.append(Store(key, block_id))
        return stores

    def _room(self) -> int:
        layout = self._ranks[0].kv_layout(self._slot)
        return max(1, STORE_STEP_BYTES // (layout.page_bytes * layout.num_layers))

    def loaded(self, report: LoadReport) -> tuple[LoadReport, dict[str, int]]:
        """(what the report says of other loads, counters to add)."""
        if report.failed:
            self._to_store.clear()
            for running in self._running.values():
                running.offered = 0
        # A load of several ranks is told once per rank, all in one report.
        ours = self._loading & {line.request_id for line in (*report.done, *report.failed)}
        self._loading -= ours
        failed = {line.request_id: line for line in report.failed if line.request_id in ours}
        tokens = {line.request_id: line.tokens for line in report.done if line.request_id in ours}
        served = tokens.keys() - failed.keys()
        counters = {
            "pool_hits": len(served),
            "pool_tokens": sum(tokens[request_id] for request_id in served),
            "pool_stored": report.stored // report.ranks,
        }
        return report.without(ours), counters

    def close(self) -> None:
        for pool in self._ranks:
            pool.close()
