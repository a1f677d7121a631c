"""The last requests and the latencies of the last minutes: what ``GET /pd/requests`` tells.

    begin --> running --> ended --> (the oldest of KEPT goes)

Bounded in memory whatever clients do. On the front end's loop only: no locks.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdnode import exchange
from pdnode.exchange import MAX_ID, Exchange
from pdnode.timeline import Phase, Timeline

if TYPE_CHECKING:
    from pdnode.vllm_compat import EngineCoreRequest

KEPT = 1000
LISTED = 40
BUCKET_S = 5
BUCKETS = 60
"""Five minutes in all."""
SAMPLES = 256
"""Of each latency in a bucket; beyond, a random choice of them."""

Finished = Callable[[Exchange, Timeline, "EngineCoreRequest"], None]


@dataclass(slots=True)
class Bucket:
    """Latencies of the requests that ended in the same BUCKET_S seconds; milliseconds."""

    number: int
    requests: int = 0
    output_tokens: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)

    def to_json(self, now_number: int) -> dict[str, Any]:
        return {
            "age_s": (now_number - self.number) * BUCKET_S,
            "requests": self.requests,
            "output_tokens": self.output_tokens,
            **_quantiles("ttft_ms", self.ttft_ms),
            **_quantiles("itl_ms", self.itl_ms),
        }


def _quantiles(name: str, values: list[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    return {
        f"{name}_p{percent}": round(ordered[int(len(ordered) * percent / 100)], 3)
        if ordered
        else None
        for percent in (50, 99)
    }


class History:
    """``names``: engine ids by slot."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.on_finished: list[Finished] = []
        self._kept: deque[Exchange] = deque()
        self._buckets: deque[Bucket] = deque(maxlen=BUCKETS)
        self._of: dict[int, Exchange] = {}
        """Timelines that have not ended, by their identity."""

    # --- written ------------------------------------------------------------------------------------

    def begin(self, timeline: Timeline) -> None:
        """A request that the API was asked for, in the context it was asked in."""
        asked = exchange.current.get()
        if asked is None:
            # Not over HTTP (a websocket): it still has a life to show.
            asked = Exchange(timeline.request_id, "", received=timeline.arrived)
        if not asked.timelines:
            self._kept.append(asked)
            if len(self._kept) > KEPT:
                self._kept.popleft()
        asked.timelines.append(timeline)
        self._of[id(timeline)] = asked

    def ended(self, timeline: Timeline, request: EngineCoreRequest) -> None:
        asked = self._of.pop(id(timeline), None)
        if asked is None:
            return
        self._sample(asked, timeline)
        for told in self.on_finished:
            told(asked, timeline, request)

    def _sample(self, asked: Exchange, timeline: Timeline) -> None:
        number = int(time.monotonic() / BUCKET_S)
        if not self._buckets or self._buckets[-1].number != number:
            self._buckets.append(Bucket(number))
        bucket = self._buckets[-1]
        bucket.requests += 1
        bucket.output_tokens += timeline.output_tokens
        if timeline.first_token is not None:
            _keep(bucket.ttft_ms, (timeline.first_token - asked.received) * 1e3)
        if timeline.itl_s is not None:
            _keep(bucket.itl_ms, timeline.itl_s * 1e3)

    # --- read ---------------------------------------------------------------------------------------

    def find(self, request_id: str) -> dict[str, Any] | None:
        """By ``x-request-id``, or by the id in the body of the answer; the newest if there are several."""
        for asked in reversed(self._kept):
            if asked.request_id[:MAX_ID] == request_id[:MAX_ID] or any(
                t.request_id == request_id for t in asked.timelines
            ):
                return self.describe(asked)
        return None

    def listed(self, limit: int = LISTED) -> dict[str, Any]:
        now_number = int(time.monotonic() / BUCKET_S)
        newest = [self._kept[-1 - i] for i in range(min(limit, len(self._kept)))]
        return {
            "requests": [self.describe(asked) for asked in newest],
            "latency": {
                "bucket_s": BUCKET_S,
                "buckets": [
                    bucket.to_json(now_number)
                    for bucket in self._buckets
                    if now_number - bucket.number < BUCKETS
                ],
            },
        }

    def describe(self, asked: Exchange) -> dict[str, Any]:
        """Times in milliseconds since the request was received."""
        return {
            "id": asked.request_id[:MAX_ID],
            "path": asked.path,
            "status": asked.status,
            "received_at": asked.received_at,
            "first_byte_ms": _ms(asked, asked.first_byte),
            "last_byte_ms": _ms(asked, asked.last_byte),
            "requests": [self._request(asked, timeline) for timeline in asked.timelines],
        }

    def _request(self, asked: Exchange, timeline: Timeline) -> dict[str, Any]:
        itl_s = timeline.itl_s
        events = {
            "arrived": timeline.arrived,
            **timeline.seven(),
            "first_token": timeline.first_token,
            "finished": timeline.finished,
        }
        return {
            "request_id": timeline.request_id,
            "state": timeline.outcome or "running",
            "prefill": self._name(timeline.prefill),
            "decode": self._name(timeline.decode),
            "reason": timeline.reason,
            "estimates": timeline.estimates,
            "prompt_tokens": timeline.prompt_tokens,
            "cached_tokens": timeline.cached_tokens,
            "output_tokens": timeline.output_tokens,
            "deaths": timeline.deaths,
            "itl_ms": None if itl_s is None else round(itl_s * 1e3, 3),
            "longest_gap_ms": round(timeline.longest_gap * 1e3, 3),
            "events_ms": {name: _ms(asked, at) for name, at in events.items()},
            "ttft": self._ttft(asked, timeline),
            "handoff": self._handoff(timeline),
            "phases": [
                {
                    "phase": phase.name,
                    "begin_ms": _ms(asked, phase.begin),
                    "end_ms": _ms(asked, phase.end),
                    "engine": self._name(phase.slot),
                }
                for phase in self._phases(asked, timeline)
            ],
        }

    def _phases(self, asked: Exchange, timeline: Timeline) -> Iterator[Phase]:
        if timeline.arrived > asked.received:
            yield Phase("front", asked.received, timeline.arrived, None)
        yield from timeline.phases()
        if timeline.finished is not None and (asked.last_byte or 0) > timeline.finished:
            yield Phase("front", timeline.finished, asked.last_byte, None)

    def _ttft(self, asked: Exchange, timeline: Timeline) -> dict[str, float] | None:
        """Where the time to the first token went; the parts add up to ``ms``.

        Until the first byte left where tokens are streamed, else until the token was here.
        """
        if timeline.first_token is None:
            return None
        until = asked.first_byte if asked.streams and asked.first_byte else timeline.first_token
        parts: dict[str, float] = {}
        at = asked.received
        for phase in self._phases(asked, timeline):
            end = min(phase.end, timeline.first_token)
            if end > at:
                parts[phase.name] = parts.get(phase.name, 0.0) + end - at
                at = end
        parts["front"] = parts.get("front", 0.0) + until - at
        return {
            "ms": round((until - asked.received) * 1e3, 3),
            **{f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in parts.items()},
        }

    def _handoff(self, timeline: Timeline) -> dict[str, Any] | None:
        copied = timeline.handoff
        if copied is None:
            return None
        seconds = copied.end - copied.begin
        leg = next(leg for leg in timeline.legs if leg.copied is copied)
        return {
            "from": self._name(copied.owner),
            "to": self._name(leg.slot),
            "bytes": copied.nbytes,
            "ms": round(seconds * 1e3, 3),
            "gb_per_s": round(copied.nbytes / seconds / 1e9, 2) if seconds else None,
        }

    def _name(self, slot: int | None) -> str | None:
        return self.names[slot] if slot is not None and 0 <= slot < len(self.names) else None


def _keep(samples: list[float], value: float) -> None:
    if len(samples) < SAMPLES:
        samples.append(value)
    else:
        samples[random.randrange(SAMPLES)] = value


def _ms(asked: Exchange, at: float | None) -> float | None:
    return None if at is None else round((at - asked.received) * 1e3, 3)
