"""Engines with different numbers of ranks: prefill on two and decode on one, and the reverse.

The twin has one rank. Two ranks add up in another order, which in float32, with the tiny model's
logits far apart, decides no token.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.twin.cases import COMPLETIONS, DETAILED, Case, Way, sized
from tests.twin.checks import replay

pytestmark = pytest.mark.engine

HOT = {"temperature": 1, "seed": 1234}


def case(name: str, way: Way = Way.SPLIT, **body: Any) -> Case:
    body = {"max_tokens": 60, **DETAILED, **body}
    return Case(f"tp-{name}", COMPLETIONS, sized(700, **body), way)


TWO_TO_ONE = (case("2_to_1-greedy"), case("2_to_1-seed", Way.RESAMPLED, **HOT))
ONE_TO_TWO = (case("1_to_2-greedy"), case("1_to_2-seed", Way.RESAMPLED, **HOT))


@pytest.fixture(scope="module")
def node(recordings, serving):
    with serving("--prefill-tp", "2", "--split", "always", "--flow", "auto") as node:
        yield node


@pytest.fixture(scope="module")
def reversed_node(node):
    """The same engines with their roles exchanged."""
    for engine, role in (("prefill-0", "decode"), ("decode-0", "prefill")):
        answer = node.http.post("/pd/role", json={"engine": engine, "role": role})
        assert answer.status_code == 200, answer.text
    return node


@pytest.mark.parametrize("case", TWO_TO_ONE, ids=lambda case: case.name)
def test_prefill_has_two_ranks(node, recordings, block_bytes, case):
    assert [len(e["worker_pids"]) for e in node.status()["engines"]] == [2, 1]
    replay(node, recordings[case.name], block_bytes)


@pytest.mark.parametrize("case", ONE_TO_TWO, ids=lambda case: case.name)
def test_decode_has_two_ranks(reversed_node, recordings, block_bytes, case):
    replay(reversed_node, recordings[case.name], block_bytes)
