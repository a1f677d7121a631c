"""The constants of a running node, measured from outside in a few seconds.

Prompts of several lengths one at a time, then several streams at once; the node's own timelines
(``/pd/requests/{id}``) say how long each prefill, copy and step took.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import secrets
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pdnode.errors import PlanError
from pdnode.estimate import Constants, Estimator, prefill_ms, step_ms
from pdnode.history import KEPT
from pdnode.planner import Hardware
from pdnode.sim.node import percentile
from pdnode.traffic import PROBE

LENGTHS = (1, 2, 4, 8, 16)
"""Prompts in blocks."""
REPEATS = 3
TOKENS = 24
STREAMS = (2, 4, 8)
MODEL_ROOM = 64
"""Tokens of the context left for the answer."""
SHORT = (16, 48)
"""And in tokens, where a block is longer: what runs beside streams is computed in such pieces."""
STREAM_PROMPT = 16
"""Streams are to run beside each other for most of their time: short prompts, long answers."""
PROMPTS = 4
"""One after another beside streams, to see how much slower both get."""
LOW_IDS = 250
NOISE = 0.05
"""Contention below this is not told from chance."""
SELF_TEST_BLOCKS = 2
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Box:
    """What a plan needs to know of the node it plans for."""

    hardware: Hardware
    prefill: int
    decode: int
    kind: str
    """``cpu`` or ``gpu``."""
    observed: dict[str, float] = field(default_factory=dict)
    """ttft_ms_p50, ttft_ms_p99, itl_ms_p50 and itl_ms_p99 of the last requests, ITL being each one's
    mean; empty: no answers."""
    observed_requests: int = 0


class Client:
    """``url``: of the node, without a path. Raises PlanError."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url.rstrip("/")
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    def stream(self, path: str, body: dict[str, Any]) -> str:
        """Reads an answer to its end; returns its x-request-id."""
        with self._opened(path, body) as answer:
            if b'data: {"error"' in (said := answer.read()):
                raise PlanError(f"{self.url}{path} answered {said.decode(errors='replace')}")
            return answer.headers.get("x-request-id", "")

    def ask(self, path: str) -> dict[str, Any]:
        """The answer's JSON."""
        with self._opened(path) as answer:
            return json.load(answer)

    @contextlib.contextmanager
    def _opened(
        self, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "x-request-id": PROBE + secrets.token_hex(8)}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                yield answer
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
    """Raises PlanError. Costs the node about a hundred and fifty short requests."""
    status = client.ask("/pd/status")
    down = [e["id"] for e in status["engines"] if e["state"] != "ready"]
    if down:
        raise PlanError(
            f"{', '.join(down)} of the node at {client.url} is not ready, so that what it takes "
            "cannot be measured: try again when /pd/status says so, or give --constants FILE"
        )
    models = client.ask("/v1/models")
    model = models["data"][0]
    seen = client.ask(f"/pd/requests?limit={KEPT}")
    block, room = status["block_size"], model["max_model_len"] - MODEL_ROOM
    probe = Probe(client, model["id"], block, room)
    estimator = Estimator(chunk_tokens=status["chunk_tokens"])
    split = 0
    for _ in range(REPEATS):
        for length in probe.lengths:
            found = probe.one(length)
            split += found["handoff"] is not None
            _observe(estimator, 1, found)
        for streams in STREAMS:
            _observe_streams(estimator, probe.streams(streams))
    if not split:
        _handoffs_so_far(estimator, client.ask("/pd/status"), block)
    constants = estimator.constants()
    if constants is None:
        raise PlanError(
            f"the node at {client.url} told no times of its engines: start it without "
            "--disable-log-stats, and with at least one prefill and one decode engine"
        )
    roles = [engine["role"] for engine in status["engines"]]
    hardware = Hardware(
        constants=constants,
        # The smallest.
        kv_tokens=min(engine["kv_blocks_total"] for engine in status["engines"]) * block,
        contention=_contention(probe, constants),
        block_size=block,
    )
    return Box(
        hardware,
        prefill=roles.count("prefill"),
        decode=roles.count("decode"),
        kind="cpu" if status["engines"][0]["device"].startswith("CPU") else "gpu",
        **observed(seen),
    )


Told = list[dict[str, Any]]
"""Requests as ``/pd/requests/{id}`` tells them."""


