"""What is asked of every node, whatever its number of engines: crowds, leaving clients, Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from aiohttp import ClientSession

from bench import load
from bench.leftovers import anonymous_names, names_of, still_there
from bench.servers import MAX_MODEL_LEN, MODEL_NAME, Node
from bench.streams import body
from pdnode.reaper import marked
from tests.twin.cases import BLOCK, CHAT, COMPLETIONS, Way, ids
from tests.twin.checks import NEVER, settled
from tests.twin.crowd import all_at_once, check_round, one_by_one
from tests.twin.leaving import hanging_up, read_chunks
from tests.twin.record import Recorded
from tests.twin.replay import Request, ask, differences, without_cached

ROUNDS = 5
LEAVERS = 16
QUEUES = (32, 64, 128, 256)
"""Long prompts sent at once: prefilling them should take longer than seeing that all have begun."""
LONGS, LONG_PROMPT = 4, 1000
GONE_S = 10.0
LAST_WORDS = 200
"""Tokens still to be answered when Ctrl-C comes: the drain time is for them."""


def crowd_answers_as_one_by_one(node: Node, crowd: list[Recorded]) -> None:
    alone = one_by_one(node, crowd)
    for member, answer in zip(crowd, alone, strict=True):
        assert not differences(member.answer, answer), member.case.name
    for round_number in range(ROUNDS):
        check_round(node, crowd, alone, salt=f"round {round_number}")


def all_cases_at_once(node: Node, recorded: list[Recorded]) -> None:
    """Requests of every kind share each engine's batches; each is answered as if it were alone."""
    before = settled(node)
    answers = all_at_once(node, recorded, "all cases")
    after = settled(node)
    lines = [
        f"{one.case.name}{line}"
        for one, answer in zip(recorded, answers, strict=True)
        for line in differences(without_cached(one.answer), without_cached(answer))
    ]
    assert not lines, "\n".join(lines[:20])
    nothing_failed(before, after)


def short_passes_long(node: Node) -> None:
    """In the order in which they came, prefill would compute the long ones first."""
    longs = [ids(random.Random(f"long {i}"), LONG_PROMPT) for i in range(LONGS)]
    short, order = ids(random.Random("passes them"), BLOCK + 20), []
    before = settled(node)

    def begun() -> int:
        return node.status()["counters"]["requests"] - before["requests"]

    async def one(client: ClientSession, name: str, prompt: list[int]) -> None:
        answer = await load.ask(client, body(MODEL_NAME, prompt, 4))
        order.append((answer.token_s[0], name))

    async def all_of_them() -> None:
        async with load.session(node.url) as client, asyncio.TaskGroup() as group:
            for prompt in longs:
                group.create_task(one(client, "long", prompt))
            while begun() < LONGS:
                await asyncio.sleep(0.01)
            assert not order
            group.create_task(one(client, "short", short))

    asyncio.run(all_of_them())
    assert settled(node)["handoffs"] == before["handoffs"] + LONGS + 1
    names = [name for _, name in sorted(order)]
    assert "short" in names[:2], names


def may_share_a_batch(recorded: Recorded | Exception) -> bool:
    """Cases that the engines see, once, and that can be given a prefix cache of their own."""
    if isinstance(recorded, Exception) or recorded.case.path not in (COMPLETIONS, CHAT):
        return False
    # Under load several tokens come in one chunk, from which vLLM's tool parser may lose a call's
    # name: so does the twin.
    streamed_tools = recorded.request.streams and "tools" in recorded.request.body
    return recorded.case.way not in (Way.NOWHERE, Way.MANY) and not streamed_tools


# --- clients that leave --------------------------------------------------------------------------


def _long_stream(name: str, length: int, **body) -> dict:
    prompt = ids(random.Random(name), length)
    return {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": MAX_MODEL_LEN - length,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **body,
    }


