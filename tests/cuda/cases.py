"""What only the fake driver can be made to do. Each case is a process: `python -m tests.cuda.cases NAME`.

A case that needs a second process starts this file again with `owner`: see `Owner`.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ipc.copy import CopyPlan, Strip
from ipc.cuda import batch, driver, mapping, share, vmm
from ipc.cuda.copy import CudaCopier
from ipc.cuda.device import device
from ipc.cuda.errors import (
    CopierBusy, CudaCallFailed, CudaFault, CudaNoContext, CudaUnavailable, NoDeviceMemory,
    NotExportable, PeerUnreadable,
)  # fmt: skip
from ipc.cuda.memory import CudaRegion, close_dead, cuda_zeros_in_new
from ipc.cuda.record import read_record
from ipc.errors import CopyRefused, PeerGone, RegionRefused, WaitTimeout
from ipc.records import RegionRecord
from ipc.segment import unlink

NBYTES = 1 << 20
WHOLE = CopyPlan((Strip(0, 0, NBYTES, 1, 0, 0),), NBYTES, NBYTES, NBYTES)
PREFIX = os.environ.get("CASE_PREFIX", "pdcuda-case-")
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


# what can be exported -----------------------------------------------------------------------------


@case()
def memory_without_any_handle_is_refused_with_what_was_probed():
    gpu = device()
    with gpu.use():
        address, free = vmm.allocate(NBYTES, gpu, 0)
        with pytest.raises(NotExportable) as caught:
            CudaRegion.export(PREFIX + "x", address, NBYTES)
        free()
    for words in ("no legacy IPC", "handle types 0x0", "--kv-path staged"):
        assert words in str(caught.value)


@case(FAKE_CUDA_FABRIC=0)
def fabric_memory_where_fabric_is_not_permitted():
    gpu = device()
    with gpu.use(), pytest.raises(CudaCallFailed, match="cuMemCreate failed: .*NOT_PERMITTED"):
        vmm.allocate(NBYTES, gpu, driver.FABRIC)


@case()
def host_memory_and_unknown_addresses_are_refused():
    gpu = device()
    with gpu.use():
        for address in (driver.host_alloc(NBYTES), noise(1).ctypes.data):
            with pytest.raises(NotExportable, match="not device memory"):
                share.share(address, NBYTES)


@case()
def one_handle_must_cover_everything():
    gpu = device()
    with gpu.use():
        address = driver.mem_alloc(NBYTES)
        share.share(address + 64, NBYTES - 64).close()
        with pytest.raises(NotExportable, match="more than one allocation"):
            share.share(address + 64, NBYTES)


@case()
def range_of_several_chunks_is_refused():
    """As expandable segments make it: neighbours in address, one handle each."""
    gpu, unit = device(), 2 << 20
    with gpu.use():
        base = driver.vmm_reserve(2 * unit)
        for chunk in range(2):
            allocation = driver.vmm_create(unit, gpu.ordinal, driver.POSIX_FD)
            driver.vmm_map(base + chunk * unit, unit, allocation, gpu.ordinal)
        assert share.share(base, unit).kind == 3
        with pytest.raises(NotExportable, match="more than one allocation"):
            share.share(base, 2 * unit)


@case(FAKE_CUDA_BYTES=8 << 20)
def full_device_names_the_flag():
    with pytest.raises(NoDeviceMemory, match="lower --kv-bytes") as caught, region("x", 64 << 20):
        pass
    assert caught.value.free_bytes == 8 << 20


# who may attach -----------------------------------------------------------------------------------


@case()
def own_region_is_refused():
    with region("kv", boot_id=7):
        told = RegionRecord(PREFIX + "kv", NBYTES, 1, 1, 1, 1, 1, 0, 7, 0, b"")
        with pytest.raises(RegionRefused, match="this process's own"):
            CudaRegion.attach(told, b"", 7)


@case()
def handle_of_this_process_does_not_open():
    gpu = device()
    with gpu.use():
        handle = driver.ipc_get(driver.mem_alloc(NBYTES))
        with pytest.raises(CudaNoContext, match="cuIpcOpenMemHandle"):
            driver.ipc_open(handle)


@case(FAKE_CUDA_BROKEN_P2P=1)
def mapping_that_shows_other_bytes_is_refused_and_closed():
    with Owner() as other:
        with pytest.raises(PeerUnreadable, match="reads other bytes"):
            other.attach()
        assert mapping.open_count() == 0


@case(FAKE_CUDA_NO_P2P=1)
def gpu_without_peer_access_is_refused():
    with Owner(CUDA_VISIBLE_DEVICES="1") as other, pytest.raises(PeerUnreadable, match="staged"):
        other.attach()


@case(CUDA_VISIBLE_DEVICES="1,0")
def gpus_are_told_apart_by_uuid_not_by_ordinal():
    """Ordinal 0 is another GPU in each process."""
    with Owner(CUDA_VISIBLE_DEVICES="0,1") as other:
        peer = other.attach()
        assert peer.uuid[-1] == 0
        assert device().uuid[-1] == 1
        assert not peer.same_gpu
        assert (read(peer) == noise(1)).all()


@case(CUDA_VISIBLE_DEVICES="1")
def hidden_gpu_is_mapped():
    with Owner(CUDA_VISIBLE_DEVICES="0") as other:
        assert (read(other.attach()) == noise(1)).all()
        with pytest.raises(CudaUnavailable, match="CUDA_VISIBLE_DEVICES"):
            device(other.attach().uuid)


# death and replacement ----------------------------------------------------------------------------


@case()
def same_memory_again_has_the_same_handle_and_is_another_mapping():
    """The owner frees and allocates under a reader that has not closed: 208, which must not show."""
    with Owner() as other:
        old = other.attach()
        first = read_record(PREFIX + "owner")
        other.renew()
        assert read_record(PREFIX + "owner").body.handle == first.body.handle
        new = other.attach()
        assert (read(new) == noise(2)).all()
        with region("mine") as mine, pytest.raises(PeerGone):
            CudaCopier(with_kernel=False).submit(WHOLE, old, mine)


@case(FAKE_CUDA_HOLD=f"/tmp/{PREFIX}hold")
def dead_owner_is_unmapped_after_the_running_copy():
    with Owner() as other, region("mine") as mine:
        peer, copier = other.attach(), CudaCopier(with_kernel=False)
        with Held():
            ticket = copier.submit(WHOLE, peer, mine)
            other.kill()
            begin = time.monotonic()
            assert close_dead(7, drain_s=0.2) == 1
            assert time.monotonic() - begin < 1
            with pytest.raises(PeerGone):
                copier.submit(WHOLE, peer, mine)
            assert not ticket.done()
        assert ticket.wait(10) == NBYTES
        assert mapping.open_count() == 0
        assert (read(mine) == noise(1)).all()


@case()
def close_from_another_thread_while_copies_start():
    """Every copy is whole or refused; no address is used after it was unmapped (that would be a fault)."""
    with Owner() as other, region("mine") as mine:
        peer, copier = other.attach(), CudaCopier(with_kernel=False, max_in_flight=2)
        other.kill()
        killer = threading.Timer(0.05, close_dead, (7, 5.0))
        killer.start()
        copies = 0
        with pytest.raises(PeerGone):
            while True:
                copies += copier.copy(WHOLE, peer, mine) == NBYTES
        killer.join()
        assert mapping.open_count() == 0
        assert copier.close(1)
    assert copies > 0


@case(FAKE_CUDA_HOLD=f"/tmp/{PREFIX}hold")
def own_region_is_freed_after_the_running_copy():
    with region("a") as a, region("b") as b:
        write(a, noise(1))
        copier = CudaCopier(with_kernel=False)
        with Held():
            ticket = copier.submit(WHOLE, a, b)
            a.close()
            with pytest.raises(RegionRefused):
                copier.submit(WHOLE, a, b)
        assert ticket.wait(10) == NBYTES
        assert (read(b) == noise(1)).all()


# copies -------------------------------------------------------------------------------------------


def _shuffled_blocks(copier: CudaCopier) -> None:
    """Many pieces, several copies in flight: random order inside one, none between them."""
    page, pages = 4096, NBYTES // 4096
    rng = np.random.default_rng(3)
    with region("a") as a, region("b") as b:
        write(a, noise(1))
        tickets, expected = [], np.zeros(NBYTES, np.uint8).reshape(pages, page)
        for _ in range(6):
            src, dst = rng.permutation(pages)[:100], rng.permutation(pages)[:100]
            strips = [Strip(int(s) * page, int(d) * page, page, 1, 0, 0) for s, d in zip(src, dst)]
            moved = CopyPlan(tuple(strips), NBYTES, NBYTES, 100 * page)
            tickets.append(copier.submit(moved, a, b))
            expected[dst] = noise(1).reshape(pages, page)[src]
        assert [ticket.wait(10) for ticket in reversed(tickets)] == [100 * page] * 6
        assert (read(b) == expected.reshape(-1)).all()
    assert copier.close(1)


@case(FAKE_CUDA_VERSION=13000, FAKE_CUDA_DELAY_US=2000)
def batch_of_cuda_13():
    _shuffled_blocks(CudaCopier(with_kernel=False))


@case(FAKE_CUDA_VERSION=12080, FAKE_CUDA_DELAY_US=2000)
def batch_of_cuda_12_8():
    _shuffled_blocks(CudaCopier(with_kernel=False))


@case(FAKE_CUDA_VERSION=12040)
def one_by_one_before_cuda_12_8():
    assert device() and batch.submitter() is batch._one_by_one
    _shuffled_blocks(CudaCopier(with_kernel=False))


@case(FAKE_CUDA_DELAY_US=2000)
def kernel():
    pytest.importorskip("triton")
    copier = CudaCopier()
    assert copier.no_kernel == ""
    _shuffled_blocks(copier)


@case()
def calibration_measures_both_ways_and_is_used():
    pytest.importorskip("triton")
    copier = CudaCopier()
    with region("a") as a, region("b") as b:
        found = copier.calibrate(a, 4096)
        assert [sample.count for sample in found.samples] == [1, 16, 64, 256, 1024]
        assert copier.crossover[a.uuid] == found
        assert copier.copy(WHOLE, a, b) == NBYTES


@case()
def default_stream_is_refused():
    gpu = device()
    with gpu.use(), pytest.raises(CudaCallFailed, match="cuMemcpyBatchAsync"):
        address = driver.mem_alloc(NBYTES)
        column = np.array([address], np.uint64)
        batch.submitter()(column, column, np.array([16], np.uint64), 0)


@case(FAKE_CUDA_HOLD=f"/tmp/{PREFIX}hold")
def waits_have_budgets_and_the_copier_has_room_for_so_many():
    with region("a") as a, region("b") as b:
        copier = CudaCopier(with_kernel=False, max_in_flight=2)
        with Held():
            tickets = [copier.submit(WHOLE, a, b) for _ in range(2)]
            with pytest.raises(CopierBusy, match="2 copies are in flight"):
                copier.submit(WHOLE, a, b)
            with pytest.raises(WaitTimeout, match="runs on"):
                tickets[0].wait(0.05)
            assert not copier.close(0.05)
        assert copier.close(10)
        assert [ticket.done() for ticket in tickets] == [True, True]
        with pytest.raises(CopyRefused, match="closed"):
            copier.submit(WHOLE, a, b)


@case()
def use_after_free_is_an_error_and_ends_the_copier():
    gpu = device()
    copier = CudaCopier(with_kernel=False)
    with gpu.use():
        a, b = driver.mem_alloc(NBYTES), driver.mem_alloc(NBYTES)
        driver.mem_free(a)
    ticket = copier.submit(WHOLE, a, b)
    with pytest.raises(CudaFault, match="cuEventQuery failed: .*ILLEGAL_ADDRESS"):
        ticket.wait(10)
    assert ticket.error is not None
    with pytest.raises(CudaFault):
        copier.submit(WHOLE, b, b)


@case()
def threads_bring_their_own_context():
    """Nothing here relies on what the thread had before, nor leaves something behind."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with pytest.raises(CudaNoContext, match="cuMemAlloc"):
                driver.mem_alloc(1)
            assert copier.submit(WHOLE, a, b).wait(10) == NBYTES
            assert driver.current_ordinal() is None
        except BaseException as error:
            failures.append(error)
            raise

    with region("a") as a, region("b") as b:
        copier = CudaCopier(with_kernel=False)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not failures


# an engine that takes its memory from here --------------------------------------------------------


@case()
def cpu_engine_allocates_in_a_region():
    import torch

    made: list[CudaRegion] = []

    def make(nbytes: int) -> CudaRegion:
        made.append(CudaRegion.create(PREFIX + "kv", nbytes, flag="--kv-bytes"))
        return made[0]

    with cuda_zeros_in_new(make):
        kv = torch.zeros(NBYTES, dtype=torch.int8)
        other = torch.zeros(NBYTES, dtype=torch.int8)
    assert kv.data_ptr() == made[0].address != other.data_ptr()
    assert not kv.any()
    kv.view(torch.bfloat16).fill_(1.5)
    assert (read(made[0]) == np.tile(np.array([0xC0, 0x3F], np.uint8), NBYTES // 2)).all()
    made[0].unlink()


if __name__ == "__main__":
    if sys.argv[1] == "owner":
        owner()
    else:
        CASES[sys.argv[1]][0]()
