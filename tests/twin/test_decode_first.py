"""``--flow decode-first``: the twin's answers, what is left to copy at prefill's end, and deaths."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.servers import MODEL_NAME, Node
from tests.twin import scenarios
from tests.twin.cases import (
    BLOCK,
    COMPLETIONS,
    DETAILED,
    STREAMED,
    Case,
    Oracle,
    Way,
    finished,
    ids,
    sized,
)
from tests.twin.checks import replay, settled
from tests.twin.replay import Request, ask

pytestmark = [pytest.mark.engine, pytest.mark.kill]

CHUNK = 512
PROMPT = 1300
"""Tokens: three chunks, the last one of two full blocks and a part."""
LONG = 4000
HOT = {"temperature": 1, "seed": 1234}


def case(name: str, way: Way = Way.SPLIT, **body: Any) -> Case:
    body = {"max_tokens": 40, **DETAILED, **body}
    return Case(f"decode_first-{name}", COMPLETIONS, sized(PROMPT, **body), way)


def stop_token_first(rng: random.Random, oracle: Oracle) -> dict[str, Any]:
    prompt = ids(rng, PROMPT)
    token, _ = oracle.greedy(prompt, 1)[0]
    return {"prompt": prompt, "temperature": 0, "max_tokens": 40, "stop_token_ids": [token]}


CASES = (
    case("greedy", max_tokens=200),
    case("greedy-streamed", **STREAMED),
    case("seed", Way.RESAMPLED, **HOT),
    case("seed-n_2-streamed", Way.RESAMPLED, n=2, **HOT, **STREAMED),
    case("penalties", Way.RESAMPLED, presence_penalty=1.2, frequency_penalty=0.7),
    case("min_tokens", Way.RESAMPLED, min_tokens=30),
    Case(
        "decode_first-stop_token-1",
        COMPLETIONS,
        stop_token_first,
        # The follower may have copied something by then, which nobody fetches.
        Way.MANY,
        shows=finished("stop"),
    ),
)


@pytest.fixture(scope="module")
def node(recordings, serving):
    flags = ("--flow", "decode-first", "--split", "always", "--max-model-len", "4096")
    with serving(*flags, "--max-num-batched-tokens", str(CHUNK), prefill=2) as node:
        yield node


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_node_answers_as_its_twin(node, recordings, block_bytes, case):
    before = node.status()["counters"]
    replay(node, recordings[case.name], block_bytes, other_arguments=True)
    after = node.status()["counters"]
    prompts = recordings[case.name].request.body.get("n", 1)
    assert after["decode_first"] - before["decode_first"] == prompts
    assert after["handoff_bytes"] > before["handoff_bytes"]


def long_prompt(name: str) -> list[int]:
    return ids(random.Random(name), LONG)


def answer(node: Node, prompt: list[int], **body: Any) -> list[int]:
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 60, "temperature": 0, **body}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answered = ask(node.url, Request(COMPLETIONS, body))
    assert answered["status"] == 200, answered
    return answered["body"]["choices"][0]["token_ids"]


def test_what_is_left_at_prefills_end_is_one_chunk(node, block_bytes):
    tails = []
    for attempt in range(3):
        before = settled(node)
        answer(node, long_prompt(f"tail {attempt}"))
        after = settled(node)
        copied, tail = (
            after[name] - before[name] for name in ("handoff_bytes", "handoff_tail_bytes")
        )
        assert copied == -(-LONG // BLOCK) * block_bytes
        tails.append(tail)
    # On busy cores decode may get its turn only after the next chunk, but hardly three times.
    assert 0 < min(tails) <= CHUNK // BLOCK * block_bytes


def test_clients_may_leave_while_prefilling(node):
    scenarios.leave_while_prefilling(node, stream=True, follows=True)


def all_with_a_death(node: Node, role: str) -> None:
    """Eight long prompts, and an engine that dies while the first of them is computed."""
    prompts = [long_prompt(f"{role} {number}") for number in range(8)]
    with ThreadPoolExecutor(len(prompts)) as pool:

        def all_of(salt: str) -> Callable[[], list[list[int]]]:
            asked = [pool.submit(answer, node, prompt, cache_salt=salt) for prompt in prompts]
            return lambda: [future.result(timeout=120) for future in asked]

        expected = all_of("nobody dies")()
        before = node.status()["counters"]
        answers = all_of("one dies")
        status = node.wait_status(
            lambda s: s["counters"]["decode_first"] > before["decode_first"],
            30,
            "a prompt sent to both engines",
        )
        engine = next(e for e in status["engines"] if e["role"] == role)
        os.kill(engine["worker_pids"][0], signal.SIGKILL)
        too_late = status["counters"]["handoffs"] - before["handoffs"] == len(prompts)
        assert answers() == expected
    assert not too_late, "all prompts were computed when it died"
    assert node.status()["counters"]["failed"] == before["failed"]


def test_prefill_may_die_while_decode_follows(node):
    all_with_a_death(node, "prefill")


def test_decode_may_die_while_it_follows(node):
    """Last on this node."""
    all_with_a_death(node, "decode")
    node.wait_status(
        lambda s: all(
            e["kv_blocks_free"] == e["kv_blocks_total"]
            for e in s["engines"]
            if e["state"] == "ready"
        ),
        5,
        "free blocks",
    )
