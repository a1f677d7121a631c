"""The constants of a running node, measured from outside in a few seconds.

Prompts of several lengths one at a time, then several streams at once; the node's own timelines
(``/pd/requests/{id}``) say how long each prefill, copy and step took.
"""

from __future__ import annotations

import http.client
import json
import random
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from pdnode.errors import PlanError
from pdnode.estimate import Constants, Estimator, prefill_ms, step_ms

LENGTHS = (1, 2, 4, 8, 16)
"""Prompts in blocks."""
REPEATS = 3
TOKENS = 24
STREAMS = (2, 4, 8)
MODEL_ROOM = 64
"""Tokens of the context left for the answer."""
STREAM_PROMPT = 16
"""Streams are to run beside each other for most of their time: short prompts, long answers."""
LOW_IDS = 250
NOISE = 0.05
"""Contention below this is not told from chance."""
SELF_TEST_BLOCKS = 2
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Box:
    """What a plan needs to know of the node it plans for."""

    constants: Constants
    prefill: int
    decode: int
    kind: str
    """``cpu`` or ``gpu``."""
    kv_tokens: int
    """Of one engine: the smallest."""
    latency: dict[str, float]
    """Observed in the last minutes: ttft_ms_p50, ... as in ``/pd/requests``; empty: no answers."""
    contention: float = 0.0
    """By which share of its time a pass gets longer for each other engine that works meanwhile: CPU
    engines share caches and memory, two of them perhaps the parts of one core."""


