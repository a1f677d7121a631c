"""Decode-first: copy a prompt's KV while its prefill engine is still computing it.

A follower is a request that vLLM never schedules. It stands for the decode leg that will come, and
brings the hashes of the prompt's blocks; what it copies becomes this engine's prefix cache, where the
decode leg finds it like any other prefix. So the decode leg is the same as without a follower, only
shorter, and a follower may fail, give up or die at any moment and cost nothing but time.

    begin       the front end says which transfer is to be followed; nothing is held
    step        the transfer's entry is there: blocks for the whole prompt are reserved, or not
                  (no room: this prompt is not followed)
                more of it is ready: one copy of the full blocks that came since
    loaded      they are here, and were the entry's to the end: they join the prefix cache, and are
                shown to peers
    yield_room  somebody who decodes needs blocks: followers give back theirs, and stop
    end         the decode leg has its blocks, or the request is over

A follower never keeps anybody waiting: a decode leg could be waiting for its blocks, and it for a
prefill engine whose blocks wait for that decode leg. What is complete is left to the decode leg.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from ipc.index import Index
from pdnode.connector.metadata import Load, LoadReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdnode.vllm_compat import BlockPool, KVCacheBlock, Request

DO_FOLLOW = "do_follow"
TRANSFER_ID = "transfer_id"
REMOTE_SLOT = "remote_slot"


@dataclass(slots=True)
class Follower:
    request: Request
    transfer_id: str
    owner: int
    blocks: list[KVCacheBlock] = field(default_factory=list)
    """Held by reference, in the order of the prompt; all its full blocks, or none."""
    filled: int = 0
    """The first so many of them are in the prefix cache."""
    load: Load | None = None
    over: bool = False


class Following:
    """All followers of one engine. ``block_size`` in tokens; ``taken`` is told of each block that
    will get other bytes, ``filled`` of those that have theirs: (hashes, blocks)."""

    def __init__(
        self,
        index: Index,
        slot: int,
        block_size: int,
        pool: BlockPool,
        taken: Callable[[list[int]], None],
        filled: Callable[[list[bytes], list[int]], None],
    ) -> None:
        self._index = index
        self._slot = slot
        self._block_size = block_size
        self._pool = pool
        self._taken, self._filled = taken, filled
        self._followers: dict[str, Follower] = {}
        """By transfer id."""
        self._under_way: set[str] = set()
        """Request ids, ended ones included, of loads that were not reported yet."""

    def begin(self, request: Request) -> None:
        params = request.kv_transfer_params or {}
        if params.get(DO_FOLLOW):
            transfer_id = params[TRANSFER_ID]
            self._followers[transfer_id] = Follower(request, transfer_id, params[REMOTE_SLOT])

    def is_follower(self, request: Request) -> bool:
        return bool((request.kv_transfer_params or {}).get(DO_FOLLOW))

    def is_copying(self, transfer_id: str) -> bool:
        """A decode leg that asks now would copy the same bytes a second time."""
        follower = self._followers.get(transfer_id)
        return follower is not None and bool(follower.blocks) and follower.load is not None

    # --- copy -----------------------------------------------------------------------------------

    def step(self, running: int) -> list[Load]:
        """What this step's worker is to copy. ``running``: requests that may need a block soon."""
        loads = (self._next_load(follower, running) for follower in self._followers.values())
        return [load for load in loads if load is not None]

    def _next_load(self, follower: Follower, running: int) -> Load | None:
        if follower.over or follower.load is not None:
            return None
        entry = self._index.select(follower.transfer_id, owner=follower.owner)
        if entry is None or entry.complete:
            return None
        if not follower.blocks and not self._reserve(follower, running):
            return None
        first, last = follower.filled, entry.tokens_ready // self._block_size
        last = min(last, len(follower.blocks))
        if last <= first:
            return None
        follower.load = Load(
            request_id=follower.request.request_id,
            entry=entry,
            src_blocks=tuple(entry.block_ids[first:last]),
            dst_blocks=tuple(block.block_id for block in follower.blocks[first:last]),
            tokens=(last - first) * self._block_size,
            ahead=True,
        )
        self._under_way.add(follower.request.request_id)
        return follower.load

    def _reserve(self, follower: Follower, running: int) -> bool:
        request = follower.request
        # The decode leg computes at least one token itself, but of its whole prompt, which is longer.
        hashes = request.block_hashes[: request.num_prompt_tokens // self._block_size]
        looked_up = (self._pool.get_cached_block(block_hash, [0]) for block_hash in hashes)
        held = [blocks[0] for blocks in takewhile(lambda blocks: blocks is not None, looked_up)]
        lacking = len(hashes) - len(held)
        room = self._pool.get_num_free_blocks() - sum(block.ref_cnt == 0 for block in held)
        if not lacking or lacking + running > room:
            follower.over = True
            self._index.add_counters(self._slot, follow_no_room=bool(lacking))
            return False
        self._pool.touch(held)
        fresh = self._pool.get_new_blocks(lacking)
        self._taken([block.block_id for block in fresh])
        follower.blocks = [*held, *fresh]
        follower.filled = len(held)
        self._index.add_counters(self._slot, follows=1)
        return True

    def loaded(self, report: LoadReport) -> set[str]:
        """The request ids in ``report`` that are followers'."""
        failed = {line.request_id for line in report.failed}
        mine = self._under_way & ({line.request_id for line in report.done} | failed)
        self._under_way -= mine
        for follower in self._followers.values():
            if follower.request.request_id in mine:
                self._arrived(follower, follower.request.request_id in failed)
        return mine

    def _arrived(self, follower: Follower, failed: bool) -> None:
        load, follower.load = follower.load, None
        assert load is not None
        if failed:
            self._give_back(follower)
        elif follower.blocks:
            # By this step the workers are past the copy, so the hashes speak the truth.
            full = follower.filled + len(load.dst_blocks)
            self._pool.cache_full_blocks(
                follower.request, follower.blocks, follower.filled, full, self._block_size, 0
            )
            # The decode leg will not show them: to it they are a prefix that somebody else filled.
            self._filled(
                follower.request.block_hashes[follower.filled : full], list(load.dst_blocks)
            )
            follower.filled = full

    # --- let go ---------------------------------------------------------------------------------

    def yield_room(self) -> bool:
        """True when there was something to give back."""
        holding = [follower for follower in self._followers.values() if follower.blocks]
        for follower in holding:
            self._give_back(follower)
        if holding:
            self._index.add_counters(self._slot, follow_yielded=len(holding))
        return bool(holding)

    def end(self, transfer_id: str) -> None:
        follower = self._followers.pop(transfer_id, None)
        if follower is not None:
            self._give_back(follower)

    def ended(self, request: Request) -> None:
        """vLLM is done with a request, which may be a follower."""
        if self.is_follower(request):
            self.end((request.kv_transfer_params or {})[TRANSFER_ID])

    def _give_back(self, follower: Follower) -> None:
        # Also while a copy into them is under way: whoever gets them next writes in a later step.
        blocks, follower.blocks, follower.over = follower.blocks, [], True
        self._pool.free_blocks(reversed(blocks))
