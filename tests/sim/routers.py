"""The router that the real placement is compared with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pdnode.placement import Plan
from pdnode.sim.engine import Engine
from pdnode.sim.work import BLOCK, Request
from pdnode.token1 import Token1


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

    def answered(self, slot: int, request: Request, now_ms: float) -> None:
        pass

    def over(self, slot: int) -> None:
        self._load[slot] -= 1
