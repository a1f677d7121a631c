"""`drop_select` for one transfer: look, claim when complete, notice when the owner is gone."""

from ipc.engines import Engines
from ipc.errors import PeerGone
from ipc.lookup import Lookup
from ipc.records import Entry, State


class Taking:
    """One reader's wish for one entry. `str()` is what was seen last, for the timeout's message."""

    def __init__(self, lookup: Lookup, engines: Engines, transfer_id: str, owner: int | None):
        self._lookup, self._engines = lookup, engines
        self._transfer_id, self._owner = transfer_id, owner
        self._boot = 0  # of the owner, once there is one
        self._wanted: Entry | None = None  # my acknowledgement word may speak of it
        self._seen = "never seen"

    def attempt(self) -> Entry | None:
        """The entry, mine; or None: try again. Raises PeerGone."""
        entry = self._lookup.select(self._transfer_id, self._owner)
        if self._wanted is not None and not _same(self._wanted, entry):
            self.end()
        if entry is not None:
            self._owner, self._boot = entry.owner, entry.boot_id
            self._seen = (
                f"{entry.tokens_ready} of {entry.tokens_total} tokens in slot {self._owner}"
            )
        if entry is not None and entry.complete:
            return self._claim(entry)
        self._check_owner()
        return None

    def end(self) -> None:
        """Leave no claim behind, but for the entry that was handed out."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self._lookup.unclaim(wanted)

    def _claim(self, entry: Entry) -> Entry | None:
        self._wanted = entry
        blocker = self._lookup.claim(entry)
        if blocker is not None:
            self._seen += f", in the hands of slot {blocker}"
            return None
        if not self._lookup.validate(entry):
            return None
        self._wanted = None
        return entry

    def _check_owner(self) -> None:
        """The entry is not there or not complete: will it ever be?"""
        if self._owner is None:
            return
        boot = self._engines.boot(self._owner)
        if self._boot and boot != self._boot:
            raise PeerGone(f"{self}: the engine was boot {self._boot:#x}, is now {boot:#x}")
        self._boot = boot
        if self._engines.state(self._owner) == State.DEAD:
            raise PeerGone(f"{self}: the engine in slot {self._owner} is dead")

    def __str__(self) -> str:
        return f"transfer {self._transfer_id!r}: {self._seen}"


def _same(wanted: Entry, entry: Entry | None) -> bool:
    return entry is not None and (entry.owner, entry.slot_index, entry.generation) == (
        wanted.owner, wanted.slot_index, wanted.generation,
    )  # fmt: skip
