"""``python -m bench serve``: goodput under a service level, mixed chat and long prompts.

Requests come as a Poisson process; a share of them has a long prompt and a short answer, the others
are chat. One is served well if its first token came within --ttft times what an idle plain engine on
one core takes for the same kind of request, and no gap after it was longer than --itl times that
engine's usual gap for that kind. Goodput is the highest rate of which 90 % are served well; rates
grow until a configuration fails one.

A chat prompt is longer than a KV block (128 tokens on CPU): a shorter one is not split, and whoever
computes it makes its streams wait.

Every plain configuration is tried at --sweep first; the best --finalists of them then go through all
rates, as the node does.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from bench.kept import Kept
from bench.line_up import (
    Entrant,
    add_line_up_flags,
    line_up,
    model_of,
    vllm_flags,
)
from bench.load import ask, session
from bench.mix import KINDS, add_mix_flags, fresh, kinds, of_kind, text
from bench.report import Report, add_output_flags, machine
from bench.servers import Twin

WELL = 0.9
IDLE_ROUNDS = 3


class Served(NamedTuple):
    """One request, in multiples of what an idle engine takes."""

    kind: str
    ttft: float
    gap: float
    """The longest."""


class Limits(NamedTuple):
    ttft: float
    itl: float

    def share(self, requests: list[Served]) -> float:
        return statistics.fmean(r.ttft <= self.ttft and r.gap <= self.itl for r in requests)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench serve", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_mix_flags(parser, requests=30)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.2, 0.4, 0.8, 1.6])
    parser.add_argument("--sweep", type=float, default=0.4, metavar="RATE")
    parser.add_argument("--finalists", type=int, default=3, metavar="N")
    parser.add_argument("--ttft", type=float, default=2.0, help="times idle")
    parser.add_argument("--itl", type=float, default=3.0, help="times idle")
    add_line_up_flags(parser)
    add_output_flags(parser)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    kept, limits = Kept(options.work), Limits(options.ttft, options.itl)
    with tempfile.TemporaryDirectory() as folder:
        logs = options.work or Path(folder)
        idle = kept.get("idle", lambda: measure_idle(options, logs))

        def served(entrant: Entrant, rates: list[float], name: str) -> dict[str, list[Served]]:
            found = kept.get(name, lambda: measure(options, entrant, logs, idle, rates))
            return {rate: [Served(*r) for r in requests] for rate, requests in found.items()}

        entrants = line_up(options)
        plain = [e for e in entrants if e.kind != "pdnode"]
        swept = {e.name: served(e, [options.sweep], f"{e.name} swept") for e in plain}
        plain.sort(key=lambda e: limits.share(*swept[e.name].values()), reverse=True)
        finalists = plain[: options.finalists]
        found = {
            e.name: served(e, options.rates, e.name)
            for e in entrants
            if e.kind == "pdnode" or e in finalists
        }
    return report(options, limits, idle, swept, found).finish(options)


# --- the load -----------------------------------------------------------------------------------


def measure_idle(options: argparse.Namespace, logs: Path) -> dict[str, float]:
    """Seconds: TTFT and usual gap of each kind, one request at a time."""
    bind = {"VLLM_CPU_OMP_THREADS_BIND": options.cpus[0]}
    server = Twin(model_of(options), logs / "idle.log", *vllm_flags(options), **bind)
    try:
        server.wait_ready()
        return asyncio.run(_idle(options, server.url))
    finally:
        server.stop()


async def _idle(options: argparse.Namespace, url: str) -> dict[str, float]:
    async with session(url) as client:
        found = {}
        for kind in KINDS:
            tokens, _ = getattr(options, kind)
            each = [await ask(client, fresh(tokens, 16)) for _ in range(IDLE_ROUNDS + 1)][1:]
            found[kind] = statistics.median(t.ttft_s for t in each)
            found[gap_of(kind)] = statistics.median(t.itl_s for t in each)
        return found


def gap_of(kind: str) -> str:
    """Its name among what was measured idle. Kinds differ: attention reads every earlier token."""
    return f"{kind} gap"


def arrivals(options: argparse.Namespace, rate: float) -> list[tuple[float, str]]:
    """(seconds from the start, kind). The same for every configuration, and at every rate the same
    requests, only closer."""
    rng, at_s, found = random.Random(options.seed), 0.0, []
    for kind in kinds(options, rng):
        at_s += rng.expovariate(1.0) / rate
        found.append((at_s, kind))
    return found


def measure(
    options: argparse.Namespace, entrant: Entrant, logs: Path, idle: dict, rates: list[float]
) -> dict[str, list[Served]]:
    """By rate, up to the first that fails."""
    return entrant.measure(logs, lambda url: _rates(options, url, idle, rates))


async def _rates(options, url: str, idle: dict, rates: list[float]) -> dict[str, list[Served]]:
    found: dict[str, list[Served]] = {}
    async with session(url) as client:
        for kind in KINDS:
            await ask(client, of_kind(options, kind))
        for rate in rates:
            found[f"{rate:g}"] = requests = await _at_rate(options, client, rate, idle)
            if Limits(options.ttft, options.itl).share(requests) < WELL:
                break
    return found


async def _at_rate(options, client, rate: float, idle: dict) -> list[Served]:
    begin_s, tasks = time.monotonic(), []

    async def one(kind: str) -> Served:
        timed = await ask(client, of_kind(options, kind))
        return Served(kind, timed.ttft_s / idle[kind], max(timed.gaps_s) / idle[gap_of(kind)])

    async with asyncio.TaskGroup() as group:
        for at_s, kind in arrivals(options, rate):
            await asyncio.sleep(max(0.0, begin_s + at_s - time.monotonic()))
            tasks.append(group.create_task(one(kind)))
    return [task.result() for task in tasks]


# --- what it says -------------------------------------------------------------------------------


def goodput(shares: dict[str, float]) -> float:
    """Requests/s. 0: even the lowest rate failed."""
    return max((float(rate) for rate, share in shares.items() if share >= WELL), default=0.0)


def report(
    options: argparse.Namespace, limits: Limits, idle: dict, swept: dict, found: dict
) -> Report:
    made = Report("serve", "goodput under a service level, chat and long prompts mixed")
    first = ", ".join(f"{kind} {limits.ttft * idle[kind] * 1e3:.0f} ms" for kind in KINDS)
    gaps = ", ".join(f"{kind} {limits.itl * idle[gap_of(kind)] * 1e3:.0f} ms" for kind in KINDS)
    made.facts = machine() | {
        "load": f"Poisson, {text(options)}; {options.requests} requests a rate",
        "served well": f"TTFT {first}; every gap {gaps}",
        "held equal": f"cores, model, {options.dtype}, arrivals and prompts' lengths",
    }
    columns = ("served well", "in time to token 1", "without a long gap")
    tries = made.table(f"plain configurations at {options.sweep:g}/s", columns)
    for name, by_rate in swept.items():
        (requests,) = by_rate.values()
        in_time = statistics.fmean(r.ttft <= limits.ttft for r in requests)
        steady = statistics.fmean(r.gap <= limits.itl for r in requests)
        tries.row(name, [limits.share(requests), in_time, steady])
    columns = [*(f"{rate:g}/s" for rate in options.rates), "goodput, 1/s"]
    table = made.table("share served well, by rate of arrivals", columns)
    good = {}
    for name, by_rate in found.items():
        shares = {rate: limits.share(requests) for rate, requests in by_rate.items()}
        good[name] = goodput(shares)
        table.row(name, [*(shares.get(f"{rate:g}") for rate in options.rates), good[name]])
    plain = max((rate for name, rate in good.items() if name != "pdnode"), default=0.0)
    if plain and "pdnode" in good:
        what = "goodput, pdnode / best plain configuration"
        made.bar(what, good["pdnode"] / plain, 2.5, at_most=False)
    return made
