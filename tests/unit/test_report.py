"""What a bench reports: medians beside their spread, bars judged, JSON that says the same."""

from __future__ import annotations

import argparse
import importlib.util
import json

import pytest

from bench.measure import Series
from bench.report import NO_MATPLOTLIB, Report, add_output_flags


@pytest.fixture
def report() -> Report:
    made = Report("example", "two peers", {"rounds": 3})
    figures = made.table("delay", ("short", "long"), unit="ms")
    figures.row("ours", [Series([3.0, 1.0, 2.0]), 4.5])
    figures.row("theirs", [Series([5.0, 5.0, 6.0]), None])
    made.bar("ours / theirs", 0.4, 0.5, at_most=True)
    made.bar("rate", 0.8, 0.9, at_most=False)
    return made


def options(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_output_flags(parser)
    return parser.parse_args(argv)


def test_thousands_are_not_written_with_an_exponent():
    assert str(Series([2690.4, 999.6, 12.345])) == "1000 (12.3..2690)"


def test_text_and_json_agree(report, tmp_path, capsys):
    assert report.finish(options("--json", str(tmp_path / "r.json"))) == 0
    text = capsys.readouterr().out
    assert "2 (1..3)" in text
    assert "met" in text
    assert "MISSED" in text
    written = json.loads((tmp_path / "r.json").read_text())
    ours = written["tables"][0]["rows"]["ours"]
    assert ours["short"] == {"median": 2.0, "rounds": [3.0, 1.0, 2.0]}
    assert written["tables"][0]["rows"]["theirs"]["long"] is None
    assert [bar["met"] for bar in written["bars"]] == [True, False]


def test_picture_or_one_sentence(report, tmp_path, capsys):
    report.finish(options("--png", str(tmp_path / "r.png")))
    drawn = (tmp_path / "r.png").exists()
    assert drawn == (importlib.util.find_spec("matplotlib") is not None)
    assert drawn != (NO_MATPLOTLIB in capsys.readouterr().out)
