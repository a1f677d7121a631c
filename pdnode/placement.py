"""Where a request runs. Pure: facts + a snapshot of the engines -> a plan, or a decline.

Nothing here waits, sends or remembers; the same facts and view give the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdnode.token1 import Token1

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True)
class Facts:
    """What placement needs to know of a request. Lengths in tokens."""

    prompt_tokens: int
    max_tokens: int
    token1: Token1 = Token1.FORWARD
    token1_field: str = ""
    whole: str = ""
    """Why the request cannot be split whatever the load ("" when it can)."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine at one moment. ``queued_tokens``: prompt tokens sent and not yet answered."""

    slot: int
    role: str
    ready: bool
    requests: int = 0
    queued_tokens: int = 0


@dataclass(frozen=True, slots=True)
class NodeView:
    engines: tuple[EngineView, ...]
    block_size: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Plan:
    """``prefill is None``: one engine, ``decode``, does all of it, for ``reason``."""

    prefill: int | None
    decode: int
    token1: Token1
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Decline:
    reason: str


def place(facts: Facts, view: NodeView) -> Plan | Decline:
    prefills = _ready(view, PREFILL)
    decodes = _ready(view, DECODE)
    if not prefills and not decodes:
        return Decline("no_engine_ready")
    reason = why_whole(facts, view) or _missing_side(prefills, decodes)
    if reason:
        return _on_one(facts, reason, prefills, decodes)
    return Plan(
        prefill=least_queued(prefills).slot,
        decode=least_busy(decodes).slot,
        token1=facts.token1,
    )


def why_whole(facts: Facts, view: NodeView) -> str:
    """The reason a request is not worth or not able to be split, or ""."""
    if facts.whole:
        return facts.whole
    if facts.token1 is Token1.SINGLE:
        return facts.token1_field
    if facts.max_tokens <= 1:
        return "max_tokens_1"
    if facts.prompt_tokens < view.block_size:
        return "short_prompt"
    # Token 1 fills the context: there is nothing left to decode elsewhere.
    if facts.prompt_tokens + 1 >= view.max_model_len:
        return "full_context"
    return ""


def least_queued(engines: Iterable[EngineView]) -> EngineView:
    return min(engines, key=lambda e: (e.queued_tokens, e.requests, e.slot))


def least_busy(engines: Iterable[EngineView]) -> EngineView:
    return min(engines, key=lambda e: (e.requests, e.queued_tokens, e.slot))


def _ready(view: NodeView, role: str) -> list[EngineView]:
    return [e for e in view.engines if e.role == role and e.ready]


def _missing_side(prefills: list[EngineView], decodes: list[EngineView]) -> str:
    if not prefills:
        return "no_prefill_engine"
    return "" if decodes else "no_decode_engine"


def _on_one(facts: Facts, reason: str, prefills: list, decodes: list) -> Plan:
    # A short prompt disturbs nobody's stream, so it may run where it will decode; work that is
    # all prompt (scoring, pooling, one token) belongs where prompts belong.
    all_prompt = facts.max_tokens <= 1 or facts.whole or facts.token1 is Token1.SINGLE
    side = (prefills or decodes) if all_prompt else (decodes or prefills)
    return Plan(
        prefill=None, decode=least_queued(side).slot, token1=Token1.FORWARD, reason=reason
    )
