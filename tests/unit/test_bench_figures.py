"""What the benches make of the times they measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench.chaos_peer import silences_s
from bench.handoff import Peer
from bench.interference import gaps_ms
from bench.nixl_proxy import DECODE_SENT
from bench.serve import Limits, Served, arrivals, goodput
from bench.streams import Timed


def test_the_handoff_is_what_the_second_token_waited_beyond_a_usual_gap():
    peer = Peer()
    peer.answers[100] = [Timed(0.0, [1.0, 1.05, 1.08, 1.11, 1.14])]
    assert peer.ttft_ms(100).median == pytest.approx(1000)
    assert peer.itl_ms(100).median == pytest.approx(30)
    assert peer.handoff_ms(100).median == pytest.approx(20)
    assert peer.handoff_itl(100) == pytest.approx(2 / 3)


def test_behind_a_proxy_it_counts_from_when_decode_was_sent_the_request():
    peer = Peer()
    headers = {DECODE_SENT.lower(): "0.900000"}
    peer.answers[100] = [Timed(0.0, [1.0, 1.03, 1.06, 1.09], headers)]
    assert peer.handoff_ms(100).median == pytest.approx(70)


def test_a_stream_that_stands_still_at_the_end_has_a_gap():
    stream = Timed(0.0, [0.5, 1.0, 1.1, 9.0])
    assert gaps_ms([stream], 0.9, 5.0) == pytest.approx([500, 100, 3900])


def test_a_request_is_served_well_only_if_both_limits_hold():
    requests = [
        Served("chat", 1.0, 1.0),
        Served("chat", 2.5, 1.0),
        Served("long", 1.0, 3.5),
        Served("long", 2.0, 3.0),
    ]
    assert Limits(2.0, 3.0).share(requests) == 0.5


def test_at_twice_the_rate_the_same_requests_come_in_half_the_time():
    options = SimpleNamespace(seed=0, requests=20, long_share=0.15)
    slow, fast = arrivals(options, 1.0), arrivals(options, 2.0)
    assert [kind for _, kind in slow] == [kind for _, kind in fast]
    assert [at_s for at_s, _ in slow] == pytest.approx([2 * at_s for at_s, _ in fast])
    assert sum(kind == "long" for _, kind in slow) == 3


def test_goodput_is_the_highest_rate_that_was_served_well():
    assert goodput({"0.1": 1.0, "0.2": 0.9, "0.4": 0.5}) == 0.2
    assert goodput({"0.1": 0.5}) == 0.0


def test_a_silence_begins_at_a_kill_and_ends_with_anybodys_token():
    at_s = [0.5, *(1.2, 1.3, 4.3, 4.4, 6.0, 8.0, 9.9), *(10.5, 10.6)]
    assert silences_s(at_s, [1.0, 10.0], 11.0) == pytest.approx([3.0, 0.5])
    assert silences_s([], [1.0], 11.0) == [10.0]
