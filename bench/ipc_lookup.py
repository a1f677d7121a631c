"""Look-ups: the index and the pool against Redis and ZeroMQ, at three table sizes."""

from __future__ import annotations

import itertools
import random
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.ipc_peers import Missing, RedisPeer, RedisPyPeer, ZmqPeer
from bench.measure import Series, each_us, no_gc, quantile
from bench.report import Report
from ipc import keys, pool_keys
from ipc.index import Index
from ipc.pool import Pool
from ipc.records import Role, State

SIZES = (10, 10_000, 1_000_000)
OPERATIONS = ("select hit", "select miss", "insert")
QUANTILES = {"p50": 0.50, "p99": 0.99}
BATCH = 10
"""Calls between two emptyings of the process's cache of hashed ids: a reader sees an id once."""
BLOCK_IDS = list(range(64, 80))
VALUE = bytes(256)


class IndexTable:
    """Engine 0 offers, engine 1 looks."""

    name = "ipc index"
    version = ""  # this tree

    def __init__(self, folder: Path) -> None:
        self._name = f"pdbench-{secrets.token_hex(4)}"
        self._tables: dict[int, tuple[Index, Index, Index]] = {}

    def use(self, database: int) -> None:
        if database not in self._tables:
            self._tables[database] = self._make(database)
        _, self._owner, self._reader = self._tables[database]

    def _make(self, database: int) -> tuple[Index, Index, Index]:
        name = f"{self._name}.{database}"
        node = Index.create(
            name, engine_slots=2, entries_per_engine=max(64, SIZES[database] + 64), node_boot_id=1
        )
        for slot in range(2):
            node.set_control(
                slot, engine_id=f"e{slot}", role=Role.BOTH, state=State.READY, boot_id=7, restarts=0
            )
        return node, Index.attach(name, me=0), Index.attach(name, me=1)

    def fill(self, ids: Iterator[str]) -> None:
        for id_ in ids:
            self.insert(id_)

    def select(self, id_: str) -> object:
        # A reader knows the owner, as the request says where its KV is.
        return self._reader.select(id_, 0)

    def insert(self, id_: str) -> None:
        self._last = self._owner.insert(
            id_, boot_id=7, block_ids=BLOCK_IDS, tokens_ready=2048, tokens_total=2048, lease_s=60
        )

    def remove(self, id_: str) -> None:
        self._owner.remove(self._last)

    def close(self) -> None:
        for node, owner, reader in self._tables.values():
            node.unlink()
            for index in (node, owner, reader):
                index.close()


class PoolTable:
    """Engine 0 fills its share with blocks of 256 bytes, engine 1 looks."""

    name = "ipc pool"
    version = ""  # this tree

    def __init__(self, folder: Path) -> None:
        self._name = f"pdbench-{secrets.token_hex(4)}"
        self._tables: dict[int, tuple] = {}

    def use(self, database: int) -> None:
        if database not in self._tables:
            name = f"{self._name}.{database}"
            nbytes = 2 * (SIZES[database] + 64) * 512 + (1 << 16)
            segment = Pool.create(name, nbytes, shares=2)
            owner, reader = (Pool.attach(name, me=me, fingerprint=b"bench") for me in range(2))
            owner.own(len(VALUE), 1)
            owner.populate()
            reader.populate()
            self._tables[database] = segment, owner, reader
        _, self._owner, self._reader = self._tables[database]

    def fill(self, ids: Iterator[str]) -> None:
        for id_ in ids:
            self.insert(id_)

    def select(self, id_: str) -> object:
        return self._reader.select(id_.encode())

    def insert(self, id_: str) -> None:
        assert self._owner.insert(id_.encode(), VALUE)

    def remove(self, id_: str) -> None:
        self._reader.drop_select(id_.encode(), timeout_s=0)

    def close(self) -> None:
        for segment, owner, reader in self._tables.values():
            segment.unlink()
            for thing in (owner, reader, segment):
                thing.close()


PEERS = (IndexTable, PoolTable, RedisPeer, RedisPyPeer, ZmqPeer)


