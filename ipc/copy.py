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
from ipc.heads import HeadSlice, page_strides
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
    src: KVLayout, dst: KVLayout, src_blocks: Sequence[int], dst_blocks: Sequence[int],
    heads: HeadSlice | None = None,
) -> CopyPlan:  # fmt: skip
    """Copy block src_blocks[i] to dst_blocks[i], all layers, in as few strips as the layouts allow.

    `heads`: only these, between pages that hold different numbers of heads; for engines of
    different tensor parallel size, one plan for each source rank of `ipc.heads.head_reads`.

    Raises CopyRefused: other page size or number of layers, lists of different length, a block that
    is not in its layout, heads that are not in a page.
    """
    inside = _inside_page(src, dst, heads)
    src_ids, dst_ids = _ids(src_blocks, src, "source"), _ids(dst_blocks, dst, "destination")
    if len(src_ids) != len(dst_ids):
        raise CopyRefused(f"{len(src_ids)} source blocks for {len(dst_ids)} destination blocks")
    grids: dict[int, _Grid] = {}
    strips = []
    for start, stop in _runs(src_ids, dst_ids):
        n = stop - start
        grid = grids.get(n) or grids.setdefault(n, _grid(src, dst, n, inside))
        at = _offset(src, int(src_ids[start])) + inside.src_off
        to = _offset(dst, int(dst_ids[start])) + inside.dst_off
        strips += [
            Strip(at + i, to + j, grid.nbytes, grid.rows, *grid.steps) for i, j in grid.places
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


class _Axis(NamedTuple):
    """`count` things at fixed steps on both sides, in bytes."""

    count: int
    src_step: int
    dst_step: int


class _Page(NamedTuple):
    """What of every page moves: `nbytes` from an offset on, repeated along the axes."""

    src_off: int
    dst_off: int
    nbytes: int
    axes: tuple[_Axis, ...]


class _Grid(NamedTuple):
    """The strips of one run, whichever: equal ones, at these places from its beginning."""

    nbytes: int
    rows: int
    steps: tuple[int, int]
    places: tuple[tuple[int, int], ...]


def _inside_page(src: KVLayout, dst: KVLayout, heads: HeadSlice | None) -> _Page:
    _must_agree("num_layers", src.num_layers, dst.num_layers)
    if heads is None:
        _must_agree("page_bytes", src.page_bytes, dst.page_bytes)
        return _Page(0, 0, src.page_bytes, ())
    content = heads.content_bytes(src.page_bytes, dst.page_bytes)
    theirs = page_strides(heads.src_order, heads.src_heads, heads.tokens, content)
    ours = page_strides(heads.dst_order, heads.dst_heads, heads.tokens, content)
    axes = _Axis(heads.count, theirs[0], ours[0]), _Axis(heads.tokens, theirs[1], ours[1])
    return _Page(heads.src_first * theirs[0], heads.dst_first * ours[0], content, axes)


def _must_agree(what: str, theirs: int, ours: int) -> None:
    if theirs != ours:
        raise CopyRefused(f"{what} differs: source {theirs}, destination {ours}")


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


def _grid(src: KVLayout, dst: KVLayout, n: int, inside: _Page) -> _Grid:
    """A run of n blocks in all layers, in as few strips as can be: the longest axis are their rows."""
    blocks = _Axis(n, src.block_stride_bytes, dst.block_stride_bytes)
    layers = _Axis(src.num_layers, src.layer_stride_bytes, dst.layer_stride_bytes)
    nbytes, axes = _joined(inside.nbytes, [layers, blocks, *inside.axes])
    rows = max(axes, default=_Axis(1, 0, 0))
    places = itertools.product(*(range(axis.count) for axis in axes if axis is not rows))
    steps = [axis[1:] for axis in axes if axis is not rows]
    return _Grid(
        nbytes, rows.count, rows[1:],
        tuple(
            (
                sum(i * step[0] for i, step in zip(place, steps, strict=True)),
                sum(i * step[1] for i, step in zip(place, steps, strict=True)),
            )
            for place in places
        ),
    )  # fmt: skip


def _joined(nbytes: int, axes: list[_Axis]) -> tuple[int, list[_Axis]]:
    """Things that touch on both sides are one; two axes that continue each other are one."""
    axes = [axis for axis in axes if axis.count > 1]
    for axis in axes:
        rest = [other for other in axes if other is not axis]
        if axis.src_step == axis.dst_step == nbytes:
            return _joined(nbytes * axis.count, rest)
        for other in rest:
            span = axis.count * axis.src_step, axis.count * axis.dst_step
            if span == other[1:]:
                rest.remove(other)
                return _joined(nbytes, [axis._replace(count=axis.count * other.count), *rest])
    return nbytes, axes


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
