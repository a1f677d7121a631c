"""The staged path without engines: what arrives, what is refused, and what a death looks like."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import psutil
import pytest

from ipc.errors import CopyRefused, PeerGone, PipeClosed, StaleRead, WaitTimeout
from ipc.records import State
from ipc.segment import names, unlink
from pdnode.connector.metadata import PrefixLoad
from pdnode.connector.paths import staged, wire
from tests.unit.staged_lab import (
    LAYERS,
    LAYOUTS,
    OWNER,
    OWNER_BLOCKS,
    PAGE,
    READER,
    READER_BLOCKS,
    Half,
    announce,
    key,
    make_index,
    own,
)

START_S = 120


@pytest.fixture
def prefix() -> Iterator[str]:
    prefix = f"pdnode-test.{os.getpid()}.{secrets.token_hex(4)}"
    yield prefix
    left = [name for name in names(prefix) if "index" not in name and not name.endswith("kv0")]
    for name in names(prefix):
        unlink(name)
    assert not left


class Lab:
    """Both halves in this process: a server thread, and a reader in the test's own."""

    def __init__(self, prefix: str, order: str) -> None:
        self.prefix = prefix
        self.node = make_index(prefix)
        self.owner = Half(prefix, OWNER, LAYOUTS[order](OWNER_BLOCKS))
        self.reader = Half(prefix, READER, LAYOUTS[order](READER_BLOCKS))
        self.server = self.owner.serve()
        self.path = self.reader.path()

    def load(self, name: str, src: list[int], dst: list[int]) -> int:
        return self.path.load(self.reader.wanted(name, src, dst))


@pytest.fixture(params=["LB", "BL"])
def lab(prefix: str, request: pytest.FixtureRequest) -> Iterator[Lab]:
    lab = Lab(prefix, request.param)
    yield lab
    lab.path.close()
    lab.server.close()


@pytest.mark.parametrize("count", [1, 2, 43, 140], ids=lambda n: f"{n}_blocks")
def test_blocks_arrive_where_they_are_wanted(lab: Lab, count: int) -> None:
    rng = np.random.default_rng(count)
    held = rng.permutation(OWNER_BLOCKS)[:READER_BLOCKS].tolist()
    src, dst = held[:count], rng.permutation(READER_BLOCKS)[:count].tolist()
    lab.owner.offer("t", held)
    assert lab.load("t", src, dst) == count * LAYERS * PAGE
    for theirs, mine in zip(src, dst, strict=True):
        assert lab.reader.block(mine) == lab.owner.block(theirs)


def test_a_connection_serves_many_loads_and_leaves_no_name(lab: Lab) -> None:
    for number in range(20):
        lab.owner.offer(f"t{number}", [number, number + 50])
        assert lab.load(f"t{number}", [number], [number]) == LAYERS * PAGE
    assert lab.reader.block(19) == lab.owner.block(19)
    # The index, its table of prefixes, and two KV segments: no pipe.
    assert len(names(lab.prefix)) == 4


def test_kv_that_was_given_up_is_refused(lab: Lab) -> None:
    ticket = lab.owner.offer("t", [1, 2])
    wanted = lab.reader.wanted("t", [1], [1])
    lab.owner.index.remove(ticket)
    with pytest.raises(StaleRead, match="given it up"):
        lab.path.load(wanted)
    lab.owner.offer("t", [1, 2])  # the same name again: another generation
    with pytest.raises(StaleRead, match="given it up"):
        lab.path.load(wanted)
    assert lab.load("t", [1], [1])


def test_blocks_of_others_are_refused(lab: Lab) -> None:
    lab.owner.offer("mine", [1, 2])
    with pytest.raises(CopyRefused, match="not in its entry"):
        lab.load("mine", [3], [3])


@pytest.mark.parametrize("count", [1, 43, 140], ids=lambda n: f"{n}_blocks")
def test_a_prefix_arrives_where_it_is_wanted(lab: Lab, count: int) -> None:
    rng = np.random.default_rng(count)
    src, dst = (rng.permutation(n)[:count].tolist() for n in (OWNER_BLOCKS, READER_BLOCKS))
    lab.owner.show(src)
    assert lab.path.load(lab.reader.found(src, dst)) == count * LAYERS * PAGE
    for theirs, mine in zip(src, dst, strict=True):
        assert lab.reader.block(mine) == lab.owner.block(theirs)


