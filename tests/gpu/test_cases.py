"""The cases of the fake driver that need nothing from it: what a real one says to the same calls."""

import pytest

from tests.cuda import fake

pytestmark = pytest.mark.gpu

CASES = (
    "memory_without_any_handle_is_refused_with_what_was_probed",
    "host_memory_and_unknown_addresses_are_refused",
    "one_handle_must_cover_everything",
    "range_of_several_chunks_is_refused",
    "own_region_is_refused",
    "handle_of_this_process_does_not_open",
    "close_from_another_thread_while_copies_start",
    "batch_as_the_driver_has_it",
    "kernel",
    "copy_begins_after_the_stream_it_is_told",
    "pinned_host_memory_is_copied_to_and_from",
    "calibration_measures_both_ways_and_is_used",
    "default_stream_is_refused",
    "threads_bring_their_own_context",
)


@pytest.mark.parametrize("name", CASES)
def test_case(name, gpu, prefix):
    fake.run_case(None, name, CASE_PREFIX=prefix)
