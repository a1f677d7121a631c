"""A prefill and a decode scheduler, vLLM's own, over memory that knows what it holds.

No model and no worker. A forward writes, for each position that it computes, a name for all tokens up
to there, provided that all before it is right in that engine's memory; else nonsense, and token 0.
"""

from __future__ import annotations

import time
from typing import Any

from ipc.index import Index
from pdnode.connector.metadata import Load, LoadDone, LoadFailed, LoadReport, PrefixLoad
from pdnode.vllm_compat import EngineCoreRequest, SamplingParams
from tests.unit.vllm_scheduler import index_of, model_output, scheduler

BLOCK, CHUNK = 16, 64
P, D = 0, 1
NONSENSE = "nonsense"


def next_token(tokens: list[int]) -> int:
    return abs(hash((*tokens, 7))) % 300 + 3


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Engine:
    """``ahead``: vLLM's asynchronous scheduling, one step is scheduled before the last is counted."""

    def __init__(self, index: str, slot: int, model: str, blocks: int, *, ahead: bool) -> None:
        self.slot = slot
        self.memory: list[list[Any]] = [[NONSENSE] * BLOCK for _ in range(blocks)]
        self.answers: dict[str, list[int]] = {}
        self.offered: dict[str, dict] = {}
        self.computed: dict[str, int] = {}
        self.lost: set[str] = set()
        """Requests whose KV is given up while it is copied."""
        self.peers: list[Engine] = []
        self._tables: dict[str, list[int]] = {}
        self._ahead, self._uncounted = ahead, []
        self._tokens: dict[str, list[int]] = {}
        self._reader = Index.attach(index, me=slot)
        self.scheduler, self._hasher = scheduler(
            index, slot, model, block_size=BLOCK, blocks=blocks, chunk=CHUNK, ahead=ahead,
            kv_paths=("shm", "shm"),
        )  # fmt: skip

    def send(self, request_id: str, tokens: list[int], count: int, **kv_transfer_params) -> None:
        extra = {"kv_transfer_params": kv_transfer_params}
        params = SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, extra_args=extra
        )
        self.scheduler.add_request(self._request(request_id, tokens, params))
        self.answers[request_id] = []

    def _request(self, request_id: str, tokens: list[int], params: SamplingParams):
        from vllm.v1.request import Request

        sent = EngineCoreRequest(
            request_id=request_id, prompt_token_ids=tokens, mm_features=None,
            sampling_params=params, pooling_params=None, arrival_time=time.time(),
            lora_request=None, cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip
        return Request.from_engine_core_request(sent, self._hasher)

    def leave(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @property
    def busy(self) -> bool:
        return self.scheduler.has_requests() or bool(self._uncounted)

    @property
    def free(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def step(self) -> None:
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            report, invalid = LoadReport(), set()
            sync = scheduled.has_sync_kv_loads
            metadata = scheduled.kv_connector_metadata
            if sync:
                self._load(metadata, report, invalid)
            sampled = self._forwards(scheduled)
            if not sync:
                self._load(metadata, report, invalid)
            output = model_output([*scheduled.num_scheduled_tokens], sampled, report, invalid)
            self._uncounted.append((scheduled, output))
        if len(self._uncounted) > self._ahead or not self.scheduler.has_requests():
            self._count(*self._uncounted.pop(0))
        self.scheduler.connector.has_pending_push_work()

    def _count(self, scheduled, output) -> None:
        outputs = self.scheduler.update_from_output(scheduled, output)
        for one in outputs[0].outputs if 0 in outputs else ():
            self.answers[one.request_id] += one.new_token_ids
            if one.prefill_stats is not None:
                self.computed[one.request_id] = one.prefill_stats.num_computed_tokens
            if one.kv_transfer_params is not None:
                self.offered[one.request_id] = one.kv_transfer_params

    def _load(self, metadata, report: LoadReport, invalid: set[int]) -> None:
        for load in (*metadata.loads, *metadata.prefix_loads):
            peer, kept = self.peers[load.entry.owner], load.request_id not in self.lost
            for source, target in zip(load.src_blocks, load.dst_blocks, strict=True):
                self.memory[target] = list(peer.memory[source]) if kept else [NONSENSE] * BLOCK
            if kept and self._is_still(load):
                report.done.append(LoadDone(load.request_id, peer.slot, len(load.src_blocks), 1))
            else:
                report.failed.append(LoadFailed(load.request_id, load.tokens, "given up"))
                invalid.update(() if getattr(load, "ahead", False) else load.dst_blocks)

    def _is_still(self, load: Load | PrefixLoad) -> bool:
        if isinstance(load, PrefixLoad):
            return self._reader.prefixes.still(load.held) == len(load.src_blocks)
        return self._reader.validate(load.entry)

    def wrong_blocks(self) -> list[int]:
        """Blocks that are shown to peers under a hash of other tokens than they hold."""
        shown = self.scheduler.connector._scheduler._prefixes._hash_of
        return [block for block, key in shown.items() if self._key(self.memory[block]) != key]

    def _key(self, page: list[Any]) -> bytes | None:
        """The name of a full block that holds what was computed of its tokens."""
        end = page[-1]
        if end == NONSENSE or [*map(len, page)] != [*range(len(end) - BLOCK + 1, len(end) + 1)]:
            return None
        return self._request("", list(end), SamplingParams(max_tokens=1)).block_hashes[-1]

    def _forwards(self, scheduled) -> list[list[int]]:
        cached = scheduled.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        for new in scheduled.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, blocks, computed in rows:
            starts[request_id] = computed
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = list(blocks[0])
            elif blocks is not None:
                self._tables[request_id] += blocks[0]
        counts = scheduled.num_scheduled_tokens
        return [self._forward(name, starts[name], count) for name, count in counts.items()]

    def _forward(self, request_id: str, first: int, count: int) -> list[int]:
        told = list(self.scheduler.requests[request_id].all_token_ids)
        known, table = self._tokens.setdefault(request_id, []), self._tables[request_id]
        end, right = first + count, True
        tokens = told if len(told) >= end or len(known) < end else known
        for at in range(end):
            page, offset, name = (
                self.memory[table[at // BLOCK]],
                at % BLOCK,
                tuple(tokens[: at + 1]),
            )
            if at < first:
                right = right and page[offset] == name
            else:
                page[offset] = name if right else NONSENSE
        if end < len(tokens):
            return []
        token = next_token(tokens) if right else 0
        self._tokens[request_id] = [*tokens, token]
        return [token]


class Pair:
    """The front end's part: legs and followers, as DecodeFirst sends them."""

    def __init__(self, model: str, blocks: tuple[int, int], *, ahead: bool) -> None:
        self.index = index_of(2)
        self.engines = [
            Engine(self.index.name, slot, model, blocks[slot], ahead=ahead) for slot in (P, D)
        ]
        for engine in self.engines:
            engine.peers = self.engines
        self._acks = Index.attach(self.index.name, me=2)
        self._open: dict[str, tuple[list[int], int, str]] = {}
        """name -> (prompt, tokens wanted, stage)"""
        self.answers: dict[str, list[int]] = {}

    def send(self, name: str, prompt: list[int], count: int) -> None:
        leg = f"{name}/p"
        self.engines[P].send(leg, prompt, 1, do_remote_decode=True)
        self.engines[D].send(f"{leg}/f", prompt, 1, do_follow=True, transfer_id=leg, remote_slot=P)
        self._open[name] = (prompt, count, "p")

    def leave(self, name: str) -> None:
        _, _, stage = self._open.pop(name)
        self.engines[P if stage == "p" else D].leave(f"{name}/{stage}")
        self._over(name)

    def _over(self, name: str) -> None:
        self.engines[D].leave(f"{name}/p/f")
        entry = self._acks.select(f"{name}/p", owner=P)
        if entry is not None:
            self._acks.drop(entry)

    def step(self) -> None:
        for engine in self.engines:
            if engine.busy:
                engine.step()
        for name, (prompt, count, stage) in [*self._open.items()]:
            answer = self.engines[P if stage == "p" else D].answers[f"{name}/{stage}"]
            if stage == "p" and answer:
                offered = self.engines[P].offered[f"{name}/p"]
                self.answers[name] = list(answer)
                self._open[name] = (prompt, count, "d")
                self.engines[D].send(f"{name}/d", [*prompt, *answer], count - 1, **offered)
            elif stage == "d" and answer:
                self.engines[D].leave(f"{name}/p/f")
            if stage == "d" and len(answer) == count - 1:
                self.answers[name] += answer
                del self._open[name]
                self._over(name)

    def run(self) -> None:
        while self._open:
            self.step()
        while any(engine.busy for engine in self.engines):
            self.step()
        self.engines[P].scheduler.connector.has_pending_push_work()

    def close(self) -> None:
        for engine in self.engines:
            engine.scheduler.shutdown()
        self.index.unlink()
        self.index.close()
