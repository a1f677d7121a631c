"""``--roles auto``: which engine should be sent the other kind of work, and when.

``propose`` looks at one moment and knows no past: the change that would save most, if it saves
enough. ``Hysteresis`` lets one through that was proposed for a while, and then none for a while.

What the present roles cost, in milliseconds summed over requests, with n engines on a side:

    prompts    each that waits, waits for half of its engine's queue:   waiting * queued / 2n
    streams    each token takes longer for the other streams there:     streams² * answer * per stream / n
    no room    a request that D has no KV for waits for one to end:     waiting * answer * step / 2n

and for the engine that changes: its running streams stand still for the prompts it is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdnode import estimate
from pdnode.placement import DECODE, PREFILL, EngineView, NodeView

ROLES = ("fixed", "auto")
LEAST_SAVING_MS = 500.0
LEAST_SHARE = 0.25
"""A change must save both of these, the second of what the present roles cost."""
LOOK_S = 0.5
PROPOSED_S = 2.0
"""For so long the same change must have been proposed at every look."""
SETTLE_S = 5.0
"""After a change: queues that were made by the old roles must not ask for the next one."""
CALM_S = 30.0
"""Without load for so long, engines go back to the roles they were started in."""


class Change(NamedTuple):
    slot: int
    role: str
    reason: str
    """``prefill_waits``, ``decode_waits`` or ``calm``."""
    saves_ms: float


def propose(view: NodeView, started: Mapping[int, str]) -> Change | None:
    """``started``: the roles the engines were started in, by slot."""
    ready = [e for e in view.engines if e.ready]
    if any(e.constants is None for e in ready):
        return None
    prefills = [e for e in ready if e.role == PREFILL]
    decodes = [e for e in ready if e.role == DECODE]
    if not prefills or not decodes:
        return None  # one side is gone: placement sends everything to the other as it is
    if not any(e.requests for e in ready):
        return _back(ready, started)
    found = [
        _change(prefills, decodes, PREFILL, "prefill_waits"),
        _change(prefills, decodes, DECODE, "decode_waits"),
    ]
    return max(filter(None, found), key=lambda change: change.saves_ms, default=None)


def _change(
    prefills: Sequence[EngineView], decodes: Sequence[EngineView], role: str, reason: str
) -> Change | None:
    step = 1 if role == PREFILL else -1
    n_prefills, n_decodes = len(prefills) + step, len(decodes) - step
    if not n_prefills or not n_decodes:
        return None
    giving = decodes if role == PREFILL else prefills
    engine = min(giving, key=lambda e: (_streams(e), e.queued_ms or 0.0, e.requests, e.slot))
    now = _prompts_ms(prefills, len(prefills)) + _streams_ms(decodes, len(decodes))
    then = _prompts_ms(prefills, n_prefills) + _streams_ms(decodes, n_decodes)
    if role == PREFILL:
        then += _streams(engine) * _queued_ms(prefills) / n_prefills
    saves = now - then
    if saves < max(LEAST_SAVING_MS, LEAST_SHARE * now):
        return None
    return Change(engine.slot, role, reason, saves)


def _prompts_ms(prefills: Sequence[EngineView], n: int) -> float:
    waiting = sum(e.requests - _streams(e) for e in prefills)
    return waiting * _queued_ms(prefills) / (2 * n)


def _streams_ms(decodes: Sequence[EngineView], n: int) -> float:
    streams = sum(map(_streams, decodes))
    waiting = sum(e.requests - _streams(e) for e in decodes)
    c = decodes[0].constants
    assert c is not None
    slower = streams * (estimate.step_ms(c, streams / n) - c.decode_step_ms) * c.output_tokens
    step_ms = estimate.step_ms(c, streams // n + 1)
    return slower + waiting * c.output_tokens * step_ms / (2 * n)


def _queued_ms(prefills: Sequence[EngineView]) -> float:
    return sum(e.queued_ms or 0.0 for e in prefills)


def _streams(e: EngineView) -> int:
    return e.streams or 0


def _back(ready: Sequence[EngineView], started: Mapping[int, str]) -> Change | None:
    changed = [e for e in ready if e.role != started[e.slot]]
    if not changed:
        return None
    return Change(changed[0].slot, started[changed[0].slot], "calm", 0.0)


@dataclass(slots=True)
class Hysteresis:
    """What was proposed since when. ``look`` once every LOOK_S; seconds of one clock."""

    proposed: tuple[str, str] | None = None
    since_s: float = 0.0
    settled_s: float = 0.0

    def look(self, change: Change | None, now_s: float) -> Change | None:
        """The change, when its time has come."""
        # Which of the engines is the idlest may change from look to look.
        kind = (change.role, change.reason) if change is not None else None
        if kind != self.proposed:
            self.proposed, self.since_s = kind, now_s
        if change is None or now_s < self.settled_s:
            return None
        if now_s - self.since_s < (CALM_S if change.reason == "calm" else PROPOSED_S):
            return None
        self.settled_s, self.proposed = now_s + SETTLE_S, None
        return change
