"""``python -m bench frontend``: what pdnode's front end costs beside vLLM's own.

Both are on one CPU core, in processes of their own that take turns, in front of fake engine cores on
another; both tokenise, detokenise and keep statistics as in service, without the HTTP server, which
is the same in both. A request through pdnode has two legs (P, then D), through vLLM's own front end one.

    paced        cores step every --step-ms: CPU per token and per request
    saturated    cores step as fast as they can: requests/s
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack

from bench.fake_cores import Cores
from bench.fake_nodes import MAX_MODEL_LEN, Cost, FrontEnd, Load, ours, plain
from bench.measure import Series, median_ratio
from bench.report import Report, add_output_flags, machine

PEERS = {"vLLM's front end": (plain, 1), "pdnode 1P1D": (ours, 2)}
"""How each is made, and over how many cores."""
BAR = 0.95


def main(argv: list[str]) -> int:
    options = parse(argv)
    with ExitStack() as stack:
        ends = {}
        for way, step_ms in (("paced", options.step_ms), ("saturated", 0.0)):
            for peer, (make, count) in PEERS.items():
                cores = stack.enter_context(
                    Cores(count, step_ms, MAX_MODEL_LEN, options.fake_core, indexed=make is ours)
                )
                ends[way, peer] = stack.enter_context(FrontEnd(make, cores, options.core))
        costs = measure(options, ends)
    return report(options, costs).finish(options)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench frontend", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=32, help="requests at a time")
    parser.add_argument("--requests", type=int, default=128, help="in a round")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--warmup", type=int, default=64, help="requests before the first round")
    add_cores(parser)
    add_output_flags(parser)
    return parser.parse_args(argv)


def add_cores(parser: argparse.ArgumentParser) -> None:
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--core", type=int, default=cores[0], help="the front end's CPU core")
    parser.add_argument(
        "--fake-core", type=int, default=cores[-1], help="the CPU core of all fake engine cores"
    )


def load_of(options: argparse.Namespace) -> Load:
    return Load(options.streams, options.requests, options.prompt, options.output)


def measure(
    options: argparse.Namespace, ends: dict[tuple[str, str], FrontEnd]
) -> dict[str, dict[str, list[Cost]]]:
    """{"paced" or "saturated": {peer: its cost in each round}}; peers take turns in a round."""
    load = load_of(options)
    warmup = Load(load.streams, options.warmup, load.prompt_tokens, load.output_tokens)
    found: dict[str, dict[str, list[Cost]]] = {}
    for end in ends.values():
        end.run(warmup)
    for _ in range(options.rounds):
        for (way, peer), end in ends.items():
            found.setdefault(way, {}).setdefault(peer, []).append(end.run(load))
    return found


def report(options: argparse.Namespace, found: dict[str, dict[str, list[Cost]]]) -> Report:
    load = load_of(options)
    made = Report("frontend", "pdnode's front end beside vLLM's own, over fake engine cores")
    made.facts = machine() | {
        "load": f"{load.streams} streams, {load.prompt_tokens} prompt and {load.output_tokens} "
        f"output tokens, {load.requests} requests a round, {options.rounds} rounds in turn",
    }
    theirs, own = PEERS
    kinds = (
        ("paced", "CPU us per token", "cpu_us_per_token"),
        ("paced", "CPU us per request", "cpu_us_per_request"),
        ("saturated", "requests/s", "requests_per_s"),
        ("saturated", "CPU us per token", "cpu_us_per_token"),
    )
    for way in ("paced", "saturated"):
        mine = [(title, name) for w, title, name in kinds if w == way]
        how = f"a step every {options.step_ms:g} ms" if way == "paced" else "no pause"
        table = made.table(f"{way}, {how}", [title for title, _ in mine], plotted=False)
        for peer, costs in found[way].items():
            table.row(peer, [Series([getattr(c, name) for c in costs]) for _, name in mine])
    rates = [[c.requests_per_s for c in found["saturated"][peer]] for peer in (own, theirs)]
    made.bar("requests/s, pdnode / vLLM", median_ratio(*rates), BAR, at_most=False)
    cpu = [[c.cpu_us_per_token for c in found["paced"][peer]] for peer in (theirs, own)]
    made.bar("CPU per token, vLLM / pdnode, paced", median_ratio(*cpu), BAR, at_most=False)
    return made
