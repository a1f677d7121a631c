"""The pool: what one process puts in, all others find; what is oldest goes; no death breaks it."""

import itertools
import os
import signal
import threading
import time

import pytest

from ipc.copy import HostCopier, plan
from ipc.errors import (
    LookupFault,
    NoSharedMemory,
    NotOwner,
    PoolTooSmall,
    SegmentForeign,
    StaleRead,
    WaitTimeout,
)
from ipc.pool import Pool
from ipc.pool_layout import ShareGeometry
from ipc.records import KVLayout
from ipc.segment import Segment
from tests.ipc.conftest import until

PAGE, LAYERS = 1024, 3
SHARES = 3


def key(n: int) -> bytes:
    return n.to_bytes(32, "big")


def value(n: int) -> bytes:
    return n.to_bytes(4, "little") * (PAGE * LAYERS // 4)


@pytest.fixture
def pool_name(prefix):
    segment = Pool.create(f"{prefix}pool", 96 * 1024, shares=SHARES)
    yield segment.name
    segment.unlink()
    segment.close()


@pytest.fixture
def attach(pool_name):
    """attach(me): that engine's view; attach(me, owner=True) also fills its share."""
    attached = []

    def make(me, *, owner=False, fingerprint=b"model", grace_s=0.0, layers=LAYERS):
        pool = Pool.attach(pool_name, me=me, fingerprint=fingerprint)
        attached.append(pool)
        if owner:
            pool.own(PAGE, layers, grace_s)
        return pool

    yield make
    for pool in attached:
        pool.close()


def fill(pool: Pool, start: int = 0) -> int:
    """Insert until the share is full; how many fit."""
    count = pool.own_share.geometry.pages
    for n in range(start, start + count):
        assert pool.insert(key(n), value(n))
    return count


def test_every_engine_finds_what_any_engine_inserted(attach):
    pools = [attach(me, owner=True) for me in range(SHARES)]
    for n, pool in enumerate(pools):
        assert pool.insert(key(n), value(n))
    for pool, n in itertools.product(pools, range(SHARES)):
        hit = pool.select(key(n))
        assert hit.owner == n
        assert pool.read(hit) == value(n)
    assert pools[0].select(key(99)) is None


def test_a_block_is_held_once(attach):
    first, second = attach(0, owner=True), attach(1, owner=True)
    assert first.insert(key(1), value(1))
    assert not second.insert(key(1), value(1))
    assert not first.insert(key(1), value(1))
    assert (first.own_share.stored, second.own_share.stored) == (1, 0)


def test_the_least_recently_used_goes_first(attach):
    owner, reader = attach(0, owner=True), attach(1)
    count = fill(owner)
    assert reader.select(key(0)) is not None
    assert owner.insert(key(1000), value(1000))
    assert owner.select(key(1)) is None
    assert [reader.select(key(n)) is not None for n in (0, 2, count - 1, 1000)] == [True] * 4


def test_what_a_reader_has_just_found_is_not_evicted(attach):
    owner, reader = attach(0, owner=True, grace_s=1000), attach(1)
    count = fill(owner)
    hits = [reader.select(key(n)) for n in range(count)]
    assert not owner.insert(key(1000), value(1000))
    assert owner.own_share.busy == 1
    assert [reader.read(hit) for hit in hits] == [value(n) for n in range(count)]


def test_a_hit_whose_page_was_reused_is_refused(attach):
    owner, reader = attach(0, owner=True), attach(1)
    count = fill(owner)
    hit = reader.select(key(0))
    fill(owner, start=count)
    assert not reader.validate(hit)
    with pytest.raises(StaleRead, match="reused"):
        reader.read(hit)


def test_a_reserved_page_is_found_only_once_published(attach):
    owner, reader = attach(0, owner=True), attach(1)
    page = owner.reserve(key(5))
    assert reader.select(key(5)) is None
    owner.publish(key(5), page)
    assert reader.select(key(5)) is not None
    other = owner.reserve(key(6))
    owner.give_back(other)
    assert fill(owner, start=10) == owner.own_share.geometry.pages


def test_blocks_are_copied_straight_from_and_to_kv(attach):
    """Both sides are layouts, so one strip moves a block, whatever its order in the cache."""
    owner, reader = attach(0, owner=True), attach(1)
    cache = bytearray(os.urandom(8 * LAYERS * PAGE))
    back = bytearray(len(cache))
    kv = KVLayout(8, LAYERS, PAGE, PAGE, 8 * PAGE)
    page = owner.reserve(key(3))
    to_pool = plan(kv, owner.kv_layout(0), [6], [page])
    HostCopier().copy(to_pool, _address(cache), owner, src_nbytes=len(cache))
    owner.publish(key(3), page)
    hit = reader.select(key(3))
    from_pool = plan(reader.kv_layout(0), kv, [hit.page], [2])
    HostCopier().copy(from_pool, reader, _address(back), dst_nbytes=len(back))
    assert reader.validate(hit)
    for layer in range(LAYERS):
        at = layer * 8 * PAGE
        assert back[at + 2 * PAGE : at + 3 * PAGE] == cache[at + 6 * PAGE : at + 7 * PAGE]


def _address(buffer: bytearray) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


# --- drop_select


def test_drop_select_takes_the_block_from_everybody(attach):
    owner, taker, reader = attach(0, owner=True), attach(1), attach(2)
    owner.insert(key(1), value(1))
    hit = reader.select(key(1))
    assert taker.drop_select(key(1), timeout_s=0) == value(1)
    assert [pool.select(key(1)) for pool in (owner, taker, reader)] == [None] * 3
    assert reader.read(hit) == value(1)  # Found before, and nobody has reused the page.
    with pytest.raises(WaitTimeout, match="no block"):
        reader.drop_select(key(1), timeout_s=0)


def test_the_owner_gets_dropped_pages_back_before_it_evicts(attach):
    owner, taker = attach(0, owner=True), attach(1)
    count = fill(owner)
    taker.drop_select(key(count - 1), timeout_s=0)
    assert owner.insert(key(1000), value(1000))
    assert owner.own_share.evicted == 0
    assert owner.insert(key(count - 1), value(7))
    assert owner.read(owner.select(key(count - 1))) == value(7)


@pytest.mark.parametrize("count", [1, 6, 7, 8])
def test_any_number_of_drops_comes_back_at_the_next_insert(attach, count):
    owner, taker = attach(0, owner=True), attach(1)
    assert fill(owner) == 8
    for n in range(count):
        taker.drop_select(key(n), timeout_s=0)
    for n in range(count):
        assert owner.insert(key(1000 + n), value(1))
    assert owner.own_share.evicted == 0


def test_what_was_dropped_while_its_owner_was_away_is_free(attach):
    first, taker = attach(0, owner=True), attach(1)
    count = fill(first)
    first.close()
    assert taker.drop_select(key(0), timeout_s=0) == value(0)
    again = attach(0, owner=True)
    assert again.insert(key(0), value(9))
    assert again.own_share.evicted == 0
    assert sum(taker.select(key(n)) is not None for n in range(count)) == count


def test_drops_that_never_lead_to_an_eviction_cost_no_memory(attach):
    owner, taker = attach(0, owner=True), attach(1)
    for n in range(20 * owner.own_share.geometry.pages):
        owner.insert(key(n), value(n))
        taker.drop_select(key(n), timeout_s=0)
    assert len(owner.own_share._heap) <= 2 * owner.own_share.geometry.pages


def test_drop_select_waits_for_the_block(attach):
    owner, taker = attach(0, owner=True), attach(1)
    later = threading.Timer(0.05, lambda: owner.insert(key(1), value(1)))
    later.start()
    assert taker.drop_select(key(1), timeout_s=10) == value(1)
    later.join()


def test_of_many_takers_one_gets_it(attach):
    owner = attach(0, owner=True)
    takers = [attach(me) for me in (0, 1, 2)]
    for n in range(200):
        owner.insert(key(n), value(n))
        barrier, got = threading.Barrier(3), []

        def take(taker, n=n, barrier=barrier, got=got):
            barrier.wait()
            try:
                got.append(taker.drop_select(key(n), timeout_s=0))
            except WaitTimeout:
                pass

        threads = [threading.Thread(target=take, args=(taker,)) for taker in takers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) <= 1
        if not got:  # All three were in each other's way; tried once only.
            assert takers[0].drop_select(key(n), timeout_s=1) == value(n)


# --- life and death


def test_values_survive_the_process_that_wrote_them(attach):
    first = attach(0, owner=True)
    count = fill(first)
    first.select(key(0))
    first.close()
    again, reader = attach(0, owner=True), attach(1)
    assert [reader.read(reader.select(key(n))) for n in range(count)] == [
        value(n) for n in range(count)
    ]
    for n in range(count):  # In the order of before: looked at from oldest to newest.
        again.select(key(n))
    assert again.insert(key(1000), value(1000))
    assert again.select(key(0)) is None


def test_the_order_of_use_survives_too(attach):
    first = attach(0, owner=True)
    fill(first)
    first.select(key(0))
    first.close()
    again = attach(0, owner=True)
    assert again.insert(key(1000), value(1000))
    assert again.select(key(1)) is None
    assert again.select(key(0)) is not None


def test_another_kind_of_kv_is_not_found_and_not_kept(attach):
    fill(attach(0, owner=True))
    assert attach(1, fingerprint=b"other").select(key(0)) is None
    reader = attach(1)
    hit = reader.select(key(0))
    wider = attach(0, owner=True, layers=LAYERS + 1)
    assert not reader.validate(hit)
    with pytest.raises(StaleRead):
        reader.read(hit)
    assert reader.select(key(0)) is None
    assert wider.insert(key(0), value(0) + bytes(PAGE))


@pytest.mark.kill
def test_a_writer_killed_mid_insert_leaves_no_entry(attach, pool_name, python):
    """Killed at random moments: what is found is whole, and no page is lost."""
    reader = attach(1)
    for round_ in range(12):
        writer = python("pool_writer.py", pool_name, PAGE, LAYERS)
        assert writer.stdout.readline() == "ready\n"
        until(lambda: any(reader.select(key(n)) for n in range(64)))
        deadline = time.monotonic() + 0.02 + 0.007 * round_
        while time.monotonic() < deadline:
            _read_all(reader)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        _read_all(reader)
    survivor = attach(0, owner=True)
    pages = survivor.own_share.geometry.pages
    assert fill(survivor, start=10_000) == pages
    assert sum(reader.select(key(n)) is not None for n in range(10_000, 10_000 + pages)) == pages


def _read_all(reader: Pool) -> None:
    for n in range(64):
        hit = reader.select(key(n))
        if hit is None:
            continue
        try:
            found = reader.read(hit)
        except StaleRead:
            continue
        # The writer's value is the key's number and a round, the same everywhere in the block.
        words = {found[i : i + 4] for i in range(0, len(found), 4)}
        assert len(words) == 1
        assert int.from_bytes(words.pop(), "little") % 64 == n


# --- refusals


def test_refusals_say_what_is_wrong(attach, pool_name, prefix):
    pool = attach(0)
    with pytest.raises(NotOwner, match="share 0"):
        pool.insert(key(1), value(1))
    with pytest.raises(LookupFault, match="engine 9"):
        Pool.attach(pool_name, me=9, fingerprint=b"")
    with pytest.raises(PoolTooSmall, match="--kv-pool-gib") as small:
        pool.own(1 << 20, 4)
    assert small.value.nbytes == 4 << 20
    owner = attach(0, owner=True)
    with pytest.raises(LookupFault, match="3,071 bytes"):
        owner.insert(key(1), value(1)[1:])
    with pytest.raises(LookupFault, match="41 bytes"):
        pool.select(bytes(41))
    with pytest.raises(NoSharedMemory, match="--kv-pool-gib"):
        Pool.create(f"{prefix}big", 1 << 50, shares=1)


def test_a_foreign_segment_is_refused(prefix):
    segment = Segment.create(f"{prefix}x", 4096, purpose="a test", flag="--test")
    with pytest.raises(SegmentForeign, match="no pool"):
        Pool.attach(segment.name, me=0, fingerprint=b"")
    segment.unlink()
    segment.close()


@pytest.mark.parametrize("block", [1, 64, 1000, 98304])
@pytest.mark.parametrize("share_bytes", [4096, 65536, 10 << 20])
def test_a_share_is_used_to_the_last_page(block, share_bytes):
    geometry = ShareGeometry.within(8192, share_bytes, 4, block, 3)
    assert geometry.pages == 0 or geometry.end <= 8192 + share_bytes
    assert geometry.of(geometry.pages + 1).end > 8192 + share_bytes
