"""The node's directory: what of it is kept, and for how long."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdnode import rundir
from pdnode.rundir import RunDir


def test_the_logs_of_a_node_that_runs_are_kept_however_many_start_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    first = RunDir("first")
    for i in range(rundir.LOGS_KEPT + 2):
        later = RunDir(f"later{i}")
        later.close()
    kept = {path.name for path in (rundir.base_dir() / rundir.LOGS).iterdir()}
    assert first.log_dir.is_dir()
    assert len(kept) == rundir.LOGS_KEPT + 1
    first.close()


def test_a_log_is_opened_where_its_folder_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "prefill-0.log"
    with open(rundir.open_log(path), "w") as log:
        log.write("said")
    assert path.read_text() == "said"
    assert path.parent.stat().st_mode & 0o777 == 0o700
