"""The pure estimates, and the estimator against engines whose constants are known."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest

from pdnode import estimate
from pdnode.estimate import Backlog, Estimator
from tests.sim.node import TRUE


def test_a_cached_token_costs_attention_only():
    assert estimate.prefill_ms(TRUE, 1000, 0) < estimate.prefill_ms(TRUE, 1000, 8000)
    assert estimate.prefill_ms(TRUE, 1000, 8000) < estimate.prefill_ms(TRUE, 9000, 0)


def test_a_prompt_cut_in_two_costs_the_same_compute():
    whole = estimate.compute_ms(TRUE, 4096, 0)
    halves = estimate.compute_ms(TRUE, 2048, 0) + estimate.compute_ms(TRUE, 2048, 2048)
    assert whole == pytest.approx(halves)


def test_every_pass_has_its_fixed_cost():
    assert estimate.prefill_ms(TRUE, 2049) - estimate.prefill_ms(TRUE, 2048) > TRUE.prefill_pass_ms


def test_nothing_to_copy_costs_nothing():
    assert estimate.handoff_ms(TRUE, 0) == 0
    assert estimate.handoff_ms(TRUE, 1) > TRUE.handoff_ms


def test_the_usual_answer_is_not_max_tokens():
    assert estimate.output_tokens(TRUE, 4096) == TRUE.output_tokens
    assert estimate.output_tokens(TRUE, 5) == 5


def test_only_what_pushes_something_out_is_paid_for():
    full = replace(TRUE, evicted_returns=0.5)
    assert estimate.evict_ms(full, -100) == estimate.evict_ms(TRUE, 100) == 0
    assert estimate.evict_ms(full, 100) > 0


def test_a_backlog_runs_off_but_not_below_nothing():
    backlog = Backlog()
    first = backlog.sent(100, now_ms=0)
    second = backlog.sent(50, now_ms=10)
    assert backlog.left_ms(40) == 110
    assert backlog.left_ms(110) == 50, "the second begins when the first is answered"
    backlog.answered(first, now_ms=120)
    assert backlog.left_ms(130) == 40
    assert backlog.left_ms(500) == 0
    backlog.answered(second, now_ms=500)
    backlog.sent(30, now_ms=1000)
    assert backlog.left_ms(1000) == 30


def test_a_backlog_is_worked_off_by_deadline():
    backlog = Backlog()
    long = backlog.sent(400, now_ms=0, deadline_ms=800, pass_ms=50)
    assert backlog.queue(100) == ((700, 300, 25),)
    short = backlog.sent(30, now_ms=100, deadline_ms=160)
    assert backlog.queue(110) == ((50, 30, 0), (690, 290, 15)), "a pass goes on to its end"
    assert backlog.queue(135) == ((25, 20, 20), (665, 275, 0)), "then the short one is computed"
    backlog.answered(short, now_ms=155)
    assert backlog.queue(160) == ((640, 270, 25),)
    backlog.answered(long, now_ms=440)
    assert backlog.queue(440) == ()


def test_a_pass_that_takes_all_of_a_prompt_lets_nobody_pass():
    backlog = Backlog()
    backlog.sent(400, now_ms=0, deadline_ms=800)
    short = backlog.sent(30, now_ms=100, deadline_ms=160)
    assert backlog.queue(200) == ((-40, 30, 0), (600, 200, 200))
    assert backlog.queue(410) == ((-250, 20, 20), (390, 0, 0))
    backlog.answered(short, now_ms=410)
    assert backlog.left_ms(420) == 0


def test_what_another_engine_saw_is_used_where_one_saw_nothing_itself():
    own, both = Estimator(chunk_tokens=2048), Estimator(chunk_tokens=2048)
    for estimator in (own, both):
        for _ in range(estimate.MIN_OBSERVATIONS):
            for tokens in (16, 64, 200):
                estimator.observe_prefill(tokens, 0, 30 + tokens)
            estimator.observe_decode_step(1, 30)
            estimator.observe_handoff(100, 1)
    both.observe_prefill(1900, 0, 30 + 1900 + 0.001 * 1900 * 950, of_another=True)
    both.observe_prefill(200, 0, 9000, of_another=True)  # its own are better
    assert estimate.prefill_ms(own.constants(), 1900) == pytest.approx(1930, rel=0.05)
    assert estimate.prefill_ms(both.constants(), 1900) == pytest.approx(3735, rel=0.05)
    assert estimate.prefill_ms(both.constants(), 200) == pytest.approx(230, rel=0.2)


def noisy(rng: random.Random, ms: float) -> float:
    """A tenth more or less; one in fifteen was disturbed and took far longer."""
    return ms * rng.uniform(0.9, 1.1) * (rng.uniform(3, 30) if rng.random() < 1 / 15 else 1)


def observe(estimator: Estimator, true: estimate.Constants, times: int = 1000) -> None:
    rng = random.Random(4)
    for _ in range(times):
        new, cached = int(rng.lognormvariate(6, 1.5)) + 1, int(rng.lognormvariate(6, 2))
        streams, copied = rng.randint(1, 60), int(rng.lognormvariate(7, 1.2)) + 1
        estimator.observe_prefill(new, cached, noisy(rng, estimate.prefill_ms(true, new, cached)))
        estimator.observe_decode_step(streams, noisy(rng, estimate.step_ms(true, streams)))
        estimator.observe_handoff(copied, noisy(rng, estimate.handoff_ms(true, copied)))
        estimator.observe_front(noisy(rng, true.front_ms))
        estimator.observe_output(rng.randint(100, 300))


def close(found: estimate.Constants, true: estimate.Constants) -> bool:
    """In what they say of work, not number by number: two constants can stand in for each other."""
    work = [(64, 0), (500, 0), (500, 4000), (4000, 0), (16_000, 0)]
    pairs = [
        *((estimate.prefill_ms(found, *w), estimate.prefill_ms(true, *w)) for w in work),
        *((estimate.step_ms(found, n), estimate.step_ms(true, n)) for n in (1, 10, 50)),
        *((estimate.handoff_ms(found, n), estimate.handoff_ms(true, n)) for n in (200, 3000)),
        (found.front_ms, true.front_ms),
        (found.output_tokens, true.output_tokens),
    ]
    return all(got == pytest.approx(want, rel=0.15) for got, want in pairs)


def test_measures_an_engine_through_noise_and_outliers():
    estimator = Estimator(chunk_tokens=TRUE.chunk_tokens)
    assert estimator.constants() is None
    observe(estimator, TRUE)
    assert close(estimator.constants(), TRUE)


def test_follows_an_engine_that_becomes_half_as_fast():
    slower = {
        f.name: 2 * getattr(TRUE, f.name)
        for f in fields(TRUE)
        if "ms" in f.name
    }  # fmt: skip
    estimator = Estimator(chunk_tokens=TRUE.chunk_tokens, initial=TRUE)
    observe(estimator, TRUE)
    # The old pace leaves the fit as new observations outnumber it.
    for _ in range(4):
        observe(estimator, replace(TRUE, **slower))
    assert close(estimator.constants(), replace(TRUE, **slower))


def test_one_size_of_prompt_gives_no_negative_cost():
    estimator = Estimator(chunk_tokens=2048)
    for _ in range(estimate.REFIT_EVERY):
        estimator.observe_prefill(100, 0, 12.0)
        estimator.observe_decode_step(1, 8.0)
        estimator.observe_handoff(100, 1.0)
    found = estimator.constants()
    assert estimate.prefill_ms(found, 100) == pytest.approx(12.0)
    assert all(getattr(found, f.name) >= 0 for f in fields(found) if "ms" in f.name)


def test_evictions_cost_what_comes_back():
    estimator = Estimator(chunk_tokens=2048, initial=TRUE)
    for _ in range(estimate.REFIT_EVERY + 1):
        estimator.observe_evictions(evicted_tokens=1000, recomputed_tokens=250)
    assert estimator.constants().evicted_returns == pytest.approx(0.25)


def test_the_first_prompt_of_its_length_counts_at_once():
    estimator = Estimator(chunk_tokens=2048)
    for _ in range(estimate.REFIT_EVERY):
        for tokens in (16, 64):
            estimator.observe_prefill(tokens, 0, 30 + tokens)
        estimator.observe_decode_step(1, 30)
        estimator.observe_handoff(100, 1)
    before = estimate.prefill_ms(estimator.constants(), 1900)
    estimator.observe_prefill(1900, 0, 4000)
    assert before < 3000
    assert estimate.prefill_ms(estimator.constants(), 1900) == pytest.approx(4000, rel=0.05)
