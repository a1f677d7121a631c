"""What is told of a request: its phases, DistServe's seven events, the ring, the trace file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pdnode import exchange, history, timeline, traffic
from pdnode.errors import BadTrace
from pdnode.exchange import Exchange
from pdnode.history import History
from pdnode.timeline import HANDOFF, Timeline
from pdnode.trace_file import TraceFile

NAMES = ["prefill-0", "decode-0"]


class Clock:
    """The front end's clock, set by hand."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (timeline, history):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def output(tokens: int = 1, queued=None, begun=None, copied=None) -> Any:
    events = [
        SimpleNamespace(type=SimpleNamespace(name=name), timestamp=at)
        for name, at in (("QUEUED", queued), ("SCHEDULED", begun))
        if at is not None
    ]
    return SimpleNamespace(
        events=events,
        prefill_stats=None,
        new_token_ids=[7] * tokens,
        kv_transfer_params={HANDOFF: copied} if copied else None,
    )


def split_request(clock: Clock, at: float = 100.0) -> Timeline:
    """Arrives at +0.002, P runs from +0.010 to +0.050, the copy ends at +0.056, D until +0.100."""
    clock.now = at + 0.002
    line = Timeline("cmpl-1", 300, arrived=clock.now)
    line.prefill, line.decode, line.reason = 0, 1, "split_faster"
    clock.now = at + 0.003
    line.sent(0, "prefill", 300)
    line.output(output(queued=at + 0.004, begun=at + 0.010), at + 0.050)
    clock.now = at + 0.051
    line.emitted(1)
    line.sent(1, "decode", 301)
    line.output(output(queued=at + 0.052, begun=at + 0.054), at + 0.060)
    clock.now = at + 0.061
    line.emitted(1)
    copied = [0, int((at + 0.055) * 1e9), int((at + 0.056) * 1e9), 1_000_000]
    line.output(output(tokens=3, copied=copied), at + 0.100)
    clock.now = at + 0.101
    line.emitted(3)
    line.ended("done", 0)
    return line


def phases(line: Timeline, at: float) -> list[tuple]:
    return [
        (p.name, round((p.begin - at) * 1e3, 3), round((p.end - at) * 1e3, 3))
        for p in line.phases()
    ]


def test_phases_have_no_gap_and_the_seven_events_are_there(clock: Clock) -> None:
    line = split_request(clock)
    assert phases(line, 100.0) == [
        ("front", 2, 3), ("queued", 3, 10), ("prefill", 10, 50), ("front", 50, 51),
        ("queued", 51, 54), ("handoff", 54, 56), ("decode", 56, 60), ("decode", 60, 100),
        ("front", 100, 101),
    ]  # fmt: skip
    seven = {name: round((at - 100) * 1e3) for name, at in line.seven().items()}
    assert seven == {
        "issued": 2, "prefill_begin": 10, "prefill_end": 50, "handoff_begin": 55,
        "handoff_end": 56, "decode_begin": 56, "decode_end": 100,
    }  # fmt: skip


def test_a_leg_that_was_lost_is_shown(clock: Clock) -> None:
    clock.now = 1.0
    line = Timeline("cmpl-1", 300, arrived=1.0)
    line.sent(0, "prefill", 300)
    clock.now = 3.0
    line.sent(1, "prefill", 300)
    line.output(output(begun=3.5), 4.0)
    clock.now = 4.0
    line.ended("done", 1)
    assert [name for name, *_ in phases(line, 0)] == ["lost", "queued", "prefill"]


def described(clock: Clock, streams: bool) -> dict:
    asked = Exchange("abc", "/v1/completions", received=100.0, streams=streams, status=200)
    told = History(NAMES)
    token = exchange.current.set(asked)
    line = split_request(clock)
    told.begin(line)
    exchange.current.reset(token)
    asked.first_byte, asked.last_byte = 100.0525, 100.102
    told.ended(line, None)
    assert told.find("abc") == told.find("cmpl-1")
    assert told.find("other") is None
    return told.find("abc")


