"""The twin's answers, recorded before any node starts: two servers at once would be too much."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.servers import ENGINE_ARGS, Twin
from tests.twin.cases import BLOCK, CROWD, Case
from tests.twin.record import Recorded, record


@pytest.fixture(scope="session")
def block_bytes(model: Path) -> int:
    """KV of one block of the tiny model: K and V, of every layer and KV head, in float32."""
    shape = json.loads((model / "config.json").read_text())
    values = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return values * 4 * BLOCK


@pytest.fixture(scope="session")
def recordings(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Recorded | Exception]:
    """By case name, for the cases that the selected tests need."""
    log = tmp_path_factory.mktemp("twin") / "twin.log"
    twin = Twin(str(model), log, *ENGINE_ARGS)
    try:
        twin.wait_ready()
        return record(twin.url, _wanted_cases(request.session.items))
    finally:
        twin.stop()


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
