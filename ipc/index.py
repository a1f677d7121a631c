"""The shared-memory lookup index: who holds which request's KV, how much of it, who is alive.

`Index` is the facade; it checks who may write what, and forwards:

    engines.py   control, load and region cells         (node, scheduler, worker)
    entries.py   insert / publish / renew / remove      (the owner's scheduler process)
    lookup.py    select / validate / drop / claim       (any process)
    take.py      drop_select: wait, then claim          (any process)
    prefixes.py  `prefixes`: which blocks hold which block hash

No call takes a lock that another process could hold; only `drop_select` waits, within its budget.
An Index belongs to one thread of one process. Times are CLOCK_MONOTONIC nanoseconds.
"""

from collections.abc import Sequence

from ipc import layout
from ipc.cells import Shared, read_header, write_header
from ipc.engines import Engines
from ipc.entries import Entries, end_entry, nobody_moved, unclean_slots
from ipc.errors import BootMismatch, LookupFault, NotOwner, WaitTimeout
from ipc.layout import NODE
from ipc.lookup import Lookup
from ipc.prefixes import Prefixes
from ipc.records import EngineRecord, Entry, RegionRecord, Ticket
from ipc.segment import Segment
from ipc.take import Taking
from ipc.wait import Wait


class Index:
    """One process's view of the index. `me` is its engine slot, or NODE (-1)."""

    def __init__(self, segment: Segment, me: int):
        self._shared = Shared(segment)
        self.geometry, self.node_boot_id, self.fingerprint = read_header(self._shared)
        if not NODE <= me < self.geometry.engines:
            raise LookupFault(f"slot {me} of an index with {self.geometry.engines} engine slots")
        self.name, self.me = segment.name, me
        self._engines = Engines(self._shared, self.geometry)
        self._lookup = Lookup(self._shared, self.geometry, me, self._engines.boot)
        self.prefixes = Prefixes(
            self.name, self._shared, self.geometry, me, self.node_boot_id, self._engines
        )
        self._entries = None if me == NODE else Entries(self._shared, self.geometry, me)

    @classmethod
    def create(
        cls, name: str, *, engine_slots: int, entries_per_engine: int = 4096,
        fingerprint: bytes = b"", node_boot_id: int, run_pages_per_engine: int | None = None,
    ) -> "Index":  # fmt: skip
        """The node: make the segment. `fingerprint` is at most 64 bytes, no trailing zero.

        Raises SegmentExists, NoSharedMemory (naming --index-entries).
        """
        geometry = layout.Geometry.of(engine_slots, entries_per_engine, run_pages_per_engine)
        segment = Segment.create(
            name, geometry.total, purpose="the lookup index", flag="--index-entries"
        )
        segment.populate(write=True)
        shared = Shared(segment)
        write_header(shared, geometry, node_boot_id, fingerprint)
        shared.words.release()
        return cls(segment, NODE)

    @classmethod
    def attach(cls, name: str, *, me: int) -> "Index":
        """Map an index. Raises SegmentMissing, SegmentForeign."""
        segment = Segment.attach(name)
        segment.populate(write=True)
        try:
            return cls(segment, me)
        except BaseException:
            segment.close()
            raise

    def close(self) -> None:
        """Unmap. The node also calls `unlink`."""
        self.prefixes.close()
        self._shared.close()

    def unlink(self) -> bool:
        self.prefixes.unlink()
        return self._shared.segment.unlink()

    # engines -------------------------------------------------------------------------------------

    @property
    def engine_slots(self) -> int:
        return self.geometry.engines

    def set_control(
        self, slot: int, *, engine_id: str, role: int, state: int, boot_id: int, restarts: int
    ) -> None:
        """The node: who sits in `slot`. `boot_id` is random per start of the engine, not 0."""
        if self.me != NODE:
            raise NotOwner(f"slot {self.me} wrote a control line: only the node does")
        self._engines.set_control(self._slot(slot), engine_id, role, state, boot_id, restarts)

    def set_load(self, slot: int, **fields: int) -> None:
        """That engine's scheduler: set gauges; unnamed fields stay, the heartbeat becomes now."""
        self._engines.set_load(self._mine(slot, "load"), fields)

    def add_counters(self, slot: int, **fields: int) -> None:
        """That engine's scheduler: add to counters; they go on across restarts."""
        self._engines.add_counters(self._mine(slot, "load"), fields)

    def set_region(self, slot: int, rank: int, region: RegionRecord) -> None:
        """That rank's worker: where its KV is."""
        self._engines.set_region(self._mine(slot, "region"), self._rank(rank), region)

    def engine(self, slot: int) -> EngineRecord:
        """Control and load line of a slot; zeros where nobody wrote. Raises StaleRead."""
        return self._engines.engine(self._slot(slot))

    def region(self, slot: int, rank: int) -> RegionRecord | None:
        """A rank's region, None when its worker has not written. Raises StaleRead."""
        return self._engines.region(self._slot(slot), self._rank(rank))

    # entries, owner ------------------------------------------------------------------------------

    def insert(
        self, transfer_id: str, *, boot_id: int, block_ids: Sequence[int], tokens_ready: int,
        tokens_total: int, first_token: int = -1, lease_s: float,
    ) -> Ticket:  # fmt: skip
        """Offer KV. The blocks must stay untouched until `remove`. Never blocks.

        Raises IndexFull, EntryExists, BootMismatch.
        """
        entries, current = self._own_table(), self._engines.boot(self.me)
        if boot_id != current:
            raise BootMismatch(
                f"insert under boot {boot_id:#x}, but the control line of slot {self.me} says "
                f"{current:#x}: an engine that was replaced must not write"
            )
        return entries.insert(
            transfer_id, boot_id, block_ids, tokens_ready, tokens_total, first_token, lease_s
        )

    def publish(
        self, ticket: Ticket, *, block_ids: Sequence[int], tokens_ready: int,
        first_token: int | None = None,
    ) -> None:  # fmt: skip
        """Progress: `block_ids` is the whole list so far. Raises IndexFull, StaleRead."""
        self._own_table().publish(ticket, block_ids, tokens_ready, first_token)

    def renew(self, ticket: Ticket, lease_s: float) -> None:
        """The lease ends `lease_s` seconds from now. Raises StaleRead when it was removed."""
        self._own_table().renew(ticket, lease_s)

    def released(self, ticket: Ticket) -> str | None:
        """None: still pinned. Else why not: "taken", "expired" or "removed".

        A claim that is not dropped keeps the entry until the lease ends; after that a claimer that
        is still copying learns from `validate` that it has lost.
        """
        return self._own_table().released(ticket)

    def remove(self, ticket: Ticket) -> bool:
        """End the entry; after this its blocks may be reused. False when it had ended before."""
        return self._own_table().remove(ticket)

    def live(self) -> list[Ticket]:
        """Tickets of this process that have not been removed, oldest first."""
        return self._own_table().live()

    # entries, reader -----------------------------------------------------------------------------

    def select(self, transfer_id: str, owner: int | None = None) -> Entry | None:
        """Look, do not wait. `owner` None looks in all tables.

        None: not there, of an earlier boot, dropped by me already, or just being written.
        """
        return self._lookup.select(transfer_id, None if owner is None else self._slot(owner))

    def validate(self, entry: Entry) -> bool:
        """AFTER the copy: True when the bytes are those of the entry."""
        return self._lookup.validate(entry)

    def drop(self, entry: Entry) -> None:
        """I am done with it: the owner may free the blocks. Any number of times."""
        self._lookup.drop(entry)

    def unclaim(self, entry: Entry) -> None:
        """Give back what `drop_select` gave, untaken: another reader may have it."""
        self._lookup.unclaim(entry)

    def drop_select(
        self, transfer_id: str, owner: int | None = None, *, timeout_s: float | None
    ) -> Entry:
        """Wait until the entry is complete, and take it: no second reader gets it.

        The owner keeps the blocks until `drop` (or the end of the lease). `timeout_s`: None waits
        for ever, 0 tries once. Raises WaitTimeout with what was seen last; PeerGone when the owner
        was replaced, or died before the entry was complete.
        """
        taking, wait = Taking(self._lookup, self._engines, transfer_id, owner), Wait(timeout_s)
        try:
            while (entry := taking.attempt()) is None:
                if not wait.nap():
                    raise WaitTimeout(f"{taking} after {timeout_s} s")
            return entry
        finally:
            taking.end()

    # node ----------------------------------------------------------------------------------------

    def sweep(self, slot: int) -> int:
        """The node, when the engine in `slot` is dead and reaped: end its entries, undo its claims.

        Readers may go on reading; they see the entries end. Returns how many there were.
        """
        if self.me != NODE:
            raise NotOwner(f"slot {self.me} swept slot {slot}: only the node does")
        slots = unclean_slots(self._shared, self.geometry, self._slot(slot))
        for index in slots:
            end_entry(self._shared, self.geometry, slot, index)
        nobody_moved(self._shared, self.geometry, slot)
        self._lookup.clear_claims(slot)
        return len(slots)

    def _own_table(self) -> Entries:
        if self._entries is None:
            raise NotOwner("the node has no table of entries: attach with me=<engine slot>")
        return self._entries

    def _mine(self, slot: int, what: str) -> int:
        if slot != self.me:
            raise NotOwner(f"slot {self.me} wrote the {what} line of slot {slot}")
        return slot

    def _slot(self, slot: int) -> int:
        if not 0 <= slot < self.geometry.engines:
            raise LookupFault(f"slot {slot} of an index with {self.geometry.engines} engine slots")
        return slot

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < layout.RANKS:
            raise LookupFault(f"rank {rank}: a row has room for {layout.RANKS} ranks")
        return rank
