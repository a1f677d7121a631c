"""What the benches make of the times they measured."""

from __future__ import annotations

import pytest

from bench.handoff import Peer
from bench.interference import gaps_ms
from bench.nixl_proxy import DECODE_SENT
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
