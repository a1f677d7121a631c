"""Damaged shared memory: a typed refusal or "not there", never a crash, a hang, wrong data."""

import os
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipc import layout
from ipc.errors import IpcError, WaitTimeout
from ipc.index import Index
from ipc.memory import HostRegion
from ipc.pipe import RECEIVE, SEND, KVPipe
from ipc.records import RegionRecord
from ipc.segment import SHM_DIR, Segment, unlink
from tests.ipc.conftest import BOOTS

fuzz = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def write_file(name: str, raw: bytes) -> None:
    with open(f"{SHM_DIR}/{name}", "wb") as file:
        file.write(raw)


def open_everything(name: str) -> None:
    """Each kind of attach on the same bytes; all must refuse or succeed in peace."""
    record = RegionRecord(name, 4096, 1, 1, 4096, 4096, 4096, 0, 1, 1)
    for attach in (
        lambda: use_index(Index.attach(name, me=0)),
        lambda: HostRegion.attach(record, b"", 1).close(),
        lambda: receive(KVPipe.attach(name, end=RECEIVE)),
    ):
        try:
            attach()
        except IpcError:
            pass


def use_index(index: Index) -> None:
    try:
        for operation in (*operations(index), *owner_operations(index)):
            try:
                operation()
            except IpcError:
                pass
    finally:
        index.close()


