import os
import re
import signal

import pytest

from ipc import segment
from ipc.errors import NoSharedMemory, SegmentError, SegmentExists, SegmentForeign, SegmentMissing
from ipc.segment import SHM_DIR, Segment, names, sweep, unlink


def make(name: str, nbytes: int = 100) -> Segment:
    return Segment.create(name, nbytes, purpose="a test", flag="--test-bytes")


def test_segment_is_zeroed_whole_pages_private_to_the_user(prefix):
    made = make(prefix + "a", 5000)
    assert made.nbytes == 8192
    assert made.buf[:] == bytes(8192)
    assert os.stat(f"{SHM_DIR}/{made.name}").st_mode & 0o777 == 0o600
    made.unlink()


def test_two_mappings_see_the_same_bytes_and_a_readonly_one_refuses_writes(prefix):
    made = make(prefix + "a")
    writable, readonly = Segment.attach(made.name), Segment.attach(made.name, readonly=True)
    for mapping in (made, writable, readonly):
        mapping.populate(write=True)
    writable.buf[7] = 42
    assert (made.buf[7], readonly.buf[7]) == (42, 42)
    with pytest.raises(TypeError):
        readonly.buf[0] = 1
    made.unlink()


def test_mapping_survives_unlink_and_the_name_can_be_taken_again(prefix):
    first = make(prefix + "a")
    first.buf[0] = 1
    assert first.unlink()
    assert not first.unlink()
    second = make(prefix + "a")
    assert (first.buf[0], second.buf[0]) == (1, 0)
    second.unlink()


def test_taken_missing_and_impossible_names_are_typed(prefix):
    made = make(prefix + "a")
    with pytest.raises(SegmentExists, match=made.name):
        make(made.name)
    with pytest.raises(SegmentMissing, match="none"):
        Segment.attach(prefix + "none")
    for name in ("", "a/b", "x" * 64, "ä"):
        with pytest.raises(SegmentError):
            make(name)
    made.unlink()


def test_more_than_the_tmpfs_has_says_what_is_needed_and_free_and_which_flag(prefix):
    stat = os.statvfs(SHM_DIR)
    total = stat.f_blocks * stat.f_frsize
    with pytest.raises(NoSharedMemory) as caught:
        make(prefix + "huge", total + (1 << 30))
    message = str(caught.value)
    assert "--test-bytes" in message
    assert f"{caught.value.nbytes:,}" in message
    assert f"{caught.value.free_bytes:,}" in message
    assert names(prefix) == []
    # What a refused creation had taken is given back.
    assert caught.value.free_bytes > 0


@pytest.mark.parametrize("size", [0, 1, 4095, 4097])
def test_file_that_is_not_whole_pages_is_refused(prefix, size):
    with open(f"{SHM_DIR}/{prefix}cut", "wb") as file:
        file.write(bytes(size))
    with pytest.raises(SegmentForeign, match=re.escape(str(size))):
        Segment.attach(prefix + "cut")
    unlink(prefix + "cut")


def test_sweep_removes_what_is_not_kept_and_says_so(prefix):
    for letter in "abc":
        make(prefix + letter)
    assert names(prefix) == [prefix + letter for letter in "abc"]
    assert sweep(prefix, lambda name: name.endswith("b")) == [prefix + "a", prefix + "c"]
    assert sweep(prefix, lambda _: False) == [prefix + "b"]


def test_close_leaves_memory_to_those_who_still_look_at_it(prefix):
    made = make(prefix + "a")
    view = memoryview(made.buf)
    made.close()
    made.close()
    view[0] = 5
    assert view[0] == 5
    made.unlink()


def test_bytes_of_a_killed_process_are_still_there(prefix, python):
    child = python("holder.py", "segment", prefix + "a")
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    left = Segment.attach(prefix + "a")
    assert left.buf[:5] == b"still"
    assert segment.unlink(prefix + "a")
