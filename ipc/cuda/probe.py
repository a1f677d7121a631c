"""Small copies that wait: the pattern that tells whether a peer's memory can really be read.

Drivers have claimed peer access that did not work, so vLLM too tests with a real copy
(`all_reduce_utils.can_actually_p2p`). The copy goes into memory of our own GPU first: a copy
straight to the host could take another way.
"""

import ctypes

from ipc.cuda import driver
from ipc.errors import WaitTimeout
from ipc.wait import Wait

_BUDGET_S = 10.0


def write(address: int, data: bytes) -> None:
    """Into our own memory."""
    host = ctypes.create_string_buffer(data, len(data))
    driver.copy_from_host(address, ctypes.addressof(host), len(data))


def zero(address: int, nbytes: int) -> None:
    _waiting(lambda stream: driver.mem_zero(address, nbytes, stream), "zeroing a KV region")


def read_through(address: int, nbytes: int) -> bytes:
    """The bytes at `address`, a peer's, by way of our GPU. Raises WaitTimeout, CudaCallFailed."""
    ours, host = driver.mem_alloc(nbytes), ctypes.create_string_buffer(nbytes)
    try:
        _waiting(lambda stream: driver.copy_async(ours, address, nbytes, stream), "reading a probe")
        driver.copy_to_host(ctypes.addressof(host), ours, nbytes)
    finally:
        driver.mem_free(ours)
    return host.raw


def _waiting(submit, what: str) -> None:
    stream, event, wait = driver.stream_create(), driver.event_create(), Wait(_BUDGET_S)
    try:
        submit(stream)
        driver.event_record(event, stream)
        while not driver.event_done(event):
            if not wait.nap():
                raise WaitTimeout(f"{what}: the GPU was not done after {_BUDGET_S} s")
    finally:
        driver.event_destroy(event)
        driver.stream_destroy(stream)
