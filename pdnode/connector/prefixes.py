"""Full KV blocks by content, node-wide: what this engine holds for others, and what it takes of theirs.

    allocated  blocks that vLLM has just handed out are withdrawn: they will get other bytes
    step       blocks that are known to be full and in memory are published, by vLLM's block hash
    finished   the rest of them; they stay published until vLLM hands them out again
    filled     blocks that no request has yet, and a follower has filled, are published
    match      which peer holds most of what lies behind the local prefix
    loaded     what was taken, or failed to be and is computed by vLLM after all

A block is published one step after the one that filled it, when the scheduler has counted it: a step
over a load that failed fills blocks with nonsense, and vLLM then counts their tokens back. That is
later than vLLM's own prefix cache, which knows blocks before they are computed.

Nothing pins a peer's block. The load is in the same step as the look-up, so its owner would hear of
a pin when the copy is done; and what it evicts meanwhile has another generation, which the reader
sees after the copy. So it is over the staged path too: there the owner's worker sends, which knows no
more of a request than we do.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

from ipc.errors import IndexFull
from pdnode.connector.metadata import LoadReport, PrefixLoad
from pdnode.connector.settings import ConnectorSettings
from pdnode.connector.unsure import computed_after_all
from pdnode.kvpath import MAPPED
from pdnode.vllm_compat import init_logger

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from ipc.index import Index
    from ipc.prefixes import Held
    from pdnode.vllm_compat import BlockPool, Request

logger = init_logger(__name__)

LEFT_ALONE_S = 2.0
"""A peer that has to send, after a copy from it failed: it may be slow, stopped, or short of blocks."""
REMEMBERED = 4
"""Evicted hashes that are remembered, as a multiple of the engine's blocks: did they come back?"""


class Running:
    """A request with blocks. ``published``: how many of its first blocks need no more looking at;
    ``computed_from``: those before it were taken, not computed."""

    __slots__ = ("block_ids", "computed_from", "published", "request")

    def __init__(self, request: Request, block_ids: list[int], held: int, computed: int) -> None:
        self.request = request
        self.block_ids = block_ids
        # Whoever filled the local prefix publishes it, and knows when it is filled.
        self.published = held
        self.computed_from = computed


