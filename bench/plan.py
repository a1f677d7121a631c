"""``python -m bench plan``: the goodput that ``launcher.py plan`` predicts, and what the node then does.

1. A 1P1D node is started and measured from outside, as ``plan --url`` does it.
2. For each workload the planner predicts both uses of the two engines: split, and data parallel.
3. The same arrivals are played against the node, faster and slower, and then against the same
   engines under --split never. Goodput is the rate at which 90 % of the requests met both goals.

A round is another draw of the arrivals. A prediction and its measurement always have the same ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from aiohttp import ClientSession, ClientTimeout, TCPConnector

from bench.measure import Series, median_ratio
from bench.report import Report, add_output_flags, machine
from bench.servers import Node
from bench.sse import Cutter
from pdnode import default_model, planner
from pdnode.calibrate import LOW_IDS, Box, Client, measure
from pdnode.estimate import Constants, prefill_ms
from pdnode.planner import DATA_PARALLEL, SHARE, Goals
from pdnode.traffic import Arrival

SERVED = "model"
BAR = 0.2
STEP = 1.25
"""The next rate that is played is this much higher or lower, until the goals are met at one only."""
NARROW = 1.1
"""Then between the two, until they are this close."""
MOST_PLAYS = 8
SETTLE_S = 0.5
REQUEST_S = 300.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokens are drawn evenly between the two ends."""

    prompt: tuple[int, int]
    output: tuple[int, int]
    long_prompt: tuple[int, int] = (0, 0)
    long_share: float = 0.0


WORKLOADS = {
    "chat": Workload((32, 256), (16, 64)),
    "long": Workload((512, 1024), (32, 64)),
    "mixed": Workload((32, 256), (16, 64), long_prompt=(512, 1024), long_share=0.25),
}


def arrivals(workload: Workload, requests: int, rate: float, seed: int) -> list[Arrival]:
    """A Poisson process; the same seed gives the same requests at any rate."""
    rng, at_ms, found = random.Random(seed), 0.0, []
    for _ in range(requests):
        at_ms += rng.expovariate(1.0) * 1e3 / rate
        is_long = rng.random() < workload.long_share
        prompt = rng.randint(*(workload.long_prompt if is_long else workload.prompt))
        found.append(Arrival(at_ms, prompt, rng.randint(*workload.output)))
    return found


def goals_for(workload: Workload, constants: Constants, ttft: float, itl: float) -> Goals:
    """``ttft``: times the longest prompt's prefill, ``itl``: times a lone stream's step."""
    longest = max(workload.prompt[1], workload.long_prompt[1])
    step_ms = constants.decode_step_ms + constants.decode_step_ms_per_stream
    return Goals(
        round(ttft * (prefill_ms(constants, longest) + constants.front_ms)), round(itl * step_ms, 1)
    )


# --- the node, measured ---------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0

    def met(self, goals: Goals) -> bool:
        itl_ms = (self.last_s - self.first_s) * 1e3 / max(1, self.tokens - 1)
        return (self.first_s - self.sent_s) * 1e3 <= goals.ttft_ms and itl_ms <= goals.itl_ms


