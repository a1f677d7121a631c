import pytest

from ipc import entries as owner_half
from ipc import layout
from ipc.errors import (
    BootMismatch,
    EntryExists,
    IndexFull,
    LookupFault,
    NotOwner,
    PeerGone,
    WaitTimeout,
)
from ipc.index import Index
from ipc.keys import key_of
from ipc.records import State
from tests.ipc.conftest import BOOTS, start_engine


def put(index: Index, transfer_id: str = "a", **changes):
    given = {
        "boot_id": BOOTS[index.me], "block_ids": [3, 4, 5, 9], "tokens_ready": 60,
        "tokens_total": 60, "first_token": 17, "lease_s": 100.0,
    }  # fmt: skip
    return index.insert(transfer_id, **{**given, **changes})


@pytest.fixture
def p(engines):
    return engines[0]


@pytest.fixture
def d(engines):
    return engines[1]


def test_inserted_entry_is_found_by_id_alone_and_by_owner(p, d, node):
    ticket = put(p)
    for found in (d.select("a"), d.select("a", owner=0), node.select("a"), p.select("a")):
        assert found.block_ids == [3, 4, 5, 9]
        assert found.runs == ((3, 3), (9, 1))
        assert (found.tokens_ready, found.tokens_total, found.first_token) == (60, 60, 17)
        assert (found.owner, found.boot_id) == (0, BOOTS[0])
        assert found.generation == ticket.generation
    assert d.select("a", owner=1) is None
    assert d.select("b") is None


def test_same_id_in_two_tables_is_found_under_each_owner(engines):
    put(engines[2], block_ids=[2])
    put(engines[3], block_ids=[3])
    assert engines[0].select("a", owner=3).block_ids == [3]
    assert engines[0].select("a", owner=2).block_ids == [2]
    assert engines[0].select("a").block_ids in ([2], [3])


@pytest.mark.parametrize("count", [0, 1, 6, 7, 69, 70, 400])
def test_any_number_of_block_runs_comes_back_in_order(p, d, count):
    blocks = [5000 - 7 * n for n in range(count)]
    put(p, block_ids=blocks)
    assert d.select("a").block_ids == blocks
    assert d.select("a").block_ids == blocks


def test_removed_entry_is_gone_and_a_reader_in_the_middle_sees_it(p, d):
    ticket = put(p)
    entry = d.select("a")
    assert d.validate(entry)
    assert p.remove(ticket)
    assert not d.validate(entry)
    assert d.select("a") is None
    assert not p.remove(ticket)
    assert p.released(ticket) == "removed"


def test_new_entry_in_the_same_slot_is_not_the_old_one(p, d):
    first = put(p)
    old = d.select("a")
    p.remove(first)
    second = put(p)
    assert second.slot_index == first.slot_index
    assert not d.validate(old)
    d.drop(old)
    assert p.released(second) is None


def test_publish_replaces_blocks_and_progress(p, d):
    ticket = put(p, tokens_ready=0, block_ids=[])
    assert not d.select("a").complete
    p.publish(ticket, block_ids=range(0, 200, 2), tokens_ready=30)
    assert d.select("a").tokens_ready == 30
    p.publish(ticket, block_ids=[1, 2], tokens_ready=60, first_token=99)
    found = d.select("a")
    assert (found.block_ids, found.complete, found.first_token) == ([1, 2], True, 99)


def test_drop_releases_to_the_owner_and_hides_the_entry_from_who_dropped(p, d, engines):
    ticket = put(p)
    entry = d.select("a")
    assert p.released(ticket) is None
    d.drop(entry)
    d.drop(entry)
    assert p.released(ticket) == "taken"
    assert d.select("a") is None
    assert engines[2].select("a") is not None


def test_lease_ends_unless_it_is_renewed(p):
    ticket = put(p, lease_s=0.0)
    assert p.released(ticket) == "expired"
    p.renew(ticket, 100.0)
    assert p.released(ticket) is None


def test_full_table_says_how_full_and_which_flag_and_recovers(p):
    tickets = [put(p, f"id-{n}") for n in range(64)]
    with pytest.raises(IndexFull, match="64 of 64") as caught:
        put(p, "one more")
    assert (caught.value.live, caught.value.capacity) == (64, 64)
    assert "--index-entries" in str(caught.value)
    p.remove(tickets[10])
    put(p, "one more")


