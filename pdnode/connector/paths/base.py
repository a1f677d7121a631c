"""What every path has in common: this worker's own memory, and one peer object per owner.

Life of a peer: ``connect`` at the first load from its slot, ``load`` any number of times, ``close``
when it fails, when its slot has another boot, or when the path sees that it is gone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ipc.copy import Span
from ipc.errors import LookupFault, PeerGone, RegionRefused
from ipc.heads import HeadSlice, head_reads
from ipc.index import Index
from ipc.records import KVLayout, RegionRecord, State
from pdnode.connector.metadata import Load, PrefixLoad
from pdnode.connector.settings import ConnectorSettings


@dataclass(frozen=True, slots=True)
class Home:
    """This worker's end of every path: where bytes go to, and where peers are looked up."""

    settings: ConnectorSettings
    rank: int
    index: Index
    region: Span
    layout: KVLayout

    def reads(self, owner: int) -> list[tuple[int, HeadSlice | None]]:
        """[(rank of that engine, which of its heads)] that this rank needs. None: whole pages."""
        theirs, ours = (self.settings.ranks_of(slot) for slot in (owner, self.settings.slot))
        if theirs == ours:
            return [(self.rank, None)]
        # Both ends run the same vLLM: whatever a head keeps of a block is one piece in either page.
        return [*head_reads(self.settings.kv_heads, theirs, ours, self.rank, tokens=1)]

    def record(self, owner: int, boot_id: int, rank: int | None = None) -> RegionRecord:
        """Where a rank of that engine has its KV (default: the same rank as this).

        Raises PeerGone, RegionRefused.
        """
        rank = self.rank if rank is None else rank
        record = self.index.region(owner, rank)
        if record is None or record.boot_id != boot_id:
            now = "nothing" if record is None else f"boot {record.boot_id:#x}"
            raise PeerGone(
                f"the KV of slot {owner}, rank {rank} was boot {boot_id:#x}, is now {now}"
            )
        mine = bytes.fromhex(self.settings.fingerprint)
        if record.fingerprint != mine:
            raise RegionRefused(
                f"the KV of slot {owner} has fingerprint {record.fingerprint.hex()}, this engine "
                f"{mine.hex()}: they differ in model, dtype, block size, layout or version"
            )
        return record

    def is_alive(self, owner: int, boot_id: int) -> bool:
        try:
            engine = self.index.engine(owner)
        except LookupFault:
            return True  # Unreadable just now: no reason to drop a peer.
        return engine.boot_id == boot_id and engine.state != State.DEAD

    def is_same_boot(self, owner: int, boot_id: int) -> bool:
        try:
            return self.index.engine(owner).boot_id == boot_id
        except LookupFault:
            return True


class Peer(Protocol):
    def close(self) -> None: ...


class KvPath(ABC):
    """All peers of one worker that are read in one way. One thread at a time."""

    kind: ClassVar[str]

    def __init__(self, home: Home) -> None:
        self._home = home
        self._peers: dict[int, tuple[int, Any]] = {}

    def connect(self, load: Load | PrefixLoad) -> Any:
        """The peer, connected now or before. Raises IpcError."""
        owner, boot_id = load.entry.owner, load.entry.boot_id
        known = self._peers.get(owner)
        if known is not None and known[0] == boot_id:
            return known[1]
        self.close_peer(owner)
        peer = self._open(load)
        self._peers[owner] = (boot_id, peer)
        return peer

    def load(self, load: Load | PrefixLoad) -> int:
        """Copy the load's blocks into ours: the bytes moved. Raises IpcError.

        Whether they were still the entry's is for the caller to ask, afterwards.
        """
        return self._copy(load, self.connect(load))

    def close_peer(self, owner: int) -> None:
        known = self._peers.pop(owner, None)
        if known is not None:
            known[1].close()

    def close_gone(self) -> None:
        """Let go of peers that died or were replaced: their memory is held by who maps it."""
        for owner, (boot_id, peer) in [*self._peers.items()]:
            if self._gone(owner, boot_id, peer):
                self.close_peer(owner)

    def close(self) -> None:
        for owner in [*self._peers]:
            self.close_peer(owner)

    @abstractmethod
    def _open(self, load: Load | PrefixLoad) -> Peer: ...

    @abstractmethod
    def _copy(self, load: Load | PrefixLoad, peer: Any) -> int: ...

    @abstractmethod
    def _gone(self, owner: int, boot_id: int, peer: Any) -> bool: ...
