"""A node with little room and strict rules: what it refuses, what it holds back, who may leave.

One prefill and one decode engine of 23 blocks each, ``--strict`` and a short ``--lease``. The truth
of every answer is the node's own when it has nothing else to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from bench.chaos import ask as ask_stream
from bench.leftovers import names_of
from bench.servers import ENGINE_ARGS, MODEL_NAME, Node
from pdnode import rundir
from pdnode.reaper import marked
from tests.node.extension import Looking
from tests.twin.checks import settled

BLOCK = 128
BLOCKS = 24
"""One of them is vLLM's null block."""
BLOCK_BYTES = 128 * 2**10
LEASE_S = 4
BOUND = 20
AT_ONCE_S = 5.0
KEY = "a-key-of-this-test"
AUTHORIZATION = {"Authorization": f"Bearer {KEY}"}
MARKER = "quetzalcoatlus"

pytestmark = [pytest.mark.engine, pytest.mark.kill]


@pytest.fixture(scope="module")
def node(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    little = ["--kv-cache-memory-bytes", str(BLOCKS * BLOCK_BYTES)]
    little += ["--max-num-queued-reqs", str(BOUND), "--lease", str(LEASE_S)]
    rules = ["--strict", "--split", "always", "--api-key", KEY]
    rules += ["--worker-extension-cls", f"{Looking.__module__}.{Looking.__name__}"]
    log = tmp_path_factory.mktemp("pressure") / "node.log"
    node = Node(str(model), log, *ENGINE_ARGS, *little, *rules, VLLM_SERVER_DEV_MODE="1")
    node.http.headers.update(AUTHORIZATION)
    try:
        node.wait_ready()
        yield node
    finally:
        node.stop()


def body_of(name: object, length: int, max_tokens: int) -> dict:
    rng = random.Random(f"pressure {name}")
    prompt = [rng.randrange(10, 400) for _ in range(length)]
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return body | {"ignore_eos": True, "return_token_ids": True}


def ask(node: Node, body: dict) -> list[int] | int:
    """The tokens, or the status of an error."""
    answer = node.http.post("/v1/completions", json=body)
    return answer.json()["choices"][0]["token_ids"] if answer.is_success else answer.status_code


def ask_all(node: Node, bodies: list[dict], at_once: int) -> list[list[int] | int]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda body: ask(node, body), bodies))


def forget(node: Node) -> None:
    node.http.post("/reset_prefix_cache").raise_for_status()


def engine_of(status: dict, role: str) -> dict:
    return next(e for e in status["engines"] if e["role"] == role)


def metric(node: Node, name: str) -> float:
    lines = node.http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_a_decode_engine_that_runs_out_of_blocks_preempts_and_answers_the_same(node):
    bodies = [body_of(f"grows {i}", 4 * BLOCK - 10, 4 * BLOCK) for i in range(4)]
    alone = ask_all(node, bodies, at_once=2)
    for _ in range(4):
        forget(node)
        before, preempted = settled(node), metric(node, "vllm:num_preemptions_total")
        assert ask_all(node, bodies, at_once=4) == alone
        after = settled(node)
        assert after["handoffs"] == before["handoffs"] + 4
        assert after["failed"] == before["failed"]
        if metric(node, "vllm:num_preemptions_total") > preempted:
            return
    raise AssertionError("decode never ran out of blocks: the four were not in it at one time")


