"""One prefill and one decode engine over every path that KV can take on CPU: the same answers.

``shm`` is what CPU engines take by themselves. ``staged`` is the pipe between GPUs without peer
access, for real. ``cuda-ipc`` runs over a stand-in for NVIDIA's driver library
(tests/cuda/fake_driver): it shows that the calls are in the right order, not how a GPU behaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.leftovers import names_of
from bench.servers import ENGINE_ARGS, MODEL_NAME, Node, Server, Twin
from tests.cuda import fake
from tests.twin.cases import BLOCK

LENGTHS = (129, 256, 700, 1999)
CROWD = 16
CROWD_LENGTH, CROWD_TOKENS = 600, 120
GONE_S = 5.0

pytestmark = [pytest.mark.engine, pytest.mark.kill, pytest.mark.slow]


def prompt(name: object, length: int) -> list[int]:
    rng = random.Random(f"path {name}")
    return [rng.randrange(10, 400) for _ in range(length)]


def ask(server: Server, tokens: list[int], max_tokens: int = 24) -> list[int]:
    return answer(server, tokens, max_tokens)["choices"][0]["token_ids"]


def answer(server: Server, tokens: list[int], max_tokens: int) -> dict:
    body = {"model": MODEL_NAME, "prompt": tokens, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answered = server.http.post("/v1/completions", json=body)
    assert answered.status_code == 200, answered.text
    return answered.json()


def next_turn(first_answer: list[int]) -> list[int]:
    return [*FIRST_TURN, *first_answer, *prompt("next turn", 50)]


def ask_crowd(server: Server, name: object) -> list[list[int]]:
    """All at once. The first tokens are equal in none of the prompts: nothing is cached."""
    prompts = [prompt((name, i), CROWD_LENGTH) for i in range(CROWD)]
    with ThreadPoolExecutor(CROWD) as pool:
        return list(pool.map(lambda tokens: ask(server, tokens, CROWD_TOKENS), prompts))


FIRST_TURN, TURN_ANSWER = prompt("first turn", 300), 140
"""Two full blocks of prompt, and a third of prompt and answer, which only decode holds."""


@pytest.fixture(scope="module")
def expected(twin: Twin) -> dict:
    """Plain vLLM's answers."""
    answers: dict = {n: ask(twin, prompt(n, n)) for n in LENGTHS}
    answers["first turn"] = ask(twin, FIRST_TURN, TURN_ANSWER)
    answers["next turn"] = ask(twin, next_turn(answers["first turn"]))
    return answers | {name: ask_crowd(twin, name) for name in ("calm", "killed")}


@pytest.fixture(scope="module")
def block_bytes(model: Path) -> int:
    shape = json.loads((model / "config.json").read_text())
    values = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return values * 4 * BLOCK


