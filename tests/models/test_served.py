"""What docs/models.md calls served, on a running node: plain vLLM's answers, handed over.

One model has them all, so that one node is enough: layers with a sliding window, a LoRA adapter.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.servers import ENGINE_ARGS, MODEL_NAME, Node, Server, Twin
from tests.models.variants import adapter, sliding

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ADAPTER = "with-adapter"
PROMPTS = [[(n * 7 * i + i * i) % 240 + 260 for i in range(700)] for n in (1, 2, 3)]


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Model and flags."""
    folder = tmp_path_factory.mktemp("served")
    windowed = sliding(model, folder / "model", window=200)
    lora = adapter(windowed, folder / "lora")
    return (
        str(windowed),
        *ENGINE_ARGS,
        *("--enable-lora", "--lora-modules", f"{ADAPTER}={lora}", "--max-lora-rank", "8"),
    )


def answers(server: Server, model: str) -> list[list[int]]:
    body = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    asked = [
        server.http.post("/v1/completions", json={"model": model, "prompt": prompt, **body})
        for prompt in PROMPTS
    ]
    return [answer.raise_for_status().json()["choices"][0]["token_ids"] for answer in asked]


@pytest.fixture(scope="module")
def expected(served, tmp_path_factory) -> dict[str, list[list[int]]]:
    model, *flags = served
    twin = Twin(model, tmp_path_factory.mktemp("twin") / "log", *flags)
    try:
        twin.wait_ready()
        return {name: answers(twin, name) for name in (MODEL_NAME, ADAPTER)}
    finally:
        twin.stop()


@pytest.fixture(scope="module")
def node(expected, served, tmp_path_factory):
    model, *flags = served
    flags += ["--split", "always", "--flow", "decode-first", "--max-num-batched-tokens", "256"]
    node = Node(model, tmp_path_factory.mktemp("node") / "log", *flags)
    try:
        node.wait_ready()
        yield node
    finally:
        node.stop()


@pytest.mark.parametrize("name", [MODEL_NAME, ADAPTER])
def test_answers_are_plain_vllms(node, expected, name):
    before = node.status()["counters"]
    assert answers(node, name) == expected[name]
    after = node.status()["counters"]
    assert after["handoffs"] - before["handoffs"] == len(PROMPTS)
    assert after["recomputed_prompt_tokens"] == before["recomputed_prompt_tokens"]


def test_the_adapter_matters(expected):
    assert expected[MODEL_NAME] != expected[ADAPTER]
