"""Damaged shared memory: a typed refusal or "not there", never a crash, a hang, wrong data."""

import os
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipc import layout
from ipc.errors import IpcError
from ipc.index import Index
from ipc.memory import HostRegion
from ipc.pipe import RECEIVE, SEND, KVPipe
from ipc.records import RegionRecord
from ipc.segment import SHM_DIR, Segment, unlink
from tests.ipc.conftest import BOOTS

fuzz = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
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
        for operation in operations(index):
            try:
                operation()
            except IpcError:
                pass
    finally:
        index.close()


def operations(index: Index):
    for slot in range(index.engine_slots):
        yield lambda slot=slot: index.engine(slot)
        yield lambda slot=slot: index.region(slot, 3)
        yield lambda slot=slot: index.select("id-1", slot)
    for n in range(12):
        yield lambda n=n: index.select(f"id-{n}")
        yield lambda n=n: index.drop_select(f"id-{n}", timeout_s=0)
    boot = index._engines.boot(0)
    yield lambda: [
        index.insert(
            f"new-{n}", boot_id=boot, block_ids=[1, 2], tokens_ready=1, tokens_total=1, lease_s=1
        )
        for n in range(5)
    ]
    yield lambda: [index.released(ticket) for ticket in index.live()]
    yield lambda: [index.remove(ticket) for ticket in index.live()]


def receive(pipe: KVPipe) -> None:
    with pipe:
        for _ in range(4):
            pipe.recv_tensor(timeout_s=0.001)


@fuzz
@given(seed=st.integers(0, 2**32), pages=st.integers(0, 6), cut=st.integers(0, 4095))
def test_random_bytes_are_refused_by_every_attach(prefix, seed, pages, cut):
    name = prefix + "noise"
    write_file(name, random.Random(seed).randbytes(pages * 4096 + (cut if seed & 1 else 0)))
    open_everything(name)
    unlink(name)


@fuzz
@given(
    seed=st.integers(0, 2**32), spots=st.integers(1, 400),
    region=st.sampled_from(["all", "rows", "tags", "records", "pages"]),
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
    first, last = {
        "all": (0, geometry.total),
        "rows": (layout.PAGE, geometry.tags_at),
        "tags": (geometry.tags_at, geometry.records_at),
        "records": (geometry.records(0), geometry.records(1)),
        "pages": (geometry.pages(0), geometry.pages(1)),
    }[region]
    name = node.name + "-copy"
    with open(f"{SHM_DIR}/{node.name}", "rb") as file:
        raw = bytearray(file.read())
    for _ in range(spots):
        raw[noise.randrange(first, last)] = noise.randrange(256)
    write_file(name, bytes(raw))
    try:
        damaged = Index.attach(name, me=1)
    except IpcError:
        pass
    else:
        for id_, blocks in wanted.items():
            found = damaged.select(id_)
            assert found is None or found.block_ids == blocks
        use_index(damaged)
    unlink(name)
    for ticket in tickets:
        engines[0].remove(ticket)


@fuzz
@given(keep=st.integers(0, 40))
def test_index_cut_off_at_any_page_is_refused(node, keep):
    name = node.name + "-cut"
    with open(f"{SHM_DIR}/{node.name}", "rb") as file:
        raw = file.read(min(keep * 4096, node.geometry.total - 4096))
    write_file(name, raw)
    with pytest.raises(IpcError):
        Index.attach(name, me=0)
    unlink(name)


@fuzz
@given(seed=st.integers(0, 2**32), spots=st.integers(1, 200), whole=st.booleans())
def test_damaged_pipe_gives_typed_errors(prefix, seed, spots, whole):
    noise = random.Random(seed)
    sender = KVPipe.create(prefix + "pipe", 4, 1024, end=SEND, max_frame_bytes=1 << 20)
    sender.send_tensor(torch.arange(10))
    sender.send_tensor(None)
    raw = Segment.attach(sender.name)
    first = 0 if whole else 8192
    for _ in range(spots):
        raw.buf[noise.randrange(first, raw.nbytes if whole else first + 200)] = noise.randrange(256)
    try:
        receive(KVPipe.attach(sender.name, end=RECEIVE))
    except IpcError:
        pass
    sender.close()
    unlink(sender.name)


def test_index_as_large_as_its_header_claims_is_checked_not_believed(prefix):
    """A header with sound checksum and sizes that do not fit the file."""
    made = Index.create(f"{prefix}index", engine_slots=2, node_boot_id=1)
    os.truncate(f"{SHM_DIR}/{made.name}", 8192)
    with pytest.raises(IpcError, match="cut off"):
        Index.attach(made.name, me=0)
    unlink(made.name)