@pytest.fixture(scope="module", params=["shm", "staged", "cuda-ipc"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def node(
    expected: dict, kind: str, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp(kind)
    env = {"PDNODE_FAKE_CUDA": str(fake.build(folder))} if kind == "cuda-ipc" else {}
    asked = ["--split", "always", *([] if kind == "shm" else ["--kv-path", kind])]
    node = Node(str(model), folder / "node.log", *ENGINE_ARGS, *asked, **env)
    try:
        node.wait_ready()
        yield node
    finally:
        node.stop()


def all_ready(node: Node) -> dict:
    return node.wait_status(
        lambda s: all(e["state"] == "ready" for e in s["engines"]), 120, "all engines ready"
    )


def test_path_is_named_and_measured(node: Node, kind: str) -> None:
    [path] = node.status()["paths"]
    assert (path["from"], path["to"], path["kind"]) == ("prefill-0", "decode-0", kind)
    assert path["gb_per_s"] > 0
    assert f"prefill-0 -> decode-0  {kind}" in node.log.read_text()


@pytest.mark.parametrize("length", LENGTHS)
def test_answers_are_plain_vllms(node: Node, expected: dict, block_bytes: int, length: int) -> None:
    before = node.status()
    assert ask(node, prompt(length, length)) == expected[length]
    after = node.status()
    assert after["counters"]["handoffs"] == before["counters"]["handoffs"] + 1
    assert after["paths"][0]["handoffs"] == before["paths"][0]["handoffs"] + 1
    moved = after["counters"]["handoff_bytes"] - before["counters"]["handoff_bytes"]
    assert moved == -(-length // BLOCK) * block_bytes


def test_the_next_turn_computes_nothing_of_the_answer_before(node: Node, expected: dict) -> None:
    first = ask(node, FIRST_TURN, TURN_ANSWER)
    assert first == expected["first turn"]
    before = node.status()["counters"]
    told = answer(node, next_turn(first), len(expected["next turn"]))
    assert told["choices"][0]["token_ids"] == expected["next turn"]
    after = node.status()["counters"]
    assert after["prefix_pulls"] == before["prefix_pulls"] + 1
    assert after["prefix_tokens"] == before["prefix_tokens"] + BLOCK
    assert after["prefix_failures"] == before["prefix_failures"]
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * BLOCK


def test_a_crowd_is_answered_as_one_by_one(node: Node, expected: dict) -> None:
    before = node.status()["counters"]
    assert ask_crowd(node, "calm") == expected["calm"]
    after = node.status()["counters"]
    for name in ("failed", "load_failures", "recomputed_prompt_tokens", "resumes"):
        assert after[name] == before[name], name


def test_a_killed_prefill_engine_fails_no_request(node: Node, expected: dict) -> None:
    before = all_ready(node)
    old_names = [n for n in names_of(before["boot_id"]) if "prefill-0" in n]
    assert old_names
    [prefill] = [e for e in before["engines"] if e["role"] == "prefill"]
    killing = threading.Thread(target=kill_when_handing_over, args=(node, prefill, before))
    killing.start()
    assert ask_crowd(node, "killed") == expected["killed"]
    killing.join(60)
    node.wait_status(
        lambda s: s["engines"][0]["restarts"] == prefill["restarts"] + 1, 60, "a restart"
    )
    after = all_ready(node)
    assert after["counters"]["failed"] == before["counters"]["failed"]
    # The new engine is reached by the same path, and nobody keeps memory of the old one.
    assert ask(node, prompt("after", LENGTHS[0])) == ask(node, prompt("after", LENGTHS[0]))
    assert node.status()["paths"][0]["handoffs"] > after["paths"][0]["handoffs"]
    let_go(node, old_names)


def kill_when_handing_over(node: Node, prefill: dict, before: dict) -> None:
    """SIGKILL of the worker, while some requests have been handed over and others have not."""
    node.wait_status(
        lambda s: s["paths"][0]["handoffs"] > before["paths"][0]["handoffs"], 60, "a hand-off"
    )
    os.kill(prefill["worker_pids"][0], signal.SIGKILL)


def let_go(node: Node, names: list[str]) -> None:
    """No process of the node maps any of these, and no more than one ring each way is open."""
    deadline = time.monotonic() + GONE_S
    while (found := [line for line in mappings(node) if any(name in line for name in names)]) or (
        len([line for line in mappings(node) if ".00d" in line]) > 2
    ):
        assert time.monotonic() < deadline, f"still mapped: {found or mappings(node)}"
        time.sleep(0.1)


def mappings(node: Node) -> list[str]:
    lines = []
    for process in node.descendants():
        with contextlib.suppress(OSError):
            lines += Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return [line for line in lines if "/dev/shm/" in line]


def test_all_blocks_come_back_and_a_stop_leaves_nothing(node: Node) -> None:
    """Last on a node: it ends it."""
    status = node.wait_status(
        lambda s: all(e["kv_blocks_free"] == e["kv_blocks_total"] for e in s["engines"]),
        5,
        "free blocks",
    )
    assert node.stop() == 0
    deadline = time.monotonic() + GONE_S
    while left := names_of(status["boot_id"]):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
