"""How much of a prompt which engine holds, or will: what placement is told of caches.

Two sources. What an engine holds is in the index, published by its scheduler under vLLM's block
hashes; those are computed here one by one and only as far as somebody holds them. What it was sent
and has not computed yet only the front end knows: a chain of Python hashes per prompt, cheaper by
far and never used for anything but this choice.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ipc.errors import IpcError

if TYPE_CHECKING:
    from ipc.index import Index
    from pdnode.vllm_compat import BlockHasher, EngineCoreRequest

FIRST_LOOK, GROWTH = 4, 4
"""Block hashes that are computed before anybody is asked; then that many times more."""

Chain = tuple[int, ...]
"""One number per full block of a prompt, each of all tokens up to its end."""


class Found(NamedTuple):
    """Tokens by engine slot. ``coming``: those that were sent there and may be computed later."""

    held: dict[int, int]
    coming: dict[int, int]


class Prefixes:
    """On the front end's loop. ``hasher`` None: prefix caching is off."""

    def __init__(self, index: Index, hasher: BlockHasher | None, block_size: int, slots: int):
        self._table = index.prefixes
        self._hasher = hasher
        self._block_size = block_size
        self._slots = range(slots)
        self._sent: list[Counter[int]] = [Counter() for _ in self._slots]

    def chain(self, request: EngineCoreRequest) -> Chain:
        """Empty for a prompt that no cache may know."""
        if self._hasher is None or request.prompt_embeds is not None:
            return ()
        tokens, size = request.prompt_token_ids or (), self._block_size
        value, chain = hash((request.cache_salt, _adapter(request), _media(request))), []
        for end in range(size, len(tokens) + 1, size):
            value = hash((value, *tokens[end - size : end]))
            chain.append(value)
        return tuple(chain)

    def find(self, request: EngineCoreRequest, chain: Chain) -> Found:
        if not chain:
            return Found({}, {})
        coming = {slot: self._leading(sent, chain) for slot, sent in enumerate(self._sent) if sent}
        return Found(self._held(request, len(chain)), {s: n for s, n in coming.items() if n})

    def sent(self, slot: int, chain: Chain) -> None:
        self._sent[slot].update(chain)

    def over(self, slot: int, chain: Chain) -> None:
        sent = self._sent[slot]
        for value in chain:
            sent[value] -= 1
            if not sent[value]:
                del sent[value]

    def _leading(self, sent: Counter[int], chain: Chain) -> int:
        count = next((i for i, value in enumerate(chain) if value not in sent), len(chain))
        return count * self._block_size

    def _held(self, request: EngineCoreRequest, blocks: int) -> dict[int, int]:
        assert self._hasher is not None
        hashes = self._hasher.of(request)
        known: list[bytes] = []
        look = FIRST_LOOK
        while True:
            known.extend(islice(hashes, min(look, blocks) - len(known)))
            lengths = self._lengths(known)
            if len(known) >= blocks or max(lengths.values(), default=0) < len(known):
                return {slot: n * self._block_size for slot, n in lengths.items() if n}
            look *= GROWTH

    def _lengths(self, hashes: list[bytes]) -> dict[int, int]:
        try:
            return self._table.lengths(hashes, self._slots)
        except IpcError:
            return {}  # A table is damaged or just ending: the request is placed without them.


def _adapter(request: EngineCoreRequest) -> str:
    return request.lora_request.lora_name if request.lora_request is not None else ""


def _media(request: EngineCoreRequest) -> tuple[str, ...]:
    return tuple(feature.identifier for feature in request.mm_features or ())
