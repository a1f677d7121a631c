"""Engines are killed and stopped under running requests; the launcher is stopped and killed.

Real processes, real signals. The truth of every answer is the same node's own answer when nobody was
killed (which tests/twin compares with plain vLLM).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from bench.leftovers import anonymous_names, names_of, still_there
from bench.servers import ENGINE_ARGS, MODEL_NAME, Node
from bench.sse import events
from bench.tiny_models import tiny_llama
from pdnode import reaper, rundir

BLOCK = 128
CHUNKS = ("--max-num-batched-tokens", "512")
"""The prompts of these tests are computed in several steps."""
PROMPT = [(7 * i) % 400 + 10 for i in range(700)]

SAMPLINGS = {
    "greedy": {},
    "seeded": {"seed": 3, "temperature": 1.0},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.3, "min_tokens": 5},
}

pytestmark = pytest.mark.kill


@pytest.fixture(scope="module")
def slow_model() -> Path:
    """Slow enough that the engine, not the front end, sets the pace: a kill then hits a running stream."""
    return tiny_llama(num_layers=12, hidden=512, heads=8, kv_heads=4, head_dim=64)


@pytest.fixture(scope="module")
def node(slow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    log = tmp_path_factory.mktemp("survival") / "node.log"
    # Always split: who is killed must be an engine that a request is on.
    args = (*ENGINE_ARGS, *CHUNKS, "--split", "always", "--health-timeout", "5")
    node = Node(str(slow_model), log, *args, prefill=2, decode=2)
    try:
        node.wait_ready()
        yield node
    finally:
        node.stop()


def tokens_of(node: Node, on_token: Callable[[int], None] | None = None, **body) -> list[int]:
    """Stream one answer; ``on_token(n)`` is called when n tokens have arrived."""
    request = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 300, "temperature": 0}
    request |= {"ignore_eos": True, "stream": True, "return_token_ids": True, **body}
    tokens: list[int] = []
    with node.http.stream("POST", "/v1/completions", json=request) as response:
        assert response.status_code == 200, response.read()
        for chunk in events(response.iter_bytes()):
            assert "error" not in chunk, chunk
            tokens += chunk["choices"][0]["token_ids"]
            if on_token:
                on_token(len(tokens))
    return tokens


def streams_at_once(node: Node, then: Callable[[], None] | None = None) -> dict[str, list[int]]:
    """One stream of each sampling; ``then`` is called once every one has 30 tokens."""
    running = threading.Barrier(len(SAMPLINGS), action=then)

    def one(sampling: dict) -> list[int]:
        return tokens_of(node, once_at(30, lambda: running.wait(60)), **sampling)

    with ThreadPoolExecutor(len(SAMPLINGS)) as pool:
        return dict(zip(SAMPLINGS, pool.map(one, SAMPLINGS.values()), strict=True))


def serving_engine(node: Node, role: str, but: str = "") -> dict:
    """The engine of ``role`` that computes for a request now."""

    def serves(engine: dict) -> bool:
        computes = engine["running"] and engine["index_entries"]
        return engine["role"] == role and computes and engine["id"] != but

    status = node.wait_status(
        lambda s: any(map(serves, s["engines"])), 30, f"a {role} engine with a request"
    )
    return next(filter(serves, status["engines"]))


@pytest.fixture(scope="module")
def expected(node: Node) -> dict[str, list[int]]:
    """Their answers in peace."""
    return streams_at_once(node)


def change_role(node: Node, engine: str, role: str) -> None:
    body = {"engine": engine, "role": role}
    assert node.http.post("/pd/role", json=body).status_code == 200


def all_ready(node: Node) -> dict:
    return node.wait_status(
        lambda s: all(e["state"] == "ready" for e in s["engines"]), 120, "all engines ready"
    )


def once_at(count: int, action: Callable[[], None]) -> Callable[[int], None]:
    done = []

    def on_token(n: int) -> None:
        if n >= count and not done:
            done.append(n)
            action()

    return on_token


def killer(node: Node, role: str, process: str, number: int = signal.SIGKILL):
    def kill() -> None:
        engine = serving_engine(node, role)
        os.kill(engine["pid"] if process == "core" else engine["worker_pids"][0], number)

    return kill


@pytest.mark.parametrize("length", [100, 600])
def test_a_seeded_request_of_one_engine_does_not_end_it(node, length):
    """vLLM's CPU worker ends when a seeded request's own prompt is computed in two steps."""
    before = all_ready(node)
    body = {
        "model": MODEL_NAME,
        "prompt": PROMPT[:length],
        "max_tokens": 1,
        "seed": 1,
        "temperature": 1,
    }
    answers = [node.http.post("/v1/completions", json=body).json() for _ in range(2)]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    after = node.status()
    assert after["counters"]["single_engine"] == before["counters"]["single_engine"] + 2
    assert [e["pid"] for e in after["engines"]] == [e["pid"] for e in before["engines"]]


def test_roles_change_under_load_and_change_no_answer(node, expected):
    with ThreadPoolExecutor(4) as pool:
        begun: list[Future] = []

        def flip_and_begin_another(tokens: int) -> None:
            if tokens >= 60 * (len(begun) + 1) and len(begun) < 4:
                change_role(node, "prefill-1", ("decode", "prefill")[len(begun) % 2])
                begun.append(pool.submit(tokens_of, node))

        answers = [tokens_of(node, flip_and_begin_another)]
        answers += [answer.result() for answer in begun]
    assert answers == [expected["greedy"]] * 5


@pytest.mark.parametrize("body", [b"", b"{", b'{"engine": "x", "role": "decode"}', b"[]"])
def test_a_bad_role_change_is_refused_and_changes_nothing(node, body):
    before = [e["role"] for e in node.status()["engines"]]
    assert node.http.post("/pd/role", content=body).status_code == 400
    assert [e["role"] for e in node.status()["engines"]] == before


@pytest.mark.parametrize("process", ["core", "worker"])
def test_streams_whose_decode_engine_is_killed_go_on_unchanged(node, expected, process):
    before = all_ready(node)["counters"]
    change_role(node, "decode-1", "prefill")  # so that all streams are on decode-0
    kill = killer(node, "decode", process)

    def take_turns() -> None:
        change_role(node, "decode-1", "decode")
        kill()

    assert streams_at_once(node, take_turns) == expected
    after = all_ready(node)["counters"]
    assert after["resumes"] == before["resumes"] + len(SAMPLINGS)
    assert after["failed"] == before["failed"]
    # One partial block of KV may have been in nobody's table yet; the rest is copied. A sampler
    # with a history writes its answer again, but does not compute the prompt again.
    recomputed = after["resume_recomputed_tokens"] - before["resume_recomputed_tokens"]
    assert recomputed <= len(SAMPLINGS) * BLOCK


def test_nothing_hangs_on_the_processes_that_start_engines(node, expected):
    """The nursery and the midwives (pdnode/nursery_process.py): engines outlive them, and the next
    engine is started by a new one."""
    before = all_ready(node)
    midwives = [psutil.Process(engine["pid"]).parent() for engine in before["engines"]]
    [nursery] = {midwife.parent() for midwife in midwives}
    assert nursery.ppid() == node.process.pid

    def kill_them() -> None:
        for process in (nursery, *midwives):
            process.kill()

    assert streams_at_once(node, kill_them) == expected
    after = all_ready(node)
    assert after["counters"]["resumes"] == before["counters"]["resumes"]
    assert [e["pid"] for e in after["engines"]] == [e["pid"] for e in before["engines"]]
    for engine in after["engines"]:
        os.kill(engine["pid"], signal.SIGKILL)
    assert streams_at_once(node) == expected
    assert all_ready(node)["counters"]["failed"] == before["counters"]["failed"]


def test_an_engine_comes_back_although_somebody_tidied_up_its_log(node):
    status = all_ready(node)
    logs = rundir.base_dir() / rundir.LOGS / status["boot_id"]
    assert logs.is_dir()
    shutil.rmtree(logs)
    engine = status["engines"][-1]
    os.kill(engine["pid"], signal.SIGKILL)
    node.wait_status(lambda s: s["engines"][-1]["state"] != "ready", 5, "dead")
    all_ready(node)
    assert (logs / f"{engine['id']}.log").stat().st_size


def test_nothing_runs_on_a_dead_engine(node, expected):
    all_ready(node)
    seen = []

    def kill() -> None:
        victim = serving_engine(node, "decode")
        os.kill(victim["pid"], signal.SIGKILL)
        dead = node.wait_status(
            lambda s: any(e["state"] != "ready" for e in s["engines"]), 5, "a dead engine"
        )
        seen.extend(e["running"] for e in dead["engines"] if e["id"] == victim["id"])

    assert tokens_of(node, once_at(30, kill)) == expected["greedy"]
    assert seen == [0]


def test_a_prompt_whose_prefill_engine_is_killed_is_answered_all_the_same(node):
    prompt = [(11 * i) % 400 + 10 for i in range(1900)]
    in_peace = tokens_of(node, prompt=prompt, max_tokens=100)
    node.http.post("/reset_prefix_cache")
    all_ready(node)
    killed = threading.Thread(target=killer(node, "prefill", "worker"))
    killed.start()
    answers = []
    asking = [
        threading.Thread(
            target=lambda i=i: answers.append(
                (i, tokens_of(node, prompt=prompt[i:], max_tokens=100))
            )
        )
        for i in range(6)
    ]
    for thread in asking:
        thread.start()
    for thread in [killed, *asking]:
        thread.join(120)
    assert len(answers) == 6
    assert dict(answers)[0] == in_peace
    all_ready(node)


def test_a_request_under_which_two_engines_die_is_blamed_and_no_other(node, expected):
    """As one would be that ends whatever computes its prompt."""
    body = {"model": MODEL_NAME, "prompt": [(13 * i) % 400 + 10 for i in range(1900)]}
    before = all_ready(node)["counters"]
    running = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        stream = pool.submit(tokens_of, node, once_at(1, running.set))
        assert running.wait(30)
        poison = pool.submit(node.http.post, "/v1/completions", json=body)
        first = serving_engine(node, "prefill")
        os.kill(first["worker_pids"][0], signal.SIGKILL)
        second = serving_engine(node, "prefill", but=first["id"])
        os.kill(second["worker_pids"][0], signal.SIGKILL)
        assert stream.result(120) == expected["greedy"]
        answer = poison.result(120)
    assert answer.status_code == 500
    message = answer.json()["error"]["message"]
    assert (
        f"2 engines ended while they ran this request, the last one was {second['id']}" in message
    )
    assert all_ready(node)["counters"]["failed"] == before["failed"] + 1


UNSENDABLE = {
    "on the first leg": {"top_k": 2**64, "temperature": 1.0},
    "on the second leg only": {"min_tokens": 1, "stop": ["\ud800"]},
    "in a name": {"vllm_xargs": {"\ud800": 2}, "min_tokens": 1},
    "beside the sampling": {"request_id": "\ud800"},
    "streamed": {"min_tokens": 1, "stop": ["\ud800"], "stream": True},
}


@pytest.mark.parametrize("body", UNSENDABLE.values(), ids=UNSENDABLE)
def test_a_request_that_cannot_be_sent_costs_nobody_anything(node, expected, body):
    """msgpack has no half surrogate pairs and no integers of more than 64 bits; JSON has."""
    before = all_ready(node)
    request = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    # ASCII, as any client may write it.
    text = json.dumps(request | body)
    headers = {"content-type": "application/json"}
    answers = []

    def ask() -> None:
        answers.append(node.http.post("/v1/completions", content=text, headers=headers))

    assert tokens_of(node, once_at(30, ask)) == expected["greedy"]
    [answer] = answers
    assert "cannot be sent to an engine" in answer.text
    assert answer.status_code == 400 or "stream" in body
    after = node.status()
    assert after["counters"]["failed"] == before["counters"]["failed"]
    assert [e["pid"] for e in after["engines"]] == [e["pid"] for e in before["engines"]]
    newest = node.http.get("/pd/requests?limit=2").json()["requests"]
    states = [request["state"] for asked in newest for request in asked["requests"]]
    assert "running" not in states


def test_a_stopped_worker_is_ejected_after_the_health_timeout(node, expected):
    all_ready(node)
    begin_s = time.monotonic()
    got = tokens_of(node, once_at(30, killer(node, "decode", "worker", signal.SIGSTOP)))
    assert got == expected["greedy"]
    assert time.monotonic() - begin_s > 5
    errors = [e["last_error"] or "" for e in all_ready(node)["engines"]]
    assert any("--health-timeout 5 s, as it was stopped by a signal" in error for error in errors)


def test_nothing_of_an_engine_is_in_the_launchers_process_group(node):
    """It would get a terminal's Ctrl-C, and could get the launcher a SIGHUP (setpgid(2))."""
    launcher = node.process.pid
    inside = [p.pid for p in node.descendants() if os.getpgid(p.pid) == launcher]
    assert all(psutil.Process(pid).ppid() == launcher for pid in inside), inside
    assert len(inside) <= 1, "more than the process that starts engines"


