"""Whose prompt an engine computes next, and how much of it in one pass. Pure.

vLLM computes prompts in the order in which they came and fills every pass with them: behind one of
30,000 tokens a question of 200 waits until all of that is done. Here

- every prompt has a deadline: when it came, plus ``STRETCH`` times what it takes by itself. The
  earliest goes first. Short ones pass long ones, and none is passed for ever, because who comes later
  has a later deadline.
- a pass, which nothing can interrupt, takes no longer over a long prompt than ``UNDER_WAY`` of what a
  short one takes by itself, if short ones came lately while others were computed. Else it takes all
  it can: each pass has a cost of its own.
- on a decode engine a pass takes no longer than ``STEADY`` steps, as streams wait for it.
- a prompt that will be late takes longer passes, up to ``HURRY`` times: where none can be in time, what
  passes cost by themselves makes every next one later.

The front end decides both, as it has measured what things cost, and sends them along
(:class:`Turn`); :mod:`pdnode.connector.prompt_order` obeys in the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import NamedTuple

from pdnode import estimate
from pdnode.estimate import Ahead, Constants

ORDERS = ("deadline", "arrival")

STRETCH = 2.0
"""A prompt may be passed by others for so many times what it takes by itself."""
LEAST_PASS_MS = 100.0
"""A shorter wait is not worth a pass more."""
OVERHEADS = 4
"""A pass takes at least so many times what it costs even without tokens."""

UNDER_WAY = 2 / 3
"""A short prompt that comes just when such a pass has begun, and has time for once its own (``STRETCH``),
is then still done before it is due, although a loaded machine is slower than what was measured."""

FEWEST = 8
"""Tokens of a pass, and the least share of its fixed cost that it spends on them: with less it would
be nearly all overhead."""
LEAST_SHARE = 0.25
STEADY = 2.5
"""Decode steps that a pass with prompt tokens may take where streams run."""

HURRY = 4.0
"""A prompt that will take so many times what it may takes passes that much longer, and none longer."""

REMEMBERED_MS = 60_000.0
RECENT = 32


class Turn(NamedTuple):
    deadline_ms: float
    """CLOCK_MONOTONIC."""
    tokens: int
    """To be computed, as far as the front end knows."""
    pass_tokens: int = 0
    """Of them in one pass at most; 0: no bound."""


class Crowd:
    """How long the prompts take that lately came to one engine while it had another."""

    def __init__(self) -> None:
        self._came: deque[tuple[float, float]] = deque(maxlen=RECENT)

    def came(self, at_ms: float, own_ms: float) -> None:
        self._came.append((at_ms, own_ms))

    def short_ms(self, now_ms: float) -> float:
        """A quarter of them take no longer; inf: none came."""
        recent = sorted(ms for at_ms, ms in self._came if now_ms - at_ms < REMEMBERED_MS)
        return recent[len(recent) // 4] if recent else inf


def hurry(queue: Iterable[Ahead], own_ms: float, stretch: float) -> float:
    """By how much longer passes than usual a prompt may take that meets ``queue``."""
    wait_ms, _ = among(queue, own_ms, stretch)
    may_ms = stretch * own_ms
    return min(HURRY, max(1.0, (wait_ms + own_ms) / may_ms)) if may_ms else 1.0


def pass_tokens(c: Constants, cached: int, new: int, short_ms: float, longer: float = 1.0) -> int:
    """Of ``new`` tokens to compute, how many in one pass, so that short ones need not wait; 0: all."""
    if short_ms == inf:
        return 0
    under_way_ms = longer * UNDER_WAY * short_ms
    pass_ms = max(LEAST_PASS_MS, OVERHEADS * c.prefill_pass_ms, under_way_ms)
    per_token_ms = estimate.compute_ms(c, new, cached) / new
    if not per_token_ms:
        return 0
    tokens = max(FEWEST, int((pass_ms - c.prefill_pass_ms) / per_token_ms))
    return _evenly(new, tokens) if 2 * tokens <= new else 0


def beside_streams(c: Constants, cached: int, new: int, longer: float = 1.0) -> int:
    """Of ``new`` tokens to compute on a decode engine, how many in one pass; 0: all.

    The streams' own tokens come on top, as they do in a decode step.
    """
    fixed_ms = max(c.decode_step_ms, c.prefill_pass_ms)
    room_ms = max(longer * STEADY * c.decode_step_ms - fixed_ms, LEAST_SHARE * fixed_ms)
    # At the prompt's end, where a token takes longest.
    per_token_ms = c.prefill_ms_per_token + c.prefill_ms_per_token_context * (cached + new)
    if not per_token_ms:
        return 0
    tokens = max(FEWEST, int(room_ms / per_token_ms))
    return _evenly(new, tokens) if tokens < new else 0


def _evenly(new: int, tokens: int) -> int:
    """As many passes as ``tokens`` in each make, and none of them longer than it must be."""
    return -(-new // -(-new // tokens))


class Prompt(NamedTuple):
    """One that an engine is to compute, in tokens."""

    new: int
    cached: int = 0
    coming: int = 0
    """Of ``cached``: what another request is still to bring. It must not be passed by who waits for it."""
    streams: int = 0
    """Past their first token on that engine."""
    beside_streams: bool = False
    """On a decode engine where streams run, or are about to come."""


class Taken(NamedTuple):
    turn: Turn
    ms: float
    """What all of the prompt will take."""
    pass_ms: float
    """What one pass takes of that; inf: there is only one."""


def take(
    c: Constants,
    prompt: Prompt,
    queue: Iterable[Ahead],
    now_ms: float,
    stretch: float,
    short_ms: float,
) -> Taken:
    """The turn of a prompt that comes now, and meets ``queue``. ``short_ms``: from the engine's
    :class:`Crowd`."""
    new, cached, coming, streams, beside = prompt
    own_ms = estimate.prefill_ms(c, new + coming, cached - coming, streams)
    longer = hurry(queue, own_ms, stretch)
    if beside:
        tokens = beside_streams(c, cached, new, longer)
    else:
        tokens = pass_tokens(c, cached, new, short_ms, longer)
    ms = estimate.prefill_ms(in_passes_of(c, tokens), new, cached, streams)
    turn = Turn(now_ms + stretch * own_ms, new + coming, tokens)
    return Taken(turn, ms, pass_ms(c, new, ms, tokens))


def in_passes_of(c: Constants, tokens: int) -> Constants:
    return replace(c, chunk_tokens=min(tokens, c.chunk_tokens)) if tokens else c


def pass_ms(c: Constants, new: int, ms: float, tokens: int) -> float:
    """Of ``ms`` for ``new`` tokens, what one pass of ``tokens`` takes; inf: all of it is one pass."""
    most = in_passes_of(c, tokens).chunk_tokens
    return ms * most / new if most < new else inf


def among(queue: Iterable[Ahead], own_ms: float, stretch: float) -> tuple[float, float]:
    """What a prompt that takes ``own_ms`` meets at an engine, in milliseconds:

    until it begins (what is due earlier, and the pass that runs), and by how much later those that it
    passes are done after they are due. To pass one that has time costs nobody anything.
    """
    due_ms, wait_ms, late_ms, done_ms = stretch * own_ms, 0.0, 0.0, 0.0
    for each in queue:
        done_ms += each.left_ms
        if each.due_ms <= due_ms:
            wait_ms += each.left_ms
        else:
            wait_ms += each.pass_left_ms
            late_ms += max(0.0, min(own_ms, done_ms + own_ms - each.due_ms))
    return wait_ms, late_ms
