"""Cases of `CudaRegion`: what can be exported, who may attach, what a death leaves."""

import threading
import time

import numpy as np
import pytest

from ipc.cuda import driver, mapping, share, vmm
from ipc.cuda.copy import CudaCopier
from ipc.cuda.device import device
from ipc.cuda.errors import (
    CudaCallFailed,
    CudaNoContext,
    CudaUnavailable,
    NoDeviceMemory,
    NotExportable,
    PeerUnreadable,
)  # fmt: skip
from ipc.cuda.memory import CudaRegion, close_dead, cuda_zeros_in_new
from ipc.cuda.record import read_record
from ipc.errors import PeerGone, RegionRefused
from ipc.records import RegionRecord
from tests.cuda.case_kit import (
    HOLD,
    NBYTES,
    PREFIX,
    WHOLE,
    Held,
    Owner,
    case,
    noise,
    read,
    region,
    write,
)

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
    with gpu.use(), pytest.raises(CudaCallFailed, match=r"cuMemCreate failed: .*NOT_PERMITTED"):
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
    """The owner frees and allocates under a reader that has not closed: 208 must not show."""
    with Owner() as other:
        old = other.attach()
        first = read_record(PREFIX + "owner")
        other.renew()
        assert read_record(PREFIX + "owner").body.handle == first.body.handle
        new = other.attach()
        assert (read(new) == noise(2)).all()
        with region("mine") as mine, pytest.raises(PeerGone):
            CudaCopier(with_kernel=False).submit(WHOLE, old, mine)


@case(FAKE_CUDA_HOLD=HOLD)
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
    """Every copy is whole or refused; an address used after it was unmapped would be a fault."""
    with Owner() as other, region("mine") as mine:
        peer, copier = other.attach(), CudaCopier(with_kernel=False, max_in_flight=2)
        other.kill()
        copies = int(copier.copy(WHOLE, peer, mine) == NBYTES)
        killer = threading.Timer(0.05, close_dead, (7, 5.0))
        killer.start()
        try:
            while True:
                copies += copier.copy(WHOLE, peer, mine) == NBYTES
        except PeerGone:
            killer.join()
        assert mapping.open_count() == 0
        assert copier.close(1)
    assert copies > 0


@case(FAKE_CUDA_HOLD=HOLD)
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
