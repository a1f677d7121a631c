"""Fixtures for tests that talk to a real node. One starts when a test first needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from bench.servers import ENGINE_ARGS, Node, Twin
from bench.tiny_models import tiny_llama


@pytest.fixture(scope="session")
def model() -> Path:
    return tiny_llama()


@pytest.fixture(scope="session")
def twin(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twin]:
    """Plain vLLM with the nodes' arguments. Idle while nobody asks it, so it stays for all tests."""
    twin = Twin(str(model), tmp_path_factory.mktemp("twin") / "twin.log", *ENGINE_ARGS)
    try:
        twin.wait_ready()
        yield twin
    finally:
        twin.stop()


@pytest.fixture(scope="session")
def serving(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., AbstractContextManager[Node]]:
    """``with serving(prefill=2, decode=2) as node``: a ready node, stopped at the end."""

    @contextmanager
    def start(*args: str, prefill: int = 1, decode: int = 1) -> Iterator[Node]:
        log = tmp_path_factory.mktemp("node") / "node.log"
        node = Node(str(model), log, *ENGINE_ARGS, *args, prefill=prefill, decode=decode)
        try:
            node.wait_ready()
            yield node
        finally:
            node.stop()

    return start
