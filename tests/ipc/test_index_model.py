"""Random histories of one index, checked after every step against dictionaries."""

import itertools
import secrets

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ipc import entries as owner_half
from ipc.errors import EntryExists, IndexFull, StaleRead, WaitTimeout
from ipc.index import Index
from ipc.keys import key_of
from ipc.layout import Geometry
from ipc.records import Role, State
from ipc.segment import names

SLOTS, ENTRIES, RUN_PAGES = 3, 9, 3
# All with one first bucket, so that some must live in their second.
BUCKETS = Geometry.of(SLOTS, ENTRIES, RUN_PAGES).buckets
CROWD = (id_ for n in itertools.count() if key_of(id_ := f"transfer-{n}", BUCKETS).first == 0)
IDS = list(itertools.islice(CROWD, 11))
slots = st.integers(0, SLOTS - 1)
ids = st.sampled_from(IDS)
block_lists = st.one_of(
    st.lists(st.integers(0, 2**32 - 1), max_size=12),
    st.builds(
        lambda n, step: list(range(0, n * step, step)), st.integers(1, 140), st.integers(1, 2)
    ),
)


class Model:
    """What one entry must look like, and who has said what of it."""

    def __init__(self, ticket, boot, blocks, ready, total, token, expired):
        self.ticket, self.boot, self.blocks = ticket, boot, blocks
        self.ready, self.total, self.token, self.expired = ready, total, token, expired
        self.dropped: set[int] = set()
        self.claimed: int | None = None


