"""What the worker half does in a GPU engine, over the fake driver: export, both paths, a death."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from ipc.records import State
from ipc.segment import names, unlink
from pdnode.connector.kv_memory import one_buffer
from tests.cuda import fake
from tests.unit import worker_lab


@pytest.fixture
def prefix() -> Iterator[str]:
    prefix = f"pdnode-test.{os.getpid()}.{secrets.token_hex(4)}"
    yield prefix
    for name in names(prefix):
        unlink(name)


@pytest.mark.kill
def test_vllms_buffer_is_read_by_both_paths_and_let_go(prefix: str, tmp_path) -> None:
    env = fake.environment(fake.build(tmp_path))
    node = worker_lab.make_index(prefix)
    started = []

    def start(role: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "tests.unit.worker_lab", role, prefix]
        process = subprocess.Popen(
            command, cwd=fake.ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        started.append(process)
        return process

    try:
        owner, reader = start("owner"), start("reader")
        await_line(reader, "loaded")
        owner.kill()
        owner.wait()
        worker_lab.announce(node, worker_lab.OWNER, State.DEAD)
        reader.stdin.write("dead\n")
        reader.stdin.flush()
        await_line(reader, "let go")
        assert reader.wait(60) == 0
    finally:
        for process in started:
            process.kill()
            process.communicate()


def await_line(process: subprocess.Popen, line: str) -> None:
    """What vLLM's import prints comes first."""
    for got in process.stdout:
        if got.strip() == line:
            return
    pytest.fail(f"the process ended with {process.wait()} before it said {line!r}")


def test_caches_in_several_allocations_are_refused() -> None:
    kv = torch.zeros(2, 4, 8, dtype=torch.uint8)
    assert one_buffer({"a": kv[0], "b": kv[1]}) == (kv.data_ptr(), kv.numel())
    with pytest.raises(ValueError, match="2 allocations"):
        one_buffer({"a": kv[0], "b": kv[1].clone()})
