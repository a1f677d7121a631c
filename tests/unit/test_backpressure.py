"""What waits for a reader holds half of the blocks: vLLM's own scheduler with our half, no model."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from bench.tiny_models import tiny_llama
from ipc.index import Index
from pdnode.journey import KV_PARAMS
from pdnode.vllm_compat import EngineCoreRequest, SamplingParams
from tests.unit.vllm_scheduler import index_of, scheduler, without_process_ties

BLOCK = 16
BLOCKS = 25
"""One of them is vLLM's null block; the limit is 12."""


class Prefill:
    """An engine in slot 0 whose forwards take no time, and the index as an engine in slot 1 has it."""

    def __init__(self, index_name: str, lease_s: float) -> None:
        self.scheduler, self._hasher = scheduler(
            index_name, 0, str(tiny_llama()), block_size=BLOCK, blocks=BLOCKS, lease_s=lease_s
        )
        self.reader = Index.attach(index_name, me=1)
        self.ended: list[str] = []

    def send(self, request_id: str, blocks: int, *, to_hand_over: bool = True) -> None:
        from vllm.v1.request import Request

        extra = {KV_PARAMS: {"do_remote_decode": True}} if to_hand_over else None
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, extra_args=extra)
        first = hash(request_id) % 1000
        sent = EngineCoreRequest(
            request_id=request_id, prompt_token_ids=[first, *range(3, blocks * BLOCK + 2)],
            mm_features=None, sampling_params=params, pooling_params=None,
            arrival_time=time.time(), lora_request=None, cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip
        self.scheduler.add_request(Request.from_engine_core_request(sent, self._hasher))

    def steps(self, count: int = 8) -> list[str]:
        """Requests that end in them."""
        ended = len(self.ended)
        for _ in range(count):
            self._step()
        return self.ended[ended:]

    def _step(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        scheduled = self.scheduler.schedule()
        ids = [*scheduled.num_scheduled_tokens]
        done = [
            self.scheduler.requests[i].num_computed_tokens == self.scheduler.requests[i].num_tokens
            for i in ids
        ]
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[[7] if ends else [] for ends in done],
        )
        for each in self.scheduler.update_from_output(scheduled, output).values():
            self.ended += [one.request_id for one in each.outputs if one.finished]
        self.scheduler.connector.has_pending_push_work()

    def take(self, request_id: str) -> None:
        """A peer has copied it."""
        self.reader.drop(self.reader.select(request_id, owner=0))

    @property
    def held(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return BLOCKS - 1 - pool.get_num_free_blocks()

    @property
    def counters(self):
        return self.reader.engine(0)


@pytest.fixture
def prefill(monkeypatch, request) -> Iterator[Prefill]:
    """Its parameter: the lease."""
    without_process_ties(monkeypatch)
    index = index_of(2)
    prefill = Prefill(index.name, getattr(request, "param", 60.0))
    yield prefill
    prefill.scheduler.shutdown()
    prefill.reader.close()
    index.unlink()
    index.close()


def test_prompts_wait_while_finished_ones_hold_their_half(prefill):
    for i in range(5):
        prefill.send(f"r{i}", 4)
    assert prefill.steps() == ["r0", "r1", "r2"]
    assert prefill.held == 12
    assert prefill.counters.deferred == 2
    prefill.send("ends here", 4, to_hand_over=False)
    assert prefill.steps() == ["ends here"]
    prefill.take("r1")
    assert prefill.steps() == ["r3"]
    assert prefill.held == 12
    assert prefill.counters.deferred == 2


def test_a_long_prompt_is_not_overtaken_by_short_ones_that_would_fit(prefill):
    prefill.send("holds", 8)
    prefill.steps()
    prefill.send("long", 10)
    prefill.send("short", 2)
    assert prefill.steps() == []
    prefill.take("holds")
    # Larger than what "short" leaves of the half, and yet first.
    assert prefill.steps() == ["long", "short"]


def test_a_prompt_larger_than_the_half_starts_when_nothing_else_is_held(prefill):
    prefill.send("huge", 20)
    assert prefill.steps() == ["huge"]
    prefill.send("next", 2)
    assert prefill.steps() == []
    prefill.take("huge")
    assert prefill.steps() == ["next"]


def test_a_deferred_request_that_is_aborted_holds_nobody_up(prefill):
    from vllm.v1.request import RequestStatus

    prefill.send("holds", 12)
    prefill.steps()
    prefill.send("leaves", 4)
    prefill.send("stays", 4)
    assert prefill.steps() == []
    prefill.scheduler.finish_requests("leaves", RequestStatus.FINISHED_ABORTED)
    prefill.take("holds")
    assert prefill.steps() == ["stays"]
    prefill.take("stays")
    prefill.steps(1)
    assert prefill.held == 0


@pytest.mark.parametrize("prefill", [0.05], indirect=True)
def test_what_nobody_takes_is_given_up_after_its_lease(prefill):
    for i in range(6):
        prefill.send(f"r{i}", 4)
    assert len(prefill.steps(2)) == 3
    deadline = time.monotonic() + 30
    while len(prefill.ended) < 6 or prefill.held:
        prefill.steps(1)
        assert time.monotonic() < deadline
    assert prefill.counters.leases_expired == 6
