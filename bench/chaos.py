"""``python -m bench chaos``: mixed requests against a node while its engines are killed.

1. A plain vLLM engine with the same model and arguments answers every request once: the truth.
2. A node answers them over and over, ``--streams`` at a time, while a seeded schedule of faults
   (``--kinds``, see bench/faults.py) runs and some clients leave at any moment.
3. Every answer is compared; when all is calm again blocks, processes and segments are counted.

Exit code 0 only if no request failed, no answer differed and nothing leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import httpx

from bench.faults import KINDS, Faults, Status, in_small_shm
from bench.servers import ENGINE_ARGS, MODEL_NAME, Node, Twin
from bench.sse import events_async
from bench.tiny_models import tiny_llama

CALM_S = 120.0
IN_SMALL_SHM = "PDNODE_BENCH_SMALL_SHM"
RECOVERIES = {"SIGKILL": ("engine", "worker"), "SIGTERM": ("term",), "SIGSTOP": ("stop",)}
"""A stopped engine is known for one after --health-timeout, and not sooner."""
ASK_AGAIN_S = 1.0
"""After an error: not to count one outage a thousand times."""
LEAVE_WITHIN_S = 4.0
"""A client that leaves does so within this time: in the queue, in prefill, or while it is answered."""


def requests(seed: int, greedy: bool = False) -> list[dict]:
    """A mix that crosses every path: lengths, sampling with and without history, stops, n."""
    rng = random.Random(seed)
    ways = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 1, "seed": 11},
        {"temperature": 0, "presence_penalty": 0.6, "frequency_penalty": 0.4},
        {"temperature": 0, "min_tokens": 40},
        {"temperature": 1, "seed": 5, "n": 2},
        {"temperature": 0, "bad_words": ["the"]},
    ]
    if greedy:
        ways = [way for way in ways if not way["temperature"]]
    made = []
    for i, length in enumerate((20, 130, 300, 700, 1100, 1500) * 3):
        body = {
            "model": MODEL_NAME,
            "prompt": [rng.randrange(10, 400) for _ in range(length)],
            "max_tokens": rng.choice((60, 150, 300)),
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            **ways[i % len(ways)],
        }
        made.append(body)
    return made


@dataclass
class Answer:
    sent_s: float = field(default_factory=time.monotonic)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    at_s: list[float] = field(default_factory=list)
    error: str = ""

    def difference(self, truth: Answer) -> str:
        """Where it begins. "": there is none."""
        for index, tokens in sorted(truth.tokens.items()):
            mine = self.tokens.get(index, [])
            for at, (token, right) in enumerate(zip_longest(mine, tokens)):
                if token != right:
                    return (
                        f"choice {index}: token {at + 1} of {len(tokens)} is {token}, not {right}"
                    )
        if self.finish != truth.finish:
            return f"finish reasons are {self.finish}, not {truth.finish}"
        return "" if self.text == truth.text else "the texts of the same tokens"


async def ask(client: httpx.AsyncClient, body: dict) -> Answer:
    answer = Answer()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code} {(await response.aread())[:200]!r}"
                return answer
            async for event in events_async(response.aiter_bytes()):
                take(answer, event)
                if answer.error:
                    return answer
    except httpx.HTTPError as error:
        answer.error = repr(error)
    return answer


def take(answer: Answer, chunk: dict) -> None:
    if "error" in chunk:
        answer.error = str(chunk["error"])
        return
    answer.at_s.append(time.monotonic())
    for choice in chunk["choices"]:
        index = choice["index"]
        answer.tokens.setdefault(index, []).extend(choice["token_ids"] or [])
        answer.text[index] = answer.text.get(index, "") + choice["text"]
        if choice["finish_reason"]:
            answer.finish[index] = choice["finish_reason"]


@dataclass
class Tally:
    asked: int = 0
    failed: list[str] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)
    left: int = 0
    recovered: list[tuple[str, float]] = field(default_factory=list)
    """Kind of fault, and seconds from it to the next token of a stream."""
    hit: int = 0
    """Failed, and were running when an engine was killed."""
    timed_out: int = 0
    at_s: list[float] = field(default_factory=list)
    """When anybody got anything."""

    @property
    def recovery_s(self) -> list[float]:
        return [seconds for _, seconds in self.recovered]

    def judge(
        self, number: int, answer: Answer, truth: Answer, faults: list[tuple[float, str]]
    ) -> None:
        self.asked += 1
        self.at_s += answer.at_s
        if answer.error:
            self.failed.append(f"request {number}: {answer.error}")
            self.hit += any(answer.sent_s <= at <= time.monotonic() for at, _ in faults)
            self.timed_out += "Timeout" in answer.error
        elif difference := answer.difference(truth):
            self.differ.append(f"request {number}: {difference}")
        self._recovery(answer, faults)

    def _recovery(self, answer: Answer, faults: list[tuple[float, str]]) -> None:
        """Fault to next token, for streams that paused over one."""
        gaps = list(zip(answer.at_s, answer.at_s[1:], strict=False))
        if len(gaps) < 10:
            return
        usual = statistics.median(b - a for a, b in gaps)
        for fault_s, kind in faults:
            for a, b in gaps:
                if a <= fault_s < b and b - a > max(5 * usual, 0.05):
                    self.recovered.append((kind, b - fault_s))


class Chaos:
    """``truths``: the right answers to the first so many of ``requests(seed)``.

    ``status``: engines as /pd/status shows them, of a server that has no such route.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        url: str,
        truths: list[Answer],
        status: Status | None = None,
    ) -> None:
        self._options = options
        self._url = url
        self._bodies = requests(options.seed, options.greedy)[: len(truths)]
        self._truths = truths
        self.faults = Faults(status or self._status, options.kinds, random.Random(options.seed))
        self.tally = Tally()

    async def run(self) -> None:
        # No connection is used twice: servers end an idle one after 5 s, and a request sent in that
        # moment would be lost.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=self._options.timeout, limits=limits
        ) as client:
            self._client = client
            self._begin_s = time.monotonic()
            self.end_s = time.monotonic() + self._options.seconds
            async with asyncio.TaskGroup() as group:
                for stream in range(self._options.streams):
                    group.create_task(self._stream(stream))
                group.create_task(self._schedule())

    async def _status(self) -> dict:
        return (await self._client.get("/pd/status")).json()

    async def _stream(self, stream: int) -> None:
        rng = random.Random(f"{self._options.seed}-{stream}")
        while time.monotonic() < self.end_s:
            number = rng.randrange(len(self._bodies))
            leave_s = rng.uniform(0, LEAVE_WITHIN_S) if rng.random() < self._options.leave else None
            answer = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(leave_s):
                    answer = await ask(self._client, self._bodies[number])
            if answer is None:
                self.tally.left += 1
            else:
                if answer.error:
                    answer.error += f" (after {time.monotonic() - self._begin_s:.0f} s)"
                self.tally.judge(number, answer, self._truths[number], self.faults.at)
                if answer.error:
                    await asyncio.sleep(ASK_AGAIN_S)

    async def _schedule(self) -> None:
        await asyncio.sleep(self._options.every / 2)
        while time.monotonic() < self.end_s - self._options.every / 2:
            await self.faults.one()
            await asyncio.sleep(self._options.every)


