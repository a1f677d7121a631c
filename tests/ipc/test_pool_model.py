"""Random histories of one pool against dictionaries; and random bytes in the place of a pool."""

import os
import random
import secrets
from collections import OrderedDict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ipc.errors import IpcError, WaitTimeout
from ipc.pool import Pool
from ipc.segment import SHM_DIR, names, unlink

SHARES, PAGE, LAYERS, PAGES = 2, 512, 2, 4
KEYS = [f"block-{n}".encode() for n in range(12)]
engines = st.integers(0, SHARES - 1)
keys = st.sampled_from(KEYS)
contents = st.integers(0, 255).map(lambda n: bytes([n]) * (PAGE * LAYERS))


class PoolMachine(RuleBasedStateMachine):
    """The model: one ordered dictionary a share, oldest use first."""

    @initialize()
    def start(self):
        self.segment = Pool.create(
            f"pdmodel-{secrets.token_hex(6)}", 4096 + SHARES * 4 * 4096, shares=SHARES
        )
        self.pools = [self._boot(me) for me in range(SHARES)]
        self.model = [OrderedDict() for _ in range(SHARES)]
        self.pages = [pool.own_share.geometry.pages for pool in self.pools]
        assert min(self.pages) >= 3

    def _boot(self, me):
        pool = Pool.attach(self.segment.name, me=me, fingerprint=b"model")
        pool.own(PAGE, LAYERS, grace_s=0)
        return pool

    def teardown(self):
        if hasattr(self, "segment"):
            for pool in self.pools:
                pool.close()
            self.segment.close()
            assert self.segment.unlink()
            assert names(self.segment.name) == []

    def _holder(self, key):
        return next((share for share in self.model if key in share), None)

    @rule(me=engines, key=keys, value=contents)
    def insert(self, me, key, value):
        holder, mine = self._holder(key), self.model[me]
        assert self.pools[me].insert(key, value) == (holder is None)
        if holder is not None:
            holder.move_to_end(key)
            return
        if len(mine) == self.pages[me]:
            mine.popitem(last=False)
        mine[key] = value

    @rule(me=engines, key=keys)
    def select(self, me, key):
        holder, hit = self._holder(key), self.pools[me].select(key)
        assert (hit is None) == (holder is None)
        if hit is not None:
            assert self.pools[me].read(hit) == holder[key]
            holder.move_to_end(key)

    @rule(me=engines, key=keys)
    def drop_select(self, me, key):
        holder = self._holder(key)
        if holder is None:
            with pytest.raises(WaitTimeout):
                self.pools[me].drop_select(key, timeout_s=0)
        else:
            assert self.pools[me].drop_select(key, timeout_s=0) == holder.pop(key)

    @rule(me=engines, key=keys)
    def reserve_and_give_back(self, me, key):
        """Nothing is found, but room for it was made."""
        holder, mine = self._holder(key), self.model[me]
        page = self.pools[me].reserve(key)
        assert (page is None) == (holder is not None)
        if holder is not None:
            holder.move_to_end(key)
            return
        if len(mine) == self.pages[me]:
            mine.popitem(last=False)
        self.pools[me].give_back(page)

    @rule(me=engines, key=keys, midway=st.booleans())
    def engine_dies_and_restarts(self, me, key, midway):
        if midway and self._holder(key) is None:
            self.reserve_and_give_back(me, key)
            self.pools[me].reserve(key)
        self.pools[me].close()
        self.pools[me] = self._boot(me)

    @rule(me=engines)
    def no_page_leaks(self, me):
        """Not after every step: drops that the owner has not noticed yet are a state of their own."""
        share, model = self.pools[me].own_share, self.model[me]
        share.holds(b"look for drops")
        assert set(share._keys) == set(model)
        assert len(share._free) == share.geometry.pages - len(model)

    @invariant()
    def what_is_found_is_the_model(self):
        """Through a view that marks no use."""
        for key in KEYS:
            hits = [self.pools[0]._find(owner, key) is not None for owner in range(SHARES)]
            assert hits == [key in share for share in self.model]


TestPoolAgainstModel = PoolMachine.TestCase
TestPoolAgainstModel.settings = settings(
    max_examples=80, stateful_step_count=60, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip

fuzz = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def look(pool: Pool, key: bytes) -> None:
    hit = pool.select(key)
    if hit is not None:
        pool.read(hit)


def use(name: str) -> None:
    """Every operation; typed errors only, never a crash."""
    pool = Pool.attach(name, me=0, fingerprint=b"model")
    try:
        for operation in (
            *(lambda key=key: look(pool, key) for key in KEYS),
            lambda: pool.drop_select(KEYS[0], timeout_s=0),
            lambda: pool.own(PAGE, LAYERS, grace_s=0),
            *(lambda key=key: pool.insert(key, bytes(PAGE * LAYERS)) for key in KEYS),
            lambda: pool.drop_select(KEYS[0], timeout_s=0),
        ):
            try:
                operation()
            except IpcError:
                pass
    finally:
        pool.close()


@fuzz
@given(raw=st.binary(max_size=200), pages=st.integers(0, 4))
def test_random_bytes_are_refused(prefix, raw, pages):
    name = f"{prefix}fuzz"
    with open(f"{SHM_DIR}/{name}", "wb") as file:
        file.write(raw + os.urandom(max(0, pages * 4096 - len(raw))))
    try:
        with pytest.raises(IpcError):
            Pool.attach(name, me=0, fingerprint=b"model")
    finally:
        unlink(name)


@fuzz
@given(seed=st.integers(0, 2**32), flips=st.integers(1, 400), burst=st.integers(1, 64))
def test_a_damaged_pool_gives_typed_errors_only(prefix, seed, flips, burst):
    rng = random.Random(seed)
    segment = Pool.create(f"{prefix}pool", 4096 + 2 * 16384, shares=2)
    try:
        for me in range(2):
            pool = Pool.attach(segment.name, me=me, fingerprint=b"model")
            pool.own(PAGE, LAYERS, grace_s=0)
            for key in KEYS[me::2]:
                pool.insert(key, bytes(PAGE * LAYERS))
            pool.close()
        for _ in range(flips):
            at = rng.randrange(4096, segment.nbytes - burst)
            segment.buf[at : at + burst] = rng.randbytes(burst)
        use(segment.name)
    finally:
        segment.unlink()
        segment.close()
