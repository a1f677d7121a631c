"""Whose prompt is next, how much of it in one pass, and what placement expects to wait."""

from __future__ import annotations

from math import inf

import pytest

from pdnode import turns
from pdnode.connector.prompt_order import Pass, Prompt, next_pass
from pdnode.estimate import Ahead, Constants, Estimator, prefill_ms
from pdnode.meter import Meter, Work
from pdnode.turns import Crowd

KNOWN = Constants(10, 1, 0, 10, 1, 1, 0.01, 2)


# --- what the front end decides


def test_a_quarter_of_those_who_came_lately_are_short():
    crowd = Crowd()
    assert crowd.short_ms(0) == inf
    for at_ms, ms in enumerate((900, 30, 500, 40, 700, 600, 800, 1000)):
        crowd.came(at_ms, ms)
    assert crowd.short_ms(10) == 500
    assert crowd.short_ms(7 + turns.REMEMBERED_MS) == inf, "nobody came lately"


@pytest.mark.parametrize(
    ("new", "short_ms", "tokens"),
    [
        (4000, inf, 0),
        (4000, 300.0, 182),  # 22 passes of at most 190
        (4000, 20.0, 89),  # at least LEAST_PASS_MS
        (379, 300.0, 0),  # less than two passes
    ],
)
def test_a_pass_takes_two_thirds_of_a_short_one(new, short_ms, tokens):
    assert turns.pass_tokens(KNOWN, 0, new, short_ms) == tokens


def test_a_pass_is_worth_what_it_costs_by_itself():
    dear = Constants(100, 1, 0, 10, 1, 1, 0.01, 2)
    assert turns.pass_tokens(dear, 0, 4200, 20.0) == turns.OVERHEADS * 100 - 100


def test_tokens_after_many_others_take_longer():
    attention = Constants(10, 1, 0.001, 10, 1, 1, 0.01, 2)
    assert turns.pass_tokens(attention, 7000, 4000, 300.0) == 19


@pytest.mark.parametrize(("new", "tokens"), [(16, 0), (17, 9), (100, 15)])
def test_a_pass_beside_streams_takes_two_and_a_half_steps(new, tokens):
    slow = Constants(35, 1.4, 0.0005, 36, 1, 1, 0.01, 2)
    assert turns.beside_streams(slow, 0, 1800) == int((90 - 36) / (1.4 + 0.9))
    # There is no room for more than LEAST_SHARE of what a pass costs anyway: 16 tokens.
    full = Constants(90, 1.4, 0, 36, 1, 1, 0.01, 2)
    assert turns.beside_streams(full, 0, new) == tokens
    dear = Constants(35, 9.0, 0, 36, 1, 1, 0.01, 2)
    assert turns.beside_streams(dear, 0, 800) == turns.FEWEST


