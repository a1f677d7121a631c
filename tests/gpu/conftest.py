"""Tests that need a CUDA device. They are skipped, with the reason, where there is none."""

from collections.abc import Iterator

import pytest

from tests.cuda import fake
from tests.cuda.conftest import prefix
from tests.cuda.lab import Lab

__all__ = ["gpu", "prefix", "start_lab"]

_LOOK = """
from ipc.cuda.device import device
from ipc.cuda.memory import FAKE_DEVICE
from ipc.errors import IpcError
try:
    found = device()
except IpcError as error:
    raise SystemExit(f"no CUDA device: {error}")
if found.name.startswith(FAKE_DEVICE):
    raise SystemExit("this is the fake driver, not a CUDA device")
print(found)
"""


@pytest.fixture(scope="session")
def gpu() -> str:
    """Name, UUID and address of the GPU. A child looks, so that this process stays free of CUDA."""
    done = fake.python(["-c", _LOOK], fake.environment(None))
    if done.returncode:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    return done.stdout.strip()


@pytest.fixture(scope="module")
def start_lab(gpu) -> Iterator:
    """`start_lab(backend)`: processes that use the real driver."""
    labs: list[Lab] = []

    def start(backend: str) -> Lab:
        labs.append(Lab(backend, fake.environment(None)))
        return labs[-1]

    yield start
    for lab in labs:
        lab.close()
