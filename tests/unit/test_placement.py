"""Placement is a function: facts and a view in, a plan out."""

from __future__ import annotations

import pytest

from pdnode.placement import Decline, EngineView, Facts, NodeView, Plan, place
from pdnode.token1 import Token1

LONG = Facts(prompt_tokens=1000, max_tokens=100)


def view(*engines: EngineView) -> NodeView:
    return NodeView(engines=engines, block_size=128, max_model_len=2048)


def engine(slot: int, role: str, *, ready: bool = True, requests: int = 0, queued: int = 0):
    return EngineView(slot, role, ready, requests, queued)


TWO_BY_TWO = view(
    engine(0, "prefill", queued=4000, requests=4),
    engine(1, "prefill", queued=100, requests=1),
    engine(2, "decode", requests=3),
    engine(3, "decode", requests=2),
)


def test_least_queued_prefill_and_least_busy_decode():
    assert place(LONG, TWO_BY_TWO) == Plan(1, 3, Token1.FORWARD, "split_unmeasured")


@pytest.mark.parametrize(
    "facts, reason, slot",
    [
        (Facts(127, 100), "short_prompt", 3),
        (Facts(1000, 1), "max_tokens_1", 1),
        (Facts(2047, 1), "max_tokens_1", 1),
        (Facts(2047, 5), "full_context", 3),
        (Facts(1000, 0, whole="pooling"), "pooling", 1),
        (Facts(1000, 9, whole="prompt_embeds"), "prompt_embeds", 1),
        (Facts(1000, 9, Token1.SINGLE, "prompt_logprobs"), "prompt_logprobs", 1),
    ],
)
def test_what_cannot_be_split_runs_on_one_engine_for_a_reason(facts, reason, slot):
    assert place(facts, TWO_BY_TWO) == Plan(None, slot, Token1.FORWARD, reason)


def test_exactly_one_block_is_split():
    assert place(Facts(128, 2), TWO_BY_TWO).prefill == 1


def test_token1_choice_travels_with_the_plan():
    assert place(Facts(500, 9, Token1.RESAMPLE, "seed"), TWO_BY_TWO).token1 is Token1.RESAMPLE


@pytest.mark.parametrize(
    "gone, reason", [("prefill", "no_prefill_engine"), ("decode", "no_decode_engine")]
)
def test_without_one_side_the_other_serves_alone(gone, reason):
    engines = [
        engine(0, "prefill", ready=gone != "prefill"),
        engine(1, "decode", ready=gone != "decode"),
    ]
    plan = place(LONG, view(*engines))
    assert plan == Plan(None, 1 if gone == "prefill" else 0, Token1.FORWARD, reason)


def test_no_engine_at_all_is_a_decline():
    assert place(LONG, view(engine(0, "prefill", ready=False))) == Decline("no_engine_ready")