def test_who_will_be_late_takes_longer_passes():
    assert turns.hurry((), 100, 2) == 1
    assert turns.hurry((Ahead(150, 100),), 100, 2) == 1
    assert turns.hurry((Ahead(150, 300),), 100, 2) == 2
    assert turns.hurry((Ahead(150, 9000),), 100, 2) == turns.HURRY
    assert turns.hurry((Ahead(500, 9000),), 100, 2) == 1, "it passes that one"
    assert turns.hurry((Ahead(150, 9000),), 100, 0) == 1, "in the order in which they came"
    slow, prompt = Constants(35, 1.4, 0, 36, 1, 1, 0.01, 2), turns.Prompt(800, beside_streams=True)
    own_ms = prefill_ms(slow, 800)
    for ahead_ms, steps in ((0.0, 2.5), (3 * own_ms, 5.0), (99 * own_ms, 10.0)):
        queue = (Ahead(0.0, ahead_ms),)
        taken = turns.take(slow, prompt, queue, 0.0, 2.0, inf)
        most = int((steps - 1) * 36 / 1.4)
        assert taken.turn.pass_tokens == -(-800 // -(-800 // most)), steps
        assert taken.pass_ms <= steps * 36 * 1.1


def test_a_short_one_waits_for_the_pass_of_a_long_one_only():
    queue = (Ahead(1000, 400, 25), Ahead(3000, 900))
    assert turns.among(queue, 20, 2) == (25, 0)
    assert turns.among(queue, 600, 2) == (400, 0)
    assert turns.among(queue, 2000, 2) == (1300, 0)
    assert turns.among((Ahead(-5, 400, 25),), 1, 0) == (400, 0), "in the order in which they came"
    assert turns.among((), 20, 2) == (0, 0)


def test_to_make_others_late_is_what_passing_costs():
    assert turns.among((Ahead(450, 400),), 40, 2) == (0, 0)
    assert turns.among((Ahead(450, 400),), 70, 2) == (0, 20)
    assert turns.among((Ahead(300, 400),), 70, 2) == (0, 70), "that one is late in any case"
    assert turns.among((Ahead(450, 400), Ahead(900, 480)), 70, 2) == (0, 20 + 50)


def test_prompts_are_cut_when_others_come_meanwhile():
    meter = Meter(Estimator(chunk_tokens=2048, initial=KNOWN), turns.STRETCH)
    meter.sent(first := Work(1000), 0.0)
    assert first.turn == (2 * 1010, 1000, 0), "who comes alone is not cut"
    meter.crowd.came(5.0, 110.0)
    meter.sent(second := Work(100), 5.0)
    assert second.turn == (5 + 2 * 110, 100, 0)
    meter.sent(third := Work(1000), 6.0)
    assert third.turn == (6 + 2 * 1010, 1000, 84)
    assert third.ms == 1000 + 12 * 10, "and has more passes"
    assert meter.backlog.queue(6.0) == (
        (219, 110, 0),
        (2 * 1010 - 6, 1010 - 6, 1010 - 6),  # its pass, which takes all of it, goes on
        (2 * 1010, 1120, 0),
    )


def test_who_waits_for_anothers_prefix_is_due_after_it():
    meter = Meter(Estimator(chunk_tokens=2048, initial=KNOWN), turns.STRETCH)
    meter.sent(first := Work(1000), 0.0)
    meter.sent(sibling := Work(1000, cached=999, coming=999), 1.0)
    assert sibling.ms == 11, "what it will take"
    assert sibling.turn.deadline_ms > first.turn.deadline_ms
    assert sibling.turn.tokens == 1000, "what it would take now"


def test_beside_streams_a_prompt_is_cut_whoever_came():
    meter = Meter(Estimator(chunk_tokens=2048, initial=KNOWN), turns.STRETCH)
    meter.sent(work := Work(1000, beside_streams=True), 0.0)
    assert work.turn.pass_tokens == 15, "of 25 ms a pass costs 10, and a token 1"
    assert work.ms == 1000 + 67 * 10


def test_in_the_order_in_which_they_came_nothing_is_cut():
    meter = Meter(Estimator(chunk_tokens=2048, initial=KNOWN))
    for at_ms in range(3):
        meter.sent(work := Work(1000), float(at_ms))
        assert work.turn == (at_ms, 1000, 0)


# --- what an engine does with it


def test_the_earliest_deadline_goes_first_and_the_others_hold_back():
    long, short = Prompt(9000, 1500, 128), Prompt(500, 200)
    assert next_pass([long], [short], give_way=True) == Pass([], [0], 200)
    assert next_pass([long], [short], give_way=False) == Pass([0], [0], 328)
    assert next_pass([long, short], [], give_way=True) == Pass([1, 0], [], 200), (
        "the long one waits"
    )
    assert next_pass([long], [], give_way=True) == Pass([0], [], 128)


def test_nobody_holds_back_for_one_that_has_no_room():
    full = Prompt(500, 200, can_begin=False)
    assert next_pass([Prompt(9000, 1500)], [full], give_way=True) == Pass([0], [0], 1500)


def test_who_is_due_is_not_overtaken():
    assert next_pass([Prompt(400, 900)], [Prompt(500, 200)], give_way=True).running == [0]


def test_waiting_ones_take_turns():
    waiting = [Prompt(900, 5), Prompt(300, 5), Prompt(600, 5)]
    assert next_pass([], waiting, give_way=True).waiting == [1, 2, 0]


def test_nothing_bounds_a_pass_of_short_ones():
    assert next_pass([], [Prompt(1, 200), Prompt(2, 300)], give_way=True).tokens == inf


def test_a_much_longer_one_does_not_share_a_pass():
    short, other, long = Prompt(1, 200), Prompt(2, 300), Prompt(3, 5000)
    assert next_pass([], [long, short, other], give_way=True).tokens == 500
    assert next_pass([long], [short, other], give_way=True) == Pass([], [0, 1], 500)
    assert next_pass([], [long, Prompt(9, 200)], give_way=True).tokens == inf, "a shorter one may"


def test_one_that_cannot_begin_bounds_nobodys_pass():
    stuck, long = Prompt(1, 5, can_begin=False), Prompt(3, 5000)
    assert next_pass([], [stuck, long], give_way=True).tokens == 5000
    assert next_pass([], [stuck], give_way=True).tokens == inf
