"""The real placement, and the router it is compared with."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Protocol

from pdnode.estimate import Backlog, Constants, Estimator
from pdnode.placement import EngineView, Facts, NodeView, PlacementConfig, Plan, place
from pdnode.token1 import Token1
from tests.sim.engine import Engine
from tests.sim.traces import BLOCK, Request

MAX_TOKENS = 1024
"""What every client asks for: how long an answer will be is known to nobody."""


class Router(Protocol):
    """What the simulated node asks and tells. ``sent``: a leg went out; ``answered``, ``over``."""

    def route(self, request: Request, now_ms: float) -> Plan: ...
    def sent(self, slot: int, plan: Plan, request: Request, kind: str, now_ms: float) -> None: ...
    def answered(self, slot: int, plan: Plan, request: Request, now_ms: float) -> None: ...
    def over(self, slot: int) -> None: ...


class Placement:
    """``place`` with what a front end knows: what it sent, what was answered, who holds what."""

    def __init__(self, engines: list[Engine], config: PlacementConfig, believed: Constants) -> None:
        self._engines, self._config = engines, config
        self._backlog = [Backlog() for _ in engines]
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
        share = self._config.share_prefixes
        facts = Facts(
            request.prompt_tokens,
            MAX_TOKENS,
            cached={slot: cache.coming(request.blocks) * BLOCK for slot, cache in caches},
            readable={s: c.readable(request.blocks) * BLOCK for s, c in caches if share},
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
            BLOCK,
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
            streams=self._requests[e.slot] - self._waiting[e.slot],
            free_tokens=e.cache.free * BLOCK,
            unused_tokens=e.cache.unused * BLOCK,
            constants=constants,
        )

    def sent(self, slot: int, plan: Plan, request: Request, kind: str, now_ms: float) -> None:
        self._requests[slot] += 1
        if kind == "decode":
            return
        self._waiting[slot] += 1
        self._queued[slot] += request.prompt_tokens
        if plan.estimates is not None:
            self._backlog[slot].sent(plan.estimates.prefill_ms, now_ms)

    def answered(self, slot: int, plan: Plan, request: Request, now_ms: float) -> None:
        self._waiting[slot] -= 1
        self._queued[slot] -= request.prompt_tokens
        if plan.estimates is not None:
            self._backlog[slot].answered(plan.estimates.prefill_ms, now_ms)

    def over(self, slot: int) -> None:
        self._requests[slot] -= 1


class ApproximateTree:
    """Cache-aware routing as SGLang's router documents it (``rust/README.md`` in its repository).

    The router guesses each worker's cache from what it routed there: a radix tree per worker, kept
    under a size by dropping least recently used leaves. Loads are balanced when
    ``max - min > abs_threshold`` and ``max > rel_threshold * min``: shortest queue. Otherwise the
    worker with the longest match, if that is more than ``cache_threshold`` of the prompt, else the
    one with the smallest tree. Block names here stand for whole prefixes, so a tree is a set of
    them. Decode workers get the shortest queue. Where the description leaves a choice (equal
    matches), the less loaded worker is taken.
    """

    def __init__(
        self,
        engines: list[Engine],
        *,
        cache_threshold: float = 0.5,
        abs_threshold: int = 32,
        rel_threshold: float = 1.0001,
        tree_tokens: int = 2**22,  # its default of 2**24 characters, at four a token
    ) -> None:
        self._threshold, self._abs, self._rel = cache_threshold, abs_threshold, rel_threshold
        self._tree_blocks = tree_tokens // BLOCK
        self._prefills = [e.slot for e in engines if e.role == "prefill"]
        self._decodes = [e.slot for e in engines if e.role == "decode"]
        self._trees: list[OrderedDict[int, None]] = [OrderedDict() for _ in engines]
        self._load = [0] * len(engines)

    def route(self, request: Request, now_ms: float) -> Plan:
        slot = self._worker(request.blocks)
        self._insert(slot, request.blocks)
        decode = min(self._decodes, key=self._load.__getitem__)
        return Plan(slot, decode, Token1.FORWARD, "tree")

    def _worker(self, blocks: Sequence[int]) -> int:
        loads = [self._load[slot] for slot in self._prefills]
        low, high = min(loads), max(loads)
        if high - low > self._abs and high > self._rel * low:
            return min(self._prefills, key=self._load.__getitem__)
        matches = {slot: self._match(slot, blocks) for slot in self._prefills}
        best = max(self._prefills, key=lambda slot: (matches[slot], -self._load[slot]))
        if matches[best] > self._threshold * len(blocks):
            return best
        return min(self._prefills, key=lambda slot: len(self._trees[slot]))

    def _match(self, slot: int, blocks: Sequence[int]) -> int:
        tree = self._trees[slot]
        for i, block in enumerate(blocks):
            if block not in tree:
                return i
        return len(blocks)

    def _insert(self, slot: int, blocks: Sequence[int]) -> None:
        tree = self._trees[slot]
        for block in reversed(blocks):  # so that a leaf is older than what it hangs from
            tree[block] = None
            tree.move_to_end(block)
        while len(tree) > self._tree_blocks:
            tree.popitem(last=False)

    def sent(self, slot: int, plan: Plan, request: Request, kind: str, now_ms: float) -> None:
        self._load[slot] += 1

    def answered(self, slot: int, plan: Plan, request: Request, now_ms: float) -> None:
        pass

    def over(self, slot: int) -> None:
        self._load[slot] -= 1
