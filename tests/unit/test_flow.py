"""Which flow a request takes: a table."""

from __future__ import annotations

import pytest

from pdnode.estimate import Constants
from pdnode.flow import REASONS, Choice, choose
from pdnode.placement import EngineView, Facts
from pdnode.token1 import Token1

CHUNK = 1024
SLOW_COPY = Constants(1, 0.1, 0, 5, 0.1, 0.1, 0.01, 1)
FAST_COPY = Constants(1, 0.1, 0, 5, 0.1, 0.1, 0.0001, 1)


@pytest.mark.parametrize(
    "flow, prompt, on_p, on_d, free, constants, expected",
    [
        ("prefill-first", 4000, 0, 0, None, None, Choice(False, "asked")),
        ("decode-first", 200, 0, 0, None, None, Choice(True, "asked")),
        ("auto", 1024, 0, 0, None, None, Choice(False, "one_chunk")),
        ("auto", 4000, 3000, 0, None, None, Choice(False, "one_chunk")),
        ("auto", 1025, 0, 0, None, None, Choice(True, "several_chunks")),
        ("auto", 4000, 0, 0, 3999, SLOW_COPY, Choice(False, "no_room_on_decode")),
        ("auto", 4000, 0, 1, 3999, SLOW_COPY, Choice(True, "copy_hides")),
        ("auto", 4000, 0, 0, 9999, SLOW_COPY, Choice(True, "copy_hides")),
        ("auto", 4000, 0, 0, 9999, FAST_COPY, Choice(False, "copy_is_cheap")),
        ("auto", 4000, 0, 3900, 9999, SLOW_COPY, Choice(False, "copy_is_cheap")),
    ],
)
def test_choice(flow, prompt, on_p, on_d, free, constants, expected):
    facts = Facts(prompt, 100, Token1.FORWARD, cached={0: on_p, 1: on_d})
    prefill = EngineView(0, "prefill", True)
    decode = EngineView(1, "decode", True, free_tokens=free, constants=constants)
    assert choose(flow, facts, prefill, decode, CHUNK) == expected
    assert expected.reason in REASONS
