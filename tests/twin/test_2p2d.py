"""Two prefill and two decode engines against the twin: what mixing up engines would break."""

from __future__ import annotations

import pytest

from tests.twin import chat, scenarios
from tests.twin.cases import BY_NAME
from tests.twin.checks import replay, settled

pytestmark = pytest.mark.engine

NAMES = (
    "completion-prompt_1-max_tokens_2-at_once",
    "completion-prompt_128-max_tokens_1-at_once",
    "completion-prompt_128-max_tokens_2-streamed",
    "completion-prompt_129-max_tokens_200-at_once",
    "completion-prompt_1000-max_tokens_200-streamed",
    "chat-prompt_1000-max_tokens_200-at_once",
    "stop-tokens_1_and_2-cut-streamed",
    "stop-tokens_3_to_5-included-at_once",
    "stop_token-1",
    "eos_first-at_once",
    "min_tokens",
    "seed-streamed",
    "frequency_penalty",
    "n_4",
    "n_4-streamed",
    "prompt_logprobs",
    "echo-logprobs",
    "list_of_ids",
    "list_of_strings-streamed",
    "json_schema-streamed",
    "tools-required-at_once",
    "usage_continuous-chat",
    "responses-streamed",
    "models",
    "kv_params-remote_prefill",
    "bad-too_long",
    "bad-broken_json",
)


@pytest.fixture(scope="module")
def node(recordings, serving):
    # A policy that may keep a request on one engine is another test's subject.
    with serving("--split", "always", prefill=2, decode=2) as node:
        yield node


@pytest.mark.parametrize("case", [BY_NAME[name] for name in NAMES], ids=NAMES)
def test_node_answers_as_its_twin(node, recordings, block_bytes, case):
    replay(node, recordings[case.name], block_bytes)


def test_all_cases_at_once(node, recordings):
    shared = [recordings[name] for name in NAMES]
    scenarios.all_cases_at_once(node, [one for one in shared if scenarios.may_share_a_batch(one)])


def test_crowd_answers_as_one_by_one(node, crowd):
    scenarios.crowd_answers_as_one_by_one(node, crowd)


def test_every_pair_has_a_path(node):
    settled(node)
    pairs = {(path["from"], path["to"]) for path in node.status()["paths"]}
    assert pairs == {(f"prefill-{p}", f"decode-{d}") for p in (0, 1) for d in (0, 1)}


def test_clients_may_leave_while_prefilling(node):
    scenarios.leave_while_prefilling(node, stream=True)


@pytest.mark.parametrize("chunks", [1, 5])
def test_clients_may_leave_after_some_chunks(node, chunks):
    scenarios.leave_after(node, chunks)


def test_a_conversation_is_computed_once(node, conversation):
    turns, computed = chat.talk(node.url, "stays")
    assert turns == conversation
    chat.assert_little_was_computed(computed)


def test_a_conversation_that_hops_between_engines_is_computed_once(node, conversation):
    before = settled(node)
    try:
        turns, computed = chat.talk(node.url, "hops", chat.hopping(node))
    finally:
        chat.roles_as_started(node)
    assert turns == conversation
    chat.assert_little_was_computed(computed)
    after = settled(node)
    # How many turns need one is placement's: it may also stay where the prefix is.
    assert after["prefix_pulls"] > before["prefix_pulls"]
    assert after["prefix_failures"] == before["prefix_failures"]


def test_roles_flip_under_conversations_and_change_none(node, conversation):
    before = settled(node)
    try:
        talked = chat.talk_while_roles_flip(node, talkers=4, pause_s=1.0, flips=4)
    finally:
        chat.roles_as_started(node)
    for turns, computed in talked:
        assert turns == conversation
        chat.assert_little_was_computed(computed)
    scenarios.nothing_failed(before, settled(node))


def test_choices_of_one_prompt_share_its_prefill(node, siblings):
    assert chat.siblings(node.url) == siblings


def test_ctrl_c_leaves_nothing(node):
    scenarios.ctrl_c_leaves_nothing(node)
