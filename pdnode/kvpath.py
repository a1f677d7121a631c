"""Which way KV takes from one engine to another: the one asked for, or what the devices allow.

    shm        the reader maps the owner's segment               auto on CPU
    cuda-ipc   the reader maps the owner's GPU memory            auto on GPUs with peer access
    staged     the owner sends, through a ring in host memory    auto on GPUs without

Decided here and nowhere else, from the plan alone; the two ends only carry it out.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdnode.device import CpuDevice, Device
from pdnode.errors import ConfigError

if TYPE_CHECKING:
    from pdnode.assign import Assignment
    from pdnode.config import EngineSpec

AUTO, SHM, STAGED, CUDA_IPC = "auto", "shm", "staged", "cuda-ipc"
MAPPED = frozenset({SHM, CUDA_IPC})
"""The reader reads the owner's memory by itself, so that nothing needs to be offered first."""

PIPE_SLOTS, PIPE_SLOT_BYTES = 16, 512 << 10
"""Of the ring that a staged hand-off goes through, one per ordered pair of engines and rank."""
REQUEST_SLOTS, REQUEST_SLOT_BYTES = 4, 64 << 10
"""Of the ring for requests beside it. One in at most half of it is there when the owner is woken: 8,000
blocks of a prefix."""
CHUNK_BYTES = (2 << 20) - 4096
"""Of one tensor in it, at most: with its header a quarter of the ring, so that one is sent while
another is received. Each costs some tens of microseconds at both ends, whatever its size."""

FAKE_DRIVER = "PDNODE_FAKE_CUDA"
"""For tests only: a stand-in for NVIDIA's driver library, whose device memory is host memory."""


def between(asked: str, owner: Device, reader: Device) -> str:
    """How ``reader`` gets at the KV of ``owner``."""
    return owner.kv_path_to(reader) if asked == AUTO else asked


def prepared(asked: str, assignment: Assignment) -> Assignment:
    """The devices with what ``--kv-path`` needs around them. Raises ConfigError."""
    on_cpu = assignment.prefill[0].kind == "cpu"
    if asked == SHM and not on_cpu:
        raise ConfigError(
            "--kv-path shm is for CPU engines: KV of a GPU is not in /dev/shm; take --kv-path auto"
        )
    if asked != CUDA_IPC or not on_cpu:
        return assignment
    folder = _fake_driver_folder()
    prefill, decode = (
        tuple(dataclasses.replace(device, driver_folder=folder) for device in devices)
        for devices in (assignment.prefill, assignment.decode)
    )
    return dataclasses.replace(assignment, prefill=prefill, decode=decode)


def check_ranks(asked: str, prefill_tp: int, decode_tp: int) -> None:
    """Raises ConfigError where the roles' ranks hold different heads and the path cannot pick."""
    if prefill_tp != decode_tp and asked in (STAGED, CUDA_IPC):
        raise ConfigError(
            f"--prefill-tp {prefill_tp} and --decode-tp {decode_tp} differ, and --kv-path {asked} "
            "hands over whole pages: make them equal, or take --kv-path auto"
        )


def _fake_driver_folder() -> str:
    named = os.environ.get(FAKE_DRIVER, "")
    library = Path(named)
    if library.name != "libcuda.so.1" or not library.is_file():
        raise ConfigError(
            "--kv-path cuda-ipc needs GPUs and these are CPU engines: take --kv-path auto (tests "
            f"name a stand-in libcuda.so.1 in {FAKE_DRIVER}, now {named!r})"
        )
    return str(library.resolve().parent)


def warnings(asked: str, engines: Sequence[EngineSpec], strict: bool) -> list[str]:
    """A slow path is never taken in silence: a warning, or with --strict a refusal.

    Raises ConfigError for that, and for a path that the GPUs do not have.
    """
    slow = ", ".join(f"{p.engine_id} to {d.engine_id}" for p, d in _without_peer_access(engines))
    if not slow or asked == STAGED:
        return []
    if asked == CUDA_IPC:
        raise ConfigError(
            f"--kv-path cuda-ipc: no peer access from {slow}; take --kv-path auto or staged"
        )
    text = f"no peer access from {slow}: KV is staged through host memory"
    if strict:
        raise ConfigError(f"--strict: {text}; name other GPUs or leave --strict out")
    return [text]


def _without_peer_access(engines: Sequence[EngineSpec]) -> Iterable[tuple[EngineSpec, EngineSpec]]:
    for p, d in itertools.product(engines, engines):
        if (p.role, d.role) == ("prefill", "decode") and p.device.kv_path_to(d.device) == STAGED:
            yield p, d


def pipe_bytes(asked: str, prefill: Sequence[Device], decode: Sequence[Device]) -> int:
    """Shared memory of the rings from every engine to every other, on CPU: prefixes go all ways."""
    if asked != STAGED:
        return 0
    ranks = max((len(d.rank_cores) for d in prefill if isinstance(d, CpuDevice)), default=0)
    engines = len(prefill) + len(decode)
    one_way = PIPE_SLOTS * PIPE_SLOT_BYTES + REQUEST_SLOTS * REQUEST_SLOT_BYTES
    return engines * (engines - 1) * ranks * one_way
