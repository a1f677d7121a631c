"""Workers of GPU engines without vLLM's engine: `python -m tests.unit.worker_lab owner|reader PREFIX`.

For test_worker.py, over the fake driver, whose device memory the CPU can fill and look at. The KV
is made as vLLM makes it on a GPU: one buffer that nobody announced, views of it afterwards.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from ipc.cuda import driver, mapping
from ipc.cuda.device import device
from ipc.index import Index
from ipc.records import Role, State
from pdnode.connector.metadata import Load
from pdnode.connector.settings import ConnectorSettings
from pdnode.connector.worker import WorkerHalf

LAYERS, BLOCKS, PAGE = 3, 40, 24 << 10
NBYTES = LAYERS * BLOCKS * PAGE
OWNER, MAPPING, STAGED = 0, 1, 2
BOOTS = (0xA0, 0xA1, 0xA2)
WAIT_S = 120.0


def make_index(prefix: str) -> Index:
    node = Index.create(f"{prefix}.index", engine_slots=3, node_boot_id=1)
    for slot in range(3):
        announce(node, slot, State.READY)
    return node


def announce(node: Index, slot: int, state: State) -> None:
    node.set_control(
        slot, engine_id=f"e{slot}", role=Role.BOTH, state=state, boot_id=BOOTS[slot], restarts=0
    )


def worker(prefix: str, slot: int, path: str, served: tuple[str, ...]):
    """(the worker half, its KV as uint8 [layers, blocks, page])."""
    settings = ConnectorSettings(
        node_pid=os.getpid(), index_name=f"{prefix}.index", segment_prefix=f"{prefix}.e{slot}",
        engine_id=f"e{slot}", slot=slot, boot_id=BOOTS[slot], lease_s=60.0, fingerprint="ab" * 32,
        gpu=True, kv_paths=(path,) * 3, kv_served=served,
    )  # fmt: skip
    half = WorkerHalf(settings, 0, BLOCKS)
    kv = allocated(half)
    kv.fill_(slot)
    half.publish({f"layer.{i}": kv[i] for i in range(LAYERS)})
    return half, kv


def allocated(half: WorkerHalf) -> torch.Tensor:
    assert half.kv_memory() is None, "a GPU engine allocates by itself"
    with device().use():
        memory = (ctypes.c_char * NBYTES).from_address(driver.mem_alloc(NBYTES))
    return torch.frombuffer(memory, dtype=torch.uint8).view(LAYERS, BLOCKS, PAGE)


def contents() -> torch.Tensor:
    noise = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (LAYERS, BLOCKS, PAGE), generator=noise, dtype=torch.uint8)


def owner(prefix: str) -> None:
    """Offers all its blocks, serves until it is killed."""
    half, kv = worker(prefix, OWNER, "staged", ("cuda-ipc", "staged"))
    kv.copy_(contents())
    half._index.insert(
        "t", boot_id=BOOTS[OWNER], block_ids=list(range(BLOCKS)), tokens_ready=BLOCKS,
        tokens_total=BLOCKS, lease_s=600.0,
    )  # fmt: skip
    sys.stdin.read()


def reader(prefix: str) -> None:
    """Loads by both paths; when told, sees that the dead owner's memory is let go."""
    expected, src, dst = contents(), (3, 4, 5, 17, 39), (8, 9, 10, 2, 0)
    halves = []
    for slot, path in ((MAPPING, "cuda-ipc"), (STAGED, "staged")):
        half, kv = worker(prefix, slot, path, (path,))
        until(partial(half._index.select, "t", OWNER))
        entry = half._index.select("t", OWNER)
        half.load([Load("r", entry, src, dst, len(src))])
        report = half.take_report()
        assert not report.failed, report.failed
        assert [done.nbytes for done in report.done] == [LAYERS * len(src) * PAGE]
        assert torch.equal(kv[:, dst], expected[:, src]), path
        rest = [block for block in range(BLOCKS) if block not in dst]
        assert bool((kv[:, rest] == slot).all()), path
        halves.append(half)
    assert mapping.open_count(BOOTS[OWNER]) == 1
    print("loaded", flush=True)
    sys.stdin.readline()
    until(lambda: not mapping.open_count(BOOTS[OWNER]))
    for half in halves:
        half.load([Load("late", entry, src, dst, len(src))])
        assert [failed.request_id for failed in half.take_report().failed] == ["late"]
        half.close()
    print("let go", flush=True)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


if __name__ == "__main__":
    {"owner": owner, "reader": reader}[sys.argv[1]](*sys.argv[2:])
