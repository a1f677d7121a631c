"""The worker half takes a prefix of a peer, by whatever path, and notices when it was given away."""

from __future__ import annotations

import os
import pickle
import secrets

import pytest
import torch

from ipc.index import Index
from ipc.segment import names
from pdnode.connector.metadata import PrefixLoad
from pdnode.connector.settings import ConnectorSettings
from pdnode.connector.worker import WorkerHalf
from tests.unit.vllm_scheduler import index_of

BLOCKS, LAYERS, PAGE = 8, 3, 512
HASHES = [bytes([i]) * 32 for i in range(BLOCKS)]


@pytest.fixture
def prefix():
    prefix = f"pdtest-{secrets.token_hex(6)}"
    yield prefix
    assert names(prefix) == []


class Half:
    def __init__(self, prefix: str, slot: int, path: str) -> None:
        settings = ConnectorSettings(
            node_pid=os.getpid(), index_name=f"{prefix}.index", segment_prefix=f"{prefix}.e{slot}",
            engine_id=f"e{slot}", slot=slot, boot_id=slot + 1, lease_s=9, fingerprint="ab" * 32,
            kv_paths=(path, path), kv_served=(path,),
        )  # fmt: skip
        self.index = Index.attach(settings.index_name, me=slot)
        self.index.prefixes.own(blocks=BLOCKS, boot_id=slot + 1, flag="--kv")
        self.worker = WorkerHalf(settings, 0)
        with self.worker.kv_memory():
            buffer = torch.zeros(BLOCKS * LAYERS * PAGE, dtype=torch.int8)
        self.layers = list(buffer.view(LAYERS, BLOCKS, PAGE))
        self.worker.publish({str(i): layer for i, layer in enumerate(self.layers)})

    def block(self, number: int) -> list[int]:
        return [int(layer[number, 5]) for layer in self.layers]

    def close(self) -> None:
        self.layers = None
        self.worker.close()
        self.index.close()


@pytest.fixture(params=["shm", "staged"])
def halves(prefix, request):
    node = index_of(2, entries=16, name=f"{prefix}.index")
    owner, reader = (Half(prefix, slot, request.param) for slot in (0, 1))
    for number in range(BLOCKS):
        for i, layer in enumerate(owner.layers):
            layer[number] = 10 * i + number
    yield owner, reader
    owner.close()
    reader.close()
    node.unlink()
    node.close()


def load_of(reader: Half, count: int) -> PrefixLoad:
    held = reader.index.prefixes.take(HASHES[:count], 0)
    assert len(held.blocks) == count
    load = PrefixLoad("r", held, (6, 1, 4)[:count], count * 16)
    return pickle.loads(pickle.dumps(load))  # as between the scheduler and its workers


def test_blocks_of_a_prefix_are_copied_where_they_belong(halves):
    owner, reader = halves
    for key, block in zip(HASHES, (3, 7, 2), strict=False):
        owner.index.prefixes.publish(key, block)
    reader.worker.load([load_of(reader, 3)])
    report = reader.worker.take_report()
    assert [(done.request_id, done.owner, done.nbytes) for done in report.done] == [
        ("r", 0, 3 * LAYERS * PAGE)
    ]
    assert [reader.block(n) for n in (6, 1, 4)] == [owner.block(n) for n in (3, 7, 2)]
    assert reader.worker.take_failed_blocks() == set()


def test_a_block_that_is_given_away_while_it_is_copied_fails_the_load(halves, monkeypatch):
    """Between the look before the copy and the one after it."""
    owner, reader = halves
    for key, block in zip(HASHES, (3, 7, 2), strict=False):
        owner.index.prefixes.publish(key, block)
    load = load_of(reader, 3)
    checks = []

    def check_and_give_away(load: PrefixLoad) -> None:
        WorkerHalf._check(reader.worker, load)
        checks.append(load)
        owner.index.prefixes.withdraw(2)

    monkeypatch.setattr(reader.worker, "_check", check_and_give_away)
    reader.worker.load([load])
    report = reader.worker.take_report()
    assert (report.done, len(report.failed), len(checks)) == ([], 1, 1)
    assert reader.worker.take_failed_blocks() == {6, 1, 4}


def test_a_block_that_was_given_away_fails_the_load(halves):
    owner, reader = halves
    for key, block in zip(HASHES, (3, 7, 2), strict=False):
        owner.index.prefixes.publish(key, block)
    load = load_of(reader, 3)
    owner.index.prefixes.withdraw(7)
    owner.index.prefixes.publish(HASHES[5], 7)
    reader.worker.load([load])
    report = reader.worker.take_report()
    assert report.done == []
    [failure] = report.failed
    assert "block 1 of 3 to copy from slot 0" in failure.reason
    assert reader.worker.take_failed_blocks() == {6, 1, 4}