def damage(raw: bytearray, first: int, last: int, spots: int, noise: random.Random) -> None:
    """Single bytes, and whole words at the ends of their range: counters must not overflow."""
    extremes = [bytes(8), b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\xfe" + b"\xff" * 7]
    for _ in range(spots):
        at = noise.randrange(first, last)
        if noise.random() < 0.7:
            raw[at] = noise.randrange(256)
        elif at + 8 <= last:
            raw[at & ~7 : (at & ~7) + 8] = noise.choice(extremes)


def operations(index: Index):
    for slot in range(index.engine_slots):
        yield lambda slot=slot: index.engine(slot)
        yield lambda slot=slot: index.region(slot, 3)
        yield lambda slot=slot: index.select("id-1", slot)
    for n in range(12):
        yield lambda n=n: index.select(f"id-{n}")
        yield lambda n=n: index.drop_select(f"id-{n}", timeout_s=0)


def owner_operations(index: Index):
    me, blocks = index.me, list(range(0, 300, 2))
    if me == layout.NODE:
        yield lambda: index.set_control(0, engine_id="e", role=1, state=2, boot_id=5, restarts=0)
        yield from (lambda slot=slot: index.sweep(slot) for slot in range(index.engine_slots))
        return
    boot = index._engines.boot(me)
    for n in range(40):
        yield lambda n=n: index.insert(
            f"new-{n}", boot_id=boot, block_ids=blocks, tokens_ready=1, tokens_total=1, lease_s=1
        )
    yield lambda: [index.released(ticket) for ticket in index.live()]
    yield lambda: [index.publish(t, block_ids=[1], tokens_ready=0) for t in index.live()]
    yield lambda: [index.drop(index.select(t.transfer_id, me)) for t in index.live()[:3]]
    yield lambda: [index.remove(ticket) for ticket in index.live()]
    yield lambda: index.add_counters(me, pins=3)
    yield lambda: index.set_load(me, running=3)
    yield lambda: index.set_region(me, 3, RegionRecord("s", 4096, 1, 1, 4096, 4096, 4096, 0, 1, 1))


def receive(pipe: KVPipe) -> None:
    with pipe:
        for _ in range(4):
            pipe.recv_tensor(timeout_s=0.001)


@fuzz
@given(seed=st.integers(0, 2**32), pages=st.integers(0, 6), cut=st.integers(0, 4095))
def test_random_bytes_are_refused_by_every_attach(prefix, seed, pages, cut):
    name = prefix + "noise"
    write_file(name, random.Random(seed).randbytes(pages * 4096 + (cut if seed & 1 else 0)))
    try:
        open_everything(name)
    finally:
        unlink(name)


@fuzz
@given(
    seed=st.integers(0, 2**32), spots=st.integers(1, 400),
    region=st.sampled_from(["all", "rows", "pages", "bucket"]),
)  # fmt: skip
def test_damaged_index_gives_typed_errors_or_true_data(node, engines, seed, spots, region):
    noise, geometry = random.Random(seed), node.geometry
    wanted = {f"id-{n}": list(range(n, n + 200 * (n % 2) + 3, 2)) for n in range(12)}
    tickets = [
        engines[0].insert(
            id_, boot_id=BOOTS[0], block_ids=blocks, tokens_ready=1, tokens_total=1, lease_s=10
        )
        for id_, blocks in wanted.items()
    ]
    bucket = tickets[seed % len(tickets)].slot_index // layout.WAYS
    first, last = {
        "all": (0, geometry.total),
        "rows": (layout.PAGE, geometry.run_pages_at),
        "pages": (geometry.pages(0), geometry.pages(1)),
        "bucket": (geometry.table(bucket, 0), geometry.table(bucket + 1, 0)),
    }[region]
    name = node.name + "-copy"
    with open(f"{SHM_DIR}/{node.name}", "rb") as file:
        raw = bytearray(file.read())
    damage(raw, first, last, spots, noise)
    try:
        for me in (1, 0, layout.NODE):
            write_file(name, bytes(raw))
            use_damaged(name, me, wanted)
    finally:
        unlink(name)
        for ticket in tickets:
            engines[0].remove(ticket)


def use_damaged(name: str, me: int, wanted: dict[str, list[int]]) -> None:
    try:
        damaged = Index.attach(name, me=me)
    except IpcError:
        return
    for id_, blocks in wanted.items():
        found = damaged.select(id_)
        assert found is None or found.block_ids == blocks
    use_index(damaged)


@fuzz
@given(keep=st.integers(0, 40))
def test_index_cut_off_at_any_page_is_refused(node, keep):
    name = node.name + "-cut"
    with open(f"{SHM_DIR}/{node.name}", "rb") as file:
        raw = file.read(min(keep * 4096, node.geometry.total - 4096))
    write_file(name, raw)
    try:
        with pytest.raises(IpcError):
            Index.attach(name, me=0)
    finally:
        unlink(name)


@fuzz
@given(seed=st.integers(0, 2**32), spots=st.integers(1, 200), whole=st.booleans())
def test_damaged_pipe_gives_typed_errors(prefix, seed, spots, whole):
    noise = random.Random(seed)
    sender = KVPipe.create(prefix + "pipe", 4, 1024, end=SEND, max_frame_bytes=1 << 20)
    try:
        sender.send_tensor(torch.arange(10))
        sender.send_tensor(None)
        raw = Segment.attach(sender.name)
        first = 0 if whole else 8192
        damage(raw.buf, first, raw.nbytes if whole else first + 200, spots, noise)
        raw.close()
        try:
            receive(KVPipe.attach(sender.name, end=RECEIVE))
        except IpcError:
            pass
    finally:
        sender.close()
        unlink(sender.name)


def test_index_as_large_as_its_header_claims_is_checked_not_believed(prefix):
    """A header with sound checksum and sizes that do not fit the file."""
    made = Index.create(f"{prefix}index", engine_slots=2, node_boot_id=1)
    os.truncate(f"{SHM_DIR}/{made.name}", 8192)
    with pytest.raises(IpcError, match="cut off"):
        Index.attach(made.name, me=0)
    unlink(made.name)


def test_words_at_their_maximum_stop_nobody(node, engines):
    """A generation that an acknowledgement word cannot hold; counters about to wrap."""
    made = engines[0].insert(
        "worn", boot_id=BOOTS[0], block_ids=[1], tokens_ready=1, tokens_total=1, lease_s=10
    )
    words, at = engines[0]._shared.words, node.geometry.record(0, made.slot_index)
    words[at >> 3] = layout.WORD_MAX - 1
    words[at + 8 >> 3] = layout.WORD_MAX
    assert engines[1].select("worn") is None
    with pytest.raises(WaitTimeout):
        engines[1].drop_select("worn", timeout_s=0)
    assert engines[0].remove(made)
    again = engines[0].insert(
        "worn", boot_id=BOOTS[0], block_ids=[2], tokens_ready=1, tokens_total=1, lease_s=10
    )
    assert again.slot_index == made.slot_index
    assert engines[1].drop_select("worn", timeout_s=0).block_ids == [2]
