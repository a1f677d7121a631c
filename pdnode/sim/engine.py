"""One simulated engine: legs that take turns, passes that take their time, a KV cache that runs full."""

from __future__ import annotations

import heapq
import random
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from pdnode import estimate
from pdnode.connector import prompt_order
from pdnode.estimate import Constants
from pdnode.sim.work import BLOCK, Request
from pdnode.turns import Turn


class BlockCache:
    """A block pool: held blocks stay, the others go least recently used first, suffixes first."""

    def __init__(self, blocks: int) -> None:
        self.capacity = blocks
        self._held: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._unready: set[int] = set()
        self.evicted = 0
        self.known: dict[int, int] = {}
        """Block -> 1 for being here + 1 for each leg in the queue that will bring it."""

    @property
    def free(self) -> int:
        return self.capacity - len(self._held)

    @property
    def unused(self) -> int:
        return self.capacity - len(self._held) - len(self._idle)

    def fits(self, blocks: Sequence[int]) -> bool:
        return sum(b not in self._held for b in blocks) <= self.free

    def take(self, blocks: Sequence[int]) -> None:
        for b in blocks:
            if b in self._held:
                self._held[b] += 1
                continue
            if b in self._idle:
                del self._idle[b]
            else:
                self._add(b)
            self._held[b] = 1

    def _add(self, block: int) -> None:
        if len(self._held) + len(self._idle) >= self.capacity:
            gone, _ = self._idle.popitem(last=False)
            self.forget(gone)
            self.evicted += 1
        self._unready.add(block)
        self.expect(block)

    def give(self, blocks: Sequence[int]) -> None:
        for b in reversed(blocks):
            self._held[b] -= 1
            if not self._held[b]:
                del self._held[b]
                self._idle[b] = None

    def computed(self, blocks: Sequence[int]) -> None:
        self._unready.difference_update(blocks)

    def expect(self, block: int) -> None:
        self.known[block] = self.known.get(block, 0) + 1

    def forget(self, block: int) -> None:
        self.known[block] -= 1
        if not self.known[block]:
            del self.known[block]

    def here(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are in the cache."""
        held, idle = self._held, self._idle
        return _leading(blocks, lambda b: b in held or b in idle)

    def readable(self, blocks: Sequence[int]) -> int:
        """How many leading blocks a peer could copy now."""
        held, idle, unready = self._held, self._idle, self._unready
        return _leading(blocks, lambda b: (b in held or b in idle) and b not in unready)

    def coming(self, blocks: Sequence[int]) -> int:
        """How many leading blocks will be here when the present queue is worked off."""
        return _leading(blocks, self.known.__contains__)


def _leading(blocks: Sequence[int], has: Callable[[int], bool]) -> int:
    for i, block in enumerate(blocks):
        if not has(block):
            return i
    return len(blocks)


@dataclass(slots=True, eq=False)
class Leg:
    """A request's stay on one engine. ``tokens``: those it samples here."""

    request: Request
    kind: str  # "prefill", "decode" or "whole"
    blocks: tuple[int, ...]
    tokens: int
    journey: object
    due_ms: float = 0.0
    turn: Turn | None = None
    """None: vLLM's own scheduler, which takes them as they came and fills every pass."""
    donor: BlockCache | None = None
    source: Leg | None = None
    estimated_ms: float = 0.0
    left: int = 0
    context: int = 0
    computed_tokens: int = 0


_due = attrgetter("due_ms")

LOOKED_AT = 64
"""Waiting legs at most, for what a pass may hold."""


def _prompt(leg: Leg, can_begin: bool = True) -> prompt_order.Prompt:
    assert leg.turn is not None
    left = leg.left or leg.turn.tokens
    return prompt_order.Prompt(leg.due_ms, left, leg.turn.pass_tokens, can_begin)


class Engine:
    """``noise``: passes take up to so much more or less than the constants say."""

    def __init__(self, slot: int, role: str, true: Constants, blocks: int, noise: float) -> None:
        self.slot, self.role, self.true = slot, role, true
        self.cache = BlockCache(blocks)
        self.queue: list[Leg] = []
        """In the order of their deadlines, as are those begun."""
        self.running = False
        self._begun: list[Leg] = []
        self._streams: list[tuple[int, int, Leg]] = []
        self._steps = self._order = 0
        self._noise, self._rng = noise, random.Random(slot)
        self.pass_ms_total = 0.0

    def send(self, leg: Leg) -> None:
        insort(self.queue, leg, key=_due)
        for b in leg.blocks:
            self.cache.expect(b)

    def begin_pass(self) -> tuple[float, list[Leg]]:
        """(milliseconds, legs that sample their first token here at its end); 0: nothing to do."""
        budget, ms, firsts, computing = self._budget(), 0.0, [], False
        while budget > 0 and (leg := self._next()):
            ms += self._copy_ms(leg)
            if leg.kind != "decode":
                computing = True
                chunk = min(budget, leg.left)
                ms += estimate.compute_ms(self.true, chunk, leg.context)
                leg.left, leg.context, budget = (
                    leg.left - chunk,
                    leg.context + chunk,
                    budget - chunk,
                )
            if leg.left:
                insort(self._begun, leg, key=_due)
            else:
                firsts.append(leg)
        if not (self._streams or firsts or self._begun):
            return 0.0, []
        fixed_ms = estimate.fixed_ms if computing else estimate.step_ms
        ms += fixed_ms(self.true, len(self._streams))
        ms *= 1 + self._rng.uniform(-self._noise, self._noise)
        self.pass_ms_total += ms
        return ms, firsts

    def _budget(self) -> float:
        """Tokens of the next pass."""
        legs = [*self._begun, *self.queue[:LOOKED_AT]]
        if any(leg.turn is None for leg in legs) or not legs:
            return self.true.chunk_tokens
        fits = self._first_fits()
        prompts = [_prompt(leg, i < len(self._begun) or fits) for i, leg in enumerate(legs)]
        begun = len(self._begun)
        chosen = prompt_order.next_pass(prompts[:begun], prompts[begun:], give_way=True)
        return min(self.true.chunk_tokens, chosen.tokens)

    def _first_fits(self) -> bool:
        return bool(self.queue) and self.cache.fits(self.queue[0].blocks)

    def _next(self) -> Leg | None:
        fits = self._first_fits()
        if self._begun and not (fits and _due(self.queue[0]) < _due(self._begun[0])):
            return self._begun.pop(0)
        return self._admit() if fits else None

    def _admit(self) -> Leg:
        leg = self.queue.pop(0)
        for b in leg.blocks:
            self.cache.forget(b)
        prompt = leg.request.prompt_tokens
        leg.context = min(self.cache.here(leg.request.blocks) * BLOCK, prompt - 1)
        leg.left = 0 if leg.kind == "decode" else prompt - leg.context
        self.cache.take(leg.blocks)
        return leg

    def _copy_ms(self, leg: Leg) -> float:
        """Once per leg: the prefix from a peer, or the prompt from P."""
        if leg.kind == "decode":
            return estimate.handoff_ms(self.true, leg.request.prompt_tokens - leg.context)
        donor, leg.donor = leg.donor, None
        held = donor.readable(leg.request.blocks) * BLOCK if donor else 0
        held = min(held, leg.request.prompt_tokens - 1)
        copied = max(0, held - leg.context) if leg.left else 0
        leg.left, leg.context = leg.left - copied, leg.context + copied
        leg.computed_tokens = leg.computed_tokens or leg.left
        return estimate.handoff_ms(self.true, copied)

    def end_pass(self, firsts: list[Leg]) -> list[Leg]:
        """The legs that are over. Each stream has one token more."""
        self._steps += 1
        over = []
        for leg in firsts:
            self.cache.computed(leg.blocks)
            if leg.tokens <= 1:
                over.append(leg)
            else:
                self._order += 1
                heapq.heappush(self._streams, (self._steps + leg.tokens - 1, self._order, leg))
        while self._streams and self._streams[0][0] <= self._steps:
            over.append(heapq.heappop(self._streams)[2])
        for leg in over:
            if leg.kind != "prefill":  # P holds its blocks until D has copied them
                self.cache.give(leg.blocks)
        return over
