"""Prefix sharing under vLLM's own scheduler: evictions, preemptions, lost copies, leaving clients."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.tiny_models import tiny_llama
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
    """Chats that hop, with room for a few of them: every answer is what the whole prompt gives."""
    rng = random.Random("crowd")
    starts = [ids(("system", i), 3 * BLOCK + 5) for i in range(3)]
    waiting: dict[str, tuple[int, list[int], int]] = {}
    for engine in machine.engines:
        engine.lose_loads = 0.1
    for number in range(150):
        prompt = [*rng.choice(starts), *ids(rng.randrange(12), rng.randrange(1, 60))]
        slot, count, name = rng.randrange(2), rng.randrange(1, 30), str(number)
        machine.engines[slot].send(name, prompt, count)
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
