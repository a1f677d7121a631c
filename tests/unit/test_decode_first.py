"""Decode-first under vLLM's own schedulers: chunks, crowds over few blocks, clients that leave."""

from __future__ import annotations

import random

import pytest

from bench.tiny_models import tiny_llama
from tests.unit.handing_over import BLOCK, CHUNK, D, P, Pair, expected
from tests.unit.vllm_scheduler import without_process_ties


@pytest.fixture
def pair(monkeypatch, request):
    without_process_ties(monkeypatch)
    p_blocks, d_blocks, ahead = request.param
    pair = Pair(str(tiny_llama()), (p_blocks, d_blocks), ahead=ahead)
    yield pair
    pair.close()


def ids(seed: object, count: int) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randrange(3, 300) for _ in range(count)]


def idle(pair: Pair) -> None:
    assert [e.free for e in pair.engines] == [len(e.memory) - 1 for e in pair.engines]


@pytest.mark.parametrize("pair", [(64, 64, False), (64, 64, True)], indirect=True)
def test_only_the_last_chunk_is_left_at_prefills_end(pair):
    prompt = ids("long", 6 * CHUNK - 5)
    pair.send("a", prompt, 20)
    pair.run()
    assert pair.answers["a"] == expected(prompt, 20)
    record = pair.index.engine(D)
    assert record.handoff_bytes == 24  # the lab's worker counts blocks
    assert record.handoff_tail_bytes == CHUNK // BLOCK
    assert (record.handoffs_in, record.follows, record.load_failures) == (1, 1, 0)
    idle(pair)


@pytest.mark.parametrize("pair", [(64, 64, False), (64, 64, True)], indirect=True)
def test_a_hand_off_that_fails_is_computed_and_said(pair):
    """From what is said here the front end counts it, and --strict ends the request."""
    prompt = ids("lost", 5 * BLOCK + 3)
    prefill, decode = pair.engines
    decode.lost.add("a/d")
    prefill.send("a/p", prompt, 1, do_remote_decode=True)
    pair.run()
    token1 = prefill.answers["a/p"]
    decode.send("a/d", [*prompt, *token1], 4, **prefill.offered["a/p"])
    pair.run()
    assert token1 + decode.answers["a/d"] == expected(prompt, 5)
    assert decode.computed["a/d"] == len(prompt) + 1
    record = pair.index.engine(D)
    assert (record.handoffs_in, record.load_failures) == (0, 1)
    idle(pair)


@pytest.mark.parametrize("pair", [(64, 64, False), (64, 64, True)], indirect=True)
def test_what_a_follower_copied_is_there_for_the_next_turn_anywhere(pair):
    prompt = ids("first turn", 6 * CHUNK - 5)
    pair.send("a", prompt, 20)
    pair.run()
    prefill, decode = pair.engines
    assert not decode.wrong_blocks()
    assert prefill.scheduler.reset_prefix_cache(reset_connector=True)
    turn = [*prompt, *pair.answers["a"], *ids("second turn", 30)]
    prefill.send("b", turn, 3)
    pair.run()
    assert prefill.answers["b"] == expected(turn, 3)
    assert prefill.computed["b"] <= 30 + BLOCK
    assert not prefill.wrong_blocks()


@pytest.mark.parametrize(
    "pair", [(64, 40, False), (64, 40, True), (40, 34, False), (40, 34, True)], indirect=True
)
def test_a_crowd_over_few_blocks_is_answered_and_leaves_nothing(pair):
    """Decode has room for two or three of them: followers find none, and give back what they have."""
    rng = random.Random("crowd")
    waiting: dict[str, tuple[list[int], int]] = {}
    for number in range(120):
        name, prompt = str(number), ids(number % 90, rng.randrange(BLOCK, 20 * BLOCK))
        count = rng.randrange(2, 60)
        pair.send(name, prompt, count)
        waiting[name] = (prompt, count)
        for _ in range(rng.randrange(30)):
            pair.step()
        if rng.random() < 0.2:
            gone = rng.choice([*waiting])
            waiting.pop(gone)
            if gone not in pair.answers or gone in pair._open:
                pair.leave(gone)
        assert [engine.wrong_blocks() for engine in pair.engines] == [[], []]
    pair.run()
    for name, (prompt, count) in waiting.items():
        assert pair.answers[name] == expected(prompt, count), name
    record = pair.index.engine(D)
    assert record.follows
    assert record.follow_no_room
    assert record.follow_yielded
    assert record.load_failures == 0
    assert pair.index.engine(P).leases_expired == 0
    idle(pair)
