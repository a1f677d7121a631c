"""Full blocks by content: what an engine shows others and when, what it takes, what a router sees."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from ipc.index import Index
from pdnode.connector.metadata import LoadDone, LoadFailed, LoadReport
from pdnode.connector.prefixes import LEFT_ALONE_S, Prefixes
from pdnode.connector.settings import ConnectorSettings
from pdnode.connector.unsure import computed_after_all
from pdnode.prefixes import Prefixes as Seen
from pdnode.vllm_compat import EngineCoreRequest
from tests.unit.vllm_scheduler import index_of

BLOCK, BLOCKS = 16, 64


@dataclass
class Request:
    """What the connector reads of vLLM's request."""

    request_id: str
    tokens: list[int]
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    prefill_stats: SimpleNamespace | None = None
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self):
        self.tokens = list(self.tokens)
        self.hash_all()

    def hash_all(self):
        self.block_hashes = [
            repr(self.tokens[:end])[-32:].rjust(32).encode()
            for end in range(BLOCK, self.num_tokens + 1, BLOCK)
        ]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class Pool:
    num_gpu_blocks = BLOCKS
    enable_caching = True

    def __init__(self):
        self.cached_block_hash_to_block = object()


@pytest.fixture
def index():
    node = index_of(2, entries=16)
    yield node
    node.unlink()
    node.close()


@pytest.fixture
def engines(index):
    halves = []
    for slot in range(2):
        settings = ConnectorSettings(
            node_pid=0, index_name=index.name, segment_prefix="", engine_id=f"e{slot}", slot=slot,
            boot_id=slot + 1, lease_s=9, fingerprint="", kv_paths=("shm", "shm"),
        )  # fmt: skip
        half = Prefixes(settings, Index.attach(index.name, me=slot), BLOCK)
        half.bind_block_pool(Pool(), half._loading)
        halves.append(half)
    yield halves
    for half in halves:
        half._index.close()


@pytest.fixture
def reading(index):
    """A half in slot 1 that reads slot 0 by the given path."""
    halves = []

    def make(path: str, **more) -> Prefixes:
        settings = ConnectorSettings(
            node_pid=0, index_name=index.name, segment_prefix="", engine_id="e1", slot=1,
            boot_id=2, lease_s=9, fingerprint="", kv_paths=(path, path), **more,
        )  # fmt: skip
        half = Prefixes(settings, Index.attach(index.name, me=1), BLOCK)
        half._blocks = Pool()
        halves.append(half)
        return half

    yield make
    for half in halves:
        half._index.close()


def begin(half: Prefixes, request: Request, blocks: list[int], *, local: int = 0) -> int:
    """As vLLM's scheduler admits a request: tokens that a peer gives."""
    taken = half.match(request, local)
    half.allocated(request, blocks, local, taken, filled=local + taken)
    return taken


def compute(half: Prefixes, request: Request, tokens: int) -> list:
    """One step, whose outputs have been counted; returns the loads it began with."""
    loads = half.step({request.request_id: tokens})
    request.num_computed_tokens += tokens
    return loads


PROMPT = list(range(3 * BLOCK + 5))


def test_a_block_is_shown_when_it_is_counted_and_taken_by_who_lacks_it(engines):
    owner, reader = engines
    first, second = Request("a", PROMPT), Request("b", PROMPT)
    begin(owner, first, [4, 5, 6, 7])
    compute(owner, first, len(PROMPT))
    assert begin(reader, second, [1, 2, 3, 8]) == 0  # computed, and not yet known to be sound
    owner.step({"a": 1})
    assert begin(reader, second, [1, 2, 3, 8], local=BLOCK) == 2 * BLOCK
    [load] = reader.step({"b": 5})
    assert (load.entry.owner, load.src_blocks, load.dst_blocks) == (0, (5, 6), (2, 3))
    assert reader._table.still(load.held) == 2


def test_what_is_in_flight_is_not_shown(engines):
    owner, reader = engines
    request = Request("a", PROMPT)
    begin(owner, request, [4, 5, 6, 7])
    compute(owner, request, len(PROMPT))
    request.num_in_flight_tokens = BLOCK + 5  # the second of two chunks
    owner.step({"a": 1})
    assert reader.match(Request("b", PROMPT), 0) == 2 * BLOCK