class Client:
    """``url``: of the node, without a path. Raises PlanError."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url.rstrip("/")
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[dict[str, Any], str]:
        """(the answer's JSON, its x-request-id)."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return json.load(answer), answer.headers.get("x-request-id", "")
        except urllib.error.HTTPError as error:
            why = "give its key with --api-key" if error.code == 401 else _said(error)
            raise PlanError(f"{self.url}{path} answered {error.code}: {why}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise PlanError(
                f"no pdnode answers at {self.url} ({error}); start it, or give --constants FILE"
            ) from error


def _said(error: urllib.error.HTTPError) -> str:
    return " ".join(error.read(500).decode(errors="replace").split())


def measure(client: Client) -> Box:
    """Raises PlanError. Costs the node about a hundred short requests."""
    status, _ = client.ask("/pd/status")
    models, _ = client.ask("/v1/models")
    model = models["data"][0]
    seen, _ = client.ask("/pd/requests")
    block, room = status["block_size"], model["max_model_len"] - MODEL_ROOM
    estimator = Estimator(chunk_tokens=status["chunk_tokens"])
    rng = random.Random()
    split = 0
    for _ in range(REPEATS):
        for length in _lengths(block, room):
            found = _one(client, model["id"], length, rng)
            split += found["handoff"] is not None
            _observe(estimator, 1, found)
    for streams in STREAMS:
        with ThreadPoolExecutor(streams) as pool:
            asked = [
                pool.submit(_one, client, model["id"], min(STREAM_PROMPT, room), rng, MODEL_ROOM)
                for _ in range(streams)
            ]
        _observe_streams(estimator, [one.result() for one in asked])
    if not split:
        _handoffs_so_far(estimator, client.ask("/pd/status")[0], block)
    constants = estimator.constants()
    if constants is None:
        raise PlanError(
            f"the node at {client.url} told no times of its engines: start it without "
            "--disable-log-stats, and with at least one prefill and one decode engine"
        )
    roles = [engine["role"] for engine in status["engines"]]
    return Box(
        constants=constants,
        prefill=roles.count("prefill"),
        decode=roles.count("decode"),
        kind="cpu" if status["engines"][0]["device"].startswith("CPU") else "gpu",
        kv_tokens=min(engine["kv_blocks_total"] for engine in status["engines"]) * block,
        latency=_newest(seen),
        contention=_contention(client, model["id"], constants, block, room, rng),
    )


def _lengths(block: int, room: int) -> Iterator[int]:
    for blocks in LENGTHS:
        if blocks * block <= room:
            yield blocks * block
    if block > room:
        yield room


def _one(
    client: Client, model: str, prompt_tokens: int, rng: random.Random, tokens: int = TOKENS
) -> dict[str, Any]:
    body = {
        "model": model,
        # Low ids are in every vocabulary; drawn anew, so that no prefix cache knows them.
        "prompt": [rng.randrange(10, LOW_IDS) for _ in range(prompt_tokens)],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    _, request_id = client.ask("/v1/completions", body)
    found, _ = client.ask(f"/pd/requests/{request_id}")
    return found["requests"][0]


def _observe(estimator: Estimator, streams: int, request: dict[str, Any]) -> None:
    """A request that had the node for itself."""
    events, ttft = request["events_ms"], request["ttft"]
    if events["prefill_begin"] is not None and events["prefill_end"] is not None:
        new = request["prompt_tokens"] - request["cached_tokens"]
        ms = events["prefill_end"] - events["prefill_begin"]
        estimator.observe_prefill(new, request["cached_tokens"], ms)
        estimator.observe_front(ttft["front_ms"] + ttft.get("queued_ms", 0.0))
    if request["handoff"] is not None:
        estimator.observe_handoff(request["prompt_tokens"], request["handoff"]["ms"])
    _observe_decode(estimator, streams, request)


def _observe_streams(estimator: Estimator, requests: list[dict[str, Any]]) -> None:
    """Requests that were asked at once."""
    on = Counter(request["decode"] for request in requests)
    for request in requests:
        _observe_decode(estimator, on[request["decode"]], request)


def _observe_decode(estimator: Estimator, streams: int, request: dict[str, Any]) -> None:
    events = request["events_ms"]
    if request["output_tokens"] < 3 or events["decode_begin"] is None:
        return
    # The token that prefill sampled is not a decode step's.
    steps = request["output_tokens"] - 1
    estimator.observe_decode_step(streams, (events["decode_end"] - events["decode_begin"]) / steps)


def _contention(
    client: Client, model: str, constants: Constants, block: int, room: int, rng: random.Random
) -> float:
    """A prompt on one engine beside streams on another, both against what they take alone."""
    streams = max(STREAMS)
    enough_ms = MODEL_ROOM * step_ms(constants, streams) / 2
    length = max(
        (n for n in _lengths(block, room) if prefill_ms(constants, n) < enough_ms), default=0
    )
    found: list[float] = []
    for _ in range(REPEATS if length else 0):
        with ThreadPoolExecutor(streams + 1) as pool:
            asked = [
                pool.submit(_one, client, model, min(STREAM_PROMPT, room), rng, MODEL_ROOM)
                for _ in range(streams)
            ]
            prompt = pool.submit(_one, client, model, length, rng, 2)
        found += slowed(constants, [one.result() for one in asked], prompt.result())
    return median(found) if found and median(found) > NOISE else 0.0


def slowed(
    constants: Constants, streams: list[dict[str, Any]], prompt: dict[str, Any]
) -> list[float]:
    """Of requests as ``/pd/requests/{id}`` tells them; empty: all were on one engine."""
    on = Counter(stream["decode"] for stream in streams)
    here = prompt["prefill"] or prompt["decode"]
    beside = [stream for stream in streams if stream["decode"] != here]
    if not beside:
        return []
    begin, end = (prompt["events_ms"][f"prefill_{what}"] for what in ("begin", "end"))
    together_ms = end - begin
    of_prompt = together_ms / prefill_ms(constants, prompt["prompt_tokens"], 0, on[here]) - 1
    took_ms = fmean(s["events_ms"]["decode_end"] - s["events_ms"]["decode_begin"] for s in beside)
    alone_ms = fmean((s["output_tokens"] - 1) * step_ms(constants, on[s["decode"]]) for s in beside)
    lost_ms = took_ms - alone_ms
    # Of the time together they did their own work for the rest only.
    of_streams = lost_ms / max(together_ms - lost_ms, together_ms / MODEL_ROOM)
    return [(of_prompt + of_streams) / 2]


def _handoffs_so_far(estimator: Estimator, status: dict[str, Any], block: int) -> None:
    """An idle node splits nothing where that does not pay: then its self-test's copies are all there is."""
    for engine in status["engines"]:
        if engine["handoffs_in"]:
            ms = engine["handoff_seconds"] / engine["handoffs_in"] * 1e3
            for _ in range(REPEATS):
                estimator.observe_handoff(SELF_TEST_BLOCKS * block, ms)


def _newest(seen: dict[str, Any]) -> dict[str, float]:
    buckets = [b for b in seen["latency"]["buckets"] if b["requests"]]
    return (
        {k: v for k, v in buckets[-1].items() if k.endswith(("_p50", "_p99")) and v}
        if buckets
        else {}
    )
