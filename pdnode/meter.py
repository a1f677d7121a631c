"""What the front end sees of one engine's work, and what that says of its speed.

    sent       a leg went there: work in the queue
    answered   its first token came back: a prefill, or a hand-off, was that long
    stepped    a batch of outputs came: a decode step was that long
    over       the leg ended

Lives on the front end's loop, outlives the engine's restarts. Times are milliseconds of
CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from pdnode import estimate, turns
from pdnode.estimate import Backlog, Estimator, Queued
from pdnode.turns import Crowd, Prompt, Turn

if TYPE_CHECKING:
    from ipc.records import EngineRecord

LATELY = 64
"""Requests whose arrival times make the present rate."""


@dataclass(slots=True, eq=False)
class Work:
    """A leg as its engine's load. Tokens; ``computes`` is false for a leg that copies its prompt."""

    tokens: int
    cached: int = 0
    computes: bool = True
    beside_streams: bool = False
    coming: int = 0
    """As of :class:`turns.Prompt`, both."""
    ms: float = 0.0
    """What it was estimated to take when it was sent; 0 while nothing was measured."""
    sent_ms: float = 0.0
    streams: int = 0
    """Of others, when it was sent."""
    alone: bool = True
    """No other prompt was waiting or computed on that engine while this one was."""
    turn: Turn | None = None
    queued: Queued | None = None
    """Its part of the engine's backlog."""

    @property
    def new(self) -> int:
        return max(1, self.tokens - self.cached)


@dataclass(slots=True)
class Meter:
    estimator: Estimator
    stretch: float = 0.0
    """A prompt is due so many times its own time after it came, and goes in that order; 0: as it came."""
    backlog: Backlog = field(default_factory=Backlog)
    crowd: Crowd = field(default_factory=Crowd)
    alike: list[Estimator] = field(default_factory=list)
    """Of the other engines that are about as fast."""
    streams: int = 0
    """Requests past their first token here."""
    waiting: list[Work] = field(default_factory=list)
    _step: tuple[int, float] = (0, 0.0)
    """Outputs in the last batch, and when it was made; 0 outputs: not a clean start of a step."""
    _copies: tuple[int, int] = (0, 0)
    """Copies into this engine and their nanoseconds, as the index counted them last."""
    _evictions: tuple[int, int] = (0, 0)
    """The same of evicted blocks, and of those that were computed again."""

    @property
    def computes(self) -> bool:
        """A prompt is there that was not answered."""
        return any(work.computes for work in self.waiting)

    def sent(self, work: Work, now_ms: float) -> None:
        constants = self.estimator.constants()
        work.sent_ms, work.streams, work.alone = now_ms, self.streams, not self.waiting
        for other in self.waiting:
            other.alone = False
        pass_ms = inf
        if constants is not None and work.computes:
            if self.stretch:
                beside = work.beside_streams
                prompt = Prompt(work.new, work.cached, work.coming, self.streams, beside)
                short_ms = self.crowd.short_ms(now_ms)
                queue = self.backlog.queue(now_ms)
                taken = turns.take(constants, prompt, queue, now_ms, self.stretch, short_ms)
                work.turn, work.ms, pass_ms = taken
            else:
                work.ms = estimate.prefill_ms(constants, work.new, work.cached, self.streams)
        elif constants is not None:
            work.ms = estimate.handoff_ms(constants, work.tokens - work.cached)
        if work.turn is None:
            work.turn = Turn(now_ms, work.new if work.computes else 1)
        self.waiting.append(work)
        work.queued = self.backlog.sent(work.ms, now_ms, work.turn.deadline_ms, pass_ms)
        self._step = (0, 0.0)

    def answered(self, work: Work, computed: int | None, cached: int, now_ms: float) -> None:
        """``computed``, ``cached``: of its prompt, as the engine says (None: it does not)."""
        self._done(work, now_ms)
        self.streams += 1
        constants = self.estimator.constants()
        if not work.alone or not work.computes or not computed:
            return
        ms = now_ms - work.sent_ms - (constants.front_ms if constants else 0.0)
        pass_tokens = work.turn.pass_tokens if work.turn is not None else 0
        if work.streams:
            if constants is None:
                return
            # It joined in the middle of a step, and every pass served the streams too.
            passes = -(-computed // turns.in_passes_of(constants, pass_tokens).chunk_tokens)
            ms -= estimate.step_ms(constants, work.streams) / 2
            beside_ms = estimate.fixed_ms(constants, work.streams) - constants.prefill_pass_ms
            ms -= passes * beside_ms
        self.estimator.observe_prefill(computed, cached, ms, pass_tokens)
        for other in self.alike:
            other.observe_prefill(computed, cached, ms, pass_tokens, of_another=True)

    def over(self, work: Work, now_ms: float, *, answered: bool) -> None:
        if answered:
            self.streams -= 1
        else:
            self._done(work, now_ms)

    def _done(self, work: Work, now_ms: float) -> None:
        self.waiting.remove(work)
        assert work.queued is not None
        self.backlog.answered(work.queued, now_ms)
        self._step = (0, 0.0)

    def stepped(self, outputs: int, at_ms: float) -> None:
        """A batch with ``outputs`` requests' tokens was made at ``at_ms``, after ``answered``."""
        streams, since_ms = self._step
        if outputs == streams and not self.waiting:
            self.estimator.observe_decode_step(streams, at_ms - since_ms)
        self._step = (0 if self.waiting else outputs, at_ms)

    def copied(self, tokens: int, record: EngineRecord) -> float | None:
        """A leg began that copied ``tokens`` tokens: how long that took, if it was the only one."""
        copies = record.handoffs_in + record.prefix_pulls
        ns = record.handoff_ns + record.prefix_ns
        before, self._copies = self._copies, (copies, ns)
        if copies != before[0] + 1 or not tokens:
            return None
        ms = (ns - before[1]) / 1e6
        self.estimator.observe_handoff(tokens, ms)
        return ms

    def evictions(self, record: EngineRecord, block_size: int) -> None:
        before = self._evictions
        self._evictions = (record.blocks_evicted, record.evicted_returns)
        evicted, returned = (now - then for now, then in zip(self._evictions, before, strict=True))
        if evicted or returned:
            self.estimator.observe_evictions(evicted * block_size, returned * block_size)


class Arrivals:
    """How often requests come, lately."""

    def __init__(self) -> None:
        self._at_ms: deque[float] = deque(maxlen=LATELY)

    def add(self, now_ms: float) -> None:
        self._at_ms.append(now_ms)

    def per_ms(self, now_ms: float) -> float:
        if len(self._at_ms) < 2:
            return 0.0
        return len(self._at_ms) / max(1.0, now_ms - self._at_ms[0])
