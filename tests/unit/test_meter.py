"""What a leg's times say of an engine: only clean observations, and what they leave in the queue."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdnode.estimate import Constants, Estimator
from pdnode.meter import Arrivals, Meter, Work

KNOWN = Constants(10, 1, 0, 10, 1, 1, 0.01, 2)


class Noting(Estimator):
    def __init__(self, initial=KNOWN):
        super().__init__(chunk_tokens=2048, initial=initial)
        self.seen: list[tuple] = []

    def observe_prefill(self, *seen):
        self.seen.append(("prefill", *seen))

    def observe_decode_step(self, *seen):
        self.seen.append(("step", *seen))

    def observe_handoff(self, *seen):
        self.seen.append(("handoff", *seen))


def test_a_prefill_alone_on_an_idle_engine_is_seen_less_the_way():
    meter = Meter(Noting())
    meter.sent(work := Work(200, 50), 1000.0)
    assert meter.backlog.left_ms(1000.0) == 160  # a pass and 150 tokens
    meter.answered(work, 150, 50, 1180.0)
    assert meter.estimator.seen == [("prefill", 150, 50, 178.0, 0)]
    assert meter.backlog.left_ms(1180.0) == 0
    assert meter.streams == 1
    meter.over(work, 2000.0, answered=True)
    assert meter.streams == 0


def test_prefills_that_shared_the_engine_say_nothing():
    meter = Meter(Noting())
    meter.sent(one := Work(200), 1000.0)
    meter.sent(two := Work(200), 1001.0)
    meter.answered(one, 200, 0, 1300.0)
    meter.answered(two, 200, 0, 1400.0)
    assert meter.estimator.seen == []


def test_beside_streams_their_part_is_taken_out():
    meter = Meter(Noting())
    meter.streams = 4
    meter.sent(work := Work(100), 1000.0)
    meter.answered(work, 100, 0, 1200.0)
    # less the way (2), half a step of four streams (7), and four streams in the pass (4)
    assert meter.estimator.seen == [("prefill", 100, 0, 187.0, 0)]


def test_a_leg_that_copies_is_no_prefill_and_one_that_is_given_up_leaves_the_queue():
    meter = Meter(Noting())
    meter.sent(copying := Work(1000, computes=False), 1000.0)
    assert meter.backlog.left_ms(1000.0) == 11
    meter.sent(given_up := Work(200), 1000.0)
    meter.over(given_up, 1001.0, answered=False)
    meter.answered(copying, 1, 999, 1020.0)
    assert meter.estimator.seen == []
    assert (meter.streams, meter.waiting) == (1, [])


def test_a_step_between_two_equal_batches_is_a_decode_step():
    meter = Meter(Noting())
    meter.sent(work := Work(100), 1000.0)
    meter.answered(work, None, 0, 1200.0)
    meter.stepped(1, 1200.0)
    meter.stepped(1, 1212.0)
    meter.sent(second := Work(100), 1213.0)
    meter.stepped(1, 1230.0)  # may have computed the second's prompt
    meter.answered(second, None, 0, 1300.0)
    meter.stepped(2, 1300.0)
    meter.stepped(2, 1313.0)
    meter.stepped(1, 1325.0)  # one of the two ended in the step before
    assert meter.estimator.seen == [("step", 1, 12.0), ("step", 2, 13.0)]


@pytest.mark.parametrize(("copies", "seen"), [(1, [("handoff", 500, 4.0)]), (2, [])])
def test_a_copy_is_seen_when_it_was_the_only_one(copies, seen):
    meter = Meter(Noting())
    record = SimpleNamespace(handoffs_in=copies, handoff_ns=4_000_000, prefix_pulls=0, prefix_ns=0)
    assert meter.copied(500, record) == (4.0 if seen else None)
    assert meter.estimator.seen == seen


def test_arrivals_fade_when_none_comes():
    arrivals = Arrivals()
    assert arrivals.per_ms(0.0) == 0.0
    for at in range(0, 1000, 100):
        arrivals.add(float(at))
    assert arrivals.per_ms(1000.0) == 0.01
    assert arrivals.per_ms(10_000.0) == 0.001
