"""``--trace FILE``: every request and engine step for https://ui.perfetto.dev or chrome://tracing.

The file is a complete JSON array after every write, so it can be opened while the node serves and
whatever ended the node: each write puts new events over the closing bracket and a new one after.

    process = an engine; threads: steps, KV copied in
    process "requests": one row per request, its phases inside
    arrows: from the step that computed a prompt to the copy of its KV

Format: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdnode.exchange import Exchange
from pdnode.timeline import Timeline

CLOSE = b"\n]\n"
REQUESTS_PID = 1
FIRST_ENGINE_PID = 10
"""Plus the slot; not pids of the system, which change with every restart."""
STEPS, COPIES = 1, 2


class TraceFile:
    """Overwrites ``path``. Raises OSError."""

    def __init__(self, path: Path, engine_ids: Sequence[str]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._requests = 0
        os.write(self._fd, b"[" + CLOSE)
        self._end = 1
        self._write([_named("process_name", REQUESTS_PID, 0, "requests")])
        for slot, engine_id in enumerate(engine_ids):
            pid = FIRST_ENGINE_PID + slot
            self._write(
                [
                    _named("process_name", pid, 0, engine_id),
                    _named("thread_name", pid, STEPS, "steps"),
                    _named("thread_name", pid, COPIES, "KV copied in"),
                ]
            )

    def step(self, slot: int, outputs: Any) -> None:
        """An engine's ``EngineCoreOutputs``; those without iteration details are no step."""
        details = getattr(outputs.scheduler_stats, "iteration_details", None)
        if details is None:
            return
        prompt, tokens = details.num_ctx_tokens, details.num_generation_tokens
        self._write(
            [
                {
                    "name": "prefill" if prompt and not tokens else "mixed" if prompt else "decode",
                    "ph": "X",
                    "pid": FIRST_ENGINE_PID + slot,
                    "tid": STEPS,
                    "ts": _us(outputs.timestamp) - round(details.elapsed_ms * 1e3, 1),
                    "dur": round(details.elapsed_ms * 1e3, 1),
                    "args": {
                        "prompt_requests": details.num_ctx_requests,
                        "prompt_tokens": prompt,
                        "streams": details.num_generation_requests,
                        "tokens": tokens,
                    },
                }
            ]
        )

    def request(self, asked: Exchange, timeline: Timeline) -> None:
        """A request that has ended."""
        self._requests += 1
        row = {"cat": "request", "id": self._requests, "pid": REQUESTS_PID, "tid": 0}
        finished = timeline.finished or timeline.arrived
        events: list[dict[str, Any]] = [
            {
                **row,
                "name": timeline.request_id,
                "ph": "b",
                "ts": _us(asked.received),
                "args": {
                    "x-request-id": asked.request_id,
                    "reason": timeline.reason,
                    "outcome": timeline.outcome,
                    "prompt_tokens": timeline.prompt_tokens,
                    "cached_tokens": timeline.cached_tokens,
                    "output_tokens": timeline.output_tokens,
                    "deaths": timeline.deaths,
                },
            }
        ]
        for phase in timeline.phases():
            named = {**row, "name": phase.name}
            events.append({**named, "ph": "b", "ts": _us(phase.begin)})
            events.append({**named, "ph": "e", "ts": _us(phase.end)})
        events.append({**row, "name": timeline.request_id, "ph": "e", "ts": _us(finished)})
        self._write(events + list(self._copies(timeline)))

    def _copies(self, timeline: Timeline) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for before, leg in zip([None, *timeline.legs], timeline.legs, strict=False):
            if leg.copied is None:
                continue
            to = {"pid": FIRST_ENGINE_PID + leg.slot, "tid": COPIES}
            begin, took = _us(leg.copied.begin), _us(leg.copied.end - leg.copied.begin)
            named = {"name": "KV", "cat": "handoff", "id": f"{self._requests}-{len(events)}"}
            events.append(
                {**to, "name": "copy", "ph": "X", "ts": begin, "dur": took}
                | {"args": {"bytes": leg.copied.nbytes, "request": timeline.request_id}}
            )
            if before is not None and before.answered is not None:
                origin = {"pid": FIRST_ENGINE_PID + before.slot, "tid": STEPS}
                # An arrow binds to the slice around its time: a microsecond before the step's end.
                events.append({**named, **origin, "ph": "s", "ts": _us(before.answered) - 1})
                events.append({**named, **to, "ph": "f", "bp": "e", "ts": begin})
        return events

    def _write(self, events: list[dict[str, Any]]) -> None:
        lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events).encode()
        body = (b",\n" if self._end > 1 else b"\n") + lines
        # One write: a kill between two would leave the file without its end.
        os.pwrite(self._fd, body + CLOSE, self._end)
        self._end += len(body)

    def close(self) -> None:
        os.close(self._fd)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
