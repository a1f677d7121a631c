"""Cases of `CudaCopier`: every way to copy, budgets, contexts, faults."""

import ctypes
import threading

import numpy as np
import pytest

from ipc.copy import CopyPlan, Strip
from ipc.cuda import batch, driver
from ipc.cuda.copy import CudaCopier
from ipc.cuda.device import device
from ipc.cuda.errors import CopierBusy, CudaCallFailed, CudaFault, CudaNoContext
from ipc.errors import CopyRefused, WaitTimeout
from tests.cuda.case_kit import HOLD, NBYTES, WHOLE, Held, case, noise, read, region, write


def _shuffled_blocks(copier: CudaCopier) -> None:
    """Many pieces, several copies in flight: random order inside one, none between them."""
    page, pages = 4096, NBYTES // 4096
    rng = np.random.default_rng(3)
    with region("a") as a, region("b") as b:
        write(a, noise(1))
        tickets, expected = [], np.zeros(NBYTES, np.uint8).reshape(pages, page)
        for _ in range(6):
            src, dst = rng.permutation(pages)[:100], rng.permutation(pages)[:100]
            strips = [
                Strip(s * page, d * page, page, 1, 0, 0)
                for s, d in zip(src.tolist(), dst.tolist(), strict=True)
            ]
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


@case()
def batch_as_the_driver_has_it():
    _shuffled_blocks(CudaCopier(with_kernel=False))


@case(FAKE_CUDA_VERSION=12040)
def one_by_one_before_cuda_12_8():
    device()
    assert batch.submitter() is batch._one_by_one
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
    with gpu.use():
        column, submit = np.array([driver.mem_alloc(NBYTES)], np.uint64), batch.submitter()
        with pytest.raises(CudaCallFailed, match="cuMemcpyBatchAsync"):
            submit(column, column, np.array([16], np.uint64), 0)


@case(FAKE_CUDA_HOLD=HOLD)
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


@case(FAKE_CUDA_DELAY_US=20000)
def copy_begins_after_the_stream_it_is_told():
    """The engine's stream still zeroes the destination when the copy is submitted."""
    with region("a") as a, region("b") as b:
        write(a, noise(1))
        copier = CudaCopier(with_kernel=False)
        with b.device.use():
            engine = driver.stream_create()
            for _ in range(20):
                driver.mem_zero(b.address, NBYTES, engine)
            zeroed = driver.event_create()
            driver.event_record(zeroed, engine)
        assert copier.copy(WHOLE, a, b, after=engine) == NBYTES
        with b.device.use():
            assert driver.event_done(zeroed)
        assert (read(b) == noise(1)).all()
        assert copier.copy(WHOLE, b, a, after=0) == NBYTES
        assert copier.close(1)


@case()
def pinned_host_memory_is_copied_to_and_from():
    """As the staged path does; whatever copies: the engine, or the kernel."""
    gpu = device()
    for with_kernel in (False, True):
        copier = CudaCopier(with_kernel=with_kernel)
        with gpu.use():
            host = driver.host_alloc(NBYTES)
        raw = (ctypes.c_char * NBYTES).from_address(host)
        with region("a") as a, region("b") as b:
            write(a, noise(1))
            assert copier.copy(WHOLE, a, host, dst_nbytes=NBYTES) == NBYTES
            assert bytes(raw) == noise(1).tobytes()
            raw[:] = noise(2).tobytes()
            assert copier.copy(WHOLE, host, b, src_nbytes=NBYTES) == NBYTES
            assert (read(b) == noise(2)).all()
        assert copier.close(1)


@case()
def use_after_free_is_an_error_and_ends_the_copier():
    gpu = device()
    copier = CudaCopier(with_kernel=False)
    with gpu.use():
        a, b = driver.mem_alloc(NBYTES), driver.mem_alloc(NBYTES)
        driver.mem_free(a)
    # Seen by the submission itself where the stream was quicker, else by the wait.
    with pytest.raises(CudaFault, match="ILLEGAL_ADDRESS"):
        copier.submit(WHOLE, a, b).wait(10)
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
