"""Moves a CopyPlan between two device addresses: one submission, on a stream of its own.

    submit ─> pin both regions ─> big pieces: one cuMemcpyBatchAsync ─┐
                                  small ones: table, one kernel ──────┴─> event ─> Ticket
    Ticket.done ─> the event is there, or an error is ─> unpin, give the event and table back

Ordered by the host: the caller submits when the source is complete (the owner has seen an event of
its own after the step that wrote it), and starts work on the copied blocks when the ticket is done.
Earlier steps of this process that may still use the destination are waited for on the GPU (`after`,
a stream). No GPU ever waits for another process, so none can hang when that process dies.
Host-ordered hand-off costs tens of microseconds.
"""

import threading
import time

import numpy as np

from ipc.copy import CopyPlan, Span
from ipc.cuda import batch, driver
from ipc.cuda.crossover import Crossover, measure, scratch_bytes
from ipc.cuda.device import Device
from ipc.cuda.device import device as find_device
from ipc.cuda.errors import CopierBusy, CudaUnavailable
from ipc.cuda.launch import GatherKernel
from ipc.cuda.memory import CudaRegion
from ipc.cuda.tables import Table
from ipc.errors import CopyRefused, IpcError, WaitTimeout
from ipc.wait import Wait

TABLE_PIECES = 1 << 16


class Ticket:
    """One submitted copy. Any thread may ask."""

    def __init__(self, copier: "CudaCopier", total_bytes: int, regions: list[CudaRegion]):
        self.total_bytes, self.error = total_bytes, None
        self._copier, self._regions = copier, regions
        self._table: Table | None = None
        self._lock = threading.Lock()
        self._over = False

    error: IpcError | None

    def done(self) -> bool:
        """Never waits. True when the bytes are there, or will never be (`error`)."""
        with self._lock:
            ended = not self._over and self._ended()
            self._over = self._over or ended
        if ended:
            self._give_back()
        return self._over

    def wait(self, timeout_s: float | None) -> int:
        """The bytes moved. Raises WaitTimeout (the copy goes on), or `error`."""
        wait = Wait(timeout_s)
        while not self.done():
            if not wait.nap():
                raise WaitTimeout(
                    f"a copy of {self.total_bytes:,} bytes runs on after {timeout_s} s"
                )
        if self.error is not None:
            raise self.error
        return self.total_bytes

    def _ended(self) -> bool:
        if self._table is None:  # Nothing to move, or never submitted.
            return True
        try:
            with self._copier.device.use():
                return driver.event_done(self._table.event)
        except IpcError as error:
            self.error = error
            return True

    def _give_back(self) -> None:
        for region in self._regions:
            region.hold.unpin(self)
        self._copier._ended(self, self._table)


