"""The prefix entries of all engines: which full KV blocks each one holds, by block hash.

    engine's scheduler (`me` = its slot)
        index.prefixes.own(blocks=1024, boot_id=boot, flag="--kv-cache-memory")   once, at start
        index.prefixes.publish(block_hash, block)       AFTER the block's bytes are there
        index.prefixes.withdraw(block)                  BEFORE the block gets other bytes
    router (any process)
        index.prefixes.lengths(hashes)                  {0: 12, 1: 0}: engine 0 has the first 12
    reader (any process)
        held = index.prefixes.take(hashes, engine=0)    blocks and their generations
        copy held.blocks out of engine 0's memory
        sound = index.prefixes.still(held)              the first `sound` blocks are what was asked

Nobody keeps a block from being evicted by looking at it: `take` says what is true before the copy and
`still` whether it was true all the time. A block evicted and used again in between has another
generation, so its copy counts as not made. An engine that wants its blocks to stay offers a request
entry (`Index.insert`).

A dead engine's entries stay, as its memory may still be read, until its control line names the next
boot or the node gives the memory up: `hide`, and who found some before can still ask `still`; then
`forget`. No call waits, and none takes a lock that another process could hold.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ipc import layout, prefix_layout
from ipc.cells import Shared
from ipc.engines import Engines
from ipc.errors import BootMismatch, LookupFault, NotOwner, SegmentMissing
from ipc.prefix_table import PrefixTable, unlink_tables
from ipc.prefix_view import Keys, PrefixView
from ipc.segment import Segment


class Held(NamedTuple):
    """Blocks of one engine that held the wanted hashes, in their order, at one moment."""

    owner: int
    boot_id: int
    blocks: tuple[int, ...]
    generations: tuple[int, ...]

    def part(self, first: int, last: int | None = None) -> "Held":
        return self._replace(
            blocks=self.blocks[first:last], generations=self.generations[first:last]
        )


class Prefixes:
    """All prefix tables as one process sees them, and its own if it has one."""

    def __init__(
        self, index_name: str, shared: Shared, geometry: layout.Geometry, me: int, salt: int,
        engines: Engines,
    ):  # fmt: skip
        self._index_name, self._shared, self._geometry = index_name, shared, geometry
        self._me, self._salt, self._engines = me, salt, engines
        self._own: PrefixTable | None = None
        self._views: dict[int, PrefixView] = {}

    # owner ---------------------------------------------------------------------------------------

    def own(self, *, blocks: int, boot_id: int, flag: str) -> None:
        """That engine's scheduler, once a boot: make its table, for block ids 0 to `blocks` - 1.

        About 110 bytes of shared memory a block. Earlier boots' tables of the slot are unlinked.
        Raises BootMismatch, NotOwner, NoSharedMemory naming `flag`, LookupFault.
        """
        if self._me == layout.NODE or self._own is not None:
            raise NotOwner(f"slot {self._me}: one prefix table an engine and boot, none for a node")
        current = self._engines.boot(self._me)
        if boot_id != current:
            raise BootMismatch(
                f"a prefix table of boot {boot_id:#x}, but the control line of slot {self._me} says "
                f"{current:#x}: an engine that was replaced must not write"
            )
        unlink_tables(self._index_name, self._me)
        self._own = PrefixTable(self._index_name, self._me, boot_id, self._salt, blocks, flag)
        self._shared.words[self._geometry.prefixes(self._me) >> 3] = boot_id

    def publish(self, content: bytes, block: int) -> None:
        """`block` holds the KV of block hash `content` (1 to 40 bytes), complete, from now on.

        Whatever it held before is withdrawn first. Several blocks may hold one hash. Raises
        LookupFault; IndexFull in the improbable case that 64 like hashes are there.
        """
        self._mine().publish(content, block)

    def withdraw(self, block: int) -> bool:
        """`block` does not hold it any more; after this it may be overwritten. False: held none."""
        return self._mine().withdraw(block)

    def withdraw_all(self) -> int:
        """As `withdraw` for every block. Returns how many held something."""
        return self._mine().withdraw_all()

    def published(self) -> int:
        """How many blocks of this process's table hold something."""
        return len(self._mine())

    # reader --------------------------------------------------------------------------------------

    def lengths(
        self, hashes: Sequence[bytes], engines: Iterable[int] | None = None
    ) -> dict[int, int]:
        """Engine -> how many of the first hashes it holds; all engines when `engines` is None.

        Without a gap: an engine that lacks the first counts 0. Compared by 64 bits of each hash, as
        it is for choosing; `take` compares all. Raises SegmentForeign, LookupFault.
        """
        asked = range(self._geometry.engines) if engines is None else engines
        views = {engine: self._view(engine) for engine in asked}
        lengths = dict.fromkeys(views, 0)
        if hashes:
            # Most engines lack the first one; often all do, and then that is all there is to ask.
            first = prefix_layout.mix(hashes[0], self._salt)
            views = {engine: view for engine, view in views.items() if view and view.has(first)}
        if hashes and views:
            keys = Keys.of(hashes, self._salt)
            lengths |= {engine: view.leading(keys) for engine, view in views.items()}
        return lengths

    def take(self, hashes: Sequence[bytes], engine: int) -> Held:
        """The blocks of `engine` that hold the first hashes, up to the first that it lacks."""
        return self._read(engine, Keys.of(hashes, self._salt))

    def holders(self, content: bytes) -> list[Held]:
        """Every engine that holds this hash, with one block each."""
        mixed, found = prefix_layout.mix(content, self._salt), []
        for engine in range(self._geometry.engines):
            view = self._view(engine)
            one = None if view is None else view.read_one(content, mixed)
            if one is not None:
                found.append(Held(engine, view.boot_id, one[:1], one[1:]))
        return found

    def still(self, held: Held) -> int:
        """AFTER the copy: so many of the first blocks have held their hash all the time since `take`.

        0 when the engine was replaced, or forgotten before this process looked into its table.
        """
        if not held.boot_id or self._engines.boot(self._slot(held.owner)) != held.boot_id:
            return 0
        view = self._mapped(held.owner, held.boot_id)
        if view is None:
            return 0
        blocks = np.array(held.blocks, np.intp)
        count = view.still(blocks, np.array(held.generations, np.uint64))
        return count if self._engines.boot(held.owner) == held.boot_id else 0

    # node ----------------------------------------------------------------------------------------

    def hide(self, slot: int) -> None:
        """The node, before it gives a dead engine's memory up: nobody finds its blocks any more."""
        if self._me != layout.NODE:
            raise NotOwner(f"slot {self._me} hid the blocks of slot {slot}: only the node does")
        self._shared.words[self._geometry.prefixes(slot) >> 3] = 0

    def forget(self, slot: int) -> None:
        """The node, when the memory of a dead engine is gone: its table goes too."""
        self.hide(slot)
        unlink_tables(self._index_name, slot)

    def unlink(self) -> None:
        """The node, at its end: every table goes, whoever made it."""
        unlink_tables(self._index_name)

    def close(self) -> None:
        views, self._views = self._views, {}
        for view in views.values():
            view.close()
        if self._own is not None:
            self._own.close()

    def _mine(self) -> PrefixTable:
        if self._own is None:
            raise NotOwner(f"slot {self._me} has no prefix table: call own() first")
        return self._own

    def _read(self, engine: int, keys: Keys) -> Held:
        view = self._view(engine)
        if view is None:
            return Held(engine, 0, (), ())
        blocks, generations = view.read(keys)
        return Held(engine, view.boot_id, tuple(blocks.tolist()), tuple(generations.tolist()))

    def _view(self, engine: int) -> PrefixView | None:
        """The table of the engine's current boot, where it is shown; None when there is none."""
        boot = self._engines.boot(self._slot(engine))
        if boot == 0 or self._shared.words[self._geometry.prefixes(engine) >> 3] != boot:
            return None
        return self._mapped(engine, boot)

    def _mapped(self, engine: int, boot_id: int) -> PrefixView | None:
        """That boot's table, mapped once."""
        view = self._views.get(engine)
        if view is None or view.boot_id != boot_id:
            view = self._attach(engine, boot_id)
        return view

    def _slot(self, engine: int) -> int:
        if not 0 <= engine < self._geometry.engines:
            raise LookupFault(f"slot {engine} of an index with {self._geometry.engines} slots")
        return engine

    def _attach(self, engine: int, boot_id: int) -> PrefixView | None:
        earlier = self._views.pop(engine, None)
        if earlier is not None:
            earlier.close()
        try:
            segment = Segment.attach(
                prefix_layout.segment_name(self._index_name, engine, boot_id), readonly=True
            )
        except SegmentMissing:
            return None  # Unlinked by the next boot a moment ago.
        try:
            view = PrefixView(segment)
        except BaseException:
            segment.close()
            raise
        self._views[engine] = view
        return view
