"""The real placement, fed with what a front end would know."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Protocol

from pdnode import turns
from pdnode.estimate import Backlog, Constants, Estimator, Queued
from pdnode.placement import (
    PREFILL,
    EngineView,
    Facts,
    NodeView,
    PlacementConfig,
    Plan,
    place,
)
from pdnode.sim.engine import Engine
from pdnode.sim.work import BLOCK, Request
from pdnode.turns import Crowd, Prompt, Turn

MAX_TOKENS = 1024
"""What every client asks for: how long an answer will be is known to nobody."""


class Router(Protocol):
    """What the simulated node asks and tells. ``sent``: a leg went out; ``answered``, ``over``."""

    def route(self, request: Request, now_ms: float) -> Plan: ...
    def sent(
        self, slot: int, plan: Plan, request: Request, kind: str, now_ms: float
    ) -> Turn | None: ...
    def answered(self, slot: int, request: Request, now_ms: float) -> None: ...
    def over(self, slot: int) -> None: ...


class Placement:
    """``place`` with what a front end knows: what it sent, what was answered, who holds what."""

    def __init__(
        self,
        engines: list[Engine],
        config: PlacementConfig,
        believed: Constants,
        block_size: int = BLOCK,
    ) -> None:
        """``block_size``: of the engines, whatever the simulation's blocks are."""
        self._engines, self._config, self._block_size = engines, config, block_size
        self._backlog = [Backlog() for _ in engines]
        self._crowd = [Crowd() for _ in engines]
        self._queued_work: dict[int, Queued] = {}
        """By the identity of its request."""
        self._requests = [0] * len(engines)
        self._waiting = [0] * len(engines)
        self._queued = [0] * len(engines)
        self._turn = 0
        self._estimator = Estimator(chunk_tokens=believed.chunk_tokens, initial=believed)
        self._seen: set[int] = set()
        self._evicted = 0
        self._arrivals: deque[float] = deque(maxlen=200)

    def route(self, request: Request, now_ms: float) -> Plan:
        aware = "prefix-aware" in (self._config.prefill_policy, self._config.decode_policy)
        caches = [(e.slot, e.cache) for e in self._engines] if aware else []
        facts = Facts(
            request.prompt_tokens,
            MAX_TOKENS,
            cached={slot: cache.coming(request.blocks) * BLOCK for slot, cache in caches},
            readable={s: c.readable(request.blocks) * BLOCK for s, c in caches},
        )
        plan = place(facts, self._view(now_ms))
        assert isinstance(plan, Plan)
        self._turn += 1
        self._observe(request, plan)
        return plan

    def _observe(self, request: Request, plan: Plan) -> None:
        evicted = sum(e.cache.evicted for e in self._engines)
        seen = next(
            (i for i, b in enumerate(request.blocks) if b not in self._seen), len(request.blocks)
        )
        self._seen.update(request.text)
        lost = 0
        if plan.estimates is not None:
            lost = max(0, plan.estimates.new_tokens - (request.prompt_tokens - seen * BLOCK))
        self._estimator.observe_evictions((evicted - self._evicted) * BLOCK, lost)
        self._evicted = evicted

    def _view(self, now_ms: float) -> NodeView:
        constants = self._estimator.constants()
        engines = tuple(self._engine_view(e, now_ms, constants) for e in self._engines)
        return NodeView(
            engines,
            self._block_size,
            32_768,
            self._config,
            arrivals_per_ms=self._arrivals_per_ms(now_ms),
            turn=self._turn,
        )

    def _arrivals_per_ms(self, now_ms: float) -> float:
        self._arrivals.append(now_ms)
        return (len(self._arrivals) - 1) / max(1.0, now_ms - self._arrivals[0])

    def _engine_view(self, e: Engine, now_ms: float, constants) -> EngineView:
        return EngineView(
            e.slot,
            e.role,
            ready=True,
            requests=self._requests[e.slot],
            queued_tokens=self._queued[e.slot],
            queued_ms=self._backlog[e.slot].left_ms(now_ms),
            queue=self._backlog[e.slot].queue(now_ms),
            streams=self._requests[e.slot] - self._waiting[e.slot],
            free_tokens=e.cache.free * BLOCK,
            unused_tokens=e.cache.unused * BLOCK,
            constants=constants,
        )

    def sent(
        self, slot: int, plan: Plan, request: Request, kind: str, now_ms: float
    ) -> Turn | None:
        stretch, streams = self._config.stretch, self._requests[slot] - self._waiting[slot]
        self._requests[slot] += 1
        if kind == "decode":
            return Turn(now_ms, 1) if stretch else None
        found, c = plan.estimates, self._estimator.constants()
        turn, ms, pass_ms = Turn(now_ms, request.prompt_tokens), 0.0, inf
        if found is not None:
            ms = found.prefill_ms
            self._came(slot, ms, now_ms)
            if stretch and c is not None:
                new = found.new_tokens
                cached = request.prompt_tokens - new
                coming = min(plan.coming_tokens, cached)
                prompt = Prompt(new, cached, coming, streams, plan.beside_streams)
                short_ms = self._crowd[slot].short_ms(now_ms)
                queue = self._backlog[slot].queue(now_ms)
                turn, ms, pass_ms = turns.take(c, prompt, queue, now_ms, stretch, short_ms)
        self._waiting[slot] += 1
        self._queued[slot] += request.prompt_tokens
        work = self._backlog[slot].sent(ms, now_ms, turn.deadline_ms, pass_ms)
        self._queued_work[id(request)] = work
        return turn if stretch else None

    def _came(self, slot: int, ms: float, now_ms: float) -> None:
        prefills = [e.slot for e in self._engines if e.role == PREFILL] or [slot]
        if all(self._waiting[p] for p in prefills):
            for p in prefills:
                self._crowd[p].came(now_ms, ms)

    def answered(self, slot: int, request: Request, now_ms: float) -> None:
        self._waiting[slot] -= 1
        self._queued[slot] -= request.prompt_tokens
        self._backlog[slot].answered(self._queued_work.pop(id(request)), now_ms)

    def over(self, slot: int) -> None:
        self._requests[slot] -= 1
