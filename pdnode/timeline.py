"""When what happened to one request. Seconds of CLOCK_MONOTONIC, which all processes of a box share.

    received   the server has the request's head                 http
    arrived    tokenised, placed                                  front end
    queued     a scheduler has it                                 engine  \\
    begun      its first step begins                              engine   } of each leg
    answered   the step that gave its first token is over         engine  /
    copied     KV from a peer is here (begin, end, bytes)         worker
    first_token, finished                                         front end
    first_byte, last_byte                                         http

DistServe's seven (issued, context begin/end, migration begin/end, decoding begin/end) are named
``issued``, ``prefill_begin``, ... in :meth:`Timeline.seven`. Engines report their own times with
vLLM's events, which --disable-log-stats switches off: those times are then None.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pdnode.placement import Plan

HANDOFF = "pdnode_handoff"
"""In a finished leg's kv_transfer_params: [owner's slot, begin ns, end ns, bytes] of its copy."""
MAX_LEGS = 16
"""Of a request that survives this many deaths, the first legs are kept."""


class Copied(NamedTuple):
    """KV that a leg copied from the engine in slot ``owner``; seconds, all ranks together."""

    owner: int
    begin: float
    end: float
    nbytes: int


@dataclass(slots=True)
class LegTimes:
    slot: int
    kind: str
    """``prefill``, ``decode`` or ``whole``."""
    prompt_tokens: int
    sent: float
    queued: float | None = None
    begun: float | None = None
    answered: float | None = None
    last: float | None = None
    tokens: int = 0
    preemptions: int = 0
    copied: Copied | None = None


class Phase(NamedTuple):
    name: str
    begin: float
    end: float
    slot: int | None


@dataclass(slots=True)
class Timeline:
    request_id: str
    """As vLLM's API gave it to the client (``cmpl-...``)."""
    prompt_tokens: int
    arrived: float
    prefill: int | None = None
    decode: int = -1
    reason: str = ""
    estimates: dict[str, float | None] | None = None
    legs: list[LegTimes] = field(default_factory=list)
    first_token: float | None = None
    last_token: float | None = None
    longest_gap: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, found in the prefix cache of the engine that computed it."""
    finished: float | None = None
    outcome: str = ""
    deaths: int = 0

    # --- written while it happens ------------------------------------------------------------------

    def placed(self, plan: Plan) -> None:
        self.prefill, self.decode, self.reason = plan.prefill, plan.decode, plan.reason
        self.estimates = plan.estimates._asdict() if plan.estimates is not None else None

    def sent(self, slot: int, kind: str, prompt_tokens: int) -> None:
        if len(self.legs) == MAX_LEGS:
            self.legs.pop()
        self.legs.append(LegTimes(slot, kind, prompt_tokens, time.monotonic()))

    def output(self, output: Any, at: float) -> None:
        """An ``EngineCoreOutput`` of the present leg; ``at``: the engine's clock."""
        if not self.legs:
            return
        leg = self.legs[-1]
        for event in output.events or ():
            self._event(leg, event.type.name, event.timestamp)
        if output.prefill_stats is not None and leg.kind != "decode":
            self.cached_tokens = output.prefill_stats.num_cached_tokens
        if output.new_token_ids:
            leg.answered = leg.answered or at
            leg.last = at
            leg.tokens += len(output.new_token_ids)
        if output.kv_transfer_params and HANDOFF in output.kv_transfer_params:
            owner, begin_ns, end_ns, nbytes = output.kv_transfer_params[HANDOFF]
            leg.copied = Copied(owner, begin_ns / 1e9, end_ns / 1e9, nbytes)

    @staticmethod
    def _event(leg: LegTimes, name: str, at: float) -> None:
        if name == "QUEUED":
            leg.queued = leg.queued or at
        elif name == "SCHEDULED":
            leg.begun = leg.begun or at
        else:
            leg.preemptions += 1

    def emitted(self, tokens: int) -> None:
        """The client gets this many more."""
        now = time.monotonic()
        if self.last_token is None:
            self.first_token = now
        else:
            gap = now - self.last_token
            if gap > self.longest_gap:  # not max(): once per token
                self.longest_gap = gap
        self.last_token = now
        self.output_tokens += tokens

    def ended(self, outcome: str, deaths: int) -> None:
        if self.finished is None:
            self.finished, self.outcome, self.deaths = time.monotonic(), outcome, deaths

    # --- read afterwards ----------------------------------------------------------------------------

    @property
    def itl_s(self) -> float | None:
        """The mean time between two tokens; None below two."""
        if self.output_tokens < 2 or self.first_token is None or self.last_token is None:
            return None
        return (self.last_token - self.first_token) / (self.output_tokens - 1)

    @property
    def handoff(self) -> Copied | None:
        return next((leg.copied for leg in self.legs if leg.copied is not None), None)

    def seven(self) -> dict[str, float | None]:
        """DistServe's seven events."""
        computed = next((leg for leg in self.legs if leg.kind != "decode"), None)
        written = next((leg for leg in reversed(self.legs) if leg.kind != "prefill"), None)
        copied = self.handoff
        begin = None
        if written is not None:
            begin = written.answered if written.kind == "whole" else written.begun
        return {
            "issued": self.arrived,
            "prefill_begin": computed.begun if computed else None,
            "prefill_end": computed.answered if computed else None,
            "handoff_begin": copied.begin if copied else None,
            "handoff_end": copied.end if copied else None,
            "decode_begin": copied.end if copied and begin is not None else begin,
            "decode_end": written.last if written else None,
        }

    def phases(self) -> Iterator[Phase]:
        """Without gaps from ``arrived`` to ``finished`` (or now): where the time went.

        ``front``: this process had it. ``queued``: sent to an engine, not begun.
        """
        at = self.arrived
        for phase in self._marks():
            end = max(at, phase.end)
            if end > at:
                yield Phase(phase.name, at, end, phase.slot)
            at = end

    def _marks(self) -> Iterator[Phase]:
        """Phases by their ends only."""
        for i, leg in enumerate(self.legs):
            yield Phase("front", 0.0, leg.sent, None)
            if leg.begun is not None:
                yield Phase("queued", 0.0, leg.begun, leg.slot)
            if leg.copied is not None:
                yield Phase("handoff", 0.0, leg.copied.end, leg.slot)
            if leg.answered is not None:
                first = "decode" if leg.kind == "decode" else "prefill"
                yield Phase(first, 0.0, leg.answered, leg.slot)
            if leg.last is not None and leg.last != leg.answered:
                yield Phase("decode", 0.0, leg.last, leg.slot)
            if i + 1 < len(self.legs) and self.legs[i + 1].kind == leg.kind:
                yield Phase("lost", 0.0, self.legs[i + 1].sent, leg.slot)
        yield Phase("front", 0.0, self.finished or time.monotonic(), None)
