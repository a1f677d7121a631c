"""The benches that need no engine run to their end: our client and vLLM's own over fake cores."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

from bench import frontend, scale

LITTLE = ("--rounds", "1", "--requests", "4", "--streams", "2", "--prompt", "200", "--output", "4")


@pytest.fixture(autouse=True)
def all_cores_again():
    """The benches pin the process they run in."""
    before = os.sched_getaffinity(0)
    yield
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), before)


def report_of(bench, tmp_path: Path, *argv: str) -> dict:
    out = tmp_path / "out.json"
    assert bench.main([*argv, "--json", str(out)]) == 0
    return json.loads(out.read_text())


def test_frontend_measures_both_front_ends(tmp_path):
    report = report_of(frontend, tmp_path, *LITTLE, "--warmup", "2", "--step-ms", "1")
    for table in report["tables"]:
        assert [*table["rows"]] == ["vLLM's front end", "pdnode 1P1D"]
        assert all(cell["median"] > 0 for row in table["rows"].values() for cell in row.values())
    assert len(report["bars"]) == 2


def test_scale_measures_every_size(tmp_path):
    report = report_of(scale, tmp_path, *LITTLE, "--pairs", "1", "2", "--step-ms", "1")
    assert [[*row] for row in report["tables"][0]["rows"].values()] == [["1P1D", "2P2D"]] * 2
