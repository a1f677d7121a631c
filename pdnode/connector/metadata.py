"""What crosses between the scheduler half and the worker half of the connector, and nothing else.

Scheduler -> worker, once a step: :class:`PdMetadata` (which blocks to copy before this step's forward).
Worker -> scheduler, once a step: :class:`LoadReport` (what was copied, what was refused).
Both are pickled by vLLM's own executor queue inside one engine; neither leaves the engine.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ipc.prefixes import Held
from ipc.records import Entry
from pdnode.vllm_compat import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True, slots=True)
class Load:
    """Copy ``src_blocks[i]`` of the entry's owner into ``dst_blocks[i]`` of this engine.

    Shapes: two equally long tuples of block ids; ``tokens`` is what they save computing.
    """

    request_id: str
    entry: Entry
    src_blocks: tuple[int, ...]
    dst_blocks: tuple[int, ...]
    tokens: int
    ahead: bool = False
    """Into blocks that no request has yet: when it fails, vLLM has nothing to compute again."""


@dataclass(frozen=True, slots=True)
class PrefixLoad:
    """Copy ``held``'s blocks of its owner into ``dst_blocks[i]``: a prefix that nobody offered."""

    request_id: str
    held: Held
    dst_blocks: tuple[int, ...]
    tokens: int

    @property
    def entry(self) -> Held:
        """As ``Load.entry``, as far as paths look at it: ``owner`` and ``boot_id``."""
        return self.held

    @property
    def src_blocks(self) -> tuple[int, ...]:
        return self.held.blocks


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Copy the pool's block of ``keys[i]`` into ``dst_blocks[i]``, all layers."""

    request_id: str
    keys: tuple[bytes, ...]
    dst_blocks: tuple[int, ...]
    tokens: int


class Store(NamedTuple):
    """Offer this block to the pool, once this step's forward has filled it."""

    key: bytes
    block_id: int


@dataclass(slots=True)
class PdMetadata(KVConnectorMetadata):
    loads: list[Load] = field(default_factory=list)
    prefix_loads: list[PrefixLoad] = field(default_factory=list)
    pool_loads: list[PoolLoad] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoadDone:
    request_id: str
    owner: int
    nbytes: int
    duration_ns: int
    tokens: int = 0
    began_ns: int = 0
    """CLOCK_MONOTONIC."""


@dataclass(frozen=True, slots=True)
class LoadFailed:
    request_id: str
    tokens: int
    reason: str


@dataclass(slots=True)
class LoadReport(KVConnectorWorkerMetadata):
    """One worker's loads of one step; :meth:`aggregate` adds the ranks of a TP group."""

    done: list[LoadDone] = field(default_factory=list)
    failed: list[LoadFailed] = field(default_factory=list)
    stored: int = 0
    """Blocks that the pool got."""
    ranks: int = 1

    def without(self, request_ids: AbstractSet[str]) -> LoadReport:
        return replace(self, done=[d for d in self.done if d.request_id not in request_ids])

    def aggregate(self, other: KVConnectorWorkerMetadata) -> LoadReport:
        assert isinstance(other, LoadReport)
        return LoadReport(
            done=self.done + other.done,
            failed=self.failed + other.failed,
            stored=self.stored + other.stored,
            ranks=self.ranks + other.ranks,
        )
