"""Scheduler half: runs in the engine-core process, single-threaded inside vLLM's step loop.

Life of a hand-off here (both ends run this code; every engine is ``kv_both``):

1. P ``finished``: insert(transfer id -> block ids) and take a reference on the blocks
2. D ``match``: select; tell vLLM how many tokens need no computing
3. D ``allocated``: pair P's blocks with the ones vLLM just gave the request
4. D ``step``: hand the pairs to the workers, which copy before this step's forward
5. D ``loaded``: drop, i.e. acknowledge to P
6. P ``release_pins``: give the blocks back

Pins are block references, not vLLM's "delay free": a finished request leaves vLLM at once, so an
idle P sleeps instead of spinning until D answers, and an abort of an unknown id is harmless.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ipc.errors import IndexFull
from ipc.index import Index
from ipc.records import Entry, Ticket
from pdnode.connector.metadata import Load, LoadReport, PdMetadata
from pdnode.connector.settings import ConnectorSettings
from pdnode.vllm_compat import RequestStatus, init_logger

if TYPE_CHECKING:
    from pdnode.vllm_compat import BlockPool, Request, SchedulerOutput

logger = init_logger(__name__)

DO_REMOTE_DECODE = "do_remote_decode"
DO_REMOTE_PREFILL = "do_remote_prefill"
TRANSFER_ID = "transfer_id"
REMOTE_SLOT = "remote_slot"


class SchedulerHalf:
    def __init__(self, settings: ConnectorSettings, block_size: int) -> None:
        self._settings = settings
        self._block_size = block_size
        self._index = Index.attach(settings.index_name, me=settings.slot)
        self._pool: BlockPool | None = None
        self._pins: list[tuple[Ticket, list]] = []
        self._matched: dict[str, tuple[Entry, int]] = {}
        self._loads: list[Load] = []
        self._loading: dict[str, Load] = {}
        self._present: set[str] = set()
        self._started: set[str] = set()
        self._steps = 0
        self._published: tuple[int, ...] = ()

    def bind_block_pool(self, pool: BlockPool) -> None:
        self._pool = pool
        self._publish_load()

    # --- D: take ----------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._present.add(request.request_id)

    def match(self, request: Request, local_tokens: int) -> tuple[int, bool]:
        """Tokens beyond ``local_tokens`` whose KV a peer holds, to be copied in this same step."""
        entry = self._find(request)
        if entry is None:
            return 0, False
        # vLLM needs at least one token to compute: its logits are the next token's.
        tokens = min(entry.tokens_ready, request.num_tokens - 1) - local_tokens
        self._matched[request.request_id] = (entry, local_tokens)
        return max(tokens, 0), False

    def _find(self, request: Request) -> Entry | None:
        params = request.kv_transfer_params or {}
        if not params.get(DO_REMOTE_PREFILL):
            return None
        return self._index.select(params[TRANSFER_ID], owner=params[REMOTE_SLOT])

    def allocated(self, request: Request, block_ids: list[int], external_tokens: int) -> None:
        self._started.add(request.request_id)
        matched = self._matched.pop(request.request_id, None)
        if matched is None:
            return
        entry, local_tokens = matched
        if external_tokens == 0:
            self._index.drop(entry)
            return
        # By count, not by missing hash: vLLM has already put the hashes of full blocks on the
        # blocks that are about to be filled.
        first = local_tokens // self._block_size
        last = -(-(local_tokens + external_tokens) // self._block_size)
        load = Load(
            request_id=request.request_id,
            entry=entry,
            src_blocks=tuple(entry.block_ids[first:last]),
            dst_blocks=tuple(block_ids[first:last]),
            tokens=external_tokens,
        )
        assert len(load.src_blocks) == len(load.dst_blocks), load
        self._loads.append(load)
        self._loading[request.request_id] = load

    def step(self, scheduler_output: SchedulerOutput) -> PdMetadata:
        self._steps += 1
        loads, self._loads = self._loads, []
        self.release_pins()
        return PdMetadata(loads)

    def loaded(self, report: LoadReport) -> None:
        failed = {failure.request_id: failure for failure in report.failed}
        request_ids = {done.request_id for done in report.done} | failed.keys()
        for request_id in request_ids:
            load = self._loading.pop(request_id, None)
            if load is not None:
                self._index.drop(load.entry)
        handed_over = request_ids - failed.keys()
        self._index.add_counters(
            self._settings.slot,
            handoffs_in=len(handed_over),
            handoff_bytes=sum(done.nbytes for done in report.done),
            handoff_ns=sum(done.duration_ns for done in report.done),
            load_failures=len(failed),
            recomputed_tokens=sum(failure.tokens for failure in failed.values()),
        )
        for failure in failed.values():
            logger.warning("KV load of %s failed: %s", failure.request_id, failure.reason)

    # --- P: give ----------------------------------------------------------------------------

    def finished(self, request: Request, block_ids: list[int]) -> dict[str, Any] | None:
        request_id = request.request_id
        self._present.discard(request_id)
        self._started.discard(request_id)
        matched = self._matched.pop(request_id, None)
        if matched is not None:
            self._index.drop(matched[0])
        params = request.kv_transfer_params or {}
        if not params.get(DO_REMOTE_DECODE):
            return None
        # Stopped at token 1 (EOS, stop token) or aborted: nobody will come for the KV.
        if request.status is not RequestStatus.FINISHED_LENGTH_CAPPED:
            return None
        return self._offer(params[TRANSFER_ID], request, block_ids)

    def _offer(self, transfer_id: str, request: Request, block_ids: list[int]) -> dict | None:
        assert self._pool is not None
        tokens = request.num_prompt_tokens
        ids = block_ids[: -(-tokens // self._block_size)]
        try:
            ticket = self._index.insert(
                transfer_id,
                boot_id=self._settings.boot_id,
                block_ids=ids,
                tokens_ready=tokens,
                tokens_total=tokens,
                lease_s=self._settings.lease_s,
            )
        except IndexFull as error:
            logger.error("%s", error)
            self._index.add_counters(self._settings.slot, index_full=1)
            return None
        blocks = [self._pool.blocks[i] for i in ids]
        self._pool.touch(blocks)
        self._pins.append((ticket, blocks))
        return {
            DO_REMOTE_PREFILL: True,
            TRANSFER_ID: transfer_id,
            REMOTE_SLOT: self._settings.slot,
            "remote_engine_id": self._settings.engine_id,
        }

    def release_pins(self) -> None:
        """Give back the blocks of entries that a reader took, or whose lease ran out."""
        still, expired = [], 0
        for ticket, blocks in self._pins:
            how = self._index.released(ticket)
            if how is None:
                still.append((ticket, blocks))
                continue
            expired += how == "expired"
            self._index.remove(ticket)
            assert self._pool is not None
            self._pool.free_blocks(reversed(blocks))
        self._pins = still
        if expired:
            logger.warning(
                "%d hand-offs were not fetched within --lease %.0f s; their KV is given up",
                expired,
                self._settings.lease_s,
            )
            self._index.add_counters(self._settings.slot, leases_expired=expired)
        self._publish_load()

    # --- load table -------------------------------------------------------------------------

    def _publish_load(self) -> None:
        if self._pool is None:
            return
        running = len(self._started)
        load = (
            running,
            max(0, len(self._present) - running),
            self._pool.get_num_free_blocks(),
            len(self._pins),
            self._steps,
        )
        if load == self._published:
            return
        self._published = load
        self._index.set_load(
            self._settings.slot,
            scheduler_pid=os.getpid(),
            steps=self._steps,
            running=load[0],
            waiting=load[1],
            blocks_free=load[2],
            blocks_total=self._pool.num_gpu_blocks - 1,
        )

    def close(self) -> None:
        self._index.close()
