"""Three kinds of traffic. Deterministic: the same name gives the same 10,000 requests."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from pdnode.sim.work import BLOCK, Request, Session

REQUESTS = 10_000


class _Texts:
    """Names for blocks: shared texts first, then the session's own words."""

    def __init__(self) -> None:
        self._names = 0

    def new(self, tokens: int) -> list[int]:
        blocks = -(-tokens // BLOCK)
        self._names += blocks
        return list(range(self._names - blocks, self._names))


def _lognormal(rng: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    return int(min(high, max(low, rng.lognormvariate(math.log(median), sigma))))


def _zipf(n: int, exponent: float = 1.0) -> list[float]:
    return [1 / (rank + 1) ** exponent for rank in range(n)]


def _arrivals(rng: random.Random, per_s: float) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.expovariate(per_s) * 1000
        yield now


def _single(start_ms: float, shared: list[int], own: list[int], prompt: int, out: int) -> Session:
    text = (shared + own)[: (prompt + out) // BLOCK]
    return Session(start_ms, [Request(prompt, out, tuple(text))], [0.0])


def chat(sessions_per_s: float = 24.0, requests: int = REQUESTS) -> list[Session]:
    """Conversations of 1 to 12 turns that begin with one of 24 system prompts."""
    rng, texts = random.Random("chat"), _Texts()
    systems = [texts.new(rng.randrange(4, 17) * BLOCK) for _ in range(24)]
    sessions: list[Session] = []
    made = 0
    for start_ms in _arrivals(rng, sessions_per_s):
        turns = min(requests - made, rng.randint(1, 12))
        made += turns
        sessions.append(
            _conversation(rng, texts, rng.choices(systems, _zipf(24))[0], turns, start_ms)
        )
        if made == requests:
            return sessions


def _conversation(rng, texts: _Texts, system: list[int], turns: int, start_ms: float) -> Session:
    session, length = Session(start_ms), len(system) * BLOCK
    own = texts.new(turns * 1400)
    for _ in range(turns):
        prompt = length + _lognormal(rng, 80, 0.8, 8, 600)
        out = _lognormal(rng, 200, 0.6, 10, 800)
        length = prompt + out
        text = (system + own)[: length // BLOCK]
        session.turns.append(Request(prompt, out, tuple(text)))
        session.think_ms.append(rng.expovariate(1 / 8_000))
    return session


def rag(per_s: float = 22.0, requests: int = REQUESTS, documents_n: int = 250) -> list[Session]:
    """One of 400 documents of 4,000 to 16,000 tokens, popular ones often, then a question."""
    rng, texts = random.Random("rag"), _Texts()
    documents = [texts.new(rng.randrange(32, 126) * BLOCK) for _ in range(documents_n)]
    popularity = _zipf(documents_n)
    sessions = []
    for start_ms, _ in zip(_arrivals(rng, per_s), range(requests), strict=False):
        document = rng.choices(documents, popularity)[0]
        question, out = _lognormal(rng, 60, 0.7, 10, 400), _lognormal(rng, 120, 0.6, 5, 600)
        prompt = len(document) * BLOCK + question
        sessions.append(_single(start_ms, document, texts.new(question + out), prompt, out))
    return sessions


def mixed(per_s: float = 65.0, requests: int = REQUESTS) -> list[Session]:
    """Three short questions for every long text nobody sent before; 16 shared instructions."""
    rng, texts = random.Random("mixed"), _Texts()
    instructions = [texts.new(rng.randrange(2, 9) * BLOCK) for _ in range(16)]
    sessions = []
    for start_ms, _ in zip(_arrivals(rng, per_s), range(requests), strict=False):
        shared = rng.choices(instructions, _zipf(16))[0]
        is_long = rng.random() < 0.25
        own = (
            _lognormal(rng, 5000, 0.6, 1000, 20_000)
            if is_long
            else _lognormal(rng, 90, 0.8, 8, 800)
        )
        prompt, out = len(shared) * BLOCK + own, _lognormal(rng, 150, 0.8, 5, 800)
        sessions.append(_single(start_ms, shared, texts.new(own + out), prompt, out))
    return sessions


TRACES = {"chat": chat, "rag": rag, "mixed": mixed}
