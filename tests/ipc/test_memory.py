import ctypes
import os
import signal
from dataclasses import astuple

import pytest
import torch

from ipc.errors import NoSharedMemory, RegionRefused, SegmentForeign, SegmentMissing
from ipc.memory import HostRegion, zeros_in, zeros_in_new
from ipc.records import KVLayout, RegionRecord
from ipc.segment import SHM_DIR, Segment, names, unlink

LAYOUT = KVLayout(4, 2, 1024, 1024, 4096)


def make(name: str, nbytes: int = 8192, **stamp) -> HostRegion:
    given = {"boot_id": 7, "generation": 3, "fingerprint": b"same model", **stamp}
    return HostRegion.create(name, nbytes, flag="--kv-bytes", **given)


def record_of(name: str, **changes) -> RegionRecord:
    record = RegionRecord(name, 8192, *astuple(LAYOUT), 7, 3, b"same model", 1)
    return record._replace(**changes)


def read(region: HostRegion) -> torch.Tensor:
    """A copy of all its bytes, int8."""
    return torch.frombuffer(
        bytearray(ctypes.string_at(region.address, region.nbytes)), dtype=torch.int8
    )


def test_peer_sees_what_the_owner_writes_and_can_only_read(prefix):
    mine = make(prefix + "kv")
    peer = HostRegion.attach(record_of(mine.name), b"same model", 7, 3)
    mine.tensor()[5] = 11
    assert read(peer)[4:8].tolist() == [0, 11, 0, 0]
    with pytest.raises(RegionRefused, match="peer's"):
        peer.tensor()
    with pytest.raises(TypeError):
        peer.segment.buf[5000] = 1
    assert mine.address % 4096 == 0
    assert (mine.nbytes, peer.nbytes) == (8192, 8192)
    mine.unlink()


@pytest.mark.parametrize(
    "expected,both_values",
    [
        ((b"other model", 7, 3), (b"other model".hex(), b"same model".hex())),
        ((b"same model", 8, 3), ("0x8", "0x7")),
        ((b"same model", 7, 4), ("is 3", "expected 4")),
    ],
)
def test_record_that_is_not_what_was_agreed_is_refused_with_both_values(
    prefix, expected, both_values
):
    mine = make(prefix + "kv")
    with pytest.raises(RegionRefused) as caught:
        HostRegion.attach(record_of(mine.name), *expected)
    for value in both_values:
        assert value in str(caught.value)
    mine.unlink()


@pytest.mark.parametrize(
    "stamp,word",
    [
        ({"boot_id": 9}, "0x9"),
        ({"generation": 9}, "is 9"),
        ({"fingerprint": b"another"}, b"another".hex()),
        ({"nbytes": 4096}, "is 4096, expected 8192"),
    ],
)
def test_segment_that_is_not_what_its_record_says_is_refused(prefix, stamp, word):
    mine = make(prefix + "kv", **stamp)
    with pytest.raises(RegionRefused, match=word):
        HostRegion.attach(record_of(mine.name), b"same model", 7)
    mine.unlink()


def test_segment_of_another_kind_cut_off_or_missing_is_refused(prefix):
    other = Segment.create(prefix + "kv", 100, purpose="a test", flag="--x")
    with pytest.raises(SegmentForeign, match="no KV region"):
        HostRegion.attach(record_of(other.name), b"same model", 7)
    other.unlink()
    mine = make(prefix + "kv")
    os.truncate(f"{SHM_DIR}/{mine.name}", 4096)
    with pytest.raises(SegmentForeign, match="cut off"):
        HostRegion.attach(record_of(mine.name), b"same model", 7)
    mine.unlink()
    with pytest.raises(SegmentMissing):
        HostRegion.attach(record_of(mine.name), b"same model", 7)


def test_too_little_shared_memory_names_the_flag_and_leaves_nothing(prefix):
    stat = os.statvfs(SHM_DIR)
    with pytest.raises(NoSharedMemory, match="--kv-bytes"):
        make(prefix + "kv", stat.f_blocks * stat.f_frsize)
    assert names(prefix) == []


