"""The gather kernel: many pieces, one launch. Addresses come from a table, so any two layouts will
do.

table: int64 [pieces, 3] in device memory: source address, destination address, bytes. Program
(lane, part) takes every `lanes`-th piece, and of it every `parts`-th tile. A thread moves 16 bytes
at a time when all three columns are multiples of 16 (`gather_vectors`), else one byte
(`gather_bytes`).

Compiled ahead of time for one architecture, without a GPU and without torch; launch.py loads the
result.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

VECTOR_BYTES = 16
THREADS = 256
TILE_BYTES = 16384  # 64 bytes in flight per thread, as four 16-byte loads.
BYTE_TILE = 4096
WARP_SIZE = 32


@triton.jit
def _copy_words(src, dst, words, part, parts, TILE: tl.constexpr):
    lanes = tl.arange(0, TILE)
    whole = words // TILE
    for tile in range(part, whole, parts):
        at = tile * TILE + lanes
        tl.store(dst + at, tl.load(src + at))
    # The tail apart, so that the loop above has no mask.
    if part == whole % parts:
        at = whole * TILE + lanes
        tl.store(dst + at, tl.load(src + at, mask=at < words), mask=at < words)


@triton.jit
def gather_vectors(table, pieces, TILE: tl.constexpr):
    part, parts = tl.program_id(1), tl.num_programs(1)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        row = table + 3 * piece
        src = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int64)), 16)
        dst = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.int64)), 16)
        words = tl.multiple_of(tl.load(row + 2) // 8, 2)
        _copy_words(src, dst, words, part, parts, TILE)


@triton.jit
def gather_bytes(table, pieces, TILE: tl.constexpr):
    part, parts = tl.program_id(1), tl.num_programs(1)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        row = table + 3 * piece
        src = tl.load(row).to(tl.pointer_type(tl.int8))
        dst = tl.load(row + 1).to(tl.pointer_type(tl.int8))
        _copy_words(src, dst, tl.load(row + 2), part, parts, TILE)


class Compiled(NamedTuple):
    """image: a cubin; parameters of the kernel: table u64, pieces u32, then two unused pointers."""

    name: str
    image: bytes
    ptx: str
    threads: int
    shared_bytes: int


def compile_gather(compute_capability: int, vectors: bool) -> Compiled:
    """`compute_capability` 90 is sm_90. Seconds the first time, then from Triton's cache."""
    kernel, tile = (gather_vectors, TILE_BYTES // 8) if vectors else (gather_bytes, BYTE_TILE)
    source = ASTSource(
        kernel, {"table": "*i64", "pieces": "i32", "TILE": "constexpr"}, {"TILE": tile},
        {(0,): [["tt.divisibility", 16]]},
    )  # fmt: skip
    options = {"num_warps": THREADS // WARP_SIZE, "enable_fp_fusion": False}
    target = GPUTarget("cuda", compute_capability, WARP_SIZE)
    made = triton.compile(source, target=target, options=options)
    assert made.metadata.global_scratch_size == made.metadata.profile_scratch_size == 0
    return Compiled(
        made.metadata.name, made.asm["cubin"], made.asm["ptx"], THREADS, made.metadata.shared
    )
