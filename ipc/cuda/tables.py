"""What one running copy owns: two events, and the kernel's table in pinned and in device memory.

The table is copied to the device on the copy's own stream, so neither may change before the event.
"""

import ctypes

import numpy as np

from ipc.cuda import driver
from ipc.cuda.launch import GatherKernel

_ROW_BYTES = 24


class Table:
    """Room for `rows` pieces. All calls need the context."""

    def __init__(self, rows: int):
        self._host = driver.host_alloc(rows * _ROW_BYTES)
        self._device = driver.mem_alloc(rows * _ROW_BYTES)
        self.event = driver.event_create()
        self._before = driver.event_create()
        pinned = (ctypes.c_int64 * (3 * rows)).from_address(self._host)
        self._pinned = np.frombuffer(pinned, np.int64).reshape(rows, 3)

    def begin_after(self, earlier: int, stream: int) -> None:
        """`stream` goes on when all that the stream `earlier` was given so far has ended."""
        driver.event_record(self._before, earlier)
        driver.stream_wait(stream, self._before)

    def run(self, kernel: GatherKernel, table: np.ndarray, stream: int) -> None:
        """`table`: int64 [n, 3] of addresses and bytes, n at most `rows`. Never waits."""
        self._pinned[: len(table)] = table
        driver.copy_from_host_async(self._device, self._host, table.nbytes, stream)
        kernel.launch(self._device, table, stream)

    def close(self) -> None:
        driver.event_destroy(self.event)
        driver.event_destroy(self._before)
        driver.mem_free(self._device)
        driver.host_free(self._host)