class Prefixes:
    def __init__(self, settings: ConnectorSettings, index: Index, block_size: int) -> None:
        self._settings = settings
        self._index = index
        self._table = index.prefixes
        self._block_size = block_size
        self._mapped = {slot for slot, path in enumerate(settings.kv_paths) if path in MAPPED}
        self._peers = [slot for slot in range(len(settings.kv_paths)) if self._may_read(slot)]
        self._left_alone: dict[int, float] = {}
        """Slot -> until when, in monotonic seconds."""
        self._blocks: BlockPool
        self._unsure: Container[str]
        self._hashes_of_pool: object = None
        self._running: dict[str, Running] = {}
        self._unpublished: set[str] = set()
        """Requests that may have a full block more than is published."""
        self._matched: dict[str, tuple[int, Held]] = {}
        self._loads: list[PrefixLoad] = []
        self._loading: dict[str, tuple[Request, PrefixLoad]] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}

    def bind_block_pool(self, blocks: BlockPool, unsure: Container[str]) -> None:
        """``unsure``: requests of which a load is under way, of whatever kind."""
        self._blocks, self._unsure = blocks, unsure
        self._hashes_of_pool = blocks.cached_block_hash_to_block
        self._table.own(
            blocks=blocks.num_gpu_blocks,
            boot_id=self._settings.boot_id,
            flag=self._settings.kv_flag,
        )

    @property
    def loading(self) -> bool:
        return bool(self._loading)

    @property
    def published(self) -> int:
        """Blocks of this engine that others may take."""
        return len(self._hash_of)

    # --- take ---------------------------------------------------------------------------------

    def match(self, request: Request, local_tokens: int) -> int:
        """Tokens in full blocks beyond ``local_tokens`` that one peer holds, without a gap."""
        self._matched.pop(request.request_id, None)
        if request.skip_reading_prefix_cache or not self._peers or not self._blocks.enable_caching:
            return 0
        # As vLLM's own prefix cache: at least one token, hence its whole block, is computed.
        first, last = (n // self._block_size for n in (local_tokens, request.num_tokens - 1))
        keys = request.block_hashes[first:last]
        if not keys:
            return 0
        lengths = self._table.lengths(keys, self._now_read())
        peer = max(lengths, key=lambda slot: (lengths[slot], slot in self._mapped), default=None)
        if peer is None or not lengths[peer]:
            return 0
        held = self._table.take(keys[: lengths[peer]], peer)
        self._matched[request.request_id] = (local_tokens, held)
        return len(held.blocks) * self._block_size

    def _may_read(self, slot: int) -> bool:
        settings = self._settings
        # The staged path knows whole pages only.
        like_ours = settings.ranks_of(slot) == settings.ranks_of(settings.slot)
        return slot != settings.slot and (slot in self._mapped or like_ours)

    def _now_read(self) -> list[int]:
        if not self._left_alone:
            return self._peers
        now = time.monotonic()
        self._left_alone = {slot: t for slot, t in self._left_alone.items() if t > now}
        return [slot for slot in self._peers if slot not in self._left_alone]

    def allocated(
        self,
        request: Request,
        block_ids: list[int],
        local_tokens: int,
        taken_tokens: int,
        *,
        filled: int,
    ) -> None:
        """``taken_tokens``: of those that ``match`` found, how many vLLM gave blocks to. ``filled``:
        tokens that this engine will not compute, wherever they come from."""
        request_id, size = request.request_id, self._block_size
        matched_tokens, held = self._matched.pop(request_id, (0, None))
        first, count = local_tokens // size, taken_tokens // size
        self.handed_out(block_ids[first:])
        self._running[request_id] = Running(request, list(block_ids), first, filled // size)
        self._unpublished.add(request_id)
        if not count or held is None:
            return
        assert matched_tokens == local_tokens, (matched_tokens, local_tokens)
        load = PrefixLoad(
            request_id=request_id,
            held=held.part(0, count),
            dst_blocks=tuple(block_ids[first : first + count]),
            tokens=taken_tokens,
        )
        assert len(load.src_blocks) == len(load.dst_blocks), load
        self._loads.append(load)
        self._loading[request_id] = (request, load)

    def step(self, scheduled_tokens: Mapping[str, int]) -> list[PrefixLoad]:
        """What this step's workers copy before the forward."""
        for request_id in [*self._unpublished]:
            running = self._running[request_id]
            self._publish(running)
            tokens = running.request.num_computed_tokens + scheduled_tokens.get(request_id, 0)
            if running.published >= tokens // self._block_size:
                self._unpublished.discard(request_id)
        loads, self._loads = self._loads, []
        return loads

    def loaded(self, report: LoadReport) -> LoadReport:
        """What the report says of other loads."""
        ours = self._loading.keys() & {line.request_id for line in (*report.done, *report.failed)}
        if not ours:
            return report
        failed = {line.request_id: line for line in report.failed if line.request_id in ours}
        done = [line for line in report.done if line.request_id in ours]
        loads = {request_id: self._loading.pop(request_id) for request_id in ours}
        for request_id, line in failed.items():
            request, load = loads[request_id]
            computed_after_all(request, load.tokens)
            logger.warning("a prefix of %s was not taken: %s", request_id, line.reason)
            if load.held.owner not in self._mapped:
                self._left_alone[load.held.owner] = time.monotonic() + LEFT_ALONE_S
        served = [load for rid, (_, load) in loads.items() if rid not in failed]
        self._index.add_counters(
            self._settings.slot,
            prefix_pulls=len(served),
            prefix_tokens=sum(load.tokens for load in served),
            prefix_bytes=sum(line.nbytes for line in done),
            prefix_ns=sum(line.duration_ns for line in done),
            prefix_failures=len(failed),
        )
        others = [line for line in report.failed if line.request_id not in ours]
        return replace(report.without(ours), failed=others)

    # --- give ---------------------------------------------------------------------------------

    def grow(self, request_id: str, new_block_ids: list[int]) -> None:
        self.handed_out(new_block_ids)
        running = self._running.get(request_id)
        if running is not None:
            running.block_ids.extend(new_block_ids)
            self._unpublished.add(request_id)

    def finished(self, request_id: str) -> None:
        """It ended; its blocks stay what they are until vLLM hands them out again."""
        running = self._running.get(request_id)
        if running is not None:
            self._publish(running)
        self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """It ended, or was preempted."""
        self._running.pop(request_id, None)
        self._unpublished.discard(request_id)
        self._matched.pop(request_id, None)

    def filled(self, keys: list[bytes], block_ids: list[int]) -> None:
        """A copy into these blocks, which are not a request's, is known to have worked."""
        for key, block_id in zip(keys, block_ids, strict=True):
            self._evicted.pop(key, None)
            if not self._offer(key, block_id):
                return

    def check_reset(self) -> None:
        """vLLM's prefix cache was emptied (the weights may be others now): so is ours."""
        if self._blocks.cached_block_hash_to_block is not self._hashes_of_pool:
            self.reset()

    def reset(self) -> None:
        self._hashes_of_pool = self._blocks.cached_block_hash_to_block
        self._table.withdraw_all()
        self._hash_of.clear()
        self._evicted.clear()

    def _publish(self, running: Running) -> None:
        request = running.request
        # vLLM counts what a load is to bring as computed from the moment it is asked for.
        if not self._blocks.enable_caching or request.request_id in self._unsure:
            return
        # What is in flight on the device is not in memory yet.
        done = request.num_computed_tokens - request.num_in_flight_tokens
        hashes = request.block_hashes
        full = min(done // self._block_size, len(hashes), len(running.block_ids))
        returned = 0
        for i in range(running.published, full):
            if self._evicted.pop(hashes[i], 0) is None:
                returned += i >= running.computed_from
            if not self._offer(hashes[i], running.block_ids[i]):
                break
        running.published = max(running.published, full)
        if returned:
            self._index.add_counters(self._settings.slot, evicted_returns=returned)

    def _offer(self, key: bytes, block_id: int) -> bool:
        try:
            self._table.publish(key, block_id)
        except IndexFull as error:
            logger.error("%s", error)
            self._index.add_counters(self._settings.slot, index_full=1)
            return False
        self._hash_of[block_id] = key
        return True

    def handed_out(self, block_ids: list[int]) -> None:
        """vLLM gave these blocks away: they will get other bytes."""
        gone = 0
        for block_id in block_ids:
            key = self._hash_of.pop(block_id, None)
            if key is not None:
                self._table.withdraw(block_id)
                self._evicted[key] = None
                gone += 1
        if not gone:
            return
        while len(self._evicted) > REMEMBERED * self._blocks.num_gpu_blocks:
            self._evicted.popitem(last=False)
        self._index.add_counters(self._settings.slot, blocks_evicted=gone)