def test_the_parts_of_ttft_add_up_to_the_first_byte(clock: Clock) -> None:
    [request] = described(clock, streams=True)["requests"]
    ttft = request["ttft"]
    assert ttft == {"ms": 52.5, "front_ms": 5.5, "queued_ms": 7.0, "prefill_ms": 40.0}
    assert request["handoff"]["gb_per_s"] == pytest.approx(1.0, abs=0.01)
    assert (request["handoff"]["from"], request["handoff"]["to"]) == ("prefill-0", "decode-0")


def test_without_streaming_ttft_ends_at_the_token(clock: Clock) -> None:
    [request] = described(clock, streams=False)["requests"]
    assert request["ttft"]["ms"] == 51.0


def test_the_ring_is_bounded_and_latencies_have_quantiles(clock: Clock) -> None:
    told = History(NAMES)
    for i in range(history.KEPT + 5):
        token = exchange.current.set(Exchange(f"id-{i}", "/v1/completions", received=100.0))
        line = split_request(clock)
        told.begin(line)
        told.ended(line, None)
        exchange.current.reset(token)
    assert told.find("id-4") is None
    listed = told.listed(limit=3)
    assert [r["id"] for r in listed["requests"]] == ["id-1004", "id-1003", "id-1002"]
    [bucket] = listed["latency"]["buckets"]
    assert bucket["requests"] == history.KEPT + 5
    assert bucket["ttft_ms_p50"] == 51.0


WRITER = """
import sys
from pathlib import Path
from types import SimpleNamespace
from pdnode.trace_file import TraceFile
trace = TraceFile(Path(sys.argv[1]), ["prefill-0", "decode-0"])
details = SimpleNamespace(num_ctx_tokens=5, num_generation_tokens=0, num_ctx_requests=1,
                          num_generation_requests=0, elapsed_ms=1.5)
step = SimpleNamespace(scheduler_stats=SimpleNamespace(iteration_details=details), timestamp=1.0)
n = 0
while True:
    trace.step(0, step)
    n += 1
    if n == 100:
        print("many", flush=True)
"""


def test_the_trace_is_valid_json_after_a_kill(tmp_path) -> None:
    path = tmp_path / "trace.json"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout.readline() == "many\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    events = json.loads(path.read_text())
    steps = [event for event in events if event["ph"] == "X"]
    assert len(steps) >= 100
    assert {(s["name"], s["dur"], s["args"]["prompt_tokens"]) for s in steps} == {
        ("prefill", 1500.0, 5)
    }


def test_a_request_in_the_trace_is_balanced_and_has_its_arrow(clock: Clock, tmp_path) -> None:
    trace = TraceFile(tmp_path / "trace.json", NAMES)
    hostile = 'x"<script>\u2028\n'
    trace.request(Exchange(hostile, "/", received=100.0), split_request(clock))
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    depth = 0
    for event in events:
        depth += {"b": 1, "e": -1}.get(event["ph"], 0)
        assert depth >= 0
    assert depth == 0
    assert [event["ph"] for event in events if event.get("cat") == "handoff"] == ["s", "f"]
    assert hostile in [event.get("args", {}).get("x-request-id") for event in events]


def test_traffic_is_read_back_as_it_was_recorded(tmp_path) -> None:
    path = tmp_path / "traffic.jsonl"
    recorder = traffic.Recorder(path)
    shared = list(range(256))
    recorder.write(1000.5, [*shared, 1, 2], 7)
    recorder.write(1000.0, shared, 3)
    recorder.close()
    first, second = traffic.read(path)
    assert (first.arrival_ms, first.prompt_tokens, first.output_tokens) == (0.0, 256, 3)
    assert (second.arrival_ms, second.prompt_tokens, second.output_tokens) == (500.0, 258, 7)
    assert len(first.blocks) == 2
    assert first.blocks == second.blocks
    assert len(set(first.blocks)) == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "has no requests"),
        ("{", "line 1"),
        ('{"arrival_s": 0, "prompt_tokens": 5}', "output_tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "at least 1"),
    ],
)
def test_a_bad_trace_is_one_sentence_with_the_line(tmp_path, line: str, says: str) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(BadTrace, match=says):
        traffic.read(path)


def test_mooncake_lines_are_read(tmp_path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'
    )
    [arrival] = traffic.read(path)
    assert (arrival.prompt_tokens, arrival.output_tokens, len(arrival.blocks)) == (6955, 52, 8)
