"""The fake driver, built once; names in /dev/shm that must be free again."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc.segment import names, sweep
from tests.cuda import fake


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory) -> Path:
    """The path of a libcuda.so.1 that needs no GPU. Skips where it cannot be built."""
    return fake.build(tmp_path_factory.mktemp("fake_driver"))


@pytest.fixture
def prefix() -> Iterator[str]:
    unique = f"pdcuda-{secrets.token_hex(6)}-"
    yield unique
    left = names(unique)
    sweep(unique, lambda _: False)
    assert left == [], "segments were left in /dev/shm"
