"""Blocks that a load is to fill are kept out of vLLM's prefix cache until it is known to have worked.

vLLM puts full blocks into its prefix cache when it hands them out, before anything is in them. That is
sound for what the same step computes. A load may fail; then vLLM has the request that asked for it
compute the tokens, in as many steps as that takes, while another request that found the blocks in the
cache goes on over whatever is in them; and when the first one's client leaves, they stay in the cache
as they are. So nobody else finds them, nor what was computed behind them, before the load is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pdnode.vllm_compat import drop_in_flight

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdnode.vllm_compat import BlockPool, Request


class Filling(NamedTuple):
    """A request's blocks, and how many of them hold what they say, whatever becomes of the load."""

    request: Request
    block_ids: list[int]
    sure: int


class Unsure:
    """``cached``: how many of a request's first blocks vLLM has put into its prefix cache, by id."""

    def __init__(self, blocks: BlockPool, block_size: int, cached: Callable[[str], int]) -> None:
        self._blocks = blocks
        self._cached = cached
        self._block_size = block_size
        self._filling: dict[str, Filling] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._filling

    def begin(self, request: Request, block_ids: list[int], sure: int) -> None:
        """vLLM has just given the request its blocks, and a load will fill those behind ``sure``."""
        self._filling[request.request_id] = Filling(request, list(block_ids), sure)
        self._blocks.evict_blocks(set(block_ids[sure:]))

    def grow(self, request_id: str, new_block_ids: list[int]) -> None:
        filling = self._filling.get(request_id)
        if filling is not None:
            filling.block_ids.extend(new_block_ids)

    def step(self) -> None:
        """vLLM has scheduled: what it has put into its cache meanwhile is as unsure."""
        for filling in self._filling.values():
            self._evict(filling)

    def worked(self, request_id: str) -> None:
        """Everything that vLLM takes for cached is."""
        filling = self._filling.pop(request_id, None)
        if filling is None or not self._blocks.enable_caching:
            return
        self._evict(filling)
        blocks = [self._blocks.blocks[i] for i in filling.block_ids]
        # Not one more than vLLM counts: it would put that one in itself, and trip over it.
        full = self._cached(request_id)
        self._blocks.cache_full_blocks(
            filling.request, blocks, filling.sure, full, self._block_size, 0
        )

    def failed(self, request_id: str) -> None:
        """The request computes those blocks, and has them for itself."""
        filling = self._filling.get(request_id)
        if filling is not None:
            drop_in_flight(filling.request)
            self.forget(request_id)

    def preempted(self, request_id: str) -> None:
        """Its blocks are gone, and vLLM would still hand on the token of the step that loads."""
        self.failed(request_id)

    def forget(self, request_id: str) -> None:
        """It ended."""
        filling = self._filling.pop(request_id, None)
        if filling is not None:
            self._evict(filling)

    def _evict(self, filling: Filling) -> None:
        self._blocks.evict_blocks(set(filling.block_ids[filling.sure :]))


def computed_after_all(request: Request, tokens: int) -> None:
    """A load of ``tokens`` failed. The front end is told that they were computed, and tells the client."""
    stats = request.prefill_stats
    if stats is not None:
        # vLLM fills them in when it first schedules a request: a second load is not in them.
        tokens = min(tokens, stats.num_external_cached_tokens)
        stats.num_cached_tokens -= tokens
        stats.num_external_cached_tokens -= tokens
        stats.num_computed_tokens += tokens
