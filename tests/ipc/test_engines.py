import os

import pytest

from ipc import layout
from ipc.errors import LookupFault, NotOwner, SegmentForeign, StaleRead
from ipc.index import Index
from ipc.records import LOAD_FIELDS, EngineRecord, RegionRecord, Role, State
from ipc.segment import Segment
from tests.ipc.conftest import BOOTS, start_engine

REGION = RegionRecord(
    "pd-kv-0", 1 << 30, 100, 30, 368640, 368640, 36864000, 0, BOOTS[1], 1, b"f" * 31 + b"\0", 4711
)


def test_control_line_is_read_by_everybody(node, engines):
    start_engine(node, 2, 2**64 - 1, State.DRAINING)
    record = engines[0].engine(2)
    assert record.engine_id == "engine-2"
    assert (record.role, record.state) == (Role.BOTH, State.DRAINING)
    assert record.boot_id == 2**64 - 1


def test_load_line_keeps_what_is_not_named_and_moves_the_heartbeat(node, engines):
    engines[1].set_load(1, running=3, waiting=2, blocks_total=100)
    before = node.engine(1)
    engines[1].set_load(1, running=4)
    after = node.engine(1)
    assert (after.running, after.waiting, after.blocks_total) == (4, 2, 100)
    assert after.heartbeat_ns > before.heartbeat_ns > 0


def test_counters_go_on_after_a_restart_of_the_engine(node, engines):
    engines[1].add_counters(1, deferred=2, handoff_bytes=10**12)
    restarted = Index.attach(node.name, me=1)
    restarted.add_counters(1, deferred=1)
    assert (node.engine(1).deferred, node.engine(1).handoff_bytes) == (3, 10**12)
    restarted.close()


def test_region_goes_round_whole_and_is_none_before(node, engines):
    assert node.region(1, 7) is None
    engines[1].set_region(1, 7, REGION)
    assert node.region(1, 7) == REGION
    assert node.region(1, 7).layout.num_layers == 30


def test_every_load_field_has_a_place_in_the_record():
    assert EngineRecord._fields[6:] == LOAD_FIELDS
    assert layout.LOAD.size == 8 * len(LOAD_FIELDS)


def test_writes_to_lines_of_others_are_refused(node, engines):
    with pytest.raises(NotOwner):
        engines[0].set_load(1, running=1)
    with pytest.raises(NotOwner):
        engines[0].set_region(1, 0, REGION)
    with pytest.raises(NotOwner):
        start_engine(engines[0], 0, 5)
    with pytest.raises(NotOwner):
        node.set_load(0, running=1)
    with pytest.raises(NotOwner):
        engines[0].sweep(1)


def test_unknown_fields_slots_ranks_and_long_names_are_refused_with_the_limits(node, engines):
    with pytest.raises(LookupFault, match="queued_prompt_tokens"):
        engines[0].set_load(0, speed=1)
    with pytest.raises(LookupFault, match="4 engine slots"):
        node.engine(4)
    with pytest.raises(LookupFault, match="8 ranks"):
        node.region(0, 8)
    with pytest.raises(LookupFault, match="at most 32"):
        node.set_control(0, engine_id="x" * 33, role=0, state=0, boot_id=1, restarts=0)
    with pytest.raises(LookupFault):
        Index.attach(node.name, me=4)


def test_writer_killed_inside_a_write_leaves_the_value_before(node, engines):
    engines[1].set_load(1, running=3)
    row = node.geometry.row(1) + layout.LOAD_AT
    raw = Segment.attach(node.name)
    version = int.from_bytes(raw.buf[row : row + 8], "little")
    side = row + layout.LINE + ((version + 1) & 1) * layout.LOAD_SPAN
    raw.buf[side : side + 100] = os.urandom(100)
    assert node.engine(1).running == 3
    restarted = Index.attach(node.name, me=1)
    restarted.set_load(1, waiting=9)
    assert (node.engine(1).running, node.engine(1).waiting) == (3, 9)
    restarted.close()


def test_damaged_line_is_a_stale_read(node, engines):
    engines[1].set_load(1, running=3)
    row = node.geometry.row(1) + layout.LOAD_AT
    raw = Segment.attach(node.name)
    both = 2 * layout.LOAD_SPAN
    raw.buf[row + layout.LINE : row + layout.LINE + both] = os.urandom(both)
    with pytest.raises(StaleRead):
        node.engine(1)


def test_index_fingerprint_and_boot_are_kept_with_trailing_zeros(prefix):
    made = Index.create(
        f"{prefix}index", engine_slots=2, node_boot_id=2**63, fingerprint=b"model\0\0"
    )
    seen = Index.attach(made.name, me=0)
    assert (seen.fingerprint, seen.node_boot_id) == (b"model\0\0", 2**63)
    assert seen.engine(1).engine_id == ""
    made.unlink()


def test_index_of_another_version_is_refused_with_both_versions(node):
    raw = Segment.attach(node.name)
    raw.buf[8] = 99
    with pytest.raises(SegmentForeign, match=f"version 99, not {layout.VERSION}"):
        Index.attach(node.name, me=0)