class IndexMachine(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.boots = itertools.count(100)
        self.node = Index.create(
            f"pdmodel-{secrets.token_hex(6)}", engine_slots=SLOTS, entries_per_engine=ENTRIES,
            run_pages_per_engine=RUN_PAGES, node_boot_id=1,
        )  # fmt: skip
        self.engine: list[Index] = [None] * SLOTS
        self.boot = [0] * SLOTS
        self.live: dict[tuple[int, str], Model] = {}
        self.ended: list = []  # entries that readers still hold
        for slot in range(SLOTS):
            self._boot(slot)

    def _boot(self, slot: int) -> None:
        self.boot[slot] = next(self.boots)
        self.node.set_control(
            slot, engine_id=f"e{slot}", role=Role.BOTH, state=State.READY,
            boot_id=self.boot[slot], restarts=0,
        )  # fmt: skip
        self.engine[slot] = Index.attach(self.node.name, me=slot)

    def teardown(self):
        if hasattr(self, "node"):
            for index in (*self.engine, self.node):
                index.close()
            assert self.node.unlink()
            assert names(self.node.name) == []

    def _pages(self, slot: int) -> int:
        mine = (model for (owner, _), model in self.live.items() if owner == slot)
        return sum(_pages_of(model.blocks) for model in mine)

    @rule(
        slot=slots, id_=ids, blocks=block_lists, ready=st.integers(0, 3), expired=st.booleans(),
        token=st.integers(-1, 2**40),
    )  # fmt: skip
    def insert(self, slot, id_, blocks, ready, expired, token):
        def attempt():
            return self.engine[slot].insert(
                id_, boot_id=self.boot[slot], block_ids=blocks, tokens_ready=ready, tokens_total=3,
                first_token=token, lease_s=-1 if expired else 1000,
            )  # fmt: skip

        count = sum(owner == slot for owner, _ in self.live)
        if (slot, id_) in self.live:
            with pytest.raises(EntryExists):
                attempt()
        elif count >= ENTRIES or self._pages(slot) + _pages_of(blocks) > RUN_PAGES:
            with pytest.raises(IndexFull):
                attempt()
        else:
            model = Model(attempt(), self.boot[slot], blocks, ready, 3, token, expired)
            self.live[slot, id_] = model

    @precondition(lambda self: self.live)
    @rule(data=st.data(), blocks=block_lists, ready=st.integers(0, 3))
    def publish(self, data, blocks, ready):
        (slot, _), model = self._any(data)

        def attempt():
            self.engine[slot].publish(model.ticket, block_ids=blocks, tokens_ready=ready)

        # New pages are taken before the old ones are given back.
        if self._pages(slot) + _pages_of(blocks) > RUN_PAGES:
            with pytest.raises(IndexFull):
                attempt()
        else:
            attempt()
            model.blocks, model.ready = blocks, ready

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def renew(self, data):
        (slot, _), model = self._any(data)
        self.engine[slot].renew(model.ticket, 1000)
        model.expired = False

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def remove(self, data):
        (slot, id_), model = self._any(data)
        self._keep_for_readers(slot, id_)
        assert self.engine[slot].remove(model.ticket)
        assert not self.engine[slot].remove(model.ticket)
        with pytest.raises(StaleRead):
            self.engine[slot].renew(model.ticket, 1)
        del self.live[slot, id_]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), reader=slots)
    def drop(self, data, reader):
        (slot, id_), model = self._any(data)
        entry = self.engine[reader].select(id_, slot)
        assert (entry is None) == (reader in model.dropped)
        if entry is not None:
            self.engine[reader].drop(entry)
            model.dropped.add(reader)
            model.claimed = None if model.claimed == reader else model.claimed

    @precondition(lambda self: self.live)
    @rule(data=st.data(), reader=slots)
    def take(self, data, reader):
        (slot, id_), model = self._any(data)
        free = not model.dropped and model.claimed in (None, reader) and model.ready == model.total
        if free:
            entry = self.engine[reader].drop_select(id_, slot, timeout_s=0)
            assert entry.block_ids == model.blocks
            model.claimed = reader
        else:
            with pytest.raises(WaitTimeout):
                self.engine[reader].drop_select(id_, slot, timeout_s=0)

    @rule(slot=slots, swept=st.booleans())
    def engine_dies_and_restarts(self, slot, swept):
        mine = [id_ for owner, id_ in self.live if owner == slot]
        for id_ in mine:
            self._keep_for_readers(slot, id_)
            del self.live[slot, id_]
        self.engine[slot].close()
        if swept:
            assert self.node.sweep(slot) == len(mine) or self.unswept[slot]
            self.unswept[slot] = False
            for model in self.live.values():
                model.claimed = None if model.claimed == slot else model.claimed
        else:
            self.unswept[slot] = True
        self._boot(slot)

    @initialize()
    def nothing_unswept(self):
        self.unswept = [False] * SLOTS

    @invariant()
    def readers_see_the_model(self):
        for reader, (owner, id_) in itertools.product(
            range(SLOTS), itertools.product(range(SLOTS), IDS)
        ):
            model = self.live.get((owner, id_))
            found = self.engine[reader].select(id_, owner)
            if model is None or reader in model.dropped:
                assert found is None
            else:
                assert (found.block_ids, found.tokens_ready) == (model.blocks, model.ready)
                assert (found.first_token, found.boot_id) == (model.token, model.boot)
                assert self.engine[reader].validate(found)

    @invariant()
    def owners_see_the_model(self):
        for (slot, _), model in self.live.items():
            expected = "taken" if model.dropped else "expired" if model.expired else None
            assert self.engine[slot].released(model.ticket) == expected

    @invariant()
    def what_ended_stays_ended(self):
        for entry in self.ended:
            assert not self.node.validate(entry)

    @invariant()
    def no_slot_leaks(self):
        for slot in range(SLOTS):
            if not self.unswept[slot]:
                live = sum(owner == slot for owner, _ in self.live)
                found = owner_half.unclean_slots(self.node._shared, self.node.geometry, slot)
                assert len(found) == live

    def _any(self, data):
        key = data.draw(st.sampled_from(sorted(self.live)))
        return key, self.live[key]

    def _keep_for_readers(self, slot: int, id_: str) -> None:
        entry = self.node.select(id_, slot)
        assert entry is not None
        self.ended.append(entry)


def _pages_of(blocks: list[int]) -> int:
    runs = sum(block != before + 1 for before, block in itertools.pairwise([-2, *blocks]))
    return -(-max(0, runs - 6) // 63)


TestIndexAgainstModel = IndexMachine.TestCase
TestIndexAgainstModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
