"""Which split of a box meets a latency goal for given traffic. Pure: arrivals + constants -> rows.

Goodput is DistServe's: the highest rate of requests at which SHARE of them still meet both goals.
It is found by playing the same trace faster or slower on a simulated node (pdnode.sim), whose
requests are placed by the real placement.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdnode import turns
from pdnode.estimate import Constants
from pdnode.placement import PlacementConfig
from pdnode.sim.engine import Engine
from pdnode.sim.node import Node, Result, percentile
from pdnode.sim.router import Placement
from pdnode.sim.work import BLOCK as SIM_BLOCK
from pdnode.sim.work import Request, Session
from pdnode.traffic import BLOCK, Arrival

assert BLOCK == SIM_BLOCK, "a trace's hashes are of the simulation's blocks"

SHARE = 0.9
"""Of the requests that must meet the goals, as in DistServe."""
SEARCHES = 7
"""Halvings of the rate's interval: the found goodput is within 1 % of the simulation's."""
MOST = 64.0
"""The trace is played up to this many times faster, and slower."""
DATA_PARALLEL = "data parallel"


@dataclass(frozen=True, slots=True)
class Hardware:
    """Engines that are all alike."""

    constants: Constants
    kv_tokens: int
    """Of one engine."""
    contention: float | None = None
    """By which share of its time a pass gets longer for each other engine that works meanwhile: CPU
    engines share caches and memory, two of them perhaps the parts of one core. None: not known, and
    taken for nothing."""
    block_size: int = BLOCK
    """Tokens of a KV block: a shorter prompt is not split."""


@dataclass(frozen=True, slots=True)
class Goals:
    """``itl_ms``: of one request, the mean time between its tokens."""

    ttft_ms: float
    itl_ms: float


@dataclass(frozen=True, slots=True)
class Row:
    """One way to use the box. Times in milliseconds, at the trace's own rate."""

    prefill: int
    decode: int
    """0 and 0: plain data parallel."""
    met: float
    """Share of requests within both goals."""
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    goodput: float
    """Requests a second."""
    limit: bool = False
    """The search ended at its limit: goodput is at least this."""

    @property
    def name(self) -> str:
        return f"{self.prefill}P{self.decode}D" if self.prefill else DATA_PARALLEL


def rate_per_s(arrivals: Sequence[Arrival]) -> float:
    """Of the trace as recorded."""
    span_s = (arrivals[-1].arrival_ms - arrivals[0].arrival_ms) / 1e3
    return (len(arrivals) - 1) / span_s if span_s > 0 else float(len(arrivals))


def sessions(arrivals: Sequence[Arrival], faster: float = 1.0) -> list[Session]:
    """One session a request, since a trace says when each came. Unnamed blocks are nobody else's."""
    unnamed = itertools.count(1 << 60)
    found = []
    for a in arrivals:
        blocks = (a.prompt_tokens + a.output_tokens) // BLOCK
        named = a.blocks[: a.prompt_tokens // BLOCK]
        text = (*named, *itertools.islice(unnamed, blocks - len(named)))
        request = Request(a.prompt_tokens, a.output_tokens, text)
        found.append(Session(a.arrival_ms / faster, [request], [0.0]))
    return found


def simulate(
    arrivals: Sequence[Arrival],
    hardware: Hardware,
    prefill: int,
    decode: int,
    faster: float = 1.0,
) -> Result:
    """``prefill`` 0: ``decode`` plain replicas."""
    roles, constants = ["prefill"] * prefill + ["decode"] * decode, hardware.constants
    blocks = max(hardware.kv_tokens // BLOCK, _largest(arrivals))
    engines = [Engine(i, role, constants, blocks, noise=0.0) for i, role in enumerate(roles)]
    config = PlacementConfig(split="auto" if prefill else "never", stretch=turns.STRETCH)
    router = Placement(engines, config, constants, hardware.block_size)
    node = Node(engines, router, constants, hardware.contention or 0.0)
    return node.run(sessions(arrivals, faster))


def _largest(arrivals: Sequence[Arrival]) -> int:
    return max((a.prompt_tokens + a.output_tokens) // BLOCK + 1 for a in arrivals)


def met(result: Result, goals: Goals) -> float:
    return sum(
        ttft <= goals.ttft_ms and itl <= goals.itl_ms
        for ttft, itl in zip(result.ttft_ms, result.itl_ms, strict=True)
    ) / len(result.ttft_ms)


def plan(arrivals: Sequence[Arrival], hardware: Hardware, engines: int, goals: Goals) -> list[Row]:
    """Every split of ``engines`` and plain data parallel, the best goodput first."""

    def row(prefill: int, decode: int) -> Row:
        def play(faster: float) -> Result:
            return simulate(arrivals, hardware, prefill, decode, faster)

        return _row(play, rate_per_s(arrivals), prefill, decode, goals)

    splits = [(p, engines - p) for p in range(1, engines)] + [(0, engines)]
    return sorted((row(p, d) for p, d in splits), key=lambda row: -row.goodput)


def _row(
    play: Callable[[float], Result], rate: float, prefill: int, decode: int, goals: Goals
) -> Row:
    def share(faster: float) -> float:
        return met(play(faster), goals)

    own = play(1.0)
    goodput, limit = _highest(share, met(own, goals) >= SHARE)
    return Row(
        prefill=prefill,
        decode=decode if prefill else 0,
        met=met(own, goals),
        ttft_p50=percentile(own.ttft_ms, 0.5),
        ttft_p99=percentile(own.ttft_ms, 0.99),
        itl_p50=percentile(own.itl_ms, 0.5),
        itl_p99=percentile(own.itl_ms, 0.99),
        goodput=goodput * rate,
        limit=limit,
    )


def _highest(share, met_at_one: bool) -> tuple[float, bool]:
    """(factor of the trace's rate, the search's limit was reached)."""
    low, high = (1.0, 2.0) if met_at_one else (0.5, 1.0)
    while met_at_one and share(high) >= SHARE:
        low, high = high, high * 2
        if low >= MOST:
            return low, True
    while not met_at_one and share(low) < SHARE:
        low, high = low / 2, low
        if low < 1 / MOST:
            return 0.0, False
    for _ in range(SEARCHES):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) >= SHARE else (low, middle)
    return low, False