def leave_while_prefilling(node: Node, *, stream: bool, follows: bool = False) -> None:
    """More clients each time, until some are seen to leave before their prompt was handed over.

    ``follows``: decode copies while prefill computes, so KV may go from under a copy nobody needs.
    """
    never = [name for name in NEVER if not (follows and name == "load_failures")]
    for queue in QUEUES:
        before = settled(node)
        _begin_and_leave(node, queue, before["requests"] + queue, stream)
        after = _settled_behind(node)
        nothing_failed(before, after, never)
        if after["handoffs"] - before["handoffs"] < queue:
            return
    raise AssertionError(f"all of {QUEUES} were handed over before they left")


def _begin_and_leave(node: Node, queue: int, begun: int, stream: bool) -> None:
    with contextlib.ExitStack() as clients:
        for number in range(queue):
            name = f"prefilling {stream} {begun} {number}"
            body = _long_stream(name, MAX_MODEL_LEN - 48, stream=stream)
            clients.enter_context(hanging_up(node, body))
        node.wait_status(
            lambda status: status["counters"]["requests"] == begun, 30, "all requests begun"
        )


def leave_after(node: Node, chunks: int) -> None:
    """Each of ``LEAVERS`` clients at once reads so many chunks and hangs up."""

    def one(number: int) -> None:
        body = _long_stream(f"after {chunks} {number}", BLOCK * 3 + number)
        with hanging_up(node, body) as connection:
            read_chunks(connection, chunks)

    before = settled(node)
    with ThreadPoolExecutor(LEAVERS) as pool:
        list(pool.map(one, range(LEAVERS)))
    after = settled(node)
    assert after["requests"] - before["requests"] == LEAVERS
    nothing_failed(before, after)


def leave_without_reading(node: Node) -> None:
    before = settled(node)
    for number in range(LEAVERS):
        with hanging_up(node, _long_stream(f"unread {number}", BLOCK * 2, stream=False)):
            pass
    nothing_failed(before, _settled_behind(node))


def _settled_behind(node: Node) -> dict:
    """As ``settled``, once the server has seen what was sent before and may lie in a socket."""
    body = {"model": MODEL_NAME, "prompt": [300], "max_tokens": 2}
    answer = ask(node.url, Request("/v1/completions", body))
    assert answer["status"] == 200, answer
    return settled(node)


def nothing_failed(before: dict, after: dict, never: Sequence[str] = NEVER) -> None:
    for name in never:
        assert after[name] == before[name], f"{name} rose from {before[name]} to {after[name]}"


# --- the end -------------------------------------------------------------------------------------


def ctrl_c_leaves_nothing(node: Node) -> None:
    """As a terminal does it: SIGINT to every process of the foreground group, during a request."""
    boot_id = node.status()["boot_id"]
    anonymous = anonymous_names(marked(boot_id))
    assert names_of(boot_id), "the node's segments are not where this test looks for them"
    assert anonymous, "no process of the node is found, or vLLM no longer shares memory like this"
    begun = settled(node)["requests"] + 1
    with ThreadPoolExecutor(1) as pool:
        body = _long_stream("last words", BLOCK, stream=False, max_tokens=LAST_WORDS)
        last = pool.submit(ask, node.url, Request("/v1/completions", body))
        node.wait_status(lambda s: s["counters"]["requests"] == begun, 10, "a last request begun")
        asked = time.monotonic()
        os.killpg(node.process.pid, signal.SIGINT)
        answer = last.result(timeout=GONE_S)
    assert answer["status"] == 200, answer
    assert answer["body"]["usage"]["completion_tokens"] == LAST_WORDS
    try:
        code = node.process.wait(GONE_S - (time.monotonic() - asked))
    except subprocess.TimeoutExpired:
        raise AssertionError(f"still there after {GONE_S} s:\n{node.tail()}") from None
    assert code == 0, node.tail()
    _wait_gone(boot_id, anonymous, asked + GONE_S)


def _wait_gone(boot_id: str, anonymous: frozenset[str], deadline: float) -> None:
    while any(found := [marked(boot_id), names_of(boot_id), still_there(anonymous)]):
        assert time.monotonic() < deadline, f"left behind: {found}"
        time.sleep(0.05)
