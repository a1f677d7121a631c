"""Many requests at once, and what must hold afterwards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from bench.servers import Node
from tests.twin.checks import NEVER, settled
from tests.twin.record import Recorded
from tests.twin.replay import Request, ask, differences


def salted(recorded: Recorded, salt: str) -> Request:
    """The same request with a prefix cache of its own: no round finds the last one's blocks."""
    assert recorded.request.body is not None
    return replace(recorded.request, body={**recorded.request.body, "cache_salt": salt})


def one_by_one(node: Node, crowd: list[Recorded]) -> list[dict]:
    return [ask(node.url, salted(member, "alone")) for member in crowd]


def all_at_once(node: Node, crowd: list[Recorded], salt: str) -> list[dict]:
    with ThreadPoolExecutor(len(crowd)) as pool:
        return list(pool.map(lambda member: ask(node.url, salted(member, salt)), crowd))


def check_round(node: Node, crowd: list[Recorded], expected: list[dict], salt: str) -> None:
    before = settled(node)
    answers = all_at_once(node, crowd, salt)
    after = settled(node)
    lines = [
        f"{member.case.name}{line}"
        for member, one, other in zip(crowd, expected, answers, strict=True)
        for line in differences(one, other)
    ]
    assert not lines, "\n".join(lines[:20])
    for name in NEVER:
        assert after[name] == before[name], f"{name} rose from {before[name]} to {after[name]}"
    assert after["requests"] - before["requests"] == len(crowd)
    split = sum(member.prompt_lengths[0] >= 128 for member in crowd)
    assert after["handoffs"] - before["handoffs"] == split