def test_all_blocks_come_back(node):
    all_ready(node)
    node.wait_status(
        lambda s: all(e["kv_blocks_free"] == e["kv_blocks_total"] for e in s["engines"]),
        2,
        "free blocks",
    )


def test_a_stop_drains_running_streams_and_refuses_new_ones(node, expected):
    """Last on this node: it ends it."""
    status = all_ready(node)
    pids = [p for e in status["engines"] for p in (e["pid"], *e["worker_pids"])]
    anonymous = anonymous_names(pids)
    refused = []

    def stop() -> None:
        os.kill(node.process.pid, signal.SIGTERM)
        node.wait_status(lambda s: s["draining"], 5, "draining")
        refused.append(node.http.post("/v1/completions", json={"prompt": "x"}))

    assert tokens_of(node, once_at(20, stop)) == expected["greedy"]
    assert refused[0].status_code == 503
    assert refused[0].headers["retry-after"]
    assert node.process.wait(15) == 0
    assert_gone(status["boot_id"], anonymous)


def assert_gone(boot_id: str, anonymous: frozenset[str] = frozenset(), within_s: float = 5) -> None:
    deadline = time.monotonic() + within_s
    while True:
        left = [*reaper.marked(boot_id), *names_of(boot_id), *still_there(anonymous)]
        if (rundir.base_dir() / boot_id).exists():
            left.append("run directory")
        if not left:
            return
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def started(model: Path, log: Path) -> Node:
    return Node(str(model), log, *ENGINE_ARGS)


