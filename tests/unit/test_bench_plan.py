"""``python -m bench plan``: how it finds the rate at which a node stops to meet the goals."""

from __future__ import annotations

import pytest

from bench.plan import WORKLOADS, arrivals, between, crossing, goals_for
from pdnode import planner
from pdnode.estimate import Constants
from pdnode.planner import DATA_PARALLEL, SHARE, Hardware

CONSTANTS = Constants(
    prefill_pass_ms=20.0,
    prefill_ms_per_token=1.5,
    prefill_ms_per_token_context=0.0005,
    decode_step_ms=25.0,
    decode_step_ms_per_stream=2.0,
    handoff_ms=1.0,
    handoff_ms_per_token=0.002,
    front_ms=2.0,
)
ENGINES = Hardware(CONSTANTS, kv_tokens=50_000)


@pytest.mark.parametrize("start", [0.5, 1.0, 2.0])
def test_a_node_that_is_the_simulation_has_the_predicted_goodput(start: float) -> None:
    workload = WORKLOADS["mixed"]
    goals = goals_for(workload, CONSTANTS, 5.0, 5.0)
    trace = arrivals(workload, 80, 1.0, seed=1)
    rows = planner.plan(trace, ENGINES, 2, goals)
    for row in rows:
        prefill, decode = (0, 2) if row.name == DATA_PARALLEL else (1, 1)

        def share(rate: float, prefill: int = prefill, decode: int = decode) -> float:
            faster = rate / planner.rate_per_s(trace)
            played = planner.simulate(trace, ENGINES, prefill, decode, faster)
            return planner.met(played, goals)

        found, _ = crossing(share, start * row.goodput)
        assert found == pytest.approx(row.goodput, rel=0.15)


def test_the_goodput_lies_between_the_last_rate_that_met_the_goals_and_the_first_that_did_not() -> (
    None
):
    assert between({1.0: 1.0, 2.0: SHARE - 0.1}) == pytest.approx(1.5)
    assert between({1.0: SHARE, 2.0: 0.0}) == 1.0
    # A lucky play beyond a failed one proves nothing.
    assert between({1.0: 1.0, 2.0: 0.8, 4.0: 0.95}) == pytest.approx(1.5)
    assert between({1.0: 0.5}) == 0.0


def test_the_same_seed_gives_the_same_requests_at_any_rate() -> None:
    slow, fast = (arrivals(WORKLOADS["mixed"], 50, rate, seed=3) for rate in (1.0, 2.0))
    assert [a.prompt_tokens for a in slow] == [a.prompt_tokens for a in fast]
    assert fast[-1].arrival_ms == pytest.approx(slow[-1].arrival_ms / 2)
