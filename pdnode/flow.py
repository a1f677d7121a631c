"""In which order a split request's engines get it. Pure: a flow, a plan's engines, a prompt -> yes or no.

    prefill-first   D gets it when P is done: all of the prompt's KV is copied then
    decode-first    D gets it with P: what is copied when P is done is the prompt's last chunk
    auto            decode-first where that is estimated to shorten the hand-off

Decode-first costs one more message and D's room while P computes; a prompt of one chunk gains nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from pdnode import estimate
from pdnode.flags import FLOWS
from pdnode.placement import EngineView, Facts

PREFILL_FIRST, DECODE_FIRST, AUTO = FLOWS

REASONS = (
    "asked",
    "one_chunk",
    "no_room_on_decode",
    "copy_is_cheap",
    "several_chunks",
    "copy_hides",
)


class Choice(NamedTuple):
    decode_first: bool
    reason: str


def choose(
    flow: str, facts: Facts, prefill: EngineView, decode: EngineView, chunk_tokens: int
) -> Choice:
    """``chunk_tokens``: what ``prefill`` computes of one prompt in a step at most."""
    if flow != AUTO:
        return Choice(flow == DECODE_FIRST, "asked")
    new = facts.prompt_tokens - facts.cached.get(prefill.slot, 0)
    lacking = facts.prompt_tokens - facts.cached.get(decode.slot, 0)
    if new <= chunk_tokens:
        return Choice(False, "one_chunk")
    if decode.free_tokens is not None and decode.free_tokens < lacking:
        return Choice(False, "no_room_on_decode")
    if decode.constants is None:
        return Choice(True, "several_chunks")
    tail = min(lacking, new % chunk_tokens or chunk_tokens)
    all_ms, tail_ms = (estimate.handoff_ms(decode.constants, n) for n in (lacking, tail))
    if all_ms - tail_ms <= decode.constants.front_ms:
        return Choice(False, "copy_is_cheap")
    return Choice(True, "copy_hides")
