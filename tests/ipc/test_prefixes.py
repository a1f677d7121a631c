"""Prefix entries: who holds which block hash; against a dict, on damaged memory, under kills."""

import os
import random
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc import layout, prefix_layout
from ipc.errors import BootMismatch, IndexFull, IpcError, LookupFault, NotOwner, SegmentForeign
from ipc.index import Index
from ipc.prefix_view import Keys
from ipc.prefixes import Prefixes
from ipc.segment import SHM_DIR, Segment, names, unlink
from tests.ipc.conftest import BOOTS, start_engine
from tests.ipc.prefix_writer import BLOCK_BYTES, BLOCKS, HASHES, content
from tests.ipc.test_fuzz import damage, fuzz


def hashes(count: int, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(32) for _ in range(count)]


def own(index: Index, blocks: int = 64) -> Index:
    index.prefixes.own(blocks=blocks, boot_id=BOOTS[index.me], flag="--test")
    return index


def test_prefix_is_counted_to_the_first_gap(engines):
    prompt = hashes(40)
    own(engines[0])
    for block, one in enumerate(prompt):
        engines[0].prefixes.publish(one, block)
    own(engines[2])
    engines[2].prefixes.publish(prompt[1], 5)
    assert engines[1].prefixes.lengths(prompt) == {0: 40, 1: 0, 2: 0, 3: 0}
    engines[0].prefixes.withdraw(17)
    assert engines[1].prefixes.lengths(prompt, [0]) == {0: 17}
    assert engines[1].prefixes.take(prompt, 0).blocks == tuple(range(17))
    assert engines[1].prefixes.lengths(prompt[18:], [0]) == {0: 22}
    assert [(h.owner, h.blocks) for h in engines[3].prefixes.holders(prompt[1])] == [
        (0, (1,)), (2, (5,)),
    ]  # fmt: skip
    assert engines[1].prefixes.lengths([]) == {0: 0, 1: 0, 2: 0, 3: 0}


def test_a_block_used_again_during_the_copy_is_seen(engines):
    prompt = hashes(8)
    own(engines[0])
    for block, one in enumerate(prompt):
        engines[0].prefixes.publish(one, block)
    held = engines[1].prefixes.take(prompt, 0)
    assert engines[1].prefixes.still(held) == 8
    engines[0].prefixes.publish(hashes(1, seed=9)[0], 5)
    assert engines[1].prefixes.still(held) == 5
    engines[0].prefixes.publish(prompt[5], 5)  # The same content again is not the same bytes.
    assert engines[1].prefixes.still(held) == 5
    assert engines[1].prefixes.still(held.part(0, 4)) == 4


def test_when_one_of_two_equal_blocks_goes_the_other_is_found(engines):
    one = hashes(1)
    own(engines[0])
    for block in (3, 4, 5):
        engines[0].prefixes.publish(one[0], block)
    for gone in (3, 5):
        engines[0].prefixes.withdraw(gone)
    assert engines[1].prefixes.take(one, 0).blocks == (4,)
    assert engines[0].prefixes.withdraw(4)
    assert not engines[0].prefixes.withdraw(4)
    assert engines[1].prefixes.holders(one[0]) == []


def test_a_dead_engines_blocks_stay_until_its_memory_or_boot_goes(node, engines):
    prompt = hashes(4)
    own(engines[0])
    for block, one in enumerate(prompt):
        engines[0].prefixes.publish(one, block)
    engines[0].close()
    held = engines[1].prefixes.take(prompt, 0)
    assert len(held.blocks) == engines[1].prefixes.still(held) == 4
    start_engine(node, 0, 0xBEEF)
    assert engines[1].prefixes.lengths(prompt, [0]) == {0: 0}
    assert engines[1].prefixes.still(held) == 0
    again = Index.attach(node.name, me=0)
    with pytest.raises(BootMismatch, match="0xb000"):
        own(again)
    again.prefixes.own(blocks=16, boot_id=0xBEEF, flag="--test")
    assert len(names(f"{node.name}.prefix0.")) == 1
    again.prefixes.publish(prompt[0], 1)
    assert engines[1].prefixes.lengths(prompt, [0]) == {0: 1}
    assert engines[1].prefixes.still(held) == 0
    found = engines[1].prefixes.take(prompt, 0)
    node.prefixes.hide(0)
    assert engines[1].prefixes.lengths(prompt, [0]) == {0: 0}
    assert engines[1].prefixes.take(prompt, 0).blocks == ()
    # A worker asks for what its scheduler has found, and may never have looked there itself.
    assert [engine.prefixes.still(found) for engine in engines[1:3]] == [1, 1]
    node.prefixes.forget(0)
    assert engines[3].prefixes.still(found) == 0
    assert names(f"{node.name}.prefix") == []
    again.close()