class CudaCopier:
    """Copies between regions on one GPU's stream. One per worker; any thread may submit.

    max_in_flight: copies that run at once; `submit` above it raises CopierBusy. crossover: per UUID
    of the source's GPU, filled by `calibrate`. no_kernel: why small pieces go to the copy engine
    too.
    """

    def __init__(
        self, device: Device | None = None, *, max_in_flight: int = 8, with_kernel: bool = True
    ):
        self.device = device or find_device()
        self.crossover: dict[bytes, Crossover] = {}
        self.no_kernel = "" if with_kernel else "turned off"
        self._lock = threading.Lock()
        self._in_flight: set[Ticket] = set()
        self._closed = False
        with self.device.use():
            self._batch = batch.submitter()
            self._kernel = self._load_kernel() if with_kernel else None
            self._stream = driver.stream_create()
            # All now: an allocation later would make the GPU wait for everything.
            self._tables = [Table(TABLE_PIECES) for _ in range(max_in_flight)]

    def _load_kernel(self) -> GatherKernel | None:
        try:
            return GatherKernel(self.device)
        except CudaUnavailable as error:
            self.no_kernel = str(error)
            return None

    def copy(
        self, plan: CopyPlan, src: Span | int, dst: Span | int, *, src_nbytes: int | None = None,
        dst_nbytes: int | None = None, after: int | None = None, timeout_s: float | None = 30.0,
    ) -> int:  # fmt: skip
        """`submit` and wait: the bytes moved. As `ipc.copy.HostCopier.copy`."""
        sizes = {"src_nbytes": src_nbytes, "dst_nbytes": dst_nbytes}
        ticket = self.submit(plan, src, dst, after=after, **sizes)
        return ticket.wait(timeout_s)

    def submit(
        self, plan: CopyPlan, src: Span | int, dst: Span | int, *, src_nbytes: int | None = None,
        dst_nbytes: int | None = None, after: int | None = None,
    ) -> Ticket:  # fmt: skip
        """Start a copy; never waits. Regions stay mapped until it has ended.

        `src`, `dst`: CudaRegion; or bare addresses of device or pinned host memory, which the
        caller keeps mapped, with their sizes. `after`: a stream of this process and GPU whose work
        so far must end first (0: the default one). Raises CopyRefused, CopierBusy, PeerGone (the
        source's owner died), CudaCallFailed.
        """
        _inside(plan.src_extent_bytes, src, src_nbytes, "source")
        _inside(plan.dst_extent_bytes, dst, dst_nbytes, "destination")
        table = _addresses(plan, _address(src), _address(dst))
        regions = [place for place in (src, dst) if isinstance(place, CudaRegion)]
        ticket = Ticket(self, plan.total_bytes, regions)
        if len(table):
            same_gpu = isinstance(src, CudaRegion) and src.uuid == self.device.uuid
            known = self.crossover.get(src.uuid) if isinstance(src, CudaRegion) else None
            by_kernel = self._by_kernel(table[:, 2], known or Crossover(), same_gpu)
            self._start(ticket, table, by_kernel, after)
        return ticket

    def calibrate(self, src: CudaRegion, piece_bytes: int) -> Crossover:
        """Measure both ways for pieces of this size out of `src`, and go by it from now on.

        At start, not under load; takes some milliseconds on a GPU, and 64 MiB for its duration.
        """
        if self._kernel is None:
            return Crossover()
        with self.device.use():
            scratch = driver.mem_alloc(scratch_bytes(piece_bytes))
        try:
            found = measure(
                lambda table, by_kernel: self._seconds(src, table, by_kernel),
                src.address, src.nbytes, scratch, piece_bytes,
            )  # fmt: skip
        finally:
            with self.device.use():
                driver.mem_free(scratch)
        before = self.crossover.get(src.uuid, Crossover()).samples
        others = tuple(s for s in before if s.piece_bytes != piece_bytes)
        self.crossover[src.uuid] = Crossover(others + found.samples)
        return found

    def close(self, drain_s: float) -> bool:
        """No more copies; wait for those that run. False: some run on, and their memory stays."""
        with self._lock:
            self._closed = True
            running = list(self._in_flight)
        wait = Wait(drain_s)
        while not all(ticket.done() for ticket in running):
            if not wait.nap():
                return False
        with self.device.use():
            for table in self._take_all():
                table.close()
            stream, self._stream = self._stream, 0
            if stream:
                driver.stream_destroy(stream)
        return True

    def _by_kernel(self, nbytes: np.ndarray, known: Crossover, same_gpu: bool) -> np.ndarray:
        """bool [n]. Decided per size of piece: a plan has one or a few."""
        if self._kernel is None:
            return np.zeros(len(nbytes), bool)
        sizes, which, counts = np.unique(nbytes, return_inverse=True, return_counts=True)
        chosen = [
            known.kernel(size, count, same_gpu)
            for size, count in zip(sizes.tolist(), counts.tolist(), strict=True)
        ]
        return np.array(chosen, bool)[which]

    def _start(
        self, ticket: Ticket, table: np.ndarray, by_kernel: np.ndarray, after: int | None = None
    ) -> None:  # fmt: skip
        slot = self._take(ticket)
        # Under the ticket's lock: `close_dead` in another thread asks every pinned copy whether it
        # is done, and must not get an answer before the event is recorded.
        with ticket._lock:
            failure = self._try(ticket, slot, table, by_kernel, after)
            ticket._table, ticket.error = slot, failure
        if failure is not None:
            ticket.done()  # What had begun before it failed ends like any other copy.
            raise failure

    def _try(
        self, ticket: Ticket, slot: Table, table: np.ndarray, by_kernel: np.ndarray,
        after: int | None,
    ) -> IpcError | None:  # fmt: skip
        try:
            for region in ticket._regions:
                region.hold.pin(ticket)
            with self.device.use():
                if after is not None:
                    slot.begin_after(after, self._stream)
                self._submit(slot, table, by_kernel)
        except IpcError as error:
            return error
        return None

    def _submit(self, slot: Table, table: np.ndarray, by_kernel: np.ndarray) -> None:
        """The event is recorded whatever happens: what was started must be waited for."""
        # What does not fit into the table must not wait for a second one.
        by_kernel &= np.cumsum(by_kernel) <= TABLE_PIECES
        engine, small = table[~by_kernel], table[by_kernel]
        try:
            if len(engine):
                columns = np.ascontiguousarray(engine.T)
                self._batch(columns[1], columns[0], columns[2], self._stream)
            if len(small):
                slot.run(self._kernel, small, self._stream)
        finally:
            driver.event_record(slot.event, self._stream)

    def _seconds(self, src: CudaRegion, table: np.ndarray, by_kernel: bool) -> float:
        ticket = Ticket(self, int(table[:, 2].sum()), [src])
        begin = time.perf_counter()
        self._start(ticket, table, np.full(len(table), by_kernel))
        ticket.wait(30.0)
        return time.perf_counter() - begin

    def _take(self, ticket: Ticket) -> Table:
        with self._lock:
            if self._closed:
                raise CopyRefused("this copier was closed")
            if not self._tables:
                raise CopierBusy(
                    f"{len(self._in_flight)} copies are in flight; wait for one, or make the "
                    "copier with a larger max_in_flight"
                )
            self._in_flight.add(ticket)
            return self._tables.pop()

    def _take_all(self) -> list[Table]:
        with self._lock:
            tables, self._tables = self._tables, []
            return tables

    def _ended(self, ticket: Ticket, slot: Table | None) -> None:
        with self._lock:
            self._in_flight.discard(ticket)
            if slot is not None:
                self._tables.append(slot)


def _addresses(plan: CopyPlan, src: int, dst: int) -> np.ndarray:
    """int64 [n, 3]: source address, destination address, bytes."""
    return plan.pieces + np.array([src, dst, 0], np.int64)


def _address(place: Span | int) -> int:
    return place if isinstance(place, int) else place.address


def _inside(extent: int, place: Span | int, nbytes: int | None, side: str) -> None:
    size = nbytes if isinstance(place, int) else place.nbytes
    if size is not None and extent > size:
        raise CopyRefused(f"the plan reaches byte {extent:,} of the {side}, which has {size:,}")
