"""``launcher.py plan``: what it recommends, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import launcher
from pdnode import calibrate, plan_command, planner
from pdnode.calibrate import Box
from pdnode.estimate import Constants
from pdnode.planner import DATA_PARALLEL, Goals, Hardware
from pdnode.traffic import PROBE, Arrival

KV_TOKENS = 400_000


def constants(**changed: float) -> Constants:
    """A prompt of 100 tokens takes 10 ms, a step 10 ms, a hand-off 1 ms; nothing else costs."""
    values = {
        "prefill_pass_ms": 0.0, "prefill_ms_per_token": 0.1, "prefill_ms_per_token_context": 0.0,
        "decode_step_ms": 10.0, "decode_step_ms_per_stream": 0.0, "handoff_ms": 1.0,
        "handoff_ms_per_token": 0.0, "front_ms": 0.0, "output_tokens": 10.0,
    }  # fmt: skip
    return Constants(**values | changed)


ENGINES = Hardware(constants(), KV_TOKENS)


def evenly(n: int, every_ms: float, prompt: int, output: int) -> list[Arrival]:
    return [Arrival(i * every_ms, prompt, output) for i in range(n)]


def test_goodput_is_what_arithmetic_says() -> None:
    # Two replicas, 10 ms a prompt, nothing else: 200 a second, and the queue grows beyond.
    arrivals = evenly(300, 20.0, prompt=100, output=1)
    rows = planner.plan(arrivals, ENGINES, 2, Goals(15.0, 100.0))
    [replicas] = [row for row in rows if row.name == DATA_PARALLEL]
    assert replicas.goodput == pytest.approx(200, rel=0.03)
    [split] = [row for row in rows if row.name == "1P1D"]
    assert split.goodput == pytest.approx(100, rel=0.03)
    assert rows[0] is replicas


def test_long_prompts_under_a_tight_token_goal_are_better_split() -> None:
    # Each prompt takes 100 ms; where it is computed, every stream waits for it.
    arrivals = evenly(200, 150.0, prompt=1000, output=50)
    rows = planner.plan(arrivals, ENGINES, 2, Goals(400.0, 12.0))
    assert [row.name for row in rows] == ["1P1D", DATA_PARALLEL]
    assert rows[0].itl_p99 < 12 < rows[1].itl_p99


def test_engines_that_share_what_they_compute_with_slow_each_other() -> None:
    arrivals = evenly(300, 20.0, prompt=100, output=1)
    goals = Goals(25.0, 100.0)

    def goodput(contention: float) -> float:
        rows = planner.plan(arrivals, replace(ENGINES, contention=contention), 2, goals)
        return next(row.goodput for row in rows if row.name == DATA_PARALLEL)

    # Both busy, each pass takes twice as long: two are then as good as one.
    assert goodput(0.0) == pytest.approx(200, rel=0.03)
    assert goodput(1.0) == pytest.approx(100, rel=0.03)


def test_prompts_are_split_from_the_engines_own_block_on() -> None:
    arrivals = evenly(20, 200.0, prompt=100, output=5)
    for block_size, splits in ((16, 20), (128, 0)):
        found = planner.simulate(arrivals, replace(ENGINES, block_size=block_size), 1, 1)
        assert 20 - found.reasons["short_prompt"] == splits


def told(engine: str, prefill_ms: float, decode_ms: float) -> dict:
    """What matters here of what ``/pd/requests/{id}`` tells."""
    end_ms = prefill_ms + decode_ms
    events = {"prefill_begin": 0.0, "prefill_end": prefill_ms, "decode_begin": prefill_ms}
    return {"prefill": None, "decode": engine, "events_ms": events | {"decode_end": end_ms}}


def test_contention_is_what_both_lose_while_they_work_together() -> None:
    apart = [told("b", 1, 100.0)] * 2, [told("a", 20.0, 0)] * 2
    streams, prompts = [told("b", 1, 140.0)] * 2, [told("a", 32.0, 0)]
    assert calibrate.slowed(apart, (streams, prompts)) == [pytest.approx(0.5)]
    # A stream on the prompt's own engine waits for it anyway.
    own = told("a", 1, 500.0)
    assert calibrate.slowed(apart, ([own, *streams], prompts)) == [pytest.approx(0.5)]
    assert calibrate.slowed(apart, ([own], prompts)) == []


def answered(request_id: str, ttft_ms: float | None, itl_ms: float | None) -> dict:
    ttft = None if ttft_ms is None else {"ms": ttft_ms}
    return {"id": request_id, "requests": [{"ttft": ttft, "itl_ms": itl_ms}]}


def test_observed_is_what_the_users_requests_took() -> None:
    users = [answered(f"user-{i}", 10.0 * i, 0.1 * i) for i in range(1, 101)]
    probes = [answered(f"{PROBE}{i}", 1.0, 1.0) for i in range(100)]
    queued, one_token = answered("queued", None, None), answered("one token", 510.0, None)
    found = calibrate.observed({"requests": [*probes, queued, one_token, *users]})
    assert found["observed_requests"] == 101
    assert found["observed"] == {
        "ttft_ms_p50": 510.0,
        "ttft_ms_p99": 990.0,
        "itl_ms_p50": pytest.approx(5.1),
        "itl_ms_p99": 10.0,
    }


def test_shared_prefixes_are_not_computed_twice() -> None:
    named = [Arrival(i * 50.0, 1024, 1, tuple(range(8))) for i in range(50)]
    own = evenly(50, 50.0, prompt=1024, output=1)
    shared, alone = (planner.simulate(a, ENGINES, 1, 1) for a in (named, own))
    assert shared.computed_tokens < alone.computed_tokens / 5


@pytest.mark.parametrize(
    ("prefill", "decode", "kind", "flags"),
    [
        (1, 3, "gpu", "--prefill-gpus 0 --decode-gpus 1,2,3"),
        (2, 2, "cpu", "--prefill-engines 2 --decode-engines 2"),
        (0, 0, "gpu", "--prefill-gpus 0,1 --decode-gpus 2,3 --split never"),
    ],
)
def test_the_flags_are_the_launchers(prefill: int, decode: int, kind: str, flags: str) -> None:
    row = planner.Row(prefill, decode, 1.0, 1, 1, 1, 1, 1.0)
    assert plan_command.flags_for(row, kind, 4) == flags


def test_table_chart_and_what_was_observed() -> None:
    rows = [
        planner.Row(1, 1, 1.0, 10.0, 20.0, 5.0, 6.0, 8.0, limit=True),
        planner.Row(0, 0, 0.5, 30.0, 60.0, 9.0, 12.0, 2.0),
    ]
    box = Box(ENGINES, 1, 1, "cpu", {"ttft_ms_p50": 11.0}, 30)
    assert list(plan_command.render(rows, box, 2)) == [
        "split          goals met  TTFT p50  p99 ms  ITL p50  p99 ms  goodput/s",
        "1P1D           100.0%     10.0      20.0    5.0      6.0     >8.00",
        "data parallel  50.0%      30.0      60.0    9.0      12.0    2.00",
        "",
        "1P1D          ######################################## >8.00",
        "data parallel ##########                               2.00",
        "",
        "recommended: --prefill-engines 1 --decode-engines 1",
        "",
        "predicted for the node as it is (1P1D), and its last 30 requests:",
        "             predicted  observed",
        "ttft_ms_p50  10.0       11.0",
    ]


def given(tmp_path: Path) -> tuple[Path, Path]:
    trace, known = tmp_path / "t.jsonl", tmp_path / "c.json"
    lines = ({"arrival_s": i, "prompt_tokens": 300, "output_tokens": 5} for i in range(20))
    trace.write_text("\n".join(map(json.dumps, lines)))
    known.write_text(json.dumps({"constants": asdict(constants()), "kind": "cpu"}))
    return trace, known


def test_the_command_prints_a_recommendation(tmp_path, capsys) -> None:
    trace, known = given(tmp_path)
    goals = ["--ttft-ms", "100", "--itl-ms", "20"]
    code = launcher.main(["plan", str(trace), *goals, "--constants", str(known), "--engines", "3"])
    out = capsys.readouterr().out
    assert code == 0
    assert "20 requests, 1.00 a second" in out
    for name in ("1P2D", "2P1D", DATA_PARALLEL):
        assert name in out
    assert "recommended: --prefill-engines" in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--itl-ms", "1"], "--ttft-ms"),
        (["--ttft-ms", "1", "--itl-ms", "1", "--url", "http://127.0.0.1:1"], "no pdnode answers"),
        (["--ttft-ms", "1", "--itl-ms", "1", "--constants", "{known}", "--engines", "1"], "split"),
        (["--ttft-ms", "1", "--itl-ms", "1", "--constants", "{trace}"], "--write-constants"),
    ],
)
def test_refusals_are_one_sentence_and_exit_code_2(tmp_path, capsys, args, says) -> None:
    trace, known = given(tmp_path)
    args = [arg.format(trace=trace, known=known) for arg in args]
    assert launcher.main(["plan", str(trace), *args]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("pdnode: error: ")
    assert error.count("\n") == 1
