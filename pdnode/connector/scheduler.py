"""Scheduler half: runs in the engine-core process, single-threaded inside vLLM's step loop.

Life of a hand-off here (both ends run this code; every engine is ``kv_both``):

1. P ``allocated``: the request's entry appears in the index, and grows with its blocks
2. P ``finished``: the entry is complete, its blocks are pinned
3. D ``match``: select; tell vLLM how many tokens need no computing
4. D ``allocated``: pair P's blocks with the ones vLLM just gave the request
5. D ``step``: hand the pairs to the workers, which copy before this step's forward
6. D ``loaded``: drop, i.e. acknowledge to P
7. P ``idle``: the next turn of P's loop gives the blocks back

Decode-first, D begins before 2, with a follower (following.py); 3 then finds less to ask for.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ipc.index import Index
from ipc.records import Entry
from pdnode.connector.following import REMOTE_SLOT, TRANSFER_ID, Following
from pdnode.connector.metadata import Load, LoadReport, PdMetadata
from pdnode.connector.offers import Offers
from pdnode.connector.pool import NodePool
from pdnode.connector.prefixes import Prefixes
from pdnode.connector.settings import ConnectorSettings
from pdnode.connector.unsure import Unsure, computed_after_all
from pdnode.timeline import HANDOFF
from pdnode.vllm_compat import RequestStatus, init_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdnode.vllm_compat import BlockPool, Request, SchedulerOutput

logger = init_logger(__name__)

DO_REMOTE_DECODE = "do_remote_decode"
DO_REMOTE_PREFILL = "do_remote_prefill"


class SchedulerHalf:
    def __init__(self, settings: ConnectorSettings, block_size: int, ranks: int = 1) -> None:
        self._settings = settings
        self._block_size = block_size
        self._index = Index.attach(settings.index_name, me=settings.slot)
        self._pool: BlockPool
        self._offers: Offers
        self._unsure: Unsure
        self._following: Following
        self._matched: dict[str, Entry] = {}
        self._local: dict[str, int] = {}
        """Tokens of a request's own prefix hit, from ``match`` to ``allocated``."""
        self._from_pool: set[str] = set()
        self._loads: list[Load] = []
        self._loading: dict[str, Load] = {}
        self._loaded_once: set[str] = set()
        self._copied: dict[str, list[int]] = {}
        self._present: dict[str, Request] = {}
        self._prompting: set[str] = set()
        """Of those present, the ones whose prompt may not be computed yet."""
        self._started: set[str] = set()
        self._deferred: dict[str, None] = {}
        self._not_admitted: set[str] = set()
        self._steps = 0
        self._published: dict[str, int] = {}
        self._prefixes = Prefixes(settings, self._index, block_size)
        self._node_pool = NodePool(settings, ranks, block_size) if settings.pool_name else None

    def bind_block_pool(self, pool: BlockPool, cached: Callable[[str], int]) -> None:
        """``cached``: how many blocks of a request vLLM has put into its prefix cache."""
        self._pool = pool
        self._offers = Offers(self._settings, self._index, pool)
        self._unsure = Unsure(pool, self._block_size, cached)
        self._prefixes.bind_block_pool(pool, self._unsure)
        self._following = Following(
            self._index,
            self._settings.slot,
            self._block_size,
            pool,
            taken=self._prefixes.handed_out,
            filled=self._prefixes.filled,
        )
        if self._node_pool is not None:
            self._node_pool.bind_block_pool(pool)
        self._publish_load()

    def on_new_request(self, request: Request) -> None:
        self._present[request.request_id] = request
        self._prompting.add(request.request_id)
        self._following.begin(request)

    # --- take -------------------------------------------------------------------------------

    def match(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond ``local_tokens`` whose KV a peer holds, to be copied in this same step.

        None: not now, ask again in the next step.
        """
        if self._must_wait(request):
            return None, False
        entry = self._find(request)
        if self._following.is_follower(request) or (
            entry is not None and self._following.is_copying(entry.transfer_id)
        ):
            return None, False
        self._not_admitted.add(request.request_id)
        self._local[request.request_id] = local_tokens
        if entry is None:
            self._matched.pop(request.request_id, None)
            return self._match_prefix(request, local_tokens), False
        # vLLM needs at least one token to compute: its logits are the next token's.
        tokens = min(entry.tokens_ready, request.num_tokens - 1) - local_tokens
        self._matched[request.request_id] = entry
        return max(tokens, 0), False

    def _must_wait(self, request: Request) -> bool:
        """A prompt to be handed over, while finished ones that no D has room for hold their share.

        In order of arrival: a long prompt must not wait for ever behind short ones that still fit.
        """
        request_id = request.request_id
        if not self._is_prefill_leg(request):
            return False
        oldest = next(iter(self._deferred), request_id)
        if oldest == request_id and self._offers.has_room(self._prompt_blocks(request)):
            self._deferred.pop(request_id, None)
            return False
        if request_id not in self._deferred:
            self._deferred[request_id] = None
            self._index.add_counters(self._settings.slot, deferred=1)
        return True

    @staticmethod
    def _is_prefill_leg(request: Request) -> bool:
        return bool((request.kv_transfer_params or {}).get(DO_REMOTE_DECODE))

    def _prompt_blocks(self, request: Request) -> int:
        return -(-request.num_prompt_tokens // self._block_size)

    def _match_prefix(self, request: Request, local_tokens: int) -> int:
        """From a peer or from the node's pool, wherever there is more of it."""
        tokens = self._prefixes.match(request, local_tokens)
        pool_tokens = 0
        if self._node_pool is not None:
            pool_tokens = self._node_pool.match(request, local_tokens)
        self._from_pool.discard(request.request_id)
        # Of two equals the pool, which outlives its writers: a peer's memory may go with it.
        if pool_tokens and pool_tokens >= tokens:
            self._from_pool.add(request.request_id)
        return max(tokens, pool_tokens)

    def _find(self, request: Request) -> Entry | None:
        params = request.kv_transfer_params or {}
        if not params.get(DO_REMOTE_PREFILL):
            return None
        return self._index.select(params[TRANSFER_ID], owner=params[REMOTE_SLOT])

    def allocated(self, request: Request, block_ids: list[int], external_tokens: int) -> None:
        request_id = request.request_id
        self._started.add(request_id)
        self._not_admitted.discard(request_id)
        local_tokens = self._local.pop(request_id, request.num_computed_tokens)
        entry = self._matched.pop(request_id, None)
        filled = local_tokens + external_tokens
        self._offers.begin(request, block_ids, filled)
        if self._is_prefill_leg(request):
            self._offers.promise(request_id, self._prompt_blocks(request))
        pool_tokens = external_tokens if request_id in self._from_pool and not entry else 0
        self._from_pool.discard(request_id)
        peer_tokens = 0 if entry else external_tokens - pool_tokens
        self._prefixes.allocated(request, block_ids, local_tokens, peer_tokens, filled=filled)
        if self._node_pool is not None:
            self._node_pool.allocated(request, block_ids, pool_tokens)
        if external_tokens:
            self._unsure.begin(request, block_ids, local_tokens // self._block_size)
        if entry is None:
            return
        self._following.end(entry.transfer_id)
        if external_tokens == 0:
            self._index.drop(entry)
            return
        # By count, not by missing hash: vLLM has already put the hashes of full blocks on the
        # blocks that are about to be filled.
        first = local_tokens // self._block_size
        last = -(-filled // self._block_size)
        load = Load(
            request_id=request_id,
            entry=entry,
            src_blocks=tuple(entry.block_ids[first:last]),
            dst_blocks=tuple(block_ids[first:last]),
            tokens=external_tokens,
        )
        assert len(load.src_blocks) == len(load.dst_blocks), load
        self._loads.append(load)
        self._loading[request_id] = load

    def step(self, scheduler_output: SchedulerOutput) -> PdMetadata:
        self._steps += 1
        if self._not_admitted:
            # vLLM asked for a request and then gave it no blocks.
            self._not_admitted.clear()
            self._following.yield_room()
        loads, self._loads = [*self._loads, *self._following.step(len(self._started))], []
        for request_id in scheduler_output.preempted_req_ids or ():
            self._prompting.add(request_id)
            self._offers.withdraw(request_id)
            self._prefixes.forget(request_id)
            self._unsure.preempted(request_id)
            if self._node_pool is not None:
                self._node_pool.forget(request_id)
        self._grow(scheduler_output)
        self._unsure.step()
        self.idle()
        scheduled = scheduler_output.num_scheduled_tokens
        metadata = PdMetadata(loads, self._prefixes.step(scheduled))
        if self._node_pool is not None:
            metadata.pool_loads, metadata.stores = self._node_pool.step(
                scheduled, peers_loading=bool(self._loading) or self._prefixes.loading
            )
        return metadata

    def _grow(self, scheduler_output: SchedulerOutput) -> None:
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            # A request that came back from preemption has begun a new entry in ``allocated``.
            if new_blocks is not None and request_id not in cached.resumed_req_ids:
                self._offers.grow(request_id, new_blocks[0])
                self._prefixes.grow(request_id, new_blocks[0])
                self._unsure.grow(request_id, new_blocks[0])
                if self._node_pool is not None:
                    self._node_pool.grow(request_id, new_blocks[0])

    def make_room(self) -> bool:
        """vLLM lacks a block for a running request. True: there will be some in the next step."""
        return self._following.yield_room()

    def progressed(self) -> None:
        """A step's outputs are counted: who waits for a prompt's next chunk may copy it."""
        self._offers.progress()

    def loaded(self, report: LoadReport) -> None:
        for failure in report.failed:
            self._unsure.failed(failure.request_id)
        for done in report.done:
            self._unsure.worked(done.request_id)
        if self._node_pool is not None:
            report, counters = self._node_pool.loaded(report)
            self._index.add_counters(self._settings.slot, **counters)
        report = self._prefixes.loaded(report)
        followers = self._following.loaded(report)
        failed = {failure.request_id: failure for failure in report.failed}
        request_ids = ({done.request_id for done in report.done} | failed.keys()) - followers
        tail_bytes = 0
        for request_id in request_ids:
            load = self._loading.pop(request_id, None)
            if load is not None:
                if load.entry.complete:
                    done = (done for done in report.done if done.request_id == request_id)
                    tail_bytes += sum(line.nbytes for line in done)
                if request_id in self._present:
                    self._loaded_once.add(request_id)
                    self._copied[request_id] = _span(request_id, report)
                self._index.drop(load.entry)
        self._index.add_counters(
            self._settings.slot,
            handoffs_in=len(request_ids - failed.keys()),
            handoff_bytes=sum(done.nbytes for done in report.done),
            handoff_tail_bytes=tail_bytes,
            handoff_ns=sum(done.duration_ns for done in report.done),
            load_failures=len(failed),
        )
        for failure in failed.values():
            request = self._present.get(failure.request_id)
            if request is not None and failure.request_id not in followers:
                computed_after_all(request, failure.tokens)
            logger.warning("KV load of %s failed: %s", failure.request_id, failure.reason)

    # --- give -------------------------------------------------------------------------------

    def finished(self, request: Request, block_ids: list[int]) -> dict[str, Any] | None:
        """Called before vLLM frees the blocks. Returns what the front end tells the decode leg."""
        request_id = request.request_id
        self._present.pop(request_id, None)
        self._prompting.discard(request_id)
        self._started.discard(request_id)
        self._deferred.pop(request_id, None)
        self._not_admitted.discard(request_id)
        self._matched.pop(request_id, None)
        self._following.ended(request)
        copied = self._copied.pop(request_id, None)
        told = {HANDOFF: copied} if copied else {}
        self._local.pop(request_id, None)
        self._from_pool.discard(request_id)
        if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
            # Its last step was counted, and the load was in it or before; the report comes after.
            self._unsure.worked(request_id)
        self._prefixes.finished(request_id)
        self._unsure.forget(request_id)
        if self._node_pool is not None:
            self._node_pool.forget(request_id)
        self._let_go(request)
        if self._wanted(request) and self._offers.complete(
            request, self._prompt(request, block_ids)
        ):
            return {
                DO_REMOTE_PREFILL: True,
                TRANSFER_ID: request_id,
                REMOTE_SLOT: self._settings.slot,
                "remote_engine_id": self._settings.engine_id,
                **told,
            }
        self._offers.withdraw(request_id)
        return told or None

    def _let_go(self, request: Request) -> None:
        """Ended before its load was done: the owner need not keep the KV for it."""
        if request.request_id not in self._loaded_once:
            entry = self._find(request)
            if entry is not None:
                self._index.drop(entry)
        self._loaded_once.discard(request.request_id)

    def _wanted(self, request: Request) -> bool:
        # Stopped at token 1 (EOS, stop token) or aborted: nobody will come for the KV.
        length_capped = request.status is RequestStatus.FINISHED_LENGTH_CAPPED
        return self._is_prefill_leg(request) and length_capped

    def _prompt(self, request: Request, block_ids: list[int]) -> list[int]:
        return block_ids[: self._prompt_blocks(request)]

    def idle(self) -> None:
        """Every turn of vLLM's loop: let go of what peers have taken, show the load."""
        self._offers.release()
        self._prefixes.check_reset()
        self._publish_load()

    def reset(self) -> None:
        """vLLM's prefix cache was emptied: peers must not find here what it held either."""
        self._prefixes.reset()

    def _queued_prompt_tokens(self) -> int:
        queued = 0
        for request_id in [*self._prompting]:
            request = self._present[request_id]
            left = request.num_prompt_tokens - request.num_computed_tokens
            if left > 0:
                queued += left
            else:
                self._prompting.discard(request_id)
        return queued

    def _publish_load(self) -> None:
        running = len(self._started)
        load = {
            "scheduler_pid": os.getpid(),
            "steps": self._steps,
            "running": running,
            "waiting": max(0, len(self._present) - running),
            "blocks_free": self._pool.get_num_free_blocks(),
            "blocks_total": self._pool.num_gpu_blocks - 1,
            "queued_prompt_tokens": self._queued_prompt_tokens(),
            "blocks_cached": self._prefixes.published,
            "pins": self._offers.pins,
            "index_entries": self._offers.entries,
        }
        if load != self._published:
            self._published = load
            self._index.set_load(self._settings.slot, **load)

    def close(self) -> None:
        if self._node_pool is not None:
            self._node_pool.close()
        self._index.close()


def _span(request_id: str, report: LoadReport) -> list[int]:
    """[owner's slot, begin ns, end ns, bytes] over all ranks; nothing copied: empty."""
    done = [d for d in report.done if d.request_id == request_id]
    if not done:
        return []
    begin_ns = min(d.began_ns for d in done)
    end_ns = max(d.began_ns + d.duration_ns for d in done)
    return [done[0].owner, begin_ns, end_ns, sum(d.nbytes for d in done)]