def test_a_prefix_whose_block_was_handed_out_is_refused(lab: Lab) -> None:
    lab.owner.show([1, 2])
    wanted = lab.reader.found([1, 2], [3, 4])
    lab.owner.index.prefixes.withdraw(2)
    with pytest.raises(StaleRead, match="no KV of 2 blocks of slot 0: its owner has given it up"):
        lab.path.load(wanted)
    lab.owner.show([2])  # the same content again: another generation
    with pytest.raises(StaleRead, match="given it up"):
        lab.path.load(wanted)
    assert lab.path.load(lab.reader.found([1, 2], [3, 4]))


def test_a_prefix_of_blocks_that_are_not_there_is_refused(lab: Lab) -> None:
    lab.owner.show([1])
    wanted = lab.reader.found([1], [1])
    for outside in (OWNER_BLOCKS, -1):
        odd = dataclasses.replace(wanted, held=wanted.held._replace(blocks=(outside,)))
        with pytest.raises(CopyRefused, match="not in its entry"):
            lab.path.load(odd)


def test_a_prefix_that_changes_while_it_is_sent_is_never_taken_for_what_it_was(lab: Lab) -> None:
    """The owner hands blocks out all the time, as a scheduler does: first it says so, then it writes."""
    blocks, changes = list(range(60)), np.random.default_rng(1)
    taken = refused = 0
    over = threading.Event()
    for block in blocks:
        write(lab.owner, block, block)
    lab.owner.show(blocks)
    begin_s = time.monotonic()
    lab.path.load(lab.reader.found(blocks, blocks))
    load_s = time.monotonic() - begin_s

    def hand_out() -> None:
        while not over.is_set():
            block = int(changes.integers(len(blocks)))
            lab.owner.index.prefixes.withdraw(block)
            write(lab.owner, block, 255)
            write(lab.owner, block, block)
            lab.owner.index.prefixes.publish(key(block), block)
            # As often as not within a load, however fast the machine is.
            over.wait(4 * load_s * float(changes.random()))

    churn = threading.Thread(target=hand_out)
    churn.start()
    try:
        while min(taken, refused) < 5:
            held = lab.reader.index.prefixes.take([key(block) for block in blocks], OWNER)
            if not held.blocks:
                continue
            try:
                lab.path.load(PrefixLoad("r", held, held.blocks, len(held.blocks)))
            except StaleRead:
                refused += 1
                continue
            if lab.reader.index.prefixes.still(held) == len(held.blocks):
                taken += 1
                for block in held.blocks:
                    assert lab.reader.block(block) == bytes([block]) * (LAYERS * PAGE)
    finally:
        over.set()
        churn.join()


def write(half: Half, block: int, content: int) -> None:
    first = half.layout.base_offset_bytes + block * half.layout.block_stride_bytes
    for layer in range(LAYERS):
        at = first + layer * half.layout.layer_stride_bytes
        half.bytes[at : at + PAGE] = content


def test_an_owner_that_stops_serving_is_seen_at_once_and_let_go(lab: Lab) -> None:
    lab.owner.offer("t", [1])
    lab.load("t", [1], [1])
    lab.server.close()
    with pytest.raises(PipeClosed, match="closed it"):
        lab.load("t", [1], [1])
    with pytest.raises(PeerGone, match="not there to send KV"):
        lab.load("t", [1], [1])


def test_a_dead_owner_is_let_go(lab: Lab) -> None:
    lab.owner.offer("t", [1])
    lab.load("t", [1], [1])
    assert rings(lab.prefix) == 2
    announce(lab.node, OWNER, State.DEAD)
    lab.path.close_gone()
    lab.server.close()
    assert rings(lab.prefix) == 0


def rings(prefix: str) -> int:
    """Data pipes that this process maps, both ends counted."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum(prefix in line and "d (deleted)" in line for line in maps)


# --- the owner in a process of its own ------------------------------------------------------------


@pytest.fixture(scope="module")
def forks():
    """Owners are forked from one process that has imported everything: that takes many seconds."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.unit.staged_lab"])
    return context


@pytest.fixture
def owner(prefix: str, forks) -> Iterator[tuple[BaseProcess, Half]]:
    """(the owner's process, a reader)."""
    make_index(prefix)
    ours, theirs = forks.Pipe()
    process = forks.Process(target=own, args=(prefix, "LB", theirs))
    process.start()
    try:
        assert ours.poll(START_S), "the owner does not serve"
        assert ours.recv() == "serving"
        yield process, Half(prefix, READER, LAYOUTS["LB"](READER_BLOCKS))
    finally:
        process.kill()
        process.join()


