"""Copy engine or kernel? It depends on the GPU, the link, the piece size and how many: so measure.

Unmeasured, the rule is: one GPU, kernel (its copy engines are many times slower than its memory);
between GPUs, pieces of 128 KiB and more on the copy engine, smaller ones with the kernel.
Sources: NCCL issue 2177, vLLM issue 57555 ("one cutoff does not hold for every N or GPU").
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

COUNTS = (1, 16, 64, 256, 1024)
_BIG_BYTES = 128 << 10
_SCRATCH_BYTES = 64 << 20
_REPEATS = 5


class Sample(NamedTuple):
    """Seconds from the submission until the GPU was seen to be done; the best of some runs."""

    piece_bytes: int
    count: int
    engine_s: float
    kernel_s: float


class Crossover(NamedTuple):
    """What was measured between two GPUs, or on one."""

    samples: tuple[Sample, ...] = ()

    def kernel(self, piece_bytes: int, count: int, same_gpu: bool) -> bool:
        """Whether the kernel should take `count` pieces of this size: as the nearest sample did."""
        if not self.samples:
            return same_gpu or piece_bytes < _BIG_BYTES
        near = min(self.samples, key=lambda s: _distance(s, piece_bytes, count))
        return near.kernel_s < near.engine_s

    def as_text(self) -> str:
        """One line a sample, for the log."""
        return "\n".join(
            f"{s.count} x {s.piece_bytes:,} B: copy engine {_gbps(s, s.engine_s):.1f} GB/s, "
            f"kernel {_gbps(s, s.kernel_s):.1f} GB/s"
            for s in self.samples
        )


def measure(
    run: Callable[[np.ndarray, bool], float], src: int, src_nbytes: int, scratch: int,
    piece_bytes: int, counts: tuple[int, ...] = COUNTS,
) -> Crossover:  # fmt: skip
    """`run(table, by_kernel)` copies int64 [n, 3] (source, destination, bytes) and gives seconds.

    Sources are spread over the region; destinations wrap around in `scratch_bytes(piece_bytes)`.
    """
    samples = []
    for count in counts:
        table = _spread(src, src_nbytes, scratch, piece_bytes, count)
        engine_s, kernel_s = (
            min(run(table, by_kernel) for _ in range(_REPEATS)) for by_kernel in (False, True)
        )
        samples.append(Sample(piece_bytes, count, engine_s, kernel_s))
    return Crossover(tuple(samples))


def scratch_bytes(piece_bytes: int) -> int:
    return max(piece_bytes, min(_SCRATCH_BYTES, piece_bytes * max(COUNTS)))


def _spread(src: int, src_nbytes: int, scratch: int, piece_bytes: int, count: int) -> np.ndarray:
    piece = np.arange(count, dtype=np.int64)
    places = max(1, src_nbytes // piece_bytes)
    slots = scratch_bytes(piece_bytes) // piece_bytes
    # An odd step visits places that are not neighbours, as blocks of a busy engine are not.
    at = src + (piece * 7919 % places) * piece_bytes
    to = scratch + (piece % slots) * piece_bytes
    return np.stack([at, to, np.full_like(piece, piece_bytes)], axis=1)


def _distance(sample: Sample, piece_bytes: int, count: int) -> float:
    return abs(math.log2(sample.piece_bytes / piece_bytes)) * 4 + abs(
        math.log2(sample.count / count)
    )


def _gbps(sample: Sample, seconds: float) -> float:
    return sample.piece_bytes * sample.count / seconds / 1e9