@contextlib.contextmanager
def stopped(node: Node, role: str) -> Iterator[None]:
    """The engine's core is stopped, as one that has no room: it takes nothing."""
    pid = engine_of(node.status(), role)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_what_decode_does_not_take_holds_half_of_prefill_and_then_clients_are_told(node):
    bodies = [body_of(f"waits {i}", 300, 40) for i in range(BOUND)]
    alone = ask_all(node, bodies, at_once=4)
    forget(node)
    before = settled(node)
    with ThreadPoolExecutor(BOUND) as pool, stopped(node, "decode"):
        asking = [pool.submit(ask, node, body) for body in bodies[:-1]]
        status = node.wait_status(
            lambda s: s["counters"]["prefills_deferred"] > before["prefills_deferred"],
            20,
            "prompts held back",
        )
        prefill = engine_of(status, "prefill")
        assert prefill["kv_blocks_total"] - prefill["kv_blocks_free"] <= BLOCKS // 2
        # P has room for what ends on P.
        assert ask(node, body_of("ends on P", 300, 1)) != 503
        asking.append(pool.submit(ask, node, bodies[-1]))
        begun = before["requests"] + BOUND + 1
        node.wait_status(lambda s: s["counters"]["requests"] == begun, 20, "all begun")
        check_refusals(node)
        node.wait_status(
            lambda s: s["counters"]["leases_expired"] > before["leases_expired"],
            LEASE_S + 20,
            "a lease that runs out",
        )
    answers = [one.result(60) for one in asking]
    after = settled(node)
    # --strict: whose KV was given up is told so, and nobody else. What P gave up may still be in its
    # prefix cache, from where decode copies it as any prefix.
    lost = after["leases_expired"] - before["leases_expired"]
    told = [a for a in answers if not isinstance(a, list)]
    assert told == [500] * len(told)
    assert 1 <= lost < BOUND
    assert len(told) <= lost
    assert all(one in (500, other) for one, other in zip(answers, alone, strict=True))
    assert after["failed"] - before["failed"] == len(told)
    # Told is who would have been computed again.
    recomputed = after["recomputed_prompt_tokens"] > before["recomputed_prompt_tokens"]
    assert recomputed == bool(told)


def check_refusals(node: Node) -> None:
    rejected = node.status()["counters"]["rejected"]
    chat = [{"role": "user", "content": "hello"}]
    for path, body in (
        ("/v1/completions", {"prompt": "hello", "stream": True}),
        ("/v1/chat/completions", {"messages": chat, "stream": True}),
        ("/v1/responses", {"input": "hello"}),
    ):
        answer = node.http.post(path, json={"model": MODEL_NAME, **body})
        assert answer.status_code == 503, path
        assert int(answer.headers["retry-after"]) > 0
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == (503, None)
        assert error["message"]
    assert node.status()["counters"]["rejected"] == rejected + 3


def test_fifty_clients_leave_at_any_moment(node):
    """In the queue, while P computes, before and in the copy, while D answers, when it is over."""
    before, engines = settled(node), node.status()["engines"]
    asyncio.run(leave_at_random(node, 50))
    # The server has seen what was sent before; what lay in a socket is counted from here.
    assert ask(node, body_of("after the leavers", 10, 2)) != 503
    after = settled(node)
    assert after["requests"] > before["requests"]
    assert after["failed"] == before["failed"]
    assert [e["pid"] for e in node.status()["engines"]] == [e["pid"] for e in engines]


