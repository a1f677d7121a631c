"""Starts the gather kernel through the driver, on any stream. No torch, no Triton run time."""

import ctypes

import numpy as np

from ipc.cuda import driver
from ipc.cuda.device import Device
from ipc.cuda.errors import CudaUnavailable

_VECTOR_BYTES, _TILE_BYTES = 16, 16384  # As in kernels.py, which only loads where Triton is.
# 64 groups of 256 threads with 64 bytes each in flight: about twice what 400 GB/s at 1.3 us need,
# and half of the multiprocessors of an H100 stay free for the engine's own kernels.
_MAX_GROUPS = 64


class GatherKernel:
    """Both kernels, compiled for and loaded on one device."""

    def __init__(self, device: Device):
        """Needs the context of `device`. Raises CudaUnavailable without Triton."""
        try:
            from ipc.cuda import kernels
        except ImportError as error:
            raise CudaUnavailable(f"no gather kernel: {error}; pip install triton") from None
        capability = device.compute_capability
        self._loaded = [
            _Loaded(kernels.compile_gather(capability, vectors)) for vectors in (False, True)
        ]

    def launch(self, table_address: int, table: np.ndarray, stream: int) -> None:
        """`table`: int64 [n, 3] of addresses and bytes; `table_address`: its copy on the device."""
        aligned = not np.any(table % _VECTOR_BYTES)
        grid = _grid(len(table), int(table[:, 2].max()))
        self._loaded[aligned].launch(table_address, len(table), grid, stream)


class _Loaded:
    def __init__(self, compiled):
        self._compiled = compiled
        self._function = driver.module_function(driver.module_load(compiled.image), compiled.name)

    def launch(self, table_address: int, pieces: int, grid: tuple[int, int], stream: int) -> None:
        values = (
            ctypes.c_uint64(table_address), ctypes.c_int32(pieces), ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )  # fmt: skip
        params = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        driver.launch(
            self._function, grid, self._compiled.threads, self._compiled.shared_bytes, stream,
            ctypes.addressof(params),
        )  # fmt: skip


def _grid(pieces: int, longest_bytes: int) -> tuple[int, int]:
    """(lanes over pieces, parts of a piece): few long pieces are split, many short ones are not."""
    tiles = -(-longest_bytes // _TILE_BYTES)
    parts = max(1, min(tiles, _MAX_GROUPS // pieces))
    return max(1, min(pieces, _MAX_GROUPS // parts)), parts