async def record(server: Twin, bodies: list[dict]) -> list[Answer]:
    async with httpx.AsyncClient(base_url=server.url, timeout=300.0) as client:
        return [await ask(client, body) for body in bodies]


def calm(node: Node) -> tuple[dict, list[str]]:
    """Wait until every engine is ready and idle; returns the status and what leaked."""
    status = node.wait_status(
        lambda s: all(
            e["state"] == "ready" and not e["running"] and not e["waiting"] for e in s["engines"]
        ),
        CALM_S,
        "engines ready and idle",
    )
    leaks = [
        f"{e['id']}: {e['kv_blocks_total'] - e['kv_blocks_free']} blocks"
        for e in status["engines"]
        if e["kv_blocks_free"] != e["kv_blocks_total"]
    ]
    return status, leaks


def left_behind(boot_id: str) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if boot_id in name]


def report(chaos: Chaos, status: dict, leaks: list[str]) -> int:
    """Print the table; 0 if nothing failed, differed or leaked."""
    tally, faults = chaos.tally, chaos.faults.done
    rows = [
        ("requests answered", tally.asked),
        ("clients that left", tally.left),
        ("faults", ", ".join(f"{n} x {what}" for what, n in faults.items()) or "none"),
        ("failed requests", len(tally.failed)),
        ("answers that differ", len(tally.differ)),
        ("requests refused", status["counters"]["rejected"]),
        ("resumes", status["counters"]["resumes"]),
        ("tokens recomputed by resumes", status["counters"]["resume_recomputed_tokens"]),
        ("tokens recomputed otherwise", status["counters"]["recomputed_prompt_tokens"]),
        ("prefix copies that failed", status["counters"]["prefix_failures"]),
    ]
    for what, kinds in RECOVERIES.items():
        if seconds := [s for kind, s in tally.recovered if kind in kinds]:
            p50 = statistics.median(seconds)
            told = f"p50 {p50:.2f} s, max {max(seconds):.2f} s, {len(seconds)} streams"
            rows.append((f"recovery after {what}", told))
    rows.append(("leaks", "; ".join(leaks) or "none"))
    for name, value in rows:
        print(f"{name:<32} {value}")
    for line in (*tally.failed[:5], *tally.differ[:5]):
        print(line)
    return 1 if tally.failed or tally.differ or leaks else 0


