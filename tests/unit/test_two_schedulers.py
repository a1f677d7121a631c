"""Prefix sharing under vLLM's own scheduler: evictions, preemptions, lost copies, leaving clients."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.tiny_models import tiny_llama
from pdnode.turns import Turn
from tests.unit.two_schedulers import BLOCK, CHUNK, Machine, next_token
from tests.unit.vllm_scheduler import without_process_ties


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_llama()


@pytest.fixture
def machine(model, monkeypatch, request):
    without_process_ties(monkeypatch)
    blocks, ahead = getattr(request, "param", (64, False))
    machine = Machine(str(model), blocks, ahead=ahead)
    yield machine
    machine.close()


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def run(engine) -> None:
    while engine.busy:
        engine.step()


def ids(seed: object, count: int) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randrange(3, 300) for _ in range(count)]


def test_the_next_turn_is_computed_by_nobody_twice(machine):
    here, there = machine.engines
    history = []
    for turn in range(6):
        engine = machine.engines[turn % 2]
        history += ids(("turn", turn), 25)
        engine.send(f"{turn}", history, 9)
        run(engine)
        assert engine.answers[f"{turn}"] == expected(history, 9)
        if turn:
            assert engine.computed[f"{turn}"] <= 25 + BLOCK
        history += engine.answers[f"{turn}"]
    assert machine.index.engine(here.slot).prefix_pulls > 0
    assert machine.index.engine(there.slot).prefix_pulls > 0
    assert not here.wrong_blocks() + there.wrong_blocks()


def test_a_leg_of_one_token_leaves_what_it_took_and_what_it_computed(machine):
    """A prefill leg often ends in the very step of its copy."""
    here, there = machine.engines
    prompt = ids("one token", 4 * BLOCK)
    here.send("a", prompt, 1)
    run(here)
    longer = [*prompt, *ids("more", 2 * BLOCK)]
    there.send("b", longer, 1)
    run(there)
    assert there.computed["b"] == 2 * BLOCK
    there.send("c", longer, 1)
    run(there)
    assert there.computed["c"] == BLOCK  # the last one, as ever
    assert machine.index.engine(there.slot).prefix_pulls == 1
    here.send("d", [*longer, 5], 1)
    run(here)
    assert here.computed["d"] == 1


def test_a_copy_that_was_lost_is_computed_and_said(machine):
    here, there = machine.engines
    prompt = ids("lost", 5 * BLOCK)
    here.send("a", prompt, 2)
    run(here)
    there.lose_loads = 1.0
    there.send("b", prompt, 2)
    run(there)
    assert there.answers["b"] == expected(prompt, 2)
    assert there.computed["b"] == len(prompt)
    record = machine.index.engine(there.slot)
    assert (record.prefix_pulls, record.prefix_failures) == (0, 1)
    assert not there.wrong_blocks()


@pytest.mark.parametrize(
    "machine", [(24, False), (40, False), (24, True), (40, True)], indirect=True
)
def test_a_crowd_over_few_blocks_never_reads_nonsense(machine):
    """Chats that hop, with room for a few of them, and take turns that have nothing to do with when
    they came: every answer is what the whole prompt gives."""
    rng = random.Random("crowd")
    starts = [ids(("system", i), 3 * BLOCK + 5) for i in range(3)]
    waiting: dict[str, tuple[int, list[int], int]] = {}
    for engine in machine.engines:
        engine.lose_loads = 0.1
    for number in range(150):
        prompt = [*rng.choice(starts), *ids(rng.randrange(12), rng.randrange(1, 60))]
        slot, count, name = rng.randrange(2), rng.randrange(1, 30), str(number)
        turn = Turn(rng.randrange(100), len(prompt), rng.choice((0, 0, 16, 40)))
        machine.engines[slot].send(name, prompt, count, turn=turn)
        waiting[name] = (slot, prompt, count)
        for _ in range(rng.randrange(9)):
            for engine in machine.engines:
                if engine.busy:
                    engine.step()
                assert not engine.wrong_blocks()
        if rng.random() < 0.1:
            gone = rng.choice([*waiting])
            machine.engines[waiting.pop(gone)[0]].leave(gone)
    for engine in machine.engines:
        run(engine)
        assert not engine.wrong_blocks()
    for name, (slot, prompt, count) in waiting.items():
        assert machine.engines[slot].answers[name] == expected(prompt, count), name
    records = [machine.index.engine(slot) for slot in range(2)]
    assert all(record.prefix_pulls for record in records)
    assert any(record.prefix_failures for record in records)
    assert all(record.blocks_evicted for record in records)


def test_nothing_is_taken_of_a_cache_that_was_emptied(machine):
    here, there = machine.engines
    prompt = ids("emptied", 5 * BLOCK)
    here.send("a", prompt, 2)
    run(here)
    assert here.scheduler.reset_prefix_cache(reset_connector=True)
    there.send("b", prompt, 2)
    run(there)
    assert there.computed["b"] == len(prompt)


@pytest.mark.parametrize("machine", [(64, False), (64, True)], indirect=True, ids=["sync", "ahead"])
def test_an_entry_offers_a_prompt_when_its_step_is_counted_and_not_before(machine):
    """``b`` finds the blocks that ``a`` fills in the same step. Neither gets another block here."""
    engine, prompt = machine.engines[0], ids("siblings", 2 * BLOCK + 8)
    for request_id in ("a", "b"):
        engine.send(request_id, prompt, 6)

    def ready() -> list[int]:
        return [machine.index.select(name, owner=0).tokens_ready for name in ("a", "b")]

    engine.step()
    if not engine.answers["a"]:
        assert ready() == [0, 0]
        engine.step()
    assert ready() == [len(prompt)] * 2
    run(engine)
    assert engine.answers["a"] == engine.answers["b"] == expected(prompt, 6)


AHEAD = pytest.mark.parametrize(
    "machine", [(64, False), (64, True)], indirect=True, ids=["sync", "ahead"]
)


def begun(engine, *names: str) -> list[str]:
    """In the order of their first tokens."""
    found = []
    while engine.busy:
        engine.step()
        found += [name for name in names if engine.answers[name] and name not in found]
    return found


@AHEAD
def test_a_short_prompt_passes_a_long_one_that_is_computed(machine):
    """Which goes on where it was, and both answer what they would by themselves."""
    engine, long, short = machine.engines[0], ids("long", 400), ids("short", 40)
    engine.send("long", long, 5, turn=Turn(800, 400, 20))
    engine.step()
    engine.step()
    assert 0 < engine.scheduler.requests["long"].num_computed_tokens <= 2 * 20, (
        "its passes are bound"
    )
    engine.send("short", short, 5, turn=Turn(100, 40))
    assert begun(engine, "long", "short") == ["short", "long"]
    assert engine.answers == {"long": expected(long, 5), "short": expected(short, 5)}


@AHEAD
def test_prompts_that_wait_are_begun_by_deadline_and_streams_go_on(machine):
    engine = machine.engines[0]
    engine.send("stream", ids("stream", 20), 60)
    while not engine.answers["stream"]:
        engine.step()
    prompts = {str(due): ids(due, 100) for due in (500, 300, 400)}
    for due, prompt in prompts.items():
        engine.send(due, prompt, 2, turn=Turn(float(due), 100))
    tokens = len(engine.answers["stream"])
    assert begun(engine, *prompts) == ["300", "400", "500"]
    assert engine.answers["stream"] == expected(ids("stream", 20), 60)
    assert tokens + 6 < 60


def test_who_holds_back_for_one_without_room_goes_on(machine):
    """Here because it may not begin: what is offered already holds all that prefill may hold."""
    engine = machine.engines[0]
    engine.send("long", ids("holds back", 400), 3, turn=Turn(800, 400, 20))
    engine.step()
    engine.scheduler.connector._scheduler._must_wait = lambda request: True
    engine.send("short", ids("no room", 40), 3, turn=Turn(100, 40))
    for _ in range(60):
        engine.step()
    assert engine.answers["long"] == expected(ids("holds back", 400), 3)
    assert not engine.answers["short"]


def test_no_more_run_than_may_while_one_holds_back(machine):
    engine = machine.engines[0]
    engine.send("long", ids("one of eight", 300), 2, turn=Turn(9000, 300, 16))
    engine.step()
    for i in range(12):
        engine.send(str(i), ids(("many", i), 20), 4, turn=Turn(float(i), 20))
    while engine.busy:
        engine.step()
        assert len(engine.scheduler.running) <= 8
    assert engine.answers["long"] == expected(ids("one of eight", 300), 2)


def test_the_index_says_how_many_prompt_tokens_are_queued(machine):
    engine = machine.engines[0]
    engine.send("a", ids("queued a", 100), 9)
    engine.send("b", ids("queued b", 50), 9)

    def queued() -> int:
        engine.scheduler.connector.has_pending_push_work()
        return machine.index.engine(0).queued_prompt_tokens

    seen = [queued()]
    while seen[-1]:
        engine.step()
        seen.append(queued())
    assert seen == [150, 150 - CHUNK, 150 - 2 * CHUNK, 0]
    engine.send("c", ids("queued c", 70), 9)
    assert queued() == 70
    engine.leave("c")
    assert queued() == 0
    run(engine)