def wait_for_log(node: Node, text: str) -> None:
    deadline = time.monotonic() + 120
    while text not in node.tail(200):
        assert node.process.poll() is None, node.tail()
        assert time.monotonic() < deadline, node.tail()
        time.sleep(0.05)


def wait_for_first_birth(node: Node) -> None:
    """The nursery forks an engine whose pid the launcher does not know yet."""
    launcher, deadline = psutil.Process(node.process.pid), time.monotonic() + 60
    while not any(child.children() for child in launcher.children()):
        assert time.monotonic() < deadline, node.tail()
        time.sleep(0.001)


def boot_of(node: Node) -> str:
    """The node's boot id before it serves: from the mark in its children's environment."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in node.descendants():
            with contextlib.suppress(OSError):
                for item in Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0"):
                    if item.startswith(f"{reaper.MARK}=".encode()):
                        return item.partition(b"=")[2].decode()
        time.sleep(0.05)
    raise AssertionError("no marked child")


@pytest.mark.parametrize(
    "phase, number",
    [("starting", signal.SIGINT), ("loading", signal.SIGKILL)],
    ids=["sigint-starting", "sigkill-loading"],
)
def test_a_node_that_is_ended_while_it_starts_leaves_nothing(model, tmp_path, phase, number):
    node = started(model, tmp_path / "node.log")
    try:
        wait_for_log(node, f"decode-0     {phase}")
        if phase == "starting":
            wait_for_first_birth(node)
        boot_id = boot_of(node)
        node.process.send_signal(number)
        node.process.wait(15)
        assert_gone(boot_id, within_s=10)
    finally:
        node.stop()


def decides_by_estimate(node: Node) -> None:
    """The one node of these tests with ``--split auto``: it was measured before it was ready."""
    assert all(engine["constants"] for engine in node.status()["engines"])
    tokens_of(node, prompt=PROMPT[:20], max_tokens=4)
    tokens_of(node, prompt=PROMPT[:500], max_tokens=4)
    reasons = node.status()["counters"]["reasons"]
    assert reasons.pop("short_prompt") == 1
    assert [*reasons] in (["idle_prefill"], ["split_faster"]), reasons


def test_a_killed_launcher_takes_everything_with_it(model, tmp_path):
    node = started(model, tmp_path / "node.log")
    try:
        node.wait_ready()
        decides_by_estimate(node)
        status = node.status()
        pids = [p for e in status["engines"] for p in (e["pid"], *e["worker_pids"])]
        anonymous = anonymous_names(pids)
        assert anonymous
        # Of each engine, where its ranks found each other.
        files = reaper.recorded_files(rundir.base_dir() / status["boot_id"])
        assert len({file for file in files if file.parent != reaper.SHM_DIR}) == 2
        node.process.kill()
        node.process.wait(5)
        assert_gone(status["boot_id"], anonymous)
        assert not [file for file in files if file.exists()]
    finally:
        node.stop()
