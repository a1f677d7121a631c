"""The twin's answers, recorded before any node of these tests starts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.servers import Twin
from tests.twin import chat
from tests.twin.cases import BLOCK, CROWD, Case
from tests.twin.record import Recorded, record


@pytest.fixture(scope="session")
def block_bytes(model: Path) -> int:
    """KV of one block of the tiny model: K and V, of every layer and KV head, in float32."""
    shape = json.loads((model / "config.json").read_text())
    values = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return values * 4 * BLOCK


@dataclass(frozen=True)
class TwinAnswers:
    by_case: dict[str, Recorded | Exception]
    conversation: list[chat.Turn] | None
    siblings: dict | None


@pytest.fixture(scope="session")
def twin_answers(request: pytest.FixtureRequest, twin: Twin) -> TwinAnswers:
    """What the selected tests need."""
    items = request.session.items
    asked = {name for item in items for name in getattr(item, "fixturenames", ())}
    return TwinAnswers(
        record(twin.url, _wanted_cases(items)),
        chat.talk(twin.url, "twin")[0] if "conversation" in asked else None,
        chat.siblings(twin.url) if "siblings" in asked else None,
    )


@pytest.fixture(scope="session")
def recordings(twin_answers: TwinAnswers) -> dict[str, Recorded | Exception]:
    """By case name."""
    return twin_answers.by_case


@pytest.fixture(scope="session")
def conversation(twin_answers: TwinAnswers) -> list[chat.Turn]:
    assert twin_answers.conversation is not None
    return twin_answers.conversation


@pytest.fixture(scope="session")
def siblings(twin_answers: TwinAnswers) -> dict:
    assert twin_answers.siblings is not None
    return twin_answers.siblings


def _wanted_cases(items: list[pytest.Item]) -> list[Case]:
    wanted: dict[str, Case] = {}
    for item in items:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        if isinstance(case, Case):
            wanted[case.name] = case
        if "crowd" in getattr(item, "fixturenames", ()):
            wanted |= {member.name: member for member in CROWD}
    return list(wanted.values())


@pytest.fixture(scope="session")
def crowd(recordings: dict[str, Recorded | Exception]) -> list[Recorded]:
    """Requests that a test sends all at once, with the twin's answers to each alone."""
    members = [recordings[member.name] for member in CROWD]
    for member in members:
        if isinstance(member, Exception):
            raise member
    return members
