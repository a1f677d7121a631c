"""The clock of the simulated node, and a request's way through its engines."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pdnode.estimate import Constants
from pdnode.placement import Plan
from pdnode.sim.engine import Engine, Leg
from pdnode.sim.router import Router
from pdnode.sim.work import Request, Session


@dataclass(slots=True, eq=False)
class Journey:
    request: Request
    plan: Plan
    arrived_ms: float
    session: Session
    turn: int
    first_ms: float = 0.0
    finished_ms: float = 0.0


@dataclass(slots=True, eq=False)
class Pass:
    """What an engine does now. ``left_ms``: at ``since_ms``, of its time with the box for itself."""

    engine: Engine
    firsts: list[Leg]
    left_ms: float
    since_ms: float
    speed: float
    version: int = 0
    """Of its last event; older ones are void."""


@dataclass(slots=True)
class Result:
    ttft_ms: list[float] = field(default_factory=list)
    per_token_ms: list[float] = field(default_factory=list)
    """Of the answers of more than one token."""
    itl_ms: list[float] = field(default_factory=list)
    """The same for every answer, in the order of ``ttft_ms``; 0 for one token."""
    prompt_tokens: int = 0
    computed_tokens: int = 0
    reasons: Counter = field(default_factory=Counter)
    log: list[tuple[str, Request]] = field(default_factory=list)
    """("asked" or "done", request) in the order they happened."""
    end_ms: float = 0.0
    busy: dict[int, float] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return 1 - self.computed_tokens / self.prompt_tokens


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


class Node:
    """``true``: what the simulated hardware takes, as the engines were given it. ``contention``: by which
    share of its time a pass gets longer for each other engine that works meanwhile."""

    def __init__(
        self, engines: list[Engine], router: Router, true: Constants, contention: float = 0.0
    ) -> None:
        self._engines, self._router, self._true = engines, router, true
        self._contention = contention
        self._passes: dict[int, Pass] = {}
        self._speed = 1.0
        self._events: list[tuple[float, int, Callable, tuple]] = []
        self._order = itertools.count()
        self._now = 0.0
        self.result = Result()

    def run(self, sessions: list[Session]) -> Result:
        for session in sessions:
            self._at(session.start_ms, self._asked, session, 0)
        while self._events:
            self._now, _, act, args = heapq.heappop(self._events)
            act(*args)
            self._share()
        self.result.end_ms = self._now
        self.result.busy = {e.slot: e.pass_ms_total / self._now for e in self._engines}
        return self.result

    def _at(self, when_ms: float, act: Callable, *args) -> None:
        heapq.heappush(self._events, (when_ms, next(self._order), act, args))

    def _asked(self, session: Session, turn: int) -> None:
        request = session.turns[turn]
        plan = self._router.route(request, self._now)
        self.result.log.append(("asked", request))
        self.result.reasons[plan.reason] += 1
        journey = Journey(request, plan, self._now, session, turn)
        if plan.prefill is None:
            self._send(
                plan.decode, Leg(request, "whole", request.text, request.output_tokens, journey)
            )
        else:
            self._send(plan.prefill, Leg(request, "prefill", request.blocks, 1, journey))

    def _send(self, slot: int, leg: Leg) -> None:
        plan = leg.journey.plan
        if plan.prefix_from is not None and leg.kind != "decode":
            leg.donor = self._engines[plan.prefix_from].cache
        leg.turn = self._router.sent(slot, plan, leg.request, leg.kind, self._now)
        leg.due_ms = self._now if leg.turn is None else leg.turn.deadline_ms
        self._engines[slot].send(leg)
        self._at(self._now + self._true.front_ms / 2, self._wake, self._engines[slot])

    def _wake(self, engine: Engine) -> None:
        if not engine.running:
            self._pass(engine)

    def _pass(self, engine: Engine) -> None:
        ms, firsts = engine.begin_pass()
        engine.running = ms > 0
        if engine.running:
            begun = Pass(engine, firsts, ms, self._now, self._speed)
            self._passes[engine.slot] = begun
            self._await(begun)

    def _await(self, begun: Pass) -> None:
        begun.version += 1
        end_ms = self._now + begun.left_ms / begun.speed
        self._at(end_ms, self._passed, begun, begun.version)

    def _share(self) -> None:
        """Engines that began or ended change how fast the others are."""
        speed = 1 / (1 + self._contention * max(0, len(self._passes) - 1))
        if speed == self._speed:
            return
        self._speed = speed
        for one in self._passes.values():
            done_ms = (self._now - one.since_ms) * one.speed
            one.left_ms = max(0.0, one.left_ms - done_ms)
            one.since_ms, one.speed = self._now, speed
            self._await(one)

    def _passed(self, begun: Pass, version: int) -> None:
        if version != begun.version:
            return
        engine, firsts = begun.engine, begun.firsts
        del self._passes[engine.slot]
        over = engine.end_pass(firsts)
        for leg in firsts:
            self._first_token(engine, leg)
        for leg in over:
            self._leg_over(engine, leg)
        self._pass(engine)

    def _first_token(self, engine: Engine, leg: Leg) -> None:
        if leg.kind == "decode":
            p = leg.source
            owner = self._engines[leg.journey.plan.prefill]
            owner.cache.give(p.blocks)
            self._wake(owner)  # it may have waited for room
            return
        self._router.answered(engine.slot, leg.request, self._now)
        leg.journey.first_ms = self._now + self._true.front_ms / 2
        self.result.prompt_tokens += leg.request.prompt_tokens
        self.result.computed_tokens += leg.computed_tokens

    def _leg_over(self, engine: Engine, leg: Leg) -> None:
        self._router.over(engine.slot)
        request, journey = leg.request, leg.journey
        if leg.kind == "prefill" and request.output_tokens > 1:
            rest = Leg(
                request, "decode", request.text, request.output_tokens - 1, journey, source=leg
            )
            self._at(self._now + self._true.front_ms / 2, self._send, journey.plan.decode, rest)
            return
        if leg.kind == "prefill":
            engine.cache.give(leg.blocks)
        self._done(journey)

    def _done(self, journey: Journey) -> None:
        result, request, now = self.result, journey.request, self._now + self._true.front_ms / 2
        result.log.append(("done", request))
        result.ttft_ms.append(journey.first_ms - journey.arrived_ms)
        itl_ms = (now - journey.first_ms) / max(1, request.output_tokens - 1)
        result.itl_ms.append(itl_ms if request.output_tokens > 1 else 0.0)
        if request.output_tokens > 1:
            result.per_token_ms.append(itl_ms)
        session, turn = journey.session, journey.turn + 1
        if turn < len(session.turns):
            self._at(now + session.think_ms[turn], self._asked, session, turn)
