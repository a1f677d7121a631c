"""--roles auto: a change when one side is the bottleneck, none when it is not, and none too often."""

from __future__ import annotations

import pytest

from pdnode.placement import EngineView, NodeView
from pdnode.roles import CALM_S, PROPOSED_S, SETTLE_S, Change, Hysteresis, propose
from tests.unit.test_placement import MEASURED

STARTED = {0: "prefill", 1: "prefill", 2: "decode", 3: "decode"}


def node(*engines: tuple[str, int, int, float], constants=MEASURED) -> NodeView:
    """(role, requests, streams, queued ms) of each."""
    return NodeView(
        tuple(
            EngineView(
                slot, role, True, requests, streams=streams, queued_ms=queued, constants=constants
            )
            for slot, (role, requests, streams, queued) in enumerate(engines)
        ),
        block_size=128,
        max_model_len=2048,
    )


IDLE_P, IDLE_D = ("prefill", 0, 0, 0.0), ("decode", 0, 0, 0.0)
QUEUE, STREAMS = ("prefill", 10, 0, 10_000.0), ("decode", 20, 20, 0.0)


@pytest.mark.parametrize(
    ("engines", "slot", "role", "reason"),
    [
        pytest.param((QUEUE, QUEUE, IDLE_D, ("decode", 1, 1, 0)), 2, "prefill", "prefill_waits"),
        pytest.param((IDLE_P, IDLE_P, STREAMS, STREAMS), 0, "decode", "decode_waits"),
        pytest.param(
            (("prefill", 1, 0, 400.0), IDLE_P, STREAMS, STREAMS), 1, "decode", "decode_waits"
        ),
        pytest.param(
            (IDLE_P, IDLE_P, ("decode", 9, 2, 0.0), ("decode", 9, 2, 0.0)),
            0,
            "decode",
            "decode_waits",
            id="no room on D",
        ),
    ],
)
def test_the_idlest_engine_goes_to_the_side_that_waits(engines, slot, role, reason):
    change = propose(node(*engines), STARTED)
    assert change is not None
    assert change[:3] == (slot, role, reason)


@pytest.mark.parametrize(
    "engines",
    [
        pytest.param((QUEUE, QUEUE, STREAMS, STREAMS), id="both sides busy"),
        pytest.param((QUEUE, IDLE_D), id="the last engine of a side"),
        pytest.param((IDLE_P, STREAMS), id="the last prefill"),
        pytest.param((QUEUE, IDLE_P), id="a side is gone"),
        pytest.param(
            (("prefill", 1, 0, 300.0), IDLE_P, ("decode", 1, 1, 0), IDLE_D), id="a little load"
        ),
        pytest.param((IDLE_P, IDLE_P, IDLE_D, IDLE_D), id="nothing to do"),
    ],
)
def test_roles_stay(engines):
    assert propose(node(*engines), STARTED) is None


def test_nothing_is_proposed_before_engines_are_measured():
    assert propose(node(QUEUE, QUEUE, IDLE_D, IDLE_D, constants=None), STARTED) is None


def test_a_change_is_not_undone_by_what_it_made():
    """D's streams are more crowded afterwards, but not by enough to want the engine back."""
    before = node(QUEUE, QUEUE, IDLE_D, ("decode", 4, 4, 0.0))
    assert propose(before, STARTED)[:2] == (2, "prefill")
    third = ("prefill", 7, 0, 6_700.0)
    assert propose(node(third, third, third, ("decode", 6, 6, 0.0)), STARTED) is None


def test_engines_go_back_when_all_is_calm():
    idle = node(IDLE_P, IDLE_D, IDLE_D, IDLE_P)
    assert propose(idle, STARTED) == Change(1, "prefill", "calm", 0.0)


WAITS = Change(2, "prefill", "prefill_waits", 900.0)


def test_a_change_has_to_be_proposed_for_a_while():
    gate = Hysteresis()
    assert gate.look(WAITS, 100.0) is None
    assert gate.look(WAITS._replace(slot=3), 100.0 + PROPOSED_S - 0.1) is None
    assert gate.look(WAITS, 100.0 + PROPOSED_S) == WAITS


def test_a_look_without_it_begins_the_while_again():
    gate = Hysteresis()
    gate.look(WAITS, 100.0)
    gate.look(None, 101.0)
    assert gate.look(WAITS, 100.0 + PROPOSED_S) is None
    assert gate.look(WAITS, 100.0 + 2 * PROPOSED_S) == WAITS


def test_after_a_change_there_is_none_until_it_has_settled():
    gate = Hysteresis()
    gate.look(WAITS, 100.0)
    done = 100.0 + PROPOSED_S
    assert gate.look(WAITS, done) == WAITS
    looks = [done + 0.5 * i for i in range(40)]
    second = next(at for at in looks if at > done and gate.look(WAITS, at))
    assert second >= done + SETTLE_S


def test_calm_takes_longer():
    gate, calm = Hysteresis(), Change(1, "prefill", "calm", 0.0)
    assert gate.look(calm, 100.0) is None
    assert gate.look(calm, 100.0 + CALM_S - 1) is None
    assert gate.look(calm, 100.0 + CALM_S) == calm