def run(rounds: int, calls: int, say: Callable[[str], None]) -> tuple[dict, str]:
    """{peer: {size: {operation: {p50, p99: Series}}}}, and the peers' versions.

    A peer that is missing has its reason instead.
    """
    with tempfile.TemporaryDirectory() as folder:
        peers, results = {}, {}
        try:
            for make in PEERS:
                try:
                    peers[make.name] = make(Path(folder))
                except Missing as error:
                    results[make.name] = str(error)
                    say(f"without {make.name}: {error}")
            _fill(peers, say)
            results |= {name: _empty() for name in peers}
            for number in range(rounds):
                _round(peers, results, calls, random.Random(number))
        finally:
            for peer in peers.values():
                peer.close()
    versions = (f"{name} {peer.version}" for name, peer in peers.items() if peer.version)
    return results, ", ".join(versions)


def _empty() -> dict:
    return {size: {op: {q: Series() for q in QUANTILES} for op in OPERATIONS} for size in SIZES}


def _fill(peers: dict, say: Callable[[str], None]) -> None:
    for name, peer in peers.items():
        for database, size in enumerate(SIZES):
            say(f"filling {name} with {size:,} entries")
            peer.use(database)
            peer.fill(f"cmpl-{n}" for n in range(size))


def _round(peers: dict, results: dict, calls: int, rng: random.Random) -> None:
    """All peers in turn for every size and operation, so that a busy moment hits them alike."""
    for database, size in enumerate(SIZES):
        hits = [f"cmpl-{rng.randrange(size)}" for _ in range(calls)]
        fresh = [f"new-{rng.randrange(1 << 60)}" for _ in range(calls)]
        for operation, ids in zip(OPERATIONS, (hits, fresh, fresh), strict=True):
            for name, peer in peers.items():
                peer.use(database)
                times = _times(peer, operation, ids)
                cell = results[name][size][operation]
                for q, share in QUANTILES.items():
                    cell[q].rounds.append(quantile(times, share))


def _times(peer: object, operation: str, ids: list[str]) -> list[float]:
    times: list[float] = []
    with no_gc():
        if operation == "insert":
            for id_ in ids:
                _forget_hashes()
                times += each_us(peer.insert, [id_])
                peer.remove(id_)
        else:
            for at in range(0, len(ids), BATCH):
                _forget_hashes()
                # An id twice in one batch would be a cached one.
                times += each_us(peer.select, dict.fromkeys(ids[at : at + BATCH]))
    return times


def _forget_hashes() -> None:
    keys.key_of.cache_clear()
    pool_keys.key_of.cache_clear()


def tabulate(results: dict, report: Report) -> None:
    """A table of times and one of ratios per operation, the bars, and why a peer is missing."""
    columns = [f"{q} at {size:,}" for size in SIZES for q in QUANTILES]
    measured = {name: sizes for name, sizes in results.items() if not isinstance(sizes, str)}
    for name in results.keys() - measured.keys():
        report.note(f"{name} is not measured: {results[name]}")
    ours = measured[IndexTable.name]
    for operation in OPERATIONS:
        times = report.table(operation, columns, unit="us", log=True)
        ratios = report.table(f"{operation}, peer / ipc index", columns, plotted=False)
        for name, sizes in measured.items():
            times.row(name, [sizes[n][operation][q] for n in SIZES for q in QUANTILES])
            if sizes is not ours:
                ratios.row(
                    name, [_ratio(sizes, ours, n, operation, q) for n in SIZES for q in QUANTILES]
                )
    _bars(measured, report)


def _ratio(theirs: dict, ours: dict, size: int, operation: str, q: str) -> Series:
    """Of each round: both were measured within the same second of it."""
    pair = (sizes[size][operation][q].rounds for sizes in (theirs, ours))
    return Series([a / b for a, b in zip(*pair, strict=True)])


def _bars(measured: dict, report: Report) -> None:
    ours = measured[IndexTable.name]
    p50 = max(ours[size]["select hit"]["p50"].median for size in SIZES)
    report.bar("index, select hit, p50 in us at the worst size", p50, 10, at_most=True)
    for operation in OPERATIONS[:2]:
        p99 = [ours[size][operation]["p99"].median for size in SIZES]
        flat = max(p99) / min(p99)
        report.bar(f"index, {operation}, p99: largest / smallest size", flat, 1.5, at_most=True)
    peers = [name for name in (RedisPeer.name, RedisPyPeer.name) if name in measured]
    for name, operation in itertools.product(peers, OPERATIONS[:2]):
        ratio = min(_ratio(measured[name], ours, n, operation, "p50").median for n in SIZES)
        report.bar(f"{name} / index, {operation}, p50 at the worst size", ratio, 20, at_most=False)