def parse(argv: list[str], name: str = "chaos", what: str | None = __doc__) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m bench {name}", description=what)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--every", type=float, default=10, help="seconds between faults")
    parser.add_argument("--prefill", type=int, default=2, help="prefill engines")
    parser.add_argument("--decode", type=int, default=2, help="decode engines")
    parser.add_argument(
        "--leave", type=float, default=0.1, help="share of clients that leave early"
    )
    parser.add_argument("--health-timeout", type=float, default=10)
    parser.add_argument(
        "--timeout",
        type=float,
        default=300,
        help="a request without a sign of life for so long failed",
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--shm-gib", type=float, metavar="N", help="run with a /dev/shm of this size (needs root)"
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the servers' output there")
    parser.add_argument("--greedy", action="store_true", help="only requests that draw nothing")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    if options.shm_gib and IN_SMALL_SHM not in os.environ:
        os.environ[IN_SMALL_SHM] = "1"
        in_small_shm(options.shm_gib, [sys.executable, "-m", "bench", "chaos", *argv])
    model = str(tiny_llama())
    with tempfile.TemporaryDirectory() as name:
        folder = options.logs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        truths = recorded(model, folder, requests(options.seed, options.greedy))
        chaos, status, leaks = fire_at_node(model, folder, options, truths)
    return report(chaos, status, leaks)


def recorded(model: str, folder: Path, bodies: list[dict]) -> list[Answer]:
    twin = Twin(model, folder / "twin.log", *ENGINE_ARGS)
    try:
        twin.wait_ready()
        truths = asyncio.run(record(twin, bodies))
    finally:
        twin.stop()
    assert not any(truth.error for truth in truths), [t.error for t in truths]
    return truths


def fire_at_node(
    model: str, folder: Path, options: argparse.Namespace, truths: list[Answer]
) -> tuple[Chaos, dict, list[str]]:
    node = Node(
        model,
        folder / "node.log",
        *ENGINE_ARGS,
        *("--health-timeout", str(options.health_timeout)),
        # Where a request goes must not hang on estimates: a killed P has to hit somebody.
        *("--split", "always"),
        prefill=options.prefill,
        decode=options.decode,
    )
    try:
        node.wait_ready()
        boot_id = node.status()["boot_id"]
        chaos = Chaos(options, node.url, truths)
        asyncio.run(chaos.run())
        status, leaks = calm(node)
    finally:
        print(node.tail(15))
        node.stop()
    return chaos, status, leaks + left_behind(boot_id)