def test_a_request_that_ends_leaves_what_it_generated(engines):
    owner, reader = engines
    request = Request("a", PROMPT)
    begin(owner, request, [4, 5, 6, 7])
    compute(owner, request, len(PROMPT))
    for token in range(500, 500 + 2 * BLOCK):
        request.tokens.append(token)
        compute(owner, request, 1)
        if len(request.tokens) % BLOCK == 1:
            owner.grow("a", [8 + len(request.tokens) // BLOCK])
    request.hash_all()
    owner.finished("a")
    next_turn = Request("b", [*request.tokens, *range(40)])
    assert reader.match(next_turn, 0) == 5 * BLOCK


def test_a_block_that_is_handed_out_again_is_shown_no_more(engines):
    owner, reader = engines
    begin(owner, first := Request("a", PROMPT), [4, 5, 6, 7])
    compute(owner, first, len(PROMPT))
    owner.finished("a")
    held = reader._table.take(first.block_hashes, 0)
    assert len(held.blocks) == 3
    begin(owner, Request("c", list(range(900, 900 + BLOCK))), [5])
    assert reader._table.still(held) == 1
    assert reader.match(Request("b", PROMPT), 0) == BLOCK
    assert owner._index.engine(0).blocks_evicted == 1


def test_evicted_content_that_is_computed_again_is_counted(engines):
    owner = engines[0]
    begin(owner, first := Request("a", PROMPT), [4, 5, 6, 7])
    compute(owner, first, len(PROMPT))
    owner.finished("a")
    begin(owner, other := Request("c", list(range(900, 900 + 2 * BLOCK))), [4, 5])
    compute(owner, other, 2 * BLOCK)
    owner.finished("c")
    begin(owner, again := Request("d", PROMPT), [9, 10, 11, 12])
    compute(owner, again, len(PROMPT))
    owner.finished("d")
    record = owner._index.engine(0)
    assert (record.blocks_evicted, record.evicted_returns) == (2, 2)


def test_a_prefix_that_was_not_taken_counts_as_computed(engines):
    owner, reader = engines
    begin(owner, first := Request("a", PROMPT), [4, 5, 6, 7])
    compute(owner, first, len(PROMPT))
    owner.finished("a")
    stats = SimpleNamespace(
        num_cached_tokens=48, num_external_cached_tokens=48, num_computed_tokens=5
    )
    request = Request("b", PROMPT, prefill_stats=stats)
    begin(reader, request, [1, 2, 3, 8])
    reader.step({"b": 5})
    assert reader.loading
    report = LoadReport(failed=[LoadFailed("b", 48, "evicted")], done=[LoadDone("x", 0, 1, 1)])
    rest = reader.loaded(report)
    assert [line.request_id for line in (*rest.done, *rest.failed)] == ["x"]
    assert not reader.loading
    assert (stats.num_cached_tokens, stats.num_computed_tokens) == (0, 53)
    computed_after_all(request, 48)  # a second load, after a preemption
    assert (stats.num_cached_tokens, stats.num_computed_tokens) == (0, 53)
    record = reader._index.engine(1)
    assert (record.prefix_pulls, record.prefix_failures) == (0, 1)


def test_what_was_taken_is_counted(engines):
    owner, reader = engines
    begin(owner, first := Request("a", PROMPT), [4, 5, 6, 7])
    compute(owner, first, len(PROMPT))
    owner.finished("a")
    begin(reader, Request("b", PROMPT), [1, 2, 3, 8])
    reader.step({"b": 5})
    assert reader.loaded(LoadReport(done=[LoadDone("b", 0, 300, 7)])).done == []
    record = reader._index.engine(1)
    assert (record.prefix_pulls, record.prefix_tokens, record.prefix_bytes) == (1, 48, 300)


def test_an_emptied_prefix_cache_shows_nothing(engines):
    owner, reader = engines
    begin(owner, first := Request("a", PROMPT), [4, 5, 6, 7])
    compute(owner, first, len(PROMPT))
    owner.finished("a")
    owner._blocks.cached_block_hash_to_block = object()
    owner.check_reset()
    assert reader.match(Request("b", PROMPT), 0) == 0
    assert owner.published == 0


def test_without_vllms_prefix_cache_there_is_none_here(engines):
    owner, reader = engines
    owner._blocks.enable_caching = False
    begin(owner, first := Request("a", PROMPT), [4, 5, 6, 7])
    compute(owner, first, len(PROMPT))
    owner.finished("a")
    assert reader.match(Request("b", PROMPT), 0) == 0


@pytest.mark.parametrize(
    "path, more, takes",
    [
        ("staged", {}, True),
        ("staged", {"ranks": (2, 1)}, False),
        ("shm", {}, True),
        ("shm", {"ranks": (2, 1)}, True),
    ],
)
def test_what_is_taken_by_which_path(engines, reading, path, more, takes):
    owner = engines[0]
    begin(owner, first := Request("a", PROMPT), [4, 5, 6, 7])
    compute(owner, first, len(PROMPT))
    owner.finished("a")
    assert reading(path, **more).match(Request("b", PROMPT), 0) == 3 * BLOCK * takes


@pytest.mark.parametrize("path, asked_again", [("staged", False), ("shm", True)])
def test_a_peer_that_did_not_send_is_left_alone_for_a_while(
    engines, reading, monkeypatch, path, asked_again
):
    owner, reader = engines[0], reading(path)
    begin(owner, first := Request("a", PROMPT), [4, 5, 6, 7])
    compute(owner, first, len(PROMPT))
    owner.finished("a")
    begin(reader, Request("b", PROMPT), [1, 2, 3, 8])
    reader.loaded(LoadReport(failed=[LoadFailed("b", 48, "silent")]))
    assert reader.match(Request("c", PROMPT), 0) == 3 * BLOCK * asked_again
    later_s = time.monotonic() + LEFT_ALONE_S
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert reader.match(Request("d", PROMPT), 0) == 3 * BLOCK


# --- what the front end sees -----------------------------------------------------------------------


class Hasher:
    """As vLLM_compat.BlockHasher, with the names that Request above gives."""

    def __init__(self):
        self.hashed = 0

    def of(self, request):
        for key in Request("", request.prompt_token_ids).block_hashes:
            self.hashed += 1
            yield key


def asked(tokens: list[int], **more) -> EngineCoreRequest:
    fields = dict.fromkeys(
        ("mm_features", "sampling_params", "pooling_params", "lora_request", "cache_salt",
         "data_parallel_rank")
    )  # fmt: skip
    return EngineCoreRequest(
        request_id="r", prompt_token_ids=tokens, arrival_time=0.0, **{**fields, **more}
    )


@pytest.fixture
def seen(index):
    return Seen(index, Hasher(), BLOCK, slots=2)


def test_held_is_what_engines_published_and_hashing_stops_where_nobody_holds_more(engines, seen):
    owner = engines[0]
    begin(owner, first := Request("a", PROMPT), [4, 5, 6, 7])
    compute(owner, first, len(PROMPT))
    owner.finished("a")
    longer = asked([*PROMPT, *range(1000)])
    found = seen.find(longer, seen.chain(longer))
    assert (found.held, found.coming) == ({0: 48}, {})
    assert seen._hasher.hashed == 4
    nobody = asked(list(range(5000, 6000)))
    assert seen.find(nobody, seen.chain(nobody)) == ({}, {})
    assert seen._hasher.hashed == 8


def test_coming_is_what_was_sent_and_not_over(seen):
    request = asked(PROMPT)
    chain = seen.chain(request)
    assert len(chain) == 3
    seen.sent(1, chain)
    seen.sent(1, chain)
    other_end = asked([*PROMPT[: 2 * BLOCK], *range(700, 740)])
    assert seen.find(other_end, seen.chain(other_end)).coming == {1: 2 * BLOCK}
    seen.over(1, chain)
    assert seen.find(request, chain).coming == {1: 3 * BLOCK}
    seen.over(1, chain)
    assert seen.find(request, chain).coming == {}


def test_a_salted_prompt_is_another_prompt(seen):
    seen.sent(0, seen.chain(asked(PROMPT)))
    salted = asked(PROMPT, cache_salt="mine")
    assert seen.find(salted, seen.chain(salted)).coming == {}
