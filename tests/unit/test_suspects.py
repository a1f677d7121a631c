"""Who is blamed for a dead engine: one request at most, and only one that may have been the cause."""

from __future__ import annotations

from types import SimpleNamespace

from pdnode.journey import Journey, Leg, Stage
from pdnode.suspects import DEATHS_IN_A_ROW, PROGRESS, SHORT_LIVES, Suspects
from pdnode.vllm_compat import EngineCoreOutput


def journey(name: str) -> Journey:
    timeline = SimpleNamespace(emitted=lambda count: None)
    made = Journey(SimpleNamespace(request_id=name), None, timeline, stage=Stage.WHOLE)
    made.leg = Leg(0, name, 1)
    return made


def answer(one: Journey, tokens: int) -> None:
    one.leg.answered = True
    one.on_output(EngineCoreOutput(one.leg.leg_id, list(range(tokens))))


def die(suspects: Suspects, *hit: Journey, suspicious: bool = True):
    verdict = suspects.judge(hit, lambda one: suspicious)
    for one in verdict.free:
        one.leg = Leg(1, one.request_id, 1)
    return verdict


def test_the_second_death_in_a_row_is_proof_against_one_request():
    suspects, one, other = Suspects(), journey("one"), journey("other")
    assert die(suspects, one).free == [one]
    assert die(suspects, one, other) == ([one], [], [other])
    assert suspects.next() is None


def test_a_token_between_two_deaths_is_proof_of_innocence():
    suspects, one = Suspects(), journey("one")
    for _ in range(SHORT_LIVES - 1):
        assert die(suspects, one).free == [one]
        answer(one, 1)
    assert die(suspects, one).blamed == [one]


def test_a_stream_that_gets_on_outlives_any_number_of_engines():
    suspects, one = Suspects(), journey("one")
    for _ in range(5 * SHORT_LIVES):
        assert die(suspects, one).free == [one]
        answer(one, PROGRESS)


def test_a_request_that_waited_and_one_of_a_stopped_engine_are_never_the_cause():
    suspects, one = Suspects(), journey("one")
    for _ in range(5 * DEATHS_IN_A_ROW):
        assert die(suspects, one, suspicious=False).free == [one]


def test_a_request_that_still_repeats_its_answer_is_not_why_the_engine_died():
    suspects, one = Suspects(), journey("one")
    answer(one, 5)
    for _ in range(5 * DEATHS_IN_A_ROW):
        one.replayed = 5
        answer(one, 1)
        assert die(suspects, one).free == [one]
    # At the place where it was last time, and there is no next token.
    for _ in range(DEATHS_IN_A_ROW - 1):
        answer(one, 0)
        one.replayed = 0
        assert die(suspects, one).free == [one]
    one.leg.answered = True
    assert die(suspects, one).blamed == [one]


def test_several_with_the_same_against_them_are_tried_one_by_one():
    suspects, some = Suspects(), [journey(name) for name in "abcd"]
    die(suspects, *some)
    verdict = die(suspects, *some)
    assert verdict == ([], some, [])
    a, b, c, d = some
    assert suspects.next() is a
    assert suspects.next() is None  # as long as it has not answered
    answer(a, 1)
    assert suspects.next() is b
    # It dies under b, and a, which shared the engine, is not tried again for that.
    assert die(suspects, a, b) == ([b], [], [a])
    b.stage = Stage.FAILED
    c.stage = Stage.ABORTED
    assert suspects.next() is d
    answer(d, 1)
    assert suspects.next() is None
    assert not suspects
