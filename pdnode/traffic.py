"""Traffic as a file: one JSON object a line, what ``--record-trace`` writes and ``plan`` reads.

    {"arrival_s": 1764445612.3, "prompt_tokens": 812, "output_tokens": 96, "prefix_hashes": [..]}

``prefix_hashes`` (optional): one number per full block of BLOCK prompt tokens, equal for equal
prefixes up to there. Mooncake's published traces are read as they are: ``timestamp`` (ms),
``input_length``, ``output_length``, ``hash_ids`` (one per 512 tokens).

No prompt is written: a hash is 48 bits of a keyed BLAKE2b whose key is forgotten with the node.
"""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

from pdnode.errors import BadTrace

BLOCK = 128
MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. ``blocks``: names of its full blocks of BLOCK tokens, prefix by prefix."""

    arrival_ms: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


PROBE = "pdnode-plan-"
"""In the ids of the requests by which ``plan`` measures a node: nobody's traffic."""


class Recorder:
    """Appends to ``path``, one line per request that ended with an answer. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._out: TextIO = path.open("a", encoding="utf-8", buffering=1)
        self._key = secrets.token_bytes(16)

    def write(self, arrived_at: float, prompt: Sequence[int], output_tokens: int) -> None:
        """``arrived_at``: Unix seconds."""
        line = {
            "arrival_s": round(arrived_at, 4),
            "prompt_tokens": len(prompt),
            "output_tokens": output_tokens,
            "prefix_hashes": self.hashes(prompt),
        }
        self._out.write(json.dumps(line, separators=(",", ":")) + "\n")

    def hashes(self, prompt: Sequence[int]) -> list[int]:
        state = blake2b(key=self._key, digest_size=6)
        found = []
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            state.update(array("q", prompt[end - BLOCK : end]).tobytes())
            found.append(int.from_bytes(state.copy().digest()))
        return found

    def close(self) -> None:
        self._out.close()


def read(path: Path) -> list[Arrival]:
    """In order of arrival, the first at 0 ms. Raises BadTrace."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadTrace(f"cannot read the trace {path}: {error}") from error
    found = [_arrival(path, i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise BadTrace(f"the trace {path} has no requests; record one with --record-trace FILE")
    first = min(a.arrival_ms for a in found)
    shifted = [
        Arrival(a.arrival_ms - first, a.prompt_tokens, a.output_tokens, a.blocks) for a in found
    ]
    return sorted(shifted, key=lambda a: a.arrival_ms)


def _arrival(path: Path, number: int, line: str) -> Arrival:
    try:
        said = json.loads(line)
        if "input_length" in said:
            return _mooncake(said)
        arrival = Arrival(
            float(said["arrival_s"]) * 1e3,
            int(said["prompt_tokens"]),
            int(said["output_tokens"]),
            tuple(said.get("prefix_hashes") or ()),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise BadTrace(
            f"{path} line {number}: {type(error).__name__} {error}; a line is "
            '{"arrival_s": 0.0, "prompt_tokens": 812, "output_tokens": 96}'
        ) from error
    if arrival.prompt_tokens < 1 or arrival.output_tokens < 1:
        raise BadTrace(f"{path} line {number}: prompt_tokens and output_tokens must be at least 1")
    return arrival


def _mooncake(said: dict[str, Any]) -> Arrival:
    parts = MOONCAKE_BLOCK // BLOCK
    blocks = [h * parts + i for h in said.get("hash_ids") or () for i in range(parts)]
    prompt = int(said["input_length"])
    return Arrival(
        float(said["timestamp"]),
        prompt,
        max(1, int(said["output_length"])),
        tuple(blocks[: prompt // BLOCK]),
    )