def test_who_may_not_write_is_told(node, engines):
    with pytest.raises(NotOwner, match="own"):
        engines[0].prefixes.publish(b"x", 1)
    with pytest.raises(NotOwner):
        node.prefixes.own(blocks=4, boot_id=1, flag="--test")
    with pytest.raises(NotOwner):
        engines[0].prefixes.forget(1)
    with pytest.raises(NotOwner):
        engines[0].prefixes.hide(1)
    own(engines[0], blocks=4)
    for block, one in ((4, b"x"), (-1, b"x"), (0, b""), (0, bytes(41))):
        with pytest.raises(LookupFault):
            engines[0].prefixes.publish(one, block)
    with pytest.raises(LookupFault):
        own(engines[1]).prefixes.take([b"", b"x"], 1)
    with pytest.raises(LookupFault):
        engines[0].prefixes.lengths([b"x"], [4])


def test_more_hashes_on_one_position_than_a_window_holds(engines, monkeypatch):
    """As improbable as it is: the first 64 are found, the next one is refused and changes nothing."""
    monkeypatch.setattr(prefix_layout, "mix", lambda one, salt: int.from_bytes(one, "little") << 24)
    monkeypatch.setattr(
        prefix_layout,
        "mix_many",
        lambda words, length, salt: words[:, 0] << prefix_layout.np.uint64(24),
    )
    same = [n.to_bytes(8, "little") for n in range(1, 66)]
    own(engines[0], blocks=80)
    for block, one in enumerate(same[:64]):
        engines[0].prefixes.publish(one, block)
    with pytest.raises(IndexFull, match="--test"):
        engines[0].prefixes.publish(same[64], 70)
    assert engines[1].prefixes.lengths(same, [0]) == {0: 64}
    assert engines[1].prefixes.take(same, 0).blocks == tuple(range(64))
    engines[0].prefixes.withdraw(7)
    engines[0].prefixes.publish(same[64], 70)
    assert engines[1].prefixes.lengths(same[8:], [0]) == {0: 57}


@given(
    contents=st.lists(st.binary(min_size=1, max_size=40), max_size=20),
    salt=st.integers(0, layout.WORD_MAX),
)  # fmt: skip
def test_many_hashes_are_mixed_as_each_is(contents, salt):
    for group in (contents, [one.ljust(40, b"x") for one in contents]):
        expected = [prefix_layout.mix(one, salt) for one in group]
        assert Keys.of(group, salt).mixed.tolist() == expected


