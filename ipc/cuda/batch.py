"""cuMemcpyBatchAsync: many copies, one call. Through ctypes, because lists of objects cost more.

    12.8  (dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx*, stream)
    13.0  (dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs,           stream)

One name in the library, two ABIs: which one `cuGetProcAddress` gives depends on the version that is
asked for. Copies of one batch run in any order; the stream must not be the default one.
Sources: CUDA driver API, "Memory Management", and cuda.h of 12.8 and 13.0.
"""

import ctypes
from collections.abc import Callable

import numpy as np

from ipc.cuda import driver
from ipc.cuda.errors import call_failed

_NAME = "cuMemcpyBatchAsync"
_WITH_FAIL_INDEX, _WITHOUT_FAIL_INDEX = 12080, 13000
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: what peer memory needs.


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("src_access_order", ctypes.c_int), ("src", _Location), ("dst", _Location),
        ("flags", ctypes.c_uint),
    )  # fmt: skip


_ATTRIBUTES = _Attributes(src_access_order=_STREAM_ORDER)
_FIRST_INDEX = ctypes.c_size_t(0)  # This set of attributes holds from copy 0 on.
_VOID, _SIZE = ctypes.c_void_p, ctypes.c_size_t

# dsts, srcs, nbytes: 8-byte integers [n], contiguous; the stream.
Submit = Callable[[np.ndarray, np.ndarray, np.ndarray, int], None]


def submitter() -> Submit:
    """How this driver takes many copies: the newest ABI it has, or one call a copy before 12.8."""
    version = driver.version()
    for abi in (_WITHOUT_FAIL_INDEX, _WITH_FAIL_INDEX):
        address = driver.proc_address(_NAME, abi) if version >= abi else 0
        if address:
            return _batched(address, with_fail_index=abi == _WITH_FAIL_INDEX)
    return _one_by_one


def _batched(address: int, with_fail_index: bool) -> Submit:
    types = [_VOID, _VOID, _VOID, _SIZE, _VOID, _VOID, _SIZE, *[_VOID] * with_fail_index, _VOID]
    function = ctypes.CFUNCTYPE(ctypes.c_int, *types)(address)
    failed_at = ctypes.c_size_t(0)
    extra = [ctypes.addressof(failed_at)] if with_fail_index else []

    def submit(dsts: np.ndarray, srcs: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        status = function(
            dsts.ctypes.data, srcs.ctypes.data, sizes.ctypes.data, len(sizes),
            ctypes.addressof(_ATTRIBUTES), ctypes.addressof(_FIRST_INDEX), 1, *extra, stream,
        )  # fmt: skip
        if status:
            raise call_failed(_NAME, status, driver.error_name(status))

    return submit


def _one_by_one(dsts: np.ndarray, srcs: np.ndarray, sizes: np.ndarray, stream: int) -> None:
    for dst, src, nbytes in zip(dsts.tolist(), srcs.tolist(), sizes.tolist(), strict=True):
        driver.copy_async(dst, src, nbytes, stream)
