"""What this engine's requests hold, as the index shows it: one entry per running request.

    begin      the request got its first blocks        entry: its blocks, nothing ready
    grow       it got more blocks                      entry: all blocks, tokens computed so far
    progress   its first step is done, or a later      entry: tokens computed so far
               one of a prefill leg
    complete   a prefill leg is done                   entry complete; blocks pinned by reference
    withdraw   it ended, or was preempted              entry gone BEFORE vLLM may reuse a block
    release    a peer took it, or the lease ran out    entry gone, pin given back

An entry exists from the first block on so that a peer can pull while we compute (decode-first), and
so that the KV of an engine that was killed can still be found. It is written only when a block is
added, or a first step or a prefill leg's chunk is done: at most one block of work is not in it, and
a decode step costs nothing.

Pins are block references, not vLLM's "delay free": a finished request leaves vLLM at once, so an
idle P sleeps instead of spinning until D answers, and an abort of an unknown id is harmless.

What waits for a reader may hold half of the blocks, prompts under way included (:meth:`has_room`):
while D has no room, P still has some for everything that ends on P.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ipc.errors import IndexFull
from ipc.index import Index
from ipc.records import Ticket
from pdnode.connector.settings import ConnectorSettings
from pdnode.vllm_compat import init_logger

if TYPE_CHECKING:
    from pdnode.vllm_compat import BlockPool, Request

logger = init_logger(__name__)

HELD_PART = 2
"""One n-th of the blocks may be held for readers."""

RUNNING_LEASE_S = 365 * 86400.0
"""A running request's entry ends with the request; only a finished one's waits for a reader."""


@dataclass(slots=True)
class Offer:
    request: Request
    ticket: Ticket
    block_ids: list[int]
    given: int
    """Tokens this request need not compute: found in the prefix cache, or copied from a peer."""
    tokens_ready: int = 0


class Offers:
    def __init__(self, settings: ConnectorSettings, index: Index, pool: BlockPool) -> None:
        self._settings = settings
        self._index = index
        self._pool = pool
        self._running: dict[str, Offer] = {}
        self._pins: list[tuple[Ticket, list]] = []
        self._pinned_blocks = 0
        self._promised: dict[str, int] = {}
        """Running prefill legs, and the blocks that each will pin. A peer may be copying what is ready
        of them while the rest is computed."""
        self._unshown: set[str] = set()
        """Running requests in whose entry nothing is ready yet."""

    def has_room(self, blocks: int) -> bool:
        """May another prompt of so many blocks start, to be held for a reader when it is done?

        A prompt larger than the limit may, when nothing else is held.
        """
        held = self._pinned_blocks + sum(self._promised.values())
        return not held or held + blocks <= self._pool.num_gpu_blocks // HELD_PART

    def promise(self, request_id: str, blocks: int) -> None:
        """The request, which has begun, will be held for a reader."""
        self._promised[request_id] = blocks

    @property
    def pins(self) -> int:
        """Finished prompts whose blocks are kept for a reader."""
        return len(self._pins)

    @property
    def entries(self) -> int:
        """Of the index, in use for running requests and pins."""
        return len(self._running) + len(self._pins)

    def begin(self, request: Request, block_ids: list[int], given: int) -> None:
        """``given``: tokens of these blocks that somebody else computes or has computed."""
        self.withdraw(request.request_id)
        total = request.num_prompt_tokens + (request.max_tokens or 1) - 1
        try:
            ticket = self._index.insert(
                request.request_id,
                boot_id=self._settings.boot_id,
                block_ids=block_ids,
                tokens_ready=0,
                tokens_total=total,
                lease_s=RUNNING_LEASE_S,
            )
        except IndexFull as error:
            self._full(error)
            return
        self._running[request.request_id] = Offer(request, ticket, list(block_ids), given)
        self._unshown.add(request.request_id)

    def grow(self, request_id: str, new_block_ids: list[int]) -> None:
        offer = self._running.get(request_id)
        if offer is None:
            return
        offer.block_ids.extend(new_block_ids)
        self._publish(offer, _done(offer))

    def progress(self) -> None:
        """A step is done, and the scheduler has counted what it computed."""
        for request_id in self._promised.keys() | self._unshown:
            offer = self._running.get(request_id)
            if offer is not None and (done := _done(offer)) > offer.tokens_ready:
                self._publish(offer, done)

    def _publish(self, offer: Offer, tokens_ready: int) -> bool:
        try:
            self._index.publish(offer.ticket, block_ids=offer.block_ids, tokens_ready=tokens_ready)
        except IndexFull as error:
            self._full(error)
            self.withdraw(offer.request.request_id)
            return False
        offer.tokens_ready = tokens_ready
        if tokens_ready:
            self._unshown.discard(offer.request.request_id)
        return True

    def complete(self, request: Request, block_ids: list[int]) -> bool:
        """A prefill leg's whole prompt is in memory: pin it until a peer has it. False: not offered."""
        offer = self._running.get(request.request_id)
        if offer is None:
            return False
        offer.block_ids = list(block_ids)
        if not self._publish(offer, request.num_prompt_tokens):
            return False
        del self._running[request.request_id]
        self._index.renew(offer.ticket, self._settings.lease_s)
        blocks = [self._pool.blocks[i] for i in block_ids]
        self._pool.touch(blocks)
        self._pins.append((offer.ticket, blocks))
        self._pinned_blocks += len(blocks)
        self._promised.pop(request.request_id, None)
        return True

    def withdraw(self, request_id: str) -> None:
        self._promised.pop(request_id, None)
        self._unshown.discard(request_id)
        offer = self._running.pop(request_id, None)
        if offer is not None:
            self._index.remove(offer.ticket)

    def release(self) -> None:
        """Give back the blocks of pins that a reader took, or whose lease ran out."""
        still, expired = [], 0
        for ticket, blocks in self._pins:
            how = self._index.released(ticket)
            if how is None:
                still.append((ticket, blocks))
                continue
            expired += how == "expired"
            self._index.remove(ticket)
            self._pool.free_blocks(reversed(blocks))
            self._pinned_blocks -= len(blocks)
        self._pins = still
        if expired:
            self._expired(expired)

    def _expired(self, count: int) -> None:
        logger.warning(
            "%d hand-offs were not fetched within --lease %.0f s; their KV is given up",
            count,
            self._settings.lease_s,
        )
        self._index.add_counters(self._settings.slot, leases_expired=count)

    def _full(self, error: IndexFull) -> None:
        logger.error("%s", error)
        self._index.add_counters(self._settings.slot, index_full=1)


def _done(offer: Offer) -> int:
    """Tokens whose KV is in memory.

    What was given counts with the request's own first token and not before: a block is in vLLM's
    prefix cache from the step that will fill it, where another request of the same step (a sibling)
    finds it, and copies of a peer's blocks end in that step too.
    """
    # What is in flight on the device is not in memory yet.
    done = offer.request.num_computed_tokens - offer.request.num_in_flight_tokens
    return done if done > offer.given else 0
