"""Two of vLLM's own schedulers with our scheduler half, over memory that knows what it holds.

No model and no worker: a forward writes, for every position it computes, a name for all tokens up to
there, provided that everything before it is right in that engine's memory; else it writes nonsense.
So what a real engine could only show by a wrong token shows here at the position that was wrong.
"""

from __future__ import annotations

import random
import time
from typing import Any

from ipc.index import Index
from pdnode.connector.metadata import LoadDone, LoadFailed, LoadReport
from pdnode.connector.prompt_order import TURN
from pdnode.turns import Turn
from pdnode.vllm_compat import EngineCoreRequest, SamplingParams
from tests.unit.vllm_scheduler import index_of, model_output, scheduler

BLOCK = 16
CHUNK = 64
"""Tokens of a step."""
NOBODY = "nonsense"


def name(tokens: tuple[int, ...]) -> int:
    return hash(tokens)


def next_token(tokens: list[int]) -> int:
    """The model: greedy, and dependent on every token before."""
    return abs(name((*tokens, 7))) % 300 + 3


class Machine:
    """``blocks``: of each engine; few of them are evicted all the time. ``ahead``: vLLM's asynchronous
    scheduling, a step is scheduled before the outputs of the one before are counted."""

    def __init__(self, model: str, blocks: int, engines: int = 2, ahead: bool = False) -> None:
        self.index = index_of(engines)
        self.engines = [
            Engine(self, slot, engines, model, blocks, ahead) for slot in range(engines)
        ]

    def close(self) -> None:
        for engine in self.engines:
            engine.scheduler.shutdown()
        self.index.unlink()
        self.index.close()


class Engine:
    def __init__(
        self, machine: Machine, slot: int, engines: int, model: str, blocks: int, ahead: bool
    ) -> None:
        self.machine, self.slot = machine, slot
        self.memory: list[list[Any]] = [[NOBODY] * BLOCK for _ in range(blocks)]
        self.tables: dict[str, list[int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.lose_loads = 0.0
        """The share of loads during which the peer hands out one of the blocks."""
        self._rng = random.Random(slot)
        self._reader = Index.attach(machine.index.name, me=slot)
        self.scheduler, self._hasher = scheduler(
            machine.index.name, slot, model, block_size=BLOCK, blocks=blocks, chunk=CHUNK, ahead=ahead,
            lease_s=9, kv_paths=("shm",) * engines,
        )  # fmt: skip
        self._ahead, self._uncounted = ahead, []
        self._tokens: dict[str, list[int]] = {}
        """As the device knows them: with those that the scheduler has not been told of."""

    def send(
        self,
        request_id: str,
        tokens: list[int],
        answer: int,
        salt: str = "",
        turn: Turn | None = None,
    ) -> None:
        from vllm.v1.request import Request

        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        params.extra_args = {TURN: tuple(turn)} if turn is not None else None
        sent = EngineCoreRequest(
            request_id=request_id, prompt_token_ids=tokens, mm_features=None,
            sampling_params=params, pooling_params=None, arrival_time=time.time(),
            lora_request=None, cache_salt=salt or None, data_parallel_rank=None,
        )  # fmt: skip
        self.scheduler.add_request(Request.from_engine_core_request(sent, self._hasher))
        self.answers[request_id] = []

    @property
    def busy(self) -> bool:
        return self.scheduler.has_unfinished_requests() or bool(self._uncounted)

    def step(self) -> None:
        """One turn of the loop. The device has made a step when ``schedule`` returns."""
        if self.scheduler.has_unfinished_requests():
            scheduled = self.scheduler.schedule()
            self._follow_tables(scheduled)
            report, invalid = self._load(scheduled.kv_connector_metadata)
            starts = self._starts(scheduled)
            sampled = [
                self._forward(rid, starts[rid], n)
                for rid, n in scheduled.num_scheduled_tokens.items()
            ]
            ids = [*scheduled.num_scheduled_tokens]
            self._uncounted.append((scheduled, model_output(ids, sampled, report, invalid)))
        if len(self._uncounted) > self._ahead or not self.scheduler.has_unfinished_requests():
            self._count(*self._uncounted.pop(0))
        self.scheduler.connector.has_pending_push_work()

    def _starts(self, scheduled) -> dict[str, int]:
        cached = scheduled.scheduled_cached_reqs
        new = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        return new | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))

    def _count(self, scheduled, output) -> None:
        outputs = self.scheduler.update_from_output(scheduled, output)
        for one in outputs.get(0).outputs if outputs.get(0) else ():
            self.answers[one.request_id] += one.new_token_ids
            if one.prefill_stats is not None:
                self.computed[one.request_id] = one.prefill_stats.num_computed_tokens

    def leave(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def _follow_tables(self, scheduled) -> None:
        for new in scheduled.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
        cached = scheduled.scheduled_cached_reqs
        for rid, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if rid in cached.resumed_req_ids:
                self.tables[rid] = list(blocks[0])
            elif blocks is not None:
                self.tables[rid] += blocks[0]

    def _load(self, metadata) -> tuple[LoadReport, set[int]]:
        report, invalid = LoadReport(), set()
        for load in metadata.prefix_loads:
            peer = self.machine.engines[load.held.owner]
            for source, target in zip(load.src_blocks, load.dst_blocks, strict=True):
                self.memory[target] = list(peer.memory[source])
            if self._rng.random() < self.lose_loads:
                peer.hand_out(self._rng.choice(load.src_blocks))
            if self._reader.prefixes.still(load.held) < len(load.src_blocks):
                for target in load.dst_blocks:
                    self.memory[target] = [NOBODY] * BLOCK
                report.failed.append(LoadFailed(load.request_id, load.tokens, "handed out"))
                invalid.update(load.dst_blocks)
            else:
                report.done.append(LoadDone(load.request_id, peer.slot, 1, 1))
        return report, invalid

    def hand_out(self, block: int) -> None:
        """As if a request had got it, and written in it."""
        self.scheduler.connector._scheduler._prefixes.handed_out([block])

    def _forward(self, request_id: str, first: int, count: int) -> list[int]:
        request = self.scheduler.requests[request_id]
        known, table = self._tokens.setdefault(request_id, []), self.tables[request_id]
        # A request that was preempted, or whose load failed, has lost what the device sampled last.
        told = list(request.all_token_ids)
        end = first + count
        tokens = told if len(told) >= end or len(known) < end else known
        right = True
        for at in range(end):
            block, offset = table[at // BLOCK], at % BLOCK
            if at < first:
                right = right and self.memory[block][offset] == self._name(request, tokens, at)
            else:
                self.memory[block][offset] = self._name(request, tokens, at) if right else NOBODY
        if end < len(tokens):
            return []
        token = next_token(tokens) if right else 0
        self._tokens[request_id] = [*tokens, token]
        return [token]

    def _name(self, request, tokens: list[int], at: int) -> int:
        return name((request.cache_salt, *tokens[: at + 1]))

    def wrong_blocks(self) -> list[int]:
        """Blocks that are shown to peers and hold nonsense in a full block."""
        shown = self.scheduler.connector._scheduler._prefixes._hash_of
        return [block for block in shown if NOBODY in self.memory[block]]