def blocks_until_it_fails(reader: Half, path: staged.StagedPath) -> Exception:
    """Load over and over, and check every block of every load that was not refused."""
    src, dst = list(range(100)), list(range(40, 140))
    expected = None
    with contextlib.closing(path):
        while True:
            reader.bytes[:] = 0
            try:
                path.load(reader.wanted("t", src, dst))
            except (PeerGone, WaitTimeout) as error:
                return error
            got = [reader.block(number) for number in dst]
            expected = expected or got
            assert got == expected


@pytest.mark.kill
@pytest.mark.parametrize("after_s", [0.05, 0.11, 0.17, 0.31])
def test_an_owner_killed_in_the_middle_fails_the_load_at_once(owner, after_s: float) -> None:
    process, reader = owner
    path = reader.path()
    path.load(reader.wanted("t", [0], [0]))
    threading.Timer(after_s, process.kill).start()
    error = blocks_until_it_fails(reader, path)
    assert isinstance(error, PeerGone)
    process.join(5)
    with pytest.raises(PeerGone, match="not there to send KV"):
        path.load(reader.wanted("t", [0], [0]))


def stop(process: BaseProcess) -> None:
    """Returns when it makes no further step."""
    os.kill(process.pid, signal.SIGSTOP)
    deadline = time.monotonic() + START_S
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline


@pytest.mark.kill
def test_a_silent_owner_costs_one_wait(owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "SILENCE_S", 0.5)
    process, reader = owner
    path = reader.path()
    path.load(reader.wanted("t", [0], [0]))
    stop(process)
    begin_s = time.monotonic()
    with pytest.raises(WaitTimeout):
        path.load(reader.wanted("t", [0], [0]))
    with pytest.raises(PeerGone, match="it is asked again in"):
        path.load(reader.wanted("t", [0], [0]))
    assert time.monotonic() - begin_s < 2
    os.kill(process.pid, signal.SIGCONT)
    monkeypatch.undo()
    path = reader.path()  # nothing is remembered: the old connection's name is free again
    assert path.load(reader.wanted("t", [0], [0])) == LAYERS * PAGE
    path.close()


@pytest.mark.kill
def test_a_prefix_waits_less_for_a_silent_owner_and_hand_offs_still_ask(owner, monkeypatch) -> None:
    monkeypatch.setattr(staged, "PREFIX_SILENCE_S", 0.1)
    process, reader = owner
    path, prefix = reader.path(), reader.found([5], [5])
    path.load(prefix)
    stop(process)
    with pytest.raises(WaitTimeout):
        path.load(prefix)
    os.kill(process.pid, signal.SIGCONT)
    with pytest.raises(PeerGone, match="it is asked again in"):
        path.load(prefix)
    assert path.load(reader.wanted("t", [0], [0])) == LAYERS * PAGE
    assert path.load(prefix) == LAYERS * PAGE  # the connection is there again
    path.close()


@pytest.mark.kill
def test_a_prefix_of_an_owner_that_is_killed_fails_at_once(owner) -> None:
    process, reader = owner
    path, prefix = reader.path(), reader.found(list(range(100)), list(range(100)))
    path.load(prefix)
    process.kill()
    process.join(5)
    for _ in range(2):
        with pytest.raises(PeerGone):
            path.load(prefix)
    path.close()


@pytest.mark.parametrize("blocks", [1, 7, 100])
@pytest.mark.parametrize("limit", [1, PAGE, 5 * PAGE, 1 << 30])
def test_cuts_cover_every_page_once(blocks: int, limit: int) -> None:
    seen = [
        (layer, block)
        for cut in wire.chunks(LAYERS, PAGE, blocks, limit)
        for layer in range(cut.first_layer, cut.first_layer + cut.layers)
        for block in cut.of(range(blocks))
    ]
    assert sorted(seen) == [(layer, block) for layer in range(LAYERS) for block in range(blocks)]
    sizes = [cut.count * cut.layers * PAGE for cut in wire.chunks(LAYERS, PAGE, blocks, limit)]
    assert max(sizes) <= max(limit, PAGE)
