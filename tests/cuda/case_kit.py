"""What the cases share. A case runs in a process of its own; an `Owner` is a second one."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ipc.copy import CopyPlan, Strip
from ipc.cuda import driver
from ipc.cuda.memory import CudaRegion
from ipc.records import RegionRecord
from ipc.segment import unlink

NBYTES = 1 << 20
WHOLE = CopyPlan((Strip(0, 0, NBYTES, 1, 0, 0),), NBYTES, NBYTES, NBYTES)
PREFIX = os.environ.get("CASE_PREFIX", "pdcuda-case-")
HOLD = "the test names a file"  # Of FAKE_CUDA_HOLD: the test puts a path in its place.
CASES: dict[str, tuple[Callable[[], None], dict[str, str]]] = {}


def case(**env: object):
    """Registers a case, with the fake driver's variables it needs."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        CASES[function.__name__] = function, {k: str(v) for k, v in env.items()}
        return function

    return register


@contextlib.contextmanager
def region(name: str, nbytes: int = NBYTES, **stamp) -> Iterator[CudaRegion]:
    made = CudaRegion.create(PREFIX + name, nbytes, flag="--kv-bytes", **stamp)
    try:
        yield made
    finally:
        made.unlink()
        made.close()


def write(target: CudaRegion, data: np.ndarray) -> None:
    with target.device.use():
        driver.copy_from_host(target.address, data.ctypes.data, data.nbytes)


def read(source: CudaRegion) -> np.ndarray:
    data = np.empty(source.nbytes, np.uint8)
    with source.device.use():
        driver.copy_to_host(data.ctypes.data, source.address, data.nbytes)
    return data


def noise(seed: int, nbytes: int = NBYTES) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Owner:
    """A second process with a region of `noise(1)`; each line makes the region anew."""

    def __init__(self, **env: str):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda.cases", "owner"], env={**os.environ, **env},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.generation = 0
        self._ready()

    def _ready(self) -> None:
        assert self._process.stdout.readline() == "ready\n"
        self.generation += 1

    def renew(self) -> None:
        self._process.stdin.write("again\n")
        self._process.stdin.flush()
        self._ready()

    def attach(self) -> CudaRegion:
        told = RegionRecord(
            PREFIX + "owner", NBYTES, 1, 1, NBYTES, NBYTES, NBYTES, 0, 7, self.generation, b"model"
        )
        return CudaRegion.attach(told, b"model", 7)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> "Owner":
        return self

    def __exit__(self, *_) -> None:
        self.kill()
        unlink(PREFIX + "owner")


def owner() -> None:
    generation = 1
    while True:
        stamp = {"boot_id": 7, "generation": generation, "fingerprint": b"model"}
        with region("owner", **stamp) as made:
            write(made, noise(generation))
            print("ready", flush=True)
            if not sys.stdin.readline():
                return
            generation += 1


class Held:
    """Streams stand still inside the block."""

    path = Path(os.environ.get("FAKE_CUDA_HOLD", "/nowhere"))

    def __enter__(self) -> None:
        self.path.touch()

    def __exit__(self, *_) -> None:
        self.path.unlink(missing_ok=True)
