"""A node with a KV pool: what one engine computed, any engine takes instead of computing it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.leftovers import names_of
from bench.servers import ENGINE_ARGS, MODEL_NAME, Node, Server, Twin
from tests.twin.cases import BLOCK

LENGTHS = (2 * BLOCK, 700, 1999)
TOKENS = 24
RESTART_S = 240.0

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def prompt(name: object, length: int) -> list[int]:
    rng = random.Random(f"pool {name}")
    return [rng.randrange(10, 400) for _ in range(length)]


def full_blocks(length: int) -> int:
    """Of which the last token of the prompt is not in one: that is always computed."""
    return (length - 1) // BLOCK


def ask(server: Server, tokens: list[int]) -> tuple[list[int], int]:
    """(token ids of the answer, prompt tokens that were not computed for it)."""
    body = {"model": MODEL_NAME, "prompt": tokens, "max_tokens": TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
    return answer.json()["choices"][0]["token_ids"], details["cached_tokens"]


def counters(node: Node) -> dict[str, int]:
    return node.status()["counters"]


def taken_tokens(node: Node) -> int:
    """From the pool or from another engine's memory."""
    return counters(node)["pool_tokens"] + counters(node)["prefix_tokens"]


def engine_of(status: dict, role: str) -> dict:
    return next(engine for engine in status["engines"] if engine["role"] == role)


def forget(node: Node) -> None:
    """The ready engines' own prefix caches are empty after this."""
    deadline = time.monotonic() + 30
    while True:
        # vLLM forgets nothing while a block is in use, and says so in its log only.
        node.wait_status(
            lambda s: all(e["kv_blocks_free"] == e["kv_blocks_total"] for e in ready(s)),
            30,
            "all blocks back",
        )
        node.http.post("/reset_prefix_cache").raise_for_status()
        status = node.status()
        if not any(engine["kv_blocks_cached"] for engine in ready(status)):
            return
        assert time.monotonic() < deadline, status


def ready(status: dict) -> list[dict]:
    return [engine for engine in status["engines"] if engine["state"] == "ready"]


@pytest.fixture(scope="module")
def expected(twin: Twin) -> dict[int, list[int]]:
    """Plain vLLM's answers, by prompt length."""
    return {length: ask(twin, prompt(length, length))[0] for length in LENGTHS}


@pytest.fixture(scope="module")
def node(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    log = tmp_path_factory.mktemp("node") / "node.log"
    # Always split: which engine computes a prompt is what these tests are about.
    pool = ("--kv-pool-gib", "1", "--split", "always")
    node = Node(str(model), log, *ENGINE_ARGS, *pool, VLLM_SERVER_DEV_MODE="1")
    try:
        node.wait_ready()
        boot_id = node.status()["boot_id"]
        yield node
    finally:
        node.stop()
    assert names_of(boot_id) == []


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_that_no_engine_remembers_comes_from_the_pool(node, expected, length):
    before = counters(node)
    assert ask(node, prompt(length, length))[0] == expected[length]
    computed = counters(node)
    assert computed["pool_tokens"] == before["pool_tokens"]
    assert computed["pool_stored"] - before["pool_stored"] >= full_blocks(length)
    forget(node)
    answer, cached = ask(node, prompt(length, length))
    after = counters(node)
    assert answer == expected[length]
    assert after["pool_hits"] > computed["pool_hits"]
    assert after["pool_tokens"] - computed["pool_tokens"] >= full_blocks(length) * BLOCK
    assert cached >= full_blocks(length) * BLOCK
    assert after["pool_stored"] == computed["pool_stored"]
    assert after["load_failures"] == before["load_failures"]


def test_only_the_common_prefix_is_taken(node):
    start = prompt("common", 5 * BLOCK + 17)
    fresh = ask(node, start + prompt("one end", 300))[0]
    ask(node, start + prompt("another end", 300))
    forget(node)
    before = counters(node)
    assert ask(node, start + prompt("one end", 300))[0] == fresh
    forget(node)
    between = counters(node)
    ask(node, start + prompt("a third end", 300))
    after = counters(node)
    # Both legs may have asked: the one that computes takes five blocks, no more.
    assert between["pool_tokens"] - before["pool_tokens"] >= 7 * BLOCK
    assert after["pool_tokens"] - between["pool_tokens"] == 5 * BLOCK


def test_what_one_role_generated_the_other_takes_as_prompt(node):
    """The next turn of a chat: the answer's full blocks are in the pool too."""
    first = prompt("turn 1", BLOCK - 10)
    answer = []
    for _ in range(8):  # 24 tokens each: in the end there are two full blocks and more.
        answer += ask(node, first + answer)[0]
    forget(node)
    before = counters(node)
    ask(node, first + answer + prompt("turn 2", 30))
    assert counters(node)["pool_tokens"] - before["pool_tokens"] >= 2 * BLOCK


@pytest.mark.kill
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_was_killed_takes_from_the_pool(node, expected, role):
    """While it is away the other one takes it, from there or from the dead one's memory while that is
    still mapped; and once it is back, the P that computes takes it from the pool."""
    length = LENGTHS[-1]
    assert ask(node, prompt(length, length))[0] == expected[length]
    engine = engine_of(node.status(), role)
    restarts = engine["restarts"]
    os.kill(engine["pid"], signal.SIGKILL)
    for pid in engine["worker_pids"]:
        os.kill(pid, signal.SIGKILL)
    node.wait_status(lambda s: engine_of(s, role)["state"] != "ready", 30, "death not seen")
    forget(node)
    before = taken_tokens(node)
    assert ask(node, prompt(length, length))[0] == expected[length]
    assert taken_tokens(node) - before >= full_blocks(length) * BLOCK
    node.wait_status(
        lambda s: (
            engine_of(s, role)["state"] == "ready" and engine_of(s, role)["restarts"] > restarts
        ),
        RESTART_S,
        "restart",
    )
    forget(node)
    before = engine_of(node.status(), "prefill")["pool_tokens"]
    assert ask(node, prompt(length, length))[0] == expected[length]
    taken = engine_of(node.status(), "prefill")["pool_tokens"] - before
    assert taken >= full_blocks(length) * BLOCK
    assert counters(node)["failed"] == 0