async def ask(client: ClientSession, arrival: Arrival) -> Answer:
    body = {
        "model": SERVED,
        # Drawn anew every time, so that no prefix cache knows them.
        "prompt": [random.randrange(10, LOW_IDS) for _ in range(arrival.prompt_tokens)],
        "max_tokens": arrival.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    answer, cutter = Answer(time.monotonic()), Cutter()
    async with client.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        async for data in response.content.iter_any():
            for event in cutter.feed(data):
                if "error" in event:
                    raise RuntimeError(f"the node answered {event['error']}")
                answer.tokens += len(event["choices"][0]["token_ids"] or ())
                answer.last_s = time.monotonic()
                answer.first_s = answer.first_s or answer.last_s
    if answer.tokens != arrival.output_tokens:
        raise RuntimeError(f"{answer.tokens} tokens came where {arrival.output_tokens} were asked")
    return answer


async def play(url: str, trace: list[Arrival], faster: float) -> list[Answer]:
    connector, timeout = TCPConnector(limit=0, force_close=True), ClientTimeout(REQUEST_S)
    begin_s, tasks = time.monotonic() + SETTLE_S, []
    async with (
        ClientSession(url, connector=connector, timeout=timeout) as client,
        asyncio.TaskGroup() as group,
    ):
        for arrival in trace:
            at_s = begin_s + arrival.arrival_ms / 1e3 / faster
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            tasks.append(group.create_task(ask(client, arrival)))
    return [task.result() for task in tasks]


def crossing(share: Callable[[float], float], start: float) -> tuple[float, dict[float, float]]:
    """(where ``share`` falls through SHARE, every rate that was tried with its share)."""
    tried = {start: share(start)}
    rate, step = start, STEP if tried[start] >= SHARE else 1 / STEP
    while len(tried) < MOST_PLAYS and (tried[rate] >= SHARE) == (step > 1):
        rate *= step
        tried[rate] = share(rate)
    while len(tried) < MOST_PLAYS:
        low, high = bracket(tried)
        if not low or high / low <= NARROW:
            break
        middle = math.sqrt(low * high)
        tried[middle] = share(middle)
    return between(tried), tried


def bracket(tried: dict[float, float]) -> tuple[float, float]:
    """The lowest rate that failed and the highest below it that did not; 0: none did, or inf."""
    high = min((r for r, s in tried.items() if s < SHARE), default=math.inf)
    return max((r for r, s in tried.items() if s >= SHARE and r < high), default=0.0), high


def between(tried: dict[float, float]) -> float:
    """Along the line from the last rate that met the goals to the first that did not."""
    low, high = bracket(tried)
    if not low or high == math.inf:
        return low
    met, missed = tried[low], tried[high]
    return low + (high - low) * (met - SHARE) / (met - missed)


# --- the bench ------------------------------------------------------------------------------------


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench plan", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--requests", type=int, default=60, help="of one play")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--ttft", type=float, default=5.0, help="times the longest prefill")
    parser.add_argument("--itl", type=float, default=5.0, help="times a lone stream's step")
    parser.add_argument("--model", help="folder or name (default: the embedded one)")
    add_output_flags(parser)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    model = options.model or str(default_model.ensure())
    predicted: dict[tuple[str, str], Series] = {}
    measured: dict[tuple[str, str], Series] = {}
    with tempfile.TemporaryDirectory() as folder:
        box = None
        for way, flags in (("1P1D", ()), (DATA_PARALLEL, ("--split", "never"))):
            node = started(model, Path(folder) / f"{way}.log", *flags)
            try:
                box = box or measure(Client(node.url))
                for name in options.workloads:
                    key = (name, way)
                    predicted[key], measured[key] = rounds(options, box, node.url, name, way)
            except BaseException:
                print(node.tail(), file=sys.stderr)
                raise
            finally:
                node.stop()
    return report(options, box, predicted, measured).finish(options)


def started(model: str, log: Path, *flags: str) -> Node:
    node = Node(model, log, "--served-model-name", SERVED, "--max-model-len", "2048", *flags)
    try:
        node.wait_ready()
        return node
    except BaseException:
        node.stop()
        raise


def rounds(
    options: argparse.Namespace, box: Box, url: str, name: str, way: str
) -> tuple[Series, Series]:
    """(predicted, measured), requests a second."""
    workload, predicted, measured = WORKLOADS[name], Series(), Series()
    goals = goals_for(workload, box.hardware.constants, options.ttft, options.itl)
    for seed in range(options.seed, options.seed + options.rounds):
        trace = arrivals(workload, options.requests, 1.0, seed)
        rows = planner.plan(trace, box.hardware, 2, goals)
        expected = next(row.goodput for row in rows if row.name == way)

        def share(rate: float, trace: list[Arrival] = trace) -> float:
            answers = asyncio.run(play(url, trace, rate / planner.rate_per_s(trace)))
            return sum(answer.met(goals) for answer in answers) / len(answers)

        found, tried = crossing(share, expected or 0.1)
        predicted.rounds.append(expected)
        measured.rounds.append(found)
        shares = ", ".join(f"{rate:.2f}/s {tried[rate]:.0%}" for rate in sorted(tried))
        print(
            f"{name}, {way}, seed {seed}: predicted {expected:.2f}, measured {found:.2f} ({shares})",
            file=sys.stderr,
            flush=True,
        )
    return predicted, measured


def report(options: argparse.Namespace, box: Box, predicted: dict, measured: dict) -> Report:
    made = Report("plan", "goodput, predicted by the planner and measured on the node")
    goals = {
        name: goals_for(WORKLOADS[name], box.hardware.constants, options.ttft, options.itl)
        for name in options.workloads
    }
    made.facts = machine() | {
        "model": options.model or "the embedded one",
        "engines": "one core each",
        "constants": json.dumps(
            {k: round(v, 3) for k, v in asdict(box.hardware.constants).items()}
        ),
        "contention": f"{box.hardware.contention:.2f}",
        "load": f"Poisson, {options.requests} requests a play",
        "goals": ", ".join(
            f"{name}: first token {g.ttft_ms:g} ms, {g.itl_ms:g} ms a token"
            for name, g in goals.items()
        ),
    }
    columns = ("predicted", "measured", "predicted / measured")
    table = made.table("goodput, requests a second", columns)
    for key, mine in predicted.items():
        found = measured[key]
        ratios = Series(
            [a / b if b else 0.0 for a, b in zip(mine.rounds, found.rounds, strict=True)]
        )
        table.row(", ".join(key), [mine, found, ratios])
        off = abs(median_ratio(mine.rounds, found.rounds) - 1) if all(found.rounds) else 1.0
        made.bar(f"{', '.join(key)}: off by", off, BAR, at_most=True)
    return made
