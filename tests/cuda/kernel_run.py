"""Runs the gather kernel in Triton's interpreter and compares with numpy.

In a process of its own: TRITON_INTERPRET=1 is read when Triton is imported.
"""

import numpy as np
import torch

from ipc.copy import Strip, plan
from ipc.cuda.kernels import BYTE_TILE, TILE_BYTES, VECTOR_BYTES, gather_bytes, gather_vectors
from ipc.records import KVLayout
from tests.cuda.contract import bytes_of, moved

GRIDS = [(1, 1), (3, 1), (2, 4), (7, 3)]


def run(table: np.ndarray, grid: tuple[int, int], tile_bytes: int | None = None) -> str:
    """As launch.py chooses; the name of the kernel that ran."""
    rows = torch.from_numpy(np.ascontiguousarray(table))
    if np.any(table % VECTOR_BYTES):
        gather_bytes[grid](rows, len(table), TILE=tile_bytes or BYTE_TILE)
        return "gather_bytes"
    gather_vectors[grid](rows, len(table), TILE=(tile_bytes or TILE_BYTES) // 8)
    return "gather_vectors"


def aligned(nbytes: int, seed: int) -> np.ndarray:
    raw = bytes_of(seed, nbytes + 2 * VECTOR_BYTES).copy()
    skip = -raw.ctypes.data % VECTOR_BYTES
    return raw[skip : skip + nbytes]


def check(strips, pieces: np.ndarray, sizes: tuple[int, int], grid, tile_bytes=None) -> str:
    source, target = aligned(sizes[0], 1), aligned(sizes[1], 2)
    expected = moved(source, target, strips)
    addresses = pieces + np.array([source.ctypes.data, target.ctypes.data, 0], np.int64)
    name = run(addresses, grid, tile_bytes)
    assert (target == expected).all(), (strips, grid, name)
    return name


def views(blocks: int, layers: int, page: int) -> dict[str, KVLayout]:
    """The orders that vLLM names; what is inside a page does not matter here. In two of them a page
    is followed by a gap, as when only half of the heads are ours."""
    return {
        "LBHNC": KVLayout(blocks, layers, page, page, blocks * page),
        "LBNHC": KVLayout(blocks, layers, page, 2 * page, 2 * blocks * page, page),
        "BLHNC": KVLayout(blocks, layers, page, layers * page, page),
        "BLNHC": KVLayout(blocks, layers, page, 2 * layers * page, 2 * page, page),
    }


def layouts() -> None:
    rng = np.random.default_rng(0)
    for page, kernel in ((2048, "gather_vectors"), (1000, "gather_bytes")):
        theirs, ours = views(19, 3, page), views(11, 3, page)
        for i, (a, b) in enumerate((a, b) for a in theirs for b in ours):
            src, dst = theirs[a], ours[b]
            blocks = [3, 4, 5, *rng.permutation(np.arange(6, 19))[:4].tolist()]
            places = [0, 1, 2, *rng.permutation(np.arange(3, 11))[:4].tolist()]
            made = plan(src, dst, blocks, places)
            sizes = src.extent_bytes, dst.extent_bytes
            ran = check(made.strips, made.pieces, sizes, GRIDS[i % len(GRIDS)])
            assert ran == kernel, (a, b, page)


def tails() -> None:
    """Around the end of a tile, with small tiles so that there are several."""
    small = 256
    sizes = [1, 15, 16, 17, 240, 255, 256, 257, 272, 511, 512, 528, 1023, 1024, 1040, 5000]
    for nbytes in sizes:
        for grid in GRIDS:
            strips = [Strip(0, 64, nbytes, 1, 0, 0), Strip(8192, 8192, nbytes, 1, 0, 0)]
            pieces = np.array([[s.src_off, s.dst_off, s.nbytes] for s in strips], np.int64)
            name = check(strips, pieces, (16384, 16384), grid, small)
            assert name == ("gather_bytes" if nbytes % VECTOR_BYTES else "gather_vectors")


def mixed() -> None:
    """Pieces of different sizes in one table: one has several tiles, one is empty."""
    sizes = [16, TILE_BYTES * 2 + 48, 0, TILE_BYTES, 4096, 32]
    at = np.concatenate([[0], np.cumsum([n + 64 for n in sizes])]).tolist()
    strips = [Strip(at[i], at[-1] - at[i + 1], n, 1, 0, 0) for i, n in enumerate(sizes)]
    pieces = np.array([[s.src_off, s.dst_off, s.nbytes] for s in strips], np.int64)
    for grid in GRIDS:
        assert check(strips, pieces, (at[-1], at[-1] + 64), grid) == "gather_vectors"


if __name__ == "__main__":
    layouts()
    tails()
    mixed()
