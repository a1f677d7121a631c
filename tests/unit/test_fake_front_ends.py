"""The benches that need no engine run to their end: our client and vLLM's own over fake cores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

LITTLE = ("--rounds", "1", "--requests", "4", "--streams", "2", "--prompt", "200", "--output", "4")


def report_of(bench: str, tmp_path: Path, *argv: str) -> dict:
    """In a process of its own: the bench forks, which one with threads must not."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "bench", bench, *LITTLE, *argv, "--json", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(out.read_text())


def test_frontend_measures_both_front_ends(tmp_path):
    report = report_of("frontend", tmp_path, "--warmup", "2", "--step-ms", "1")
    for table in report["tables"]:
        assert [*table["rows"]] == ["vLLM's front end", "pdnode 1P1D"]
        assert all(cell["median"] > 0 for row in table["rows"].values() for cell in row.values())
    assert len(report["bars"]) == 2


def test_scale_measures_every_size(tmp_path):
    report = report_of("scale", tmp_path, "--pairs", "1", "2", "--step-ms", "1")
    assert [[*row] for row in report["tables"][0]["rows"].values()] == [["1P1D", "2P2D"]] * 2
