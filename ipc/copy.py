"""Block runs -> few big copies. `plan` is arithmetic, `HostCopier` moves bytes, knows no requests.

A strip is `rows` pieces of `nbytes` bytes at fixed steps on both sides: one run of blocks in all
layers, say. One strip is one numpy copy (a memcpy per row, without the GIL), so a hand-off of one
run is ONE call, whatever the number of layers. Calling memmove per piece would ask for the GIL back
each time, and a busy scheduler thread holds it for up to 5 ms.
"""

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from ipc.errors import CopyRefused
from ipc.records import KVLayout


class Strip(NamedTuple):
    """`rows` pieces of `nbytes`; the k-th is at offset + k * step, on each side. Bytes."""

    src_off: int
    dst_off: int
    nbytes: int
    rows: int
    src_step: int
    dst_step: int


@dataclass(frozen=True)
class CopyPlan:
    """What to move. Offsets are bytes from the start of each side's region."""

    strips: tuple[Strip, ...]
    src_extent_bytes: int  # one past the last byte read
    dst_extent_bytes: int  # one past the last byte written
    total_bytes: int

    @cached_property
    def pieces(self) -> np.ndarray:
        """int64 [n, 3]: src_off, dst_off, nbytes of every contiguous piece."""
        return np.concatenate([_rows_of(strip) for strip in self.strips] or [np.empty((0, 3), int)])

    @property
    def src_off(self) -> np.ndarray:
        return self.pieces[:, 0]

    @property
    def dst_off(self) -> np.ndarray:
        return self.pieces[:, 1]

    @property
    def nbytes(self) -> np.ndarray:
        return self.pieces[:, 2]


class Span(Protocol):
    """Mapped bytes: a HostRegion, for example."""

    address: int
    nbytes: int


def plan(
    src: KVLayout, dst: KVLayout, src_blocks: Sequence[int], dst_blocks: Sequence[int]
) -> CopyPlan:
    """Copy block src_blocks[i] to dst_blocks[i], all layers, in as few strips as the layouts allow.

    Raises CopyRefused: other page size or number of layers, lists of different length, a block that
    is not in its layout.
    """
    _check_layouts(src, dst)
    src_ids, dst_ids = _ids(src_blocks, src, "source"), _ids(dst_blocks, dst, "destination")
    if len(src_ids) != len(dst_ids):
        raise CopyRefused(f"{len(src_ids)} source blocks for {len(dst_ids)} destination blocks")
    strips = [
        strip
        for start, stop in _runs(src_ids, dst_ids)
        for strip in _strips(src, dst, int(src_ids[start]), int(dst_ids[start]), stop - start)
    ]
    return CopyPlan(
        tuple(strips),
        max((s.src_off + (s.rows - 1) * s.src_step + s.nbytes for s in strips), default=0),
        max((s.dst_off + (s.rows - 1) * s.dst_step + s.nbytes for s in strips), default=0),
        sum(s.rows * s.nbytes for s in strips),
    )


class HostCopier:
    """Moves plans between mapped regions, in the calling thread, without the GIL."""

    def copy(
        self, plan: CopyPlan, src: Span | int, dst: Span | int, *,
        src_nbytes: int | None = None, dst_nbytes: int | None = None,
    ) -> int:  # fmt: skip
        """The bytes moved. Every piece is checked against both sizes before the first moves.

        `src`, `dst`: regions; or bare addresses, with the sizes in `src_nbytes`, `dst_nbytes` (left
        out, the plan's own extent is trusted: `KVLayout.validate` must have been called). Raises
        CopyRefused.
        """
        source = _window(src, src_nbytes, plan.src_extent_bytes, "source")
        target = _window(dst, dst_nbytes, plan.dst_extent_bytes, "destination")
        for s in plan.strips:
            shape = (s.rows, s.nbytes)
            to = np.ndarray(shape, np.uint8, target, s.dst_off, (s.dst_step, 1))
            to[...] = np.ndarray(shape, np.uint8, source, s.src_off, (s.src_step, 1))
        return plan.total_bytes


def _check_layouts(src: KVLayout, dst: KVLayout) -> None:
    for field in ("num_layers", "page_bytes"):
        theirs, ours = getattr(src, field), getattr(dst, field)
        if theirs != ours:
            raise CopyRefused(f"{field} differs: source {theirs}, destination {ours}")


def _ids(blocks: Sequence[int], kv: KVLayout, side: str) -> np.ndarray:
    ids = np.asarray(blocks, dtype=np.int64).reshape(-1)
    if ids.size and (ids.min() < 0 or ids.max() >= kv.num_blocks):
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise CopyRefused(f"{side} block {wrong} is not one of 0 to {kv.num_blocks - 1}")
    return ids


def _runs(src: np.ndarray, dst: np.ndarray) -> list[tuple[int, int]]:
    """[start, stop) positions within which both lists step by one."""
    if not src.size:
        return []
    breaks = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    edges = [0, *breaks.tolist(), len(src)]
    return list(itertools.pairwise(edges))


def _strips(src: KVLayout, dst: KVLayout, src_block: int, dst_block: int, n: int) -> list[Strip]:
    """One run of n blocks in all layers."""
    page, layers = src.page_bytes, src.num_layers
    at, to = _offset(src, src_block), _offset(dst, dst_block)
    block_steps = src.block_stride_bytes, dst.block_stride_bytes
    layer_steps = src.layer_stride_bytes, dst.layer_stride_bytes
    if n == 1 or block_steps == (page, page):  # A run is one piece in each layer.
        return [_joined(Strip(at, to, n * page, layers, *layer_steps))]
    if layers == 1 or layer_steps == (page, page):  # A block is one piece.
        return [_joined(Strip(at, to, layers * page, n, *block_steps))]
    if n <= layers:
        return [
            Strip(at + i * block_steps[0], to + i * block_steps[1], page, layers, *layer_steps)
            for i in range(n)
        ]
    return [
        Strip(at + i * layer_steps[0], to + i * layer_steps[1], page, n, *block_steps)
        for i in range(layers)
    ]


def _joined(strip: Strip) -> Strip:
    """Rows that touch on both sides are one row."""
    if strip.src_step == strip.dst_step == strip.nbytes:
        return strip._replace(nbytes=strip.nbytes * strip.rows, rows=1)
    return strip


def _offset(kv: KVLayout, block: int) -> int:
    return kv.base_offset_bytes + block * kv.block_stride_bytes


def _rows_of(strip: Strip) -> np.ndarray:
    row = np.arange(strip.rows, dtype=np.int64)
    src, dst = strip.src_off + row * strip.src_step, strip.dst_off + row * strip.dst_step
    return np.stack([src, dst, np.full_like(row, strip.nbytes)], axis=1)


def _window(place: Span | int, nbytes: int | None, extent: int, side: str) -> ctypes.Array:
    address = place if isinstance(place, int) else place.address
    size = nbytes if isinstance(place, int) else place.nbytes
    size = extent if size is None else size
    if extent > size:
        raise CopyRefused(f"the plan reaches byte {extent:,} of the {side}, which has {size:,}")
    return (ctypes.c_char * size).from_address(address)
