"""Bytes: copies between two segments against memmove, the pipe against the queues."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import secrets
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing

from bench.measure import Series, median_ratio, no_gc, seconds_in_turn
from bench.report import Report
from ipc.copy import HostCopier, plan
from ipc.pipe import RECEIVE, SEND, KVPipe
from ipc.records import KVLayout
from ipc.segment import Segment

KIB, MIB = 1 << 10, 1 << 20
PIECES = (96 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
TOTAL = 64 * MIB
"""Of one copy, whatever its pieces: twice the largest level of cache of most machines."""
REPEATS = 9

TENSORS = (MIB, 16 * MIB, 64 * MIB)
STREAM = 256 * MIB
"""Through a pipe in one measurement, tensor after tensor."""
SLOTS, SLOT_BYTES = 8, MIB
SPAN = 128 * MIB
"""Source and destination go through this much memory: KV lies in RAM, not in a cache."""
WAIT_S = 60.0
PER_CPU = ", per CPU second"


# --- copies -----------------------------------------------------------------------------------


def copies(rounds: int) -> dict[int, dict[str, Series]]:
    """{bytes of a piece: {"copy", "memmove": GB/s; "ratio"}}, over the same two segments."""
    name = f"pdbench-{secrets.token_hex(4)}"
    pair = [
        Segment.create(f"{name}.{side}", 2 * TOTAL, purpose="the benchmark", flag="--only")
        for side in "ab"
    ]
    try:
        for segment in pair:
            segment.populate(write=True)
        names = ("copy", "memmove", "ratio")
        results = {piece: {name: Series() for name in names} for piece in PIECES}
        for _ in range(rounds):
            for piece, cell in results.items():
                _copy_round(*pair, piece, cell)
        return results
    finally:
        for segment in pair:
            segment.unlink()
            segment.close()


def _copy_round(source: Segment, target: Segment, piece: int, cell: dict[str, Series]) -> None:
    """Every second piece: the pieces touch on neither side, as one block of each layer."""
    layers = max(1, TOTAL // piece)
    nbytes = layers * piece
    layout = KVLayout(2, layers, piece, piece, 2 * piece)
    copier = HostCopier()

    def copy() -> None:
        copier.copy(plan(layout, layout, [0], [1]), source, target)

    def memmove() -> None:
        ctypes.memmove(target.address, source.address, nbytes)

    with no_gc():
        times = seconds_in_turn([copy, memmove], REPEATS)
    for name, mine in zip(("copy", "memmove"), times, strict=True):
        cell[name].rounds.append(nbytes / statistics.median(mine) / 1e9)
    cell["ratio"].rounds.append(median_ratio(times[1], times[0]))


def tabulate_copies(results: dict[int, dict[str, Series]], report: Report) -> None:
    found = report.table(
        f"copies of {TOTAL // MIB} MiB in pieces of", list(map(size_text, results)), unit="GB/s"
    )
    found.row("plan and copy", [cell["copy"] for cell in results.values()])
    found.row("memmove, one piece", [cell["memmove"] for cell in results.values()])
    ratios = report.table("copy / memmove", list(map(size_text, results)), plotted=False)
    ratios.row("ratio", [cell["ratio"] for cell in results.values()])
    worst = min(cell["ratio"].median for cell in results.values())
    report.bar("copy / memmove, worst size", worst, 0.9, at_most=False)


# --- streams of tensors -----------------------------------------------------------------------


class Stream:
    """A sender in another process, and how this one takes what it sends.

    Either way each tensor ends in this process's own memory and the sender may change its own.
    """

    name: str

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._commands, theirs = context.Pipe()
        self._open(context)
        self._process = context.Process(
            target=_sender, args=(type(self), self._far_end(), theirs), daemon=True
        )
        self._process.start()
        assert self._commands.recv() == "ready"
        self._connect()

    def _open(self, context: Any) -> None:
        self._queue = context.Queue(maxsize=4)

    def _far_end(self) -> Any:
        return self._queue

    def _connect(self) -> None:
        """What can be done only when the sender is there."""

    def rates(self, nbytes: int, into: torch.Tensor) -> tuple[float, float]:
        """GB/s, and GB per CPU second of the end that needed more of them.

        The first needs a free core for each end; the second says what the pipe itself can do on a
        machine that has other work.
        """
        count = STREAM // nbytes
        begin, begin_cpu = time.perf_counter(), time.process_time()
        self._commands.send((nbytes, count))
        for n in range(count):
            self.receive(window(into, nbytes, n))
        took, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
        busier = max(cpu, self._commands.recv())
        return count * nbytes / took / 1e9, count * nbytes / busier / 1e9

    def receive(self, out: torch.Tensor) -> None:
        raise NotImplementedError

    @staticmethod
    def sender(far_end: Any) -> Callable[[torch.Tensor], object]:
        return far_end.put

    def close(self) -> None:
        self._commands.send(None)
        self._process.join(WAIT_S)


class PipeStream(Stream):
    name = "KVPipe, recv_tensor(out=)"

    def _open(self, context: Any) -> None:
        self._name = f"pdbench-{secrets.token_hex(4)}"
        self._pipe = KVPipe.create(self._name, SLOTS, SLOT_BYTES, end=RECEIVE)

    def _far_end(self) -> str:
        return self._name

    @staticmethod
    def sender(far_end: str) -> Callable[[torch.Tensor], object]:
        return KVPipe.attach(far_end, end=SEND).send_tensor

    def receive(self, out: torch.Tensor) -> None:
        self._pipe.recv_tensor(WAIT_S, out=out)

    def close(self) -> None:
        super().close()
        self._pipe.close()
        self._pipe.unlink()


class FreshPipeStream(PipeStream):
    name = "KVPipe, fresh memory each time"

    def receive(self, out: torch.Tensor) -> None:
        self._pipe.recv_tensor(WAIT_S)


class QueueStream(Stream):
    name = "multiprocessing.Queue"

    @staticmethod
    def sender(far_end: Any) -> Callable[[torch.Tensor], object]:
        # Copied by put's thread at an unknown moment: the sender's memory must stay as it is. That
        # is in this peer's favour.
        return lambda tensor: far_end.put(tensor.numpy())

    def receive(self, out: torch.Tensor) -> None:
        self._queue.get(timeout=WAIT_S)


class TorchStream(Stream):
    name = "torch shared tensors"

    def _open(self, context: Any) -> None:
        self._queue = torch.multiprocessing.get_context("spawn").Queue(maxsize=4)

    @staticmethod
    def sender(far_end: Any) -> Callable[[torch.Tensor], object]:
        return lambda tensor: far_end.put(tensor.clone())

    def receive(self, out: torch.Tensor) -> None:
        out.copy_(self._queue.get(timeout=WAIT_S))


def _sender(kind: type[Stream], far_end: Any, commands: Connection) -> None:
    torch.set_num_threads(1)
    send = kind.sender(far_end)
    source = torch.ones(SPAN, dtype=torch.uint8)
    commands.send("ready")
    while (command := commands.recv()) is not None:
        nbytes, count = command
        begin = time.process_time()
        for n in range(count):
            send(window(source, nbytes, n))
        commands.send(time.process_time() - begin)


def window(memory: torch.Tensor, nbytes: int, n: int) -> torch.Tensor:
    at = n % (SPAN // nbytes) * nbytes
    return memory[at : at + nbytes]


STREAMS = (PipeStream, FreshPipeStream, QueueStream, TorchStream)


def streams(rounds: int) -> dict[str, dict[int, Series]]:
    """{peer: {bytes of a tensor: GB/s}}, and memmove for the same bytes, in turn."""
    torch.set_num_threads(1)
    into, source = (torch.ones(SPAN, dtype=torch.uint8) for _ in range(2))
    names = [name for kind in (*STREAMS, Memmove) for name in (kind.name, kind.name + PER_CPU)]
    results = {name: {nbytes: Series() for nbytes in TENSORS} for name in names}
    opened = [Memmove(source), *(kind() for kind in STREAMS)]
    try:
        for _ in range(rounds):
            for nbytes, stream in itertools.product(TENSORS, opened):
                wall, per_cpu = stream.rates(nbytes, into)
                results[stream.name][nbytes].rounds.append(wall)
                results[stream.name + PER_CPU][nbytes].rounds.append(per_cpu)
        return results
    finally:
        for stream in opened:
            stream.close()


class Memmove:
    """The same bytes within this process."""

    name = "memmove"

    def __init__(self, source: torch.Tensor) -> None:
        self._source = source

    def rates(self, nbytes: int, into: torch.Tensor) -> tuple[float, float]:
        count = STREAM // nbytes
        begin, begin_cpu = time.perf_counter(), time.process_time()
        for n in range(count):
            pair = (window(memory, nbytes, n).data_ptr() for memory in (into, self._source))
            ctypes.memmove(*pair, nbytes)
        took, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
        return count * nbytes / took / 1e9, count * nbytes / cpu / 1e9

    def close(self) -> None:
        """Nothing was opened."""


def tabulate_streams(results: dict[str, dict[int, Series]], report: Report) -> None:
    columns = list(map(size_text, TENSORS))
    found = report.table("streams of tensors of", columns, unit="GB/s")
    for name, sizes in results.items():
        found.row(name, [sizes[nbytes] for nbytes in TENSORS])
    ours = results[PipeStream.name]
    for kind in ("", PER_CPU):
        pair = results[PipeStream.name + kind], results[Memmove.name + kind]
        worst = min(_ratio(pair[0][nbytes], pair[1][nbytes]) for nbytes in TENSORS)
        report.bar(f"pipe / memmove{kind}, worst size", worst, 0.8, at_most=False)
    for peer in (QueueStream.name, TorchStream.name):
        ratio = min(_ratio(ours[nbytes], results[peer][nbytes]) for nbytes in TENSORS)
        report.bar(f"pipe / {peer}, worst size", ratio, 1, at_most=False)


def _ratio(ours: Series, theirs: Series) -> float:
    return median_ratio(ours.rounds, theirs.rounds)


def size_text(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
