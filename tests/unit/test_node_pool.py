"""The scheduler's half of the KV pool: what is put in when, and what a failed load must prevent."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import pytest

from ipc.pool import Pool
from ipc.segment import names
from pdnode.connector import pool as pool_half
from pdnode.connector.metadata import LoadDone, LoadFailed, LoadReport, PoolLoad, Store
from pdnode.connector.pool import NodePool
from pdnode.connector.pool_worker import POOL
from pdnode.connector.settings import ConnectorSettings

BLOCK, PAGE, LAYERS = 16, 256, 2


@dataclass
class Request:
    """What the pool reads of vLLM's request."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self):
        self.block_hashes = [key(i) for i in range(self.num_tokens // BLOCK)]


@dataclass
class Block:
    block_hash: bytes | None = None


class Blocks:
    """vLLM's block pool, as far as it is asked: block i holds the content of key i."""

    def __init__(self):
        self.blocks = [Block(key(i) + b"grp0") for i in range(64)]


def key(i: int) -> bytes:
    return i.to_bytes(32, "big")


@pytest.fixture
def name():
    name = f"pdtest-{secrets.token_hex(6)}"
    segment = Pool.create(f"{name}0", 1 << 20, shares=2)
    yield name
    segment.close()
    segment.unlink()
    assert names(name) == []


@pytest.fixture
def worker(name):
    pool = Pool.attach(f"{name}0", me=0, fingerprint=bytes(32))
    pool.own(PAGE, LAYERS)
    yield pool
    pool.close()


@pytest.fixture
def half(name, worker):
    settings = ConnectorSettings(1, "", "", "engine", 0, 1, 60.0, "00" * 32, pool_name=name)
    half = NodePool(settings, ranks=1, block_size=BLOCK)
    half.bind_block_pool(Blocks())
    yield half
    half.close()


def put(worker: Pool, *numbers: int) -> None:
    for i in numbers:
        assert worker.insert(key(i), bytes(PAGE * LAYERS))


def start(half: NodePool, request: Request, pool_tokens: int = 0) -> None:
    blocks = list(range(-(-request.num_tokens // BLOCK)))
    half.allocated(request, blocks, pool_tokens)
    request.num_computed_tokens += pool_tokens


def step(half: NodePool, **tokens: int) -> tuple[list[PoolLoad], list[Store]]:
    return half.step(tokens, peers_loading=False)


def done(request_id: str, tokens: int) -> LoadReport:
    return LoadReport(done=[LoadDone(request_id, POOL, 1, 1, tokens)])


def test_blocks_are_stored_in_the_step_that_fills_them(half):
    request = Request("a", 50)
    start(half, request)
    assert step(half, a=20) == ([], [Store(key(0), 0)])
    request.num_computed_tokens = 20
    assert step(half, a=30)[1] == [Store(key(1), 1), Store(key(2), 2)]
    request.num_computed_tokens = 50
    assert step(half, a=1)[1] == []


def test_what_the_pool_has_is_matched_up_to_the_first_gap_and_the_last_token(half, worker):
    put(worker, 0, 1, 3)
    assert half.match(Request("a", 80), 0) == 2 * BLOCK
    assert half.match(Request("b", 80), BLOCK) == BLOCK
    assert half.match(Request("c", 2 * BLOCK), 0) == BLOCK
    assert half.match(Request("d", 80, skip_reading_prefix_cache=True), 0) == 0


def test_a_match_becomes_a_load_and_then_counters(half, worker):
    put(worker, 0, 1)
    request = Request("a", 50)
    start(half, request, half.match(request, 0))
    loads, stores = step(half, a=18)
    assert loads == [PoolLoad("a", (key(0), key(1)), (0, 1), 32)]
    assert stores == []  # The load may fail, and then block 2 is not what its hash says.
    other = LoadDone("b", 1, 7, 7)
    rest, counters = half.loaded(LoadReport(done=[*done("a", 32).done, other], stored=4))
    assert rest.done == [other]
    assert counters == {"pool_hits": 1, "pool_tokens": 32, "pool_stored": 4}
    request.num_computed_tokens = 50
    assert step(half, a=1) == ([], [Store(key(2), 2)])


def test_vllm_may_give_room_for_nothing_of_the_match(half, worker):
    put(worker, 0)
    request = Request("a", 50)
    half.match(request, 0)
    half.allocated(request, [0, 1, 2, 3], 0)
    assert step(half, a=50)[0] == []


def test_after_a_failed_load_nothing_computed_meanwhile_is_stored(half, worker):
    put(worker, 0)
    request, bystander = Request("a", 50), Request("b", 50)
    start(half, bystander)
    start(half, request, half.match(request, 0))
    step(half, a=34, b=50)
    request.num_computed_tokens = bystander.num_computed_tokens = 50
    assert step(half, a=1, b=1)[1] == []  # Scheduled before the failure was known.
    failed = LoadReport(failed=[LoadFailed("a", 16, "gone")])
    rest, counters = half.loaded(failed)
    assert rest.failed == failed.failed
    assert counters["pool_hits"] == 0
    request.num_computed_tokens = bystander.num_computed_tokens = 0
    assert step(half, a=20, b=20)[1] == []  # Key 0 is still in the pool; no other block is full.
    assert step(half, a=50)[1] == [Store(key(1), 1), Store(key(2), 2)]


def test_loads_from_peers_hold_stores_back_too(half):
    start(half, Request("a", 50))
    assert half.step({"a": 50}, peers_loading=True) == ([], [])
    assert len(half.step({"a": 1}, peers_loading=False)[1]) == 3


def test_a_block_that_got_another_content_is_not_stored(half):
    start(half, Request("a", 50))
    half.step({"a": 50}, peers_loading=True)
    half.forget("a")
    half._blocks.blocks[1].block_hash = None
    half._blocks.blocks[2].block_hash = key(9) + b"grp0"
    assert step(half, b=1)[1] == [Store(key(0), 0)]


def test_stores_are_bounded_per_step_and_wait_for_a_step_with_a_forward(half, monkeypatch):
    monkeypatch.setattr(pool_half, "STORE_STEP_BYTES", 2 * PAGE * LAYERS)
    start(half, Request("a", 80))
    assert [store.block_id for store in step(half, a=80)[1]] == [0, 1]
    assert step(half)[1] == []
    assert [store.block_id for store in step(half, a=1)[1]] == [2, 3]
    assert [store.block_id for store in step(half, a=1)[1]] == [4]
