"""``python -m bench saturation``: what a box gets done when there is always more to do.

Chat and long prompts mixed, as ``serve`` sends them, but --streams at a time, the next when one is
answered. The figure is requests a second from the first to the last answer; chunks of plain vLLM are
swept, and the quickest one counts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from functools import partial

from bench.line_up import MAX_REQUESTS, add_line_up_flags, measure_each
from bench.load import ask, session
from bench.measure import Series
from bench.mix import KINDS, add_mix_flags, kinds, of_kind, text
from bench.report import Report, add_output_flags, machine

BAR = 0.95


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench saturation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--streams", type=int, default=MAX_REQUESTS // 2, help="at a time")
    parser.add_argument("--rounds", type=int, default=2)
    add_mix_flags(parser, requests=60)
    add_line_up_flags(parser)
    add_output_flags(parser)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    measured = measure_each(options, partial(rounds, options))
    plain = {name for name, (kind, _) in measured.items() if kind != "pdnode"}
    found = {name: Series(each) for name, (_, each) in measured.items()}
    return report(options, found, plain).finish(options)


async def rounds(options: argparse.Namespace, url: str) -> list[float]:
    """Requests a second, of each round."""
    async with session(url) as client:
        for kind in KINDS:
            await ask(client, of_kind(options, kind))
        return [await one_round(options, client) for _ in range(options.rounds)]


async def one_round(options: argparse.Namespace, client) -> float:
    left = iter(kinds(options, random.Random(options.seed)))

    async def stream() -> None:
        for kind in left:
            await ask(client, of_kind(options, kind))

    begin_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(options.streams):
            group.create_task(stream())
    return options.requests / (time.monotonic() - begin_s)


def report(options: argparse.Namespace, found: dict[str, Series], plain: set[str]) -> Report:
    made = Report("saturation", "requests a second when there is always more to do")
    made.facts = machine() | {
        "load": f"{text(options)}; {options.requests} requests, {options.streams} at a time, "
        f"{options.rounds} rounds",
        "held equal": f"cores, model, {options.dtype}, KV cache {options.kv_mib} MiB an engine, "
        "requests and their order",
    }
    table = made.table("all of them answered", ("requests/s",))
    for name, series in found.items():
        table.row(name, [series])
    ours = [series for name, series in found.items() if name not in plain]
    if plain and ours:
        best = max(plain, key=lambda name: found[name].median)
        what = f"requests/s, pdnode / best plain ({best})"
        made.bar(what, ours[0].median / found[best].median, BAR, at_most=False)
    return made