def test_kv_of_a_killed_engine_can_still_be_read(prefix, python):
    owner = python("holder.py", "region", prefix + "kv")
    assert owner.stdout.readline() == "ready\n"
    mapped_before = HostRegion.attach(record_of(prefix + "kv"), b"same model", 7)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    mapped_after = HostRegion.attach(record_of(prefix + "kv"), b"same model", 7)
    unlink(prefix + "kv")
    for region in (mapped_before, mapped_after):
        assert bool((read(region) == 42).all())


def test_closed_region_gives_no_address_and_tensors_outlive_it(prefix):
    mine = make(prefix + "kv")
    tensor = mine.tensor()
    mine.unlink()
    mine.close()
    with pytest.raises(RegionRefused, match="closed"):
        _ = mine.address
    tensor.fill_(3)
    assert int(tensor.sum()) == 3 * 8192


# zeros_in ----------------------------------------------------------------------------------------


def test_first_big_enough_allocation_lies_in_the_region_and_the_second_does_not(prefix):
    mine = make(prefix + "kv")
    with zeros_in(mine):
        first = torch.zeros(6000, dtype=torch.int8, device="cpu")
        second = torch.zeros(6000, dtype=torch.int8, device="cpu")
    assert first.data_ptr() == mine.address
    assert second.data_ptr() != mine.address
    assert first.shape == (6000,)
    assert torch.zeros(5, dtype=torch.int8).data_ptr() != mine.address
    mine.unlink()


def test_view_as_bfloat16_writes_into_shared_memory(prefix):
    mine = make(prefix + "kv")
    with zeros_in(mine):
        buffer = torch.zeros((8192,), dtype=torch.int8, device=torch.device("cpu"))
    layers = buffer.view(torch.bfloat16).view(2, 4, 512)
    peer = HostRegion.attach(record_of(mine.name), b"same model", 7)
    layers[1, 2] = 1.5
    theirs = read(peer).view(torch.bfloat16).view(2, 4, 512)
    assert torch.equal(theirs, layers)
    assert float(theirs.sum()) == 1.5 * 512
    mine.unlink()


@pytest.mark.parametrize(
    "make_other",
    [
        lambda: torch.zeros(100, dtype=torch.uint8),
        lambda: torch.zeros(100),
        lambda: torch.zeros(10, 10, dtype=torch.int8),
        lambda: torch.zeros((10, 10), dtype=torch.int8),
        lambda: torch.zeros(0, dtype=torch.int8),
        lambda: torch.zeros(9000, dtype=torch.int8),
        lambda: torch.zeros(100, dtype=torch.int8, device="meta"),
        lambda: torch.empty(100, dtype=torch.int8),
        lambda: torch.zeros(3, out=torch.empty(3, dtype=torch.int8), dtype=torch.int8),
    ],
)
def test_other_allocations_are_untouched_and_do_not_use_the_region_up(prefix, make_other):
    mine = make(prefix + "kv")
    with zeros_in(mine):
        other = make_other()
        real = torch.zeros(size=(100,), dtype=torch.int8)
    assert other.is_meta or other.data_ptr() != mine.address
    assert real.data_ptr() == mine.address
    mine.unlink()


def test_region_made_at_the_call_has_the_size_of_the_call(prefix):
    made = []

    def make_region(nbytes: int) -> HostRegion:
        made.append(make(prefix + "kv", nbytes))
        return made[0]

    with zeros_in_new(make_region):
        first = torch.zeros(5000, dtype=torch.int8)
        torch.zeros(6000, dtype=torch.int8)
    assert [region.nbytes for region in made] == [5000]
    assert first.data_ptr() == made[0].address
    made[0].unlink()


def test_region_smaller_than_the_call_is_refused(prefix):
    mine = make(prefix + "kv", 100)
    with zeros_in_new(lambda _: mine), pytest.raises(RegionRefused, match="101"):
        torch.zeros(101, dtype=torch.int8)
    mine.unlink()


def test_tensor_keeps_the_mapping_when_the_region_is_forgotten(prefix):
    mine = make(prefix + "kv")
    with zeros_in(mine):
        tensor = torch.zeros(8192, dtype=torch.int8)
    mine.unlink()
    del mine
    tensor.fill_(1)
    assert int(tensor.sum()) == 8192
