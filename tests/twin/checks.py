"""What every replay on a node must show, besides the twin's answer."""

from __future__ import annotations

from dataclasses import dataclass

from bench.servers import Node
from tests.twin.cases import BLOCK, Way
from tests.twin.record import Recorded
from tests.twin.replay import ask, differences

SETTLE_S = 1.0
"""From the last answer until every block is back and every engine idle."""

NEVER = (
    "recomputed_prompt_tokens",
    "load_failures",
    "leases_expired",
    "resumes",
    "failed",
)


@dataclass(frozen=True)
class Expected:
    """Counters of one case: (lowest, highest) where the way through the node leaves a choice."""

    requests: int
    handoffs: tuple[int, int]
    blocks: tuple[int, int]
    reasons: dict[str, int]


def expected_of(recorded: Recorded) -> Expected:
    case = recorded.case
    per_prompt = (recorded.request.body or {}).get("n", 1)
    sequences = len(recorded.prompt_lengths) * per_prompt
    if case.way is Way.WHOLE:
        return Expected(sequences, (0, 0), (0, 0), {case.reason: sequences})
    if case.way in (Way.ENDS_ON_P, Way.NOWHERE):
        return Expected(sequences, (0, 0), (0, 0), {})
    # The last position's logits are what D computes to sample token 1: no KV of it is needed.
    needed = [n - 1 if case.way is Way.RESAMPLED else n for n in recorded.prompt_lengths]
    fresh = sum(-(-tokens // BLOCK) for tokens in needed)
    if case.way is Way.RACES:
        return Expected(sequences, (0, sequences), (0, fresh), {})
    # Choices of one prompt may find its full blocks in D's prefix cache.
    return Expected(sequences, (sequences, sequences), (fresh, fresh * per_prompt), {})


def is_idle(status: dict) -> bool:
    return all(
        engine["running"] == engine["waiting"] == 0
        and engine["kv_blocks_free"] == engine["kv_blocks_total"]
        for engine in status["engines"]
    )


def settled(node: Node) -> dict:
    """The node's counters once nothing of any request is left in it."""
    what = "all blocks back and nothing running"
    return node.wait_status(is_idle, SETTLE_S, what)["counters"]


def replay(
    node: Node, recorded: Recorded | Exception, block_bytes: int, *, other_arguments: bool = False
) -> None:
    """Assert that the node answers as the twin did and that the request took its way.

    ``other_arguments``: of vLLM, than the twin's. Their hash is in every answer, and may differ.
    """
    if isinstance(recorded, Exception):
        raise recorded
    before = settled(node)
    answer = ask(node.url, recorded.request)
    after = settled(node)
    lines = differences(recorded.answer, answer)
    if other_arguments:
        lines = [line for line in lines if ".system_fingerprint: " not in line]
    assert not lines, "\n".join([*lines[:20], f"request: {recorded.request}"[:2000]])
    for name in NEVER:
        assert after[name] == before[name], f"{name} rose from {before[name]} to {after[name]}"
    if recorded.case.way is not Way.MANY:
        check_way(recorded, before, after, block_bytes)


def check_way(recorded: Recorded, before: dict, after: dict, block_bytes: int) -> None:
    expected = expected_of(recorded)
    assert after["requests"] - before["requests"] == expected.requests
    assert risen_reasons(before, after) == expected.reasons
    low, high = expected.handoffs
    assert low <= after["handoffs"] - before["handoffs"] <= high
    moved, rest = divmod(after["handoff_bytes"] - before["handoff_bytes"], block_bytes)
    low, high = expected.blocks
    assert rest == 0
    assert low <= moved <= high, f"{moved} blocks were copied instead of {low} to {high}"


def risen_reasons(before: dict, after: dict) -> dict[str, int]:
    old = before["single_engine_reasons"]
    risen = {name: n - old.get(name, 0) for name, n in after["single_engine_reasons"].items()}
    return {name: n for name, n in risen.items() if n}
