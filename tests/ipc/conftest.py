"""Every test gets its own name in /dev/shm, and must leave none."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ipc.index import Index
from ipc.records import Role, State
from ipc.segment import names, sweep

HERE = Path(__file__).parent
BOOTS = (0xB000, 0xB001, 0xB002, 0xB003)


@pytest.fixture
def prefix() -> Iterator[str]:
    unique = f"pdtest-{secrets.token_hex(6)}-"
    yield unique
    left = names(unique)
    sweep(unique, lambda _: False)
    assert left == [], "segments were left in /dev/shm"


@pytest.fixture
def node(prefix) -> Iterator[Index]:
    """The node's view of an index with four engines, all ready."""
    index = Index.create(
        f"{prefix}index", engine_slots=4, entries_per_engine=64, node_boot_id=1,
        run_pages_per_engine=16,
    )  # fmt: skip
    for slot, boot in enumerate(BOOTS):
        start_engine(index, slot, boot)
    yield index
    index.unlink()
    index.close()


@pytest.fixture
def engines(node) -> Iterator[list[Index]]:
    """Each engine's view of that index."""
    attached = [Index.attach(node.name, me=slot) for slot in range(4)]
    yield attached
    for index in attached:
        index.close()


def start_engine(node: Index, slot: int, boot: int, state: State = State.READY) -> None:
    node.set_control(
        slot, engine_id=f"engine-{slot}", role=Role.BOTH, state=state, boot_id=boot, restarts=0
    )


@pytest.fixture
def python() -> Iterator[Callable[..., subprocess.Popen]]:
    """Start `python FILE ARGS` from this folder with pipes; killed at the end of the test."""
    started: list[subprocess.Popen] = []

    def start(file: str, *args: object) -> subprocess.Popen:
        path = (str(HERE.parent.parent), os.environ.get("PYTHONPATH"))
        process = subprocess.Popen(
            [sys.executable, str(HERE / file), *map(str, args)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def until(condition: Callable[[], object], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.001)
