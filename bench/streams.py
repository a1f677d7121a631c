"""One streamed completion with the time of every token, and random prompts that no cache holds."""

from __future__ import annotations

import json
import random
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise

import httpx

from bench.sse import Cutter

LOWEST_ID, IDS = 1000, 20000
"""Prompts are made of these token ids: ordinary text in every vocabulary of a usual size."""


@dataclass
class Timed:
    """Seconds on CLOCK_MONOTONIC."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between neighbouring tokens."""
        return [b - a for a, b in pairwise(self.token_s)]

    @property
    def itl_s(self) -> float:
        """The median gap once the stream is under way: from token 2 on."""
        return statistics.median(self.gaps_s[1:])


def prompt(tokens: int, seed: object, ids: int = IDS) -> list[int]:
    rng = random.Random(f"{seed}")
    return [rng.randrange(LOWEST_ID, ids) for _ in range(tokens)]


def body(model: str, ids: list[int], max_tokens: int) -> dict:
    return {
        "model": model,
        "prompt": ids,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }


def ask(client: httpx.Client, request: dict) -> Timed:
    """Raises httpx.HTTPStatusError; a chunk with k tokens counts as k at its time."""
    timed, cutter = Timed(time.monotonic()), Cutter()
    with client.stream("POST", "/v1/completions", json=request) as response:
        if response.status_code != 200:
            response.read()
            response.raise_for_status()
        timed.headers = dict(response.headers)
        for data in response.iter_bytes():
            for event in cutter.feed(data):
                if "error" in event:
                    raise RuntimeError(json.dumps(event))
                tokens = event["choices"][0].get("token_ids") or ()
                timed.token_s += [time.monotonic()] * len(tokens)
    return timed