async def leave_at_random(node: Node, count: int) -> None:
    rng = random.Random(5)
    room = asyncio.Semaphore(BOUND // 2)
    answered = []

    async def one(client: httpx.AsyncClient, number: int, after_s: float) -> None:
        body = body_of(f"leaves {number}", rng.randrange(130, 1500), 60) | {"stream": True}
        async with room:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(after_s):
                    answered.append(await ask_stream(client, body))

    async with httpx.AsyncClient(base_url=node.url, headers=AUTHORIZATION, timeout=60) as client:
        await asyncio.gather(*(one(client, i, rng.uniform(0, 1.5)) for i in range(count)))
    assert len(answered) < count
    assert not [answer.error for answer in answered if answer.error]


# --- safety ---------------------------------------------------------------------------------------

GUARDED = (
    "/pd/status",
    "/pd/requests",
    "/metrics",
    "/v1/models",
    "/version",
    "/openapi.json",
    "/ping",
    "/load",
)


@pytest.mark.parametrize("key", ["", "Basic x", "Bearer another", KEY])
def test_the_key_guards_everything_but_health(node, key):
    with httpx.Client(base_url=node.url, headers={"Authorization": key} if key else {}) as stranger:
        assert stranger.get("/health").status_code == 200
        for path in GUARDED:
            assert stranger.get(path).status_code == 401, path
        role = {"engine": "prefill-0", "role": "decode"}
        for path in ("/pd/role", "/v1/completions", "/tokenize", "/reset_prefix_cache"):
            assert stranger.post(path, json=role).status_code == 401, path
    assert engine_of(node.status(), "prefill")["id"] == "prefill-0"


def test_files_and_segments_are_for_their_user_only(node):
    boot_id = node.status()["boot_id"]
    folder = rundir.base_dir() / boot_id
    for private in (rundir.base_dir(), folder, rundir.base_dir() / rundir.LOGS / boot_id):
        assert stat.S_IMODE(private.stat().st_mode) == 0o700, private
    sockets = [path for path in folder.iterdir() if stat.S_ISSOCK(path.stat().st_mode)]
    # vLLM's own between engine core and worker too, of which one names no engine.
    assert {path.name[:5] for path in sockets} > {"prefi", "decod"}
    segments = [Path("/dev/shm", name) for name in names_of(boot_id)]
    assert segments
    for path in (*folder.iterdir(), *segments):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_what_is_the_nodes_own_is_not_taken_from_a_client(node):
    body = body_of("plain", 200, 20)
    plain, before = ask(node, body), settled(node)
    private = {"do_remote_prefill": True, "remote_slot": 0, "transfer_id": "of somebody else"}
    for field in (
        {"kv_transfer_params": private},
        {"vllm_xargs": {"pdnode_forced_tokens": [11, 12, 13]}},
    ):
        answer = node.http.post("/v1/completions", json=body | field)
        taken = answer.is_success and answer.json()["choices"][0]["token_ids"] == plain
        assert taken or answer.status_code == 400, (field, answer.text)
    assert settled(node)["load_failures"] == before["load_failures"]


def of_each_worker(node: Node, method: Callable) -> list:
    return node.http.post("/collective_rpc", json={"method": method.__name__}).json()["results"]


def test_workers_are_extended_by_the_user_and_by_the_node(node):
    assert of_each_worker(node, Looking.kind_of_generators) == ["Generators", "Generators"]


def test_the_first_request_for_logprobs_compiles_nothing(node):
    """vLLM leaves that to the request, and all streams of the engine wait for seconds."""
    before = of_each_worker(node, Looking.graphs_compiled)
    assert all(before)
    body = {"model": MODEL_NAME, "prompt": "hello", "max_tokens": 3, "logprobs": 2}
    assert node.http.post("/v1/completions", json=body).status_code == 200
    assert of_each_worker(node, Looking.graphs_compiled) == before


def test_no_log_holds_a_prompt(node):
    """Last but the stop: by now these logs have seen errors, leavers and refusals."""
    chat = {"model": MODEL_NAME, "messages": [{"role": "user", "content": MARKER}]}
    assert node.http.post("/v1/chat/completions", json=chat | {"max_tokens": 4}).is_success
    assert node.http.post("/v1/completions", json={"prompt": MARKER, "n": 0}).status_code == 400
    logs = rundir.base_dir() / rundir.LOGS / node.status()["boot_id"]
    written = {path: path.read_text(errors="replace") for path in (*logs.iterdir(), node.log)}
    assert len(written) >= 3
    assert [path for path, text in written.items() if MARKER in text] == []


def test_a_second_ctrl_c_ends_it_at_once(node):
    """Last on this node: it ends it."""
    boot_id = node.status()["boot_id"]
    body = body_of("never ends", 200, 1700) | {"stream": True}
    with node.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_bytes())
        node.process.send_signal(signal.SIGINT)
        node.wait_status(lambda s: s["draining"], 5, "draining")
        node.process.send_signal(signal.SIGINT)
        assert node.process.wait(AT_ONCE_S) == 0
    deadline = time.monotonic() + AT_ONCE_S
    while left := [*marked(boot_id), *names_of(boot_id)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
    assert "Traceback" not in node.log.read_text(errors="replace")
