"""Rounds of measurements and what is said of them: the median over rounds, and their spread."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


def short(value: float) -> str:
    """Three digits, or all of them before the point."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


@dataclass
class Series:
    """One number a round."""

    rounds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> str:
        return f"{short(min(self.rounds))}..{short(max(self.rounds))}"

    def __str__(self) -> str:
        return f"{short(self.median)} ({self.spread})"

    def to_json(self) -> dict:
        return {"median": self.median, "rounds": self.rounds}


@contextmanager
def no_gc() -> Iterator[None]:
    """The collector's pauses are not what is measured."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def each_us(call: Callable[[object], object], arguments: Iterable) -> list[float]:
    """Microseconds of every single call."""
    clock, times = time.perf_counter_ns, []
    for argument in arguments:
        begin = clock()
        call(argument)
        times.append(clock() - begin)
    return [t / 1000 for t in times]


def seconds_in_turn(calls: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Of each call, ``repeats`` times; they take turns, so that noise hits all alike."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, mine in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            mine.append(time.perf_counter() - begin)
    return times


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of ratios of neighbours, not the ratio of medians: that one is noise to noise."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns wide enough; the first one to the left, numbers to the right."""
    cells = [tuple(head), *(tuple(map(str, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def verdict(bar: str, value: float, limit: float, *, at_most: bool) -> str:
    """One line on one bar."""
    met = value <= limit if at_most else value >= limit
    sign = "<=" if at_most else ">="
    return f"  {'met   ' if met else 'MISSED'}  {bar}: {value:.3g} (bar {sign} {limit:g})"
