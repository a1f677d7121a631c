"""Finished requests go to the trace, the recording and OpenTelemetry, and a file that cannot be is said."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.tracing import init_tracer

from pdnode import exchange, traffic
from pdnode.errors import NodeStartError
from pdnode.exchange import Exchange
from pdnode.history import History
from pdnode.outlets import Outlets
from pdnode.timeline import Copied, LegTimes, Timeline
from tests.people.collector import Collector


def made(**config: Any) -> tuple[Outlets, Any]:
    arguments = SimpleNamespace(
        enable_logging_iteration_details=False,
        otlp_traces_endpoint=config.pop("otlp", None),
    )
    defaults = {"trace_path": None, "record_path": None, "frontend_args": arguments}
    client = SimpleNamespace(history=History(["prefill-0", "decode-0"]), on_step=None)
    return Outlets(SimpleNamespace(**defaults | config), client), client


def finish_one(client: Any, request_id: str = "cmpl-mine") -> None:
    at = time.monotonic()
    asked = Exchange("mine", "/v1/completions", received=at - 0.2)
    line = Timeline(request_id, 130, arrived=at - 0.19, reason="split_faster")
    line.legs = [
        LegTimes(0, "prefill", 130, at - 0.18, begun=at - 0.17, answered=at - 0.1, last=at - 0.1),
        LegTimes(1, "decode", 131, at - 0.09, begun=at - 0.08, answered=at - 0.05, last=at - 0.01),
    ]
    line.legs[1].copied = Copied(0, at - 0.07, at - 0.06, 4096)
    line.emitted(5)
    token = exchange.current.set(asked)
    client.history.begin(line)
    exchange.current.reset(token)
    line.ended("done", 0)
    request = SimpleNamespace(prompt_token_ids=list(range(130)), trace_headers=None)
    client.history.ended(line, request)


def step(elapsed_ms: float) -> Any:
    details = SimpleNamespace(
        num_ctx_tokens=130, num_ctx_requests=1, num_generation_requests=0,
        num_generation_tokens=0, elapsed_ms=elapsed_ms,
    )  # fmt: skip
    stats = SimpleNamespace(iteration_details=details)
    return SimpleNamespace(scheduler_stats=stats, timestamp=time.monotonic())


def test_files_get_requests_and_steps(tmp_path: Path) -> None:
    outlets, client = made(trace_path=tmp_path / "t.json", record_path=tmp_path / "r.jsonl")
    outputs = step(elapsed_ms=7.5)
    client.on_step(0, outputs)
    # Asked for by --trace alone: vLLM would log a line for each.
    assert outputs.scheduler_stats.iteration_details is None
    finish_one(client)
    outlets.close()
    events = json.loads((tmp_path / "t.json").read_text())
    assert [e["dur"] for e in events if e["name"] == "prefill" and e["ph"] == "X"] == [7500.0]
    assert [e["args"]["bytes"] for e in events if e["name"] == "copy"] == [4096]
    [arrival] = traffic.read(tmp_path / "r.jsonl")
    assert (arrival.prompt_tokens, arrival.output_tokens, len(arrival.blocks)) == (130, 5, 1)


def test_what_plan_asks_is_not_recorded(tmp_path: Path) -> None:
    outlets, client = made(record_path=tmp_path / "r.jsonl")
    finish_one(client, f"cmpl-{traffic.PROBE}1-0")
    outlets.close()
    assert (tmp_path / "r.jsonl").read_text() == ""


def test_a_file_that_cannot_be_opened_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(NodeStartError, match=r"nowhere.*--trace"):
        made(trace_path=tmp_path / "nowhere" / "t.json")


def test_spans_arrive_before_the_node_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    collector = Collector()
    try:
        init_tracer("pdnode-test", collector.url)
        outlets, client = made(otlp=collector.url)
        finish_one(client)
        outlets.close()
        spans = dict(collector.spans)
    finally:
        collector.close()
    assert {
        "pdnode.front",
        "pdnode.queued",
        "pdnode.prefill",
        "pdnode.handoff",
        "pdnode.decode",
    } == (spans.keys())
    assert spans["pdnode.handoff"]["pdnode.handoff.bytes"] == 4096
    assert spans["pdnode.handoff"]["pdnode.handoff.from"] == "prefill-0"
    assert spans["pdnode.prefill"]["pdnode.engine"] == "prefill-0"
    assert spans["pdnode.decode"]["pdnode.x_request_id"] == "mine"
