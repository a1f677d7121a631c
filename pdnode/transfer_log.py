"""One line a minute about the hand-offs of that minute, in the words of vLLM's NIXL connector."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdnode.timeline import Timeline

EVERY_S = 60.0
MB = 1e6


class TransferLog:
    """On the front end's loop. ``say`` gets the line; a minute without a hand-off says nothing."""

    def __init__(self, say: Callable[[str], None], failures: Callable[[], tuple[int, int]]) -> None:
        """``failures``: failed copies and expired leases since the start."""
        self._say, self._failures = say, failures
        self._done: list[tuple[float, int]] = []
        self._told = (0, 0)
        self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._minute)

    def finished(self, asked: object, timeline: Timeline, request: object) -> None:
        """One of ``History.on_finished``."""
        self._done += [
            (leg.copied.end - leg.copied.begin, leg.copied.nbytes)
            for leg in timeline.legs
            if leg.copied is not None
        ]

    def _minute(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._minute)
        now = self._failures()
        line = minute_line(self._done, now[0] - self._told[0], now[1] - self._told[1])
        self._done, self._told = [], now
        if line:
            self._say(line)

    def close(self) -> None:
        self._timer.cancel()


def minute_line(done: list[tuple[float, int]], failed: int, expired: int) -> str:
    """``done``: (seconds, bytes) of each copy. "" when there is nothing to say."""
    if not (done or failed or expired):
        return ""
    times = sorted(seconds for seconds, _ in done) or [0.0]
    total_s, total_mb = sum(times), sum(nbytes for _, nbytes in done) / MB
    n = max(1, len(done))
    said = {
        "Num successful transfers": len(done),
        "Avg xfer time (ms)": round(total_s / n * 1e3, 3),
        "P90 xfer time (ms)": round(times[int(len(times) * 0.9)] * 1e3, 3),
        "Avg MB per transfer": round(total_mb / n, 3),
        "Throughput (MB/s)": round(total_mb / total_s, 3) if total_s else 0,
        "Num failed transfers": failed,
        "Num KV expired reqs": expired,
    }
    return "KV Transfer metrics: " + ", ".join(f"{name}={value}" for name, value in said.items())
