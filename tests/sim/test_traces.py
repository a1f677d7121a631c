"""10,000 requests of three kinds on 8 P and 8 D: what placement is to be good for."""

from __future__ import annotations

from functools import cache

import pytest

from pdnode.placement import REASONS
from tests.sim import compare
from tests.sim.traces import REQUESTS, TRACES

trace = pytest.mark.parametrize("trace", TRACES)


@cache
def row(trace: str, router: str) -> compare.Row:
    found = compare.run(trace, router)
    print(f"\n{compare.HEADER}\n{found}")
    return found


@trace
def test_every_request_is_answered_and_has_a_reason(trace):
    result = row(trace, "place").result
    assert len(result.ttft_ms) == REQUESTS
    assert result.reasons.keys() <= set(REASONS)


@trace
def test_hits_as_often_as_one_engine_with_all_the_memory(trace):
    found = row(trace, "place")
    assert found.result.hit_rate >= 0.98 * found.ideal


@trace
@pytest.mark.parametrize("other", ["round-robin", "tree", "tree, tighter"])
def test_the_slowest_first_tokens_come_sooner(trace, other):
    assert row(trace, "place").ttft_p99_ms < row(trace, other).ttft_p99_ms


def test_long_prompts_do_not_stall_streams_as_on_engines_that_do_both():
    split, never = row("mixed", "place").result, row("mixed", "never").result
    p99 = [compare.percentile(r.per_token_ms, 0.99) for r in (split, never)]
    assert p99[0] < p99[1] / 2


def test_the_same_seed_gives_the_same_run():
    first, again = (compare.run("mixed", "place").result for _ in range(2))
    assert first.ttft_ms == again.ttft_ms
