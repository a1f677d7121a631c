"""One prefill and one decode engine against the twin: every case, crowds, leavers, Ctrl-C."""

from __future__ import annotations

import pytest

from tests.twin import scenarios
from tests.twin.cases import CASES
from tests.twin.checks import replay

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def node(recordings, serving):
    # A policy that may keep a request on one engine is another test's subject.
    with serving("--split", "always", prefill=1, decode=1) as node:
        yield node


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_node_answers_as_its_twin(node, recordings, block_bytes, case):
    replay(node, recordings[case.name], block_bytes)


def test_all_cases_at_once(node, recordings):
    shared = [one for one in recordings.values() if scenarios.may_share_a_batch(one)]
    scenarios.all_cases_at_once(node, shared)


def test_crowd_answers_as_one_by_one(node, crowd):
    scenarios.crowd_answers_as_one_by_one(node, crowd)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "at_once"])
def test_clients_may_leave_while_prefilling(node, stream):
    scenarios.leave_while_prefilling(node, stream=stream)


def test_clients_may_leave_without_reading(node):
    scenarios.leave_without_reading(node)


@pytest.mark.parametrize("chunks", [1, 2, 5, 20])
def test_clients_may_leave_after_some_chunks(node, chunks):
    scenarios.leave_after(node, chunks)


def test_a_short_prompt_passes_long_ones_that_came_before(node):
    scenarios.short_passes_long(node)


def test_ctrl_c_leaves_nothing(node):
    scenarios.ctrl_c_leaves_nothing(node)