class Probe:
    """Asks the node and tells of each request what ``/pd/requests/{id}`` says of it."""

    def __init__(self, client: Client, model: str, block: int, room: int) -> None:
        self._client, self._model, self._room = client, model, room
        self._rng = random.Random()
        whole = [n * block for n in LENGTHS if n * block <= room] or [room]
        self.lengths = [n for n in SHORT if n < whole[0]] + whole

    def one(self, prompt_tokens: int, tokens: int = TOKENS) -> dict[str, Any]:
        body = {
            "model": self._model,
            # Low ids are in every vocabulary; drawn anew, so that no prefix cache knows them.
            "prompt": [self._rng.randrange(10, LOW_IDS) for _ in range(prompt_tokens)],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            # What a streamed token costs the front end is part of what users wait for.
            "stream": True,
        }
        request_id = self._client.stream("/v1/completions", body)
        found = self._client.ask(f"/pd/requests/{request_id}")
        return found["requests"][0]

    def streams(self, count: int) -> Told:
        """Short prompts, long answers, all at once."""
        return self.streams_beside(count, 0)[0]

    def streams_beside(self, count: int, prompt_tokens: int) -> tuple[Told, Told]:
        """And meanwhile prompts, one after another: (the streams, the prompts)."""
        length, prompts = min(STREAM_PROMPT, self._room), []
        with ThreadPoolExecutor(count) as pool:
            streams = [pool.submit(self.one, length, MODEL_ROOM) for _ in range(count)]
            while prompt_tokens and not any(stream.done() for stream in streams):
                prompts.append(self.one(prompt_tokens, 1))
        # The last one may have had some of its time alone.
        return [stream.result() for stream in streams], prompts[:-1] or prompts


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


def _observe_streams(estimator: Estimator, requests: Told) -> None:
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


def _contention(probe: Probe, constants: Constants) -> float | None:
    """Streams on one engine and prompts on another, in turn apart and together."""
    streams = max(STREAMS)
    enough_ms = MODEL_ROOM * step_ms(constants, streams) / PROMPTS
    short = [n for n in probe.lengths if prefill_ms(constants, n) < enough_ms]
    found: list[float] = []
    for _ in range(REPEATS if short else 0):
        prompts = [probe.one(max(short), 1) for _ in range(PROMPTS)]
        apart = probe.streams(streams), prompts
        found += slowed(apart, probe.streams_beside(streams, max(short)))
    if not found:
        return None
    return median(found) if median(found) > NOISE else 0.0


def slowed(apart: tuple[Told, Told], together: tuple[Told, Told]) -> list[float]:
    """Of (streams, prompts): by which share both got slower. Empty: they were on one engine."""
    prompts_on = {prompt["prefill"] or prompt["decode"] for prompt in together[1]}
    beside = [stream for stream in together[0] if stream["decode"] not in prompts_on]
    if not beside or not prompts_on:
        return []
    of_streams = _took_ms(beside, "decode") / _took_ms(apart[0], "decode") - 1
    of_prompts = _took_ms(together[1], "prefill") / _took_ms(apart[1], "prefill") - 1
    return [(of_prompts + of_streams) / 2]


def _took_ms(requests: Told, phase: str) -> float:
    return median(
        request["events_ms"][f"{phase}_end"] - request["events_ms"][f"{phase}_begin"]
        for request in requests
    )


def _handoffs_so_far(estimator: Estimator, status: dict[str, Any], block: int) -> None:
    """An idle node splits nothing where that does not pay: then its self-test's copies are all there is."""
    for engine in status["engines"]:
        if engine["handoffs_in"]:
            ms = engine["handoff_seconds"] / engine["handoffs_in"] * 1e3
            for _ in range(REPEATS):
                estimator.observe_handoff(SELF_TEST_BLOCKS * block, ms)


def observed(seen: dict[str, Any]) -> dict[str, Any]:
    """Fields of Box, from ``/pd/requests``. An earlier plan's probes are not the users' requests."""
    answers = [
        request
        for asked in seen["requests"]
        if not asked["id"].startswith(PROBE)
        for request in asked["requests"]
        if request["ttft"] is not None
    ]
    times = {
        "ttft_ms": [request["ttft"]["ms"] for request in answers],
        "itl_ms": [request["itl_ms"] for request in answers if request["itl_ms"] is not None],
    }
    observed = {
        f"{name}_{quantile}": percentile(values, share)
        for name, values in times.items()
        for quantile, share in (("p50", 0.5), ("p99", 0.99))
        if values
    }
    return {"observed": observed, "observed_requests": len(answers)}
