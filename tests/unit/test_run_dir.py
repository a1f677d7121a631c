"""The node's directory: what of it is kept, and for how long."""

from __future__ import annotations

from pathlib import Path

from pdnode import rundir


def test_the_logs_of_a_node_that_runs_are_kept_however_many_start_after_it(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()  # its run directory, as long as it runs
    first = rundir._new_log_dir(tmp_path, "first")
    for i in range(rundir.LOGS_KEPT + 2):
        rundir._new_log_dir(tmp_path, f"later{i}")
    assert first.is_dir()
    assert len([*first.parent.iterdir()]) == rundir.LOGS_KEPT + 1


def test_a_log_is_opened_where_its_folder_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "prefill-0.log"
    with open(rundir.open_log(path), "w") as log:
        log.write("said")
    assert path.read_text() == "said"
    assert path.parent.stat().st_mode & 0o777 == 0o700
