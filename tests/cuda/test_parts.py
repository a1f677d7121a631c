"""The parts of the CUDA back end that need no driver: records, holds, doors, the crossover."""

import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.cuda.crossover import Crossover, Sample
from ipc.cuda.door import Door, fetch
from ipc.cuda.errors import CudaAlreadyMapped, CudaCallFailed, CudaFault, CudaNoContext, call_failed
from ipc.cuda.holds import Hold
from ipc.cuda.launch import _grid
from ipc.cuda.record import RECORD_BYTES, CudaRecord, Exporter, Kind, Window, pattern
from ipc.errors import IpcError, PeerGone, RegionRefused, SegmentForeign
from tests.cuda.fake import run_code

RECORD = CudaRecord(
    7, 3, 1 << 30, b"model", Exporter(10, 20, 30), bytes(range(16)), "0000:17:00.0", bytes(16),
    Kind.POSIX_FD, "pdnode-door", Window(b"h" * 64, 2 << 30, 512), Window(b"p" * 64, 4096, 0),
)  # fmt: skip


@pytest.mark.parametrize(
    "modules,absent",
    [
        # torch itself imports cuda.bindings and triton where they are.
        ("ipc, ipc.index, ipc.copy", ("cuda", "triton", "ipc.cuda")),
        ("ipc.memory, ipc.pipe", ("ipc.cuda",)),
        ("ipc.cuda.memory, ipc.cuda.copy", ("cuda", "triton", "torch")),
    ],
)
def test_nothing_is_loaded_before_it_is_needed(modules, absent):
    run_code(f"import sys, {modules}\nassert not sys.modules.keys() & {set(absent)}")


def test_record_survives_its_bytes_and_fits_one_page():
    assert CudaRecord.unpack(RECORD.pack(), "kv") == RECORD
    assert len(RECORD.pack()) == RECORD_BYTES <= 4096


@given(st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES))
def test_random_bytes_are_no_record(raw):
    with pytest.raises(SegmentForeign):
        CudaRecord.unpack(raw, "kv")


@given(st.integers(0, RECORD_BYTES - 1), st.integers(1, 255))
def test_any_changed_byte_is_seen(at, change):
    raw = bytearray(RECORD.pack())
    raw[at] ^= change
    with pytest.raises(SegmentForeign):
        CudaRecord.unpack(bytes(raw), "kv")


def test_pattern_follows_from_the_region():
    assert pattern(b"a" * 16) == pattern(b"a" * 16) != pattern(b"b" * 16)


def test_this_process_is_itself():
    assert Exporter.me() == Exporter.me()
    assert Exporter.me().pid == os.getpid()


@pytest.mark.parametrize(
    "code,kind",
    [(201, CudaNoContext), (208, CudaAlreadyMapped), (700, CudaFault), (1, CudaCallFailed)],
)
def test_codes_have_types(code, kind):
    error = call_failed("cuX", code, "CUDA_ERROR_X")
    assert type(error) is kind
    assert isinstance(error, IpcError)
    assert str(error) == f"cuX failed: CUDA_ERROR_X ({code})"


class Copy:
    """A running copy; `over` is what the GPU would say."""

    def __init__(self, hold: Hold):
        self.over, self._hold = False, hold

    def done(self) -> bool:
        if self.over:
            self._hold.unpin(self)
        return self.over


def test_memory_goes_with_its_last_reference():
    freed = []
    hold = Hold("it", lambda: freed.append(1))
    assert hold.retain()
    hold.release()
    assert freed == []
    hold.release()
    hold.release()
    assert freed == [1]
    assert not hold.retain()
    with pytest.raises(RegionRefused, match="it was closed"):
        hold.pin(Copy(hold))


def test_memory_waits_for_its_copies():
    freed = []
    hold = Hold("it", lambda: freed.append(1))
    copy = Copy(hold)
    hold.pin(copy)
    hold.release()
    assert not hold.drain(time.monotonic() + 0.01)
    assert freed == []
    copy.over = True
    assert hold.drain(time.monotonic() + 5)
    assert freed == [1]


def test_doomed_memory_takes_no_new_copy_whoever_refers_to_it():
    hold = Hold("it", lambda: None)
    hold.retain()
    copy = Copy(hold)
    hold.pin(copy)
    hold.doom()
    with pytest.raises(PeerGone, match="its owner is gone"):
        hold.pin(Copy(hold))
    assert not hold.freed
    hold.unpin(copy)
    assert hold.freed


def test_descriptors_come_through_a_door_until_it_closes():
    read, write = os.pipe()
    door = Door([write])
    (theirs,) = fetch(door.name, 1, 5)
    os.write(theirs, b"x")
    assert os.read(read, 1) == b"x"
    with pytest.raises(RegionRefused, match="gave 1 descriptors, expected 2"):
        fetch(door.name, 2, 5)
    door.close()
    with pytest.raises(PeerGone, match="nobody"):
        fetch(door.name, 1, 5)
    assert not [t for t in threading.enumerate() if t.name == "pdnode-door" and not t.daemon]
    for fd in (read, write, theirs):
        os.close(fd)


def test_unmeasured_choice():
    rule = Crossover()
    assert rule.kernel(1 << 20, 1, same_gpu=True)
    assert rule.kernel(16 << 10, 1, same_gpu=False)
    assert not rule.kernel(128 << 10, 1, same_gpu=False)


def test_measured_choice_follows_the_nearest_sample():
    rule = Crossover((Sample(16384, 1, 1.0, 2.0), Sample(16384, 256, 2.0, 1.0)))
    assert not rule.kernel(16384, 2, same_gpu=True)
    assert rule.kernel(16384, 200, same_gpu=False)


@given(st.integers(1, 10**6), st.integers(1, 1 << 30))
def test_grid_is_small_and_covers(pieces, longest):
    lanes, parts = _grid(pieces, longest)
    assert 1 <= lanes <= pieces
    assert 1 <= parts <= -(-longest // 16384)
    assert lanes * parts <= 64
