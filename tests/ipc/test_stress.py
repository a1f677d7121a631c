import json
import os

import pytest


@pytest.mark.kill
def test_every_copy_is_right_or_refused_while_processes_are_killed_all_the_time(prefix, python):
    """PDNODE_STRESS_S: how long, default 20 seconds."""
    seconds = float(os.environ.get("PDNODE_STRESS_S", "20"))
    process = python("stress.py", prefix, seconds, 0.2)
    out, _ = process.communicate(timeout=seconds + 60)
    assert process.returncode == 0, "a child found wrong data (3), a leak (4) or failed (1)"
    report = json.loads(out)
    print(report)
    assert report["leaked_entries"] == report["claims_left"] == report["taken_twice"] == 0
    # It has tested something: reads that succeeded, reads too late, deaths with live entries.
    assert report["kills"] > seconds
    assert report["copies"] > 100 * seconds
    assert report["refused"] > seconds
    assert report["bad_but_refused"] > 0
    assert report["cleared_by_sweep"] > 0
