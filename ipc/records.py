"""What the index tells: plain immutable values, and the layout of a KV region. No torch here."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

from ipc.errors import CopyRefused


class Role(enum.IntFlag):
    """What an engine is meant for. Policy, not ability."""

    NONE = 0
    PREFILL = 1
    DECODE = 2
    BOTH = 3


class State(enum.IntEnum):
    """An engine as the node sees it."""

    EMPTY = 0
    STARTING = 1
    READY = 2
    DRAINING = 3
    DEAD = 4


# Gauges and counters of the load line, in the order of memory; all unsigned 64-bit.
GAUGES = (
    "scheduler_pid", "heartbeat_ns", "steps", "running", "waiting", "blocks_free", "blocks_total",
    "queued_prompt_tokens", "index_entries", "blocks_cached",
)  # fmt: skip
COUNTERS = (
    "handoffs_in", "handoff_bytes", "handoff_tail_bytes", "handoff_ns", "load_failures",
    "stale_reads", "pins", "leases_expired", "index_full", "pool_hits",
    "pool_tokens", "pool_stored", "deferred", "prefix_pulls", "prefix_tokens", "prefix_bytes",
    "prefix_ns", "prefix_failures", "blocks_evicted", "evicted_returns", "follows",
    "follow_no_room", "follow_yielded",
)  # fmt: skip
LOAD_FIELDS = GAUGES + COUNTERS


class EngineRecord(NamedTuple):
    """One engine: its control line (written by the node) and its load line (by its scheduler).

    heartbeat_ns is CLOCK_MONOTONIC of the last `set_load`, 0 before the first. Counters go on
    across restarts of the engine. handoff_ns: time spent in copies; handoff_bytes: bytes copied in;
    handoff_tail_bytes: those of them that were copied after the owner had computed everything.
    deferred: prompts that had to wait because finished ones held too many blocks. pool_hits: requests
    that took blocks from the KV pool; pool_tokens: how many tokens those saved; pool_stored: blocks
    put in. follows: prompts copied while a peer computed them; follow_no_room: those that were not,
    for lack of blocks; follow_yielded: those that had to give their blocks to others. pins and
    index_entries are what is held now: finished prompts kept for a reader, and entries in this
    engine's table.
    blocks_cached: blocks whose content others may take; prefix_*: what was taken of theirs (prefix_ns:
    time in copies); blocks_evicted: those that lost their content to another, and evicted_returns
    those of them that were computed again later.
    """

    slot: int
    engine_id: str
    role: int
    state: int
    boot_id: int
    restarts: int
    scheduler_pid: int
    heartbeat_ns: int
    steps: int
    running: int
    waiting: int
    blocks_free: int
    blocks_total: int
    queued_prompt_tokens: int
    index_entries: int
    blocks_cached: int
    handoffs_in: int
    handoff_bytes: int
    handoff_tail_bytes: int
    handoff_ns: int
    load_failures: int
    stale_reads: int
    pins: int
    leases_expired: int
    index_full: int
    pool_hits: int
    pool_tokens: int
    pool_stored: int
    deferred: int
    prefix_pulls: int
    prefix_tokens: int
    prefix_bytes: int
    prefix_ns: int
    prefix_failures: int
    blocks_evicted: int
    evicted_returns: int
    follows: int
    follow_no_room: int
    follow_yielded: int


class RegionRecord(NamedTuple):
    """Where one rank's KV lies and what it looks like; written by that rank's worker only.

    worker_pid is for people: peers are told apart by boot_id and generation, never by pid.
    nbytes is the usable size; fingerprint is at most 32 bytes.
    """

    segment: str
    nbytes: int
    num_blocks: int
    num_layers: int
    page_bytes: int
    block_stride_bytes: int
    layer_stride_bytes: int
    base_offset_bytes: int
    boot_id: int
    generation: int
    fingerprint: bytes = b""
    worker_pid: int = 0

    @property
    def layout(self) -> "KVLayout":
        return KVLayout(*self[2:8])


class Ticket(NamedTuple):
    """The owner's handle of one live entry."""

    slot_index: int
    generation: int
    transfer_id: str


class Entry(NamedTuple):
    """One consistent look at an entry. True then; `Index.validate` says whether it still is."""

    owner: int
    slot_index: int
    generation: int
    boot_id: int
    transfer_id: str
    runs: tuple[tuple[int, int], ...]  # (first block, count), in the order of the tokens
    tokens_ready: int
    tokens_total: int
    first_token: int

    @property
    def block_ids(self) -> list[int]:
        return [block for start, count in self.runs for block in range(start, start + count)]

    @property
    def complete(self) -> bool:
        return self.tokens_ready == self.tokens_total


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How blocks and layers lie in one KV buffer. All offsets are bytes from its start.

    Block b of layer l is the `page_bytes` bytes at
    `base_offset_bytes + b * block_stride_bytes + l * layer_stride_bytes`.
    """

    num_blocks: int
    num_layers: int
    page_bytes: int
    block_stride_bytes: int
    layer_stride_bytes: int
    base_offset_bytes: int = 0

    @property
    def order(self) -> str:
        """ "LB": all blocks of a layer together; "BL": all layers of a block together."""
        return "LB" if self.layer_stride_bytes >= self.block_stride_bytes else "BL"

    @property
    def extent_bytes(self) -> int:
        """One past the last byte that any block of any layer uses."""
        return (
            self.base_offset_bytes
            + (self.num_blocks - 1) * self.block_stride_bytes
            + (self.num_layers - 1) * self.layer_stride_bytes
            + self.page_bytes
        )

    def validate(self, nbytes: int) -> None:
        """Raise CopyRefused unless pages are disjoint and all lie within `nbytes`."""
        if min(self.num_blocks, self.num_layers, self.page_bytes) < 1 or self.base_offset_bytes < 0:
            raise CopyRefused(f"{self}: counts must be at least 1 and the base not negative")
        if not self._disjoint():
            raise CopyRefused(f"{self}: strides this small make pages overlap")
        if self.extent_bytes > nbytes:
            raise CopyRefused(
                f"{self} reaches byte {self.extent_bytes:,}, the region has {nbytes:,}"
            )

    def _disjoint(self) -> bool:
        dims = sorted(
            (stride, count)
            for stride, count in (
                (self.block_stride_bytes, self.num_blocks),
                (self.layer_stride_bytes, self.num_layers),
            )
            if count > 1
        )
        span = self.page_bytes
        for stride, count in dims:
            if stride < span:
                return False
            span += stride * (count - 1)
        return True