actions = st.one_of(
    st.tuples(st.just("publish"), st.integers(0, 7), st.integers(0, 5)),
    st.tuples(st.just("withdraw"), st.just(0), st.integers(0, 5)),
    st.tuples(st.just("all"), st.just(0), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(actions, max_size=40), length=st.sampled_from([1, 7, 32, 36]))
def test_any_history_equals_a_dict(steps, length):
    pool = [one.ljust(40, b"-")[:length] for one in (bytes([65 + n]) for n in range(8))]
    node = Index.create(f"pdtest-pfx{os.getpid()}", engine_slots=2, node_boot_id=7)
    start_engine(node, 0, BOOTS[0])
    owner, reader = (Index.attach(node.name, me=me) for me in range(2))
    try:
        own(owner, blocks=6)
        model: dict[int, bytes] = {}
        taken = []
        for what, number, block in steps:
            before = dict(model)
            if what == "publish":
                owner.prefixes.publish(pool[number], block)
                model[block] = pool[number]
            elif what == "withdraw":
                assert owner.prefixes.withdraw(block) == (model.pop(block, None) is not None)
            else:
                assert owner.prefixes.withdraw_all() == len(model)
                model.clear()
            changed = {b for b in range(6) if before.get(b) != model.get(b)}
            taken = [(held, gone or held.blocks[0] in changed) for held, gone in taken]
            for held, gone in taken:
                assert reader.prefixes.still(held) == (0 if gone else 1)
            check(reader, pool, model)
            taken += [(held, False) for held in reader.prefixes.holders(pool[number])]
        assert owner.prefixes.published() == len(model)
    finally:
        node.unlink()
        for index in (owner, reader, node):
            index.close()


def check(reader: Index, pool: list[bytes], model: dict[int, bytes]) -> None:
    present = set(model.values())
    for first in range(len(pool)):
        wanted = pool[first:]
        count = next((n for n, one in enumerate(wanted) if one not in present), len(wanted))
        assert reader.prefixes.lengths(wanted, [0]) == {0: count}
        blocks = reader.prefixes.take(wanted, 0).blocks
        assert [model[block] for block in blocks] == wanted[:count]
        holders = [held.blocks[0] for held in reader.prefixes.holders(wanted[0])]
        assert [model[block] for block in holders] == [wanted[0]] * (wanted[0] in present)


@fuzz
@given(seed=st.integers(0, 2**32), spots=st.integers(1, 300), whole=st.booleans())
def test_damaged_table_gives_typed_errors_or_true_data(node, seed, spots, whole):
    name = f"{node.name}.prefix0.{BOOTS[0]:016x}"
    prompt = hashes(50)
    owner = own(Index.attach(node.name, me=0))
    for block, one in enumerate(prompt):
        owner.prefixes.publish(one, block + 1)
    raw = Segment.attach(name)
    damage(raw.buf, 0 if whole else 4096, raw.nbytes, spots, random.Random(seed))
    raw.close()
    reader = Index.attach(node.name, me=1)
    try:
        assert reader.prefixes.lengths(prompt)[0] <= 50
        held = reader.prefixes.take(prompt, 0)
        assert held.blocks == tuple(range(1, 1 + len(held.blocks)))
        assert reader.prefixes.still(held) == len(held.blocks)
        for one in prompt:
            reader.prefixes.holders(one)
        reader.prefixes.still(held._replace(blocks=(2**40,) * len(held.blocks)))
    except SegmentForeign:
        assert whole
    finally:
        for block, one in enumerate(hashes(80, seed)):
            try:
                owner.prefixes.publish(one, block % 64)
            except IpcError:
                pass
        owner.prefixes.withdraw_all()
        reader.close()
        owner.close()
        unlink(name)


@fuzz
@given(seed=st.integers(0, 2**32), pages=st.integers(0, 3))
def test_random_bytes_are_no_table(node, engines, seed, pages):
    name = f"{node.name}.prefix0.{BOOTS[0]:016x}"
    engines[0]._shared.words[node.geometry.prefixes(0) >> 3] = BOOTS[0]
    with open(f"{SHM_DIR}/{name}", "wb") as file:
        file.write(random.Random(seed).randbytes(pages * 4096))
    try:
        with pytest.raises(SegmentForeign):
            engines[1].prefixes.lengths(hashes(3))
    finally:
        unlink(name)


@pytest.mark.kill
def test_every_sound_copy_is_what_was_published(node, prefix, python):
    """An engine that is killed again and again while it evicts; the reader copies all the time."""
    memory = Segment.create(f"{prefix}kv", BLOCKS * BLOCK_BYTES, purpose="a test", flag="--test")
    reader, sound = Index.attach(node.name, me=1).prefixes, 0
    try:
        for boot_id in range(100, 104):
            start_engine(node, 0, boot_id)
            process = python("prefix_writer.py", node.name, memory.name, boot_id)
            assert process.stdout.readline() == "full\n"
            sound += copy_until_killed(reader, memory, process)
    finally:
        memory.unlink()
        memory.close()
    assert sound > 300
    assert names(f"{node.name}.prefix0.") == [f"{node.name}.prefix0.{103:016x}"]


def copy_until_killed(reader: Prefixes, memory: Segment, process: subprocess.Popen) -> int:
    rng, sound = random.Random(1), 0
    for tries in range(240):
        if tries == 200:
            process.kill()
            process.wait()
        asked = [one for one in rng.sample(HASHES, 10) if reader.lengths([one], [0])[0]]
        held = reader.take(asked, 0)
        copies = [bytes(memory.buf[b * BLOCK_BYTES : (b + 1) * BLOCK_BYTES]) for b in held.blocks]
        count = reader.still(held)
        assert copies[:count] == [content(one) for one in asked[:count]]
        assert tries < 200 or count == len(asked), "the dead do not change their blocks"
        sound += count
    return sound