def test_ids_that_crowd_one_bucket_are_all_found_and_leave_no_trace(node, p, d):
    """Most live in their second bucket then, and a word at the first one says so."""
    geometry = node.geometry
    crowd = (f"x-{n}" for n in range(10_000))
    ids = [id_ for id_ in crowd if key_of(id_, geometry.buckets).first == 3][:40]
    words, moved = p._shared.words, (geometry.table(3, 0) + layout.MOVED_AT) >> 3
    tickets = [put(p, id_) for id_ in ids]
    elsewhere = sum(ticket.slot_index // layout.WAYS != 3 for ticket in tickets)
    assert words[moved] == elsewhere << 1 | 1
    assert elsewhere >= 33
    for id_, ticket in zip(ids, tickets, strict=True):
        for owner in (0, None):
            assert d.select(id_, owner).slot_index == ticket.slot_index
    for ticket in tickets[:20]:
        p.remove(ticket)
    assert [d.select(id_) is None for id_ in ids] == [True] * 20 + [False] * 20
    node.sweep(0)
    assert words[moved] == 0
    assert not any(map(d.select, ids))


def test_too_many_runs_leave_table_and_old_entry_as_they_were(p, d):
    ticket = put(p)
    scattered = range(0, 2 * (6 + 16 * 63 + 1), 2)
    with pytest.raises(IndexFull, match="run pages"):
        put(p, "b", block_ids=scattered)
    with pytest.raises(IndexFull, match="run pages"):
        p.publish(ticket, block_ids=scattered, tokens_ready=60)
    assert d.select("b") is None
    assert d.select("a").block_ids == [3, 4, 5, 9]
    most = put(p, "b", block_ids=scattered[:-1])
    assert d.select("b").block_ids == list(scattered[:-1])
    p.remove(most)
    put(p, "b", block_ids=scattered[:-1])


def test_same_id_twice_is_refused_until_removed(p):
    ticket = put(p)
    with pytest.raises(EntryExists):
        put(p)
    p.remove(ticket)
    put(p)


@pytest.mark.parametrize(
    "wrong",
    [{"block_ids": [-1]}, {"block_ids": [2**32]}, {"tokens_ready": 61}, {"tokens_ready": -1}],
)
def test_impossible_numbers_are_refused_and_leave_nothing(p, d, wrong):
    with pytest.raises(LookupFault):
        put(p, **wrong)
    assert d.select("a") is None
    assert p.live() == []


def test_only_the_current_boot_may_insert(p):
    with pytest.raises(BootMismatch, match=hex(BOOTS[0])):
        put(p, boot_id=5)


def test_node_has_no_table_and_no_acknowledgements(node, p):
    put(p)
    with pytest.raises(NotOwner):
        node.insert("b", boot_id=1, block_ids=[], tokens_ready=0, tokens_total=0, lease_s=1)
    with pytest.raises(NotOwner):
        node.drop(node.select("a"))


def test_second_writer_of_one_table_is_noticed(node, p):
    put(p)
    other = Index.attach(node.name, me=0)
    with pytest.raises(NotOwner, match="another writer"):
        put(other, "b")
    other.close()


def test_replaced_engine_ends_all_its_entries_at_once(node, p, d):
    put(p)
    entry = d.select("a")
    start_engine(node, 0, 0xFFFF)
    assert not d.validate(entry)
    assert d.select("a") is None


def test_sweep_ends_entries_of_the_dead_and_counts_them(node, p, d):
    tickets = [put(p, f"id-{n}") for n in range(5)]
    p.remove(tickets[0])
    entry = d.select("id-1")
    assert node.sweep(0) == 4
    assert node.sweep(0) == 0
    assert not d.validate(entry)
    restarted = Index.attach(node.name, me=0)
    put(restarted, "id-1")
    assert d.select("id-1").generation > entry.generation
    restarted.close()


def test_restarted_engine_ends_what_nobody_swept(node, p, d):
    put(p, "old")
    start_engine(node, 0, 0xFFFF)
    restarted = Index.attach(node.name, me=0)
    put(restarted, "new", boot_id=0xFFFF)
    assert d.select("old") is None
    assert owner_half.unclean_slots(d._shared, d.geometry, 0) == [restarted.live()[0].slot_index]
    restarted.close()


@pytest.mark.parametrize("died_in", ["insert", "publish", "remove"])
def test_writer_killed_inside_a_write_leaves_an_absent_entry_that_sweep_clears(node, p, d, died_in):
    """Every store of the owner is a point where it can die; readers must survive each."""
    for stop_at in range(1, 9):
        ticket = put(p, f"t{stop_at}", block_ids=range(0, 40, 2))
        words = _DyingWords(p._shared.words, stop_at)
        p._shared.words = words
        try:
            if died_in == "insert":
                put(p, "half", block_ids=range(0, 40, 2))
            elif died_in == "publish":
                p.publish(ticket, block_ids=range(1, 41, 2), tokens_ready=60)
            else:
                p.remove(ticket)
        except _Died:
            pass
        finally:
            p._shared.words = words.real
        seen = d.select("half") or d.select(ticket.transfer_id)
        assert seen is None or seen.block_ids in (list(range(0, 40, 2)), list(range(1, 41, 2)))
        node.sweep(0)
        p._entries = owner_half.Entries(p._shared, p.geometry, 0)
        assert d.select("half") is None
        assert d.select(ticket.transfer_id) is None
        assert owner_half.unclean_slots(d._shared, d.geometry, 0) == []


class _Died(Exception):
    pass


class _DyingWords:
    """The words of a segment; the n-th store never happens."""

    def __init__(self, real, stores: int):
        self.real, self._left = real, stores

    def __getitem__(self, at):
        return self.real[at]

    def __setitem__(self, at, value):
        self._left -= 1
        if self._left <= 0:
            raise _Died
        self.real[at] = value


def test_entry_with_an_odd_sequence_is_absent_not_a_hang(p, d):
    ticket = put(p)
    at = p.geometry.record(0, ticket.slot_index)
    p._shared.words[at >> 3] |= 1
    assert d.select("a") is None
    with pytest.raises(WaitTimeout):
        d.drop_select("a", timeout_s=0.02)


def test_record_whose_bytes_changed_is_absent(p, d):
    ticket = put(p)
    at = p.geometry.record(0, ticket.slot_index)
    p._shared.mm[at + layout.INLINE_AT] ^= 1
    assert d.select("a") is None


# drop_select -------------------------------------------------------------------------------------


def test_taken_entry_is_pinned_until_it_is_dropped(p, d):
    ticket = put(p)
    entry = d.drop_select("a", timeout_s=0)
    assert p.released(ticket) is None
    d.drop(entry)
    assert p.released(ticket) == "taken"


def test_lease_ends_a_claim_too_and_the_claimer_can_tell(p, d):
    ticket = put(p, lease_s=0)
    entry = d.drop_select("a", timeout_s=0)
    assert p.released(ticket) == "expired"
    p.remove(ticket)
    assert not d.validate(entry)


@pytest.mark.parametrize("first,second", [(1, 2), (2, 1)])
def test_one_reader_takes_an_entry_and_the_other_learns_who_has_it(p, engines, first, second):
    put(p)
    engines[first].drop_select("a", timeout_s=0)
    with pytest.raises(WaitTimeout, match=f"in the hands of slot {first}"):
        engines[second].drop_select("a", timeout_s=0)
    assert engines[first].drop_select("a", timeout_s=0).block_ids == [3, 4, 5, 9]


def test_entry_given_back_can_be_taken_by_another(p, engines):
    put(p)
    entry = engines[1].drop_select("a", timeout_s=0)
    engines[1].unclaim(entry)
    assert engines[2].drop_select("a", timeout_s=0) == entry


def test_a_claim_is_worth_nothing_once_another_reader_let_go(p, engines):
    """Its owner may free the blocks: who asks again must not be handed them."""
    put(p)
    first, other = engines[1], engines[2]
    first.drop_select("a", timeout_s=0)
    other.drop(other.select("a"))
    with pytest.raises(WaitTimeout, match=f"in the hands of slot {other.me}"):
        first.drop_select("a", timeout_s=0)


def test_claims_of_a_dead_reader_are_undone_and_its_drops_are_not(node, p, engines):
    first, second = put(p, "a"), put(p, "b")
    engines[1].drop_select("a", timeout_s=0)
    engines[1].drop(engines[1].drop_select("b", timeout_s=0))
    node.sweep(1)
    assert engines[2].drop_select("a", timeout_s=0)
    assert (p.released(first), p.released(second)) == (None, "taken")


def test_wait_ends_when_the_last_token_is_there(p, d):
    ticket = put(p, tokens_ready=0)
    with pytest.raises(WaitTimeout, match="0 of 60 tokens in slot 0"):
        d.drop_select("a", timeout_s=0.01)
    p.publish(ticket, block_ids=[1], tokens_ready=60)
    assert d.drop_select("a", timeout_s=None).block_ids == [1]


def test_timeout_of_zero_tries_once(d):
    with pytest.raises(WaitTimeout, match="never seen"):
        d.drop_select("nothing", timeout_s=0)


def test_wait_for_a_dead_or_replaced_owner_is_peer_gone(node, p, d, monkeypatch):
    put(p, tokens_ready=0)
    start_engine(node, 0, BOOTS[0], State.DEAD)
    with pytest.raises(PeerGone, match="dead"):
        d.drop_select("a", 0, timeout_s=None)
    start_engine(node, 0, BOOTS[0])
    looked = d._lookup.select

    def replaced_after_the_first_look(*args):
        found = looked(*args)
        start_engine(node, 0, 0xFFFF)
        return found

    monkeypatch.setattr(d._lookup, "select", replaced_after_the_first_look)
    with pytest.raises(PeerGone, match="0xffff"):
        d.drop_select("a", timeout_s=None)


def test_complete_entry_of_a_dead_engine_can_still_be_taken(node, p, d):
    put(p)
    start_engine(node, 0, BOOTS[0], State.DEAD)
    assert d.drop_select("a", timeout_s=0).block_ids == [3, 4, 5, 9]


def test_timeout_leaves_no_claim(p, engines):
    put(p)
    want = engines[2]._lookup
    entry = engines[2].select("a")
    engines[2]._shared.words[want._ack(2, entry)] = entry.generation << 2 | layout.WANT
    with pytest.raises(WaitTimeout, match="slot 2"):
        engines[1].drop_select("a", timeout_s=0.005)
    assert engines[1]._shared.words[want._ack(1, entry)] == 0
    engines[2].unclaim(entry)
    engines[1].drop_select("a", timeout_s=0)
