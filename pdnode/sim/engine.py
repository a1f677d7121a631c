"""One simulated engine: a queue of legs, passes that take their time, a KV cache that runs full."""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdnode import estimate
from pdnode.estimate import Constants
from pdnode.sim.work import BLOCK, Request


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
    donor: BlockCache | None = None
    source: Leg | None = None
    estimated_ms: float = 0.0
    left: int = 0
    context: int = 0
    computed_tokens: int = 0


class Engine:
    """``noise``: passes take up to so much more or less than the constants say."""

    def __init__(self, slot: int, role: str, true: Constants, blocks: int, noise: float) -> None:
        self.slot, self.role, self.true = slot, role, true
        self.cache = BlockCache(blocks)
        self.queue: deque[Leg] = deque()
        self.running = False
        self._current: Leg | None = None
        self._streams: list[tuple[int, int, Leg]] = []
        self._steps = self._order = 0
        self._noise, self._rng = noise, random.Random(slot)
        self.pass_ms_total = 0.0

    def send(self, leg: Leg) -> None:
        self.queue.append(leg)
        for b in leg.blocks:
            self.cache.expect(b)

    def begin_pass(self) -> tuple[float, list[Leg]]:
        """(milliseconds, legs that sample their first token here at its end); 0: nothing to do."""
        budget, ms, firsts, computing = self.true.chunk_tokens, 0.0, [], False
        while budget > 0 and (leg := self._current or self._admit()):
            self._current = None
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
                self._current = leg
            else:
                firsts.append(leg)
        if not (self._streams or firsts or self._current):
            return 0.0, []
        fixed = self.true.prefill_pass_ms if computing else self.true.decode_step_ms
        ms += fixed + self.true.decode_step_ms_per_stream * len(self._streams)
        ms *= 1 + self._rng.uniform(-self._noise, self._noise)
        self.pass_ms_total += ms
        return ms, firsts

    def _admit(self) -> Leg | None:
        if not self.queue or not self.cache.fits(self.queue[0].blocks):
            return None
        leg = self.queue.popleft()
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
