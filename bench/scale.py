"""``python -m bench scale``: control cost per request from 1P1D to 8P8D, over fake engine cores.

The front end's CPU time per request, once with as many streams per pair of engines (a node under its
load), once with as many streams in all (the same load on more engines).
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from bench.fake_cores import Cores
from bench.fake_nodes import MAX_MODEL_LEN, FrontEnd, Load, ours
from bench.frontend import add_cores
from bench.measure import Series, median_ratio
from bench.report import Report, add_output_flags, machine

BAR = 1.2


def main(argv: list[str]) -> int:
    options = parse(argv)
    with ExitStack() as stack:
        ends = {}
        for pairs in options.pairs:
            cores = stack.enter_context(
                Cores(2 * pairs, options.step_ms, MAX_MODEL_LEN, options.fake_core, indexed=True)
            )
            ends[pairs] = stack.enter_context(FrontEnd(ours, cores, options.core))
        costs = measure(options, ends)
    return report(options, costs).finish(options)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench scale", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pairs", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--streams", type=int, default=4, help="per pair of engines")
    parser.add_argument("--requests", type=int, default=16, help="of each stream in a round")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--output", type=int, default=32, help="tokens")
    parser.add_argument("--step-ms", type=float, default=10.0)
    add_cores(parser)
    add_output_flags(parser)
    return parser.parse_args(argv)


def loads(options: argparse.Namespace, pairs: int) -> dict[str, Load]:
    def load(streams: int) -> Load:
        return Load(streams, streams * options.requests, options.prompt, options.output)

    largest = max(options.pairs)
    return {
        f"{options.streams} streams a pair": load(options.streams * pairs),
        f"{options.streams * largest} streams in all": load(options.streams * largest),
    }


def measure(options: argparse.Namespace, ends: dict[int, FrontEnd]) -> dict[str, dict[int, Series]]:
    """{kind of load: {pairs: CPU us per request}}. All sizes are up at once and take turns."""
    found: dict[str, dict[int, Series]] = {}
    for turn in range(options.rounds + 1):
        for pairs, end in ends.items():
            for kind, load in loads(options, pairs).items():
                cost = end.run(load)
                if turn:  # the first round warms up
                    series = found.setdefault(kind, {}).setdefault(pairs, Series())
                    series.rounds.append(cost.cpu_us_per_request)
    return found


def report(options: argparse.Namespace, found: dict[str, dict[int, Series]]) -> Report:
    made = Report("scale", "control cost per request over fake engine cores")
    made.facts = machine() | {
        "load": f"{options.prompt} prompt and {options.output} output tokens, a step every "
        f"{options.step_ms:g} ms, {options.rounds} rounds in turn",
    }
    sizes = [f"{pairs}P{pairs}D" for pairs in options.pairs]
    table = made.table("front end's CPU per request", sizes, unit="us")
    for kind, costs in found.items():
        table.row(kind, [*costs.values()])
        first, last = costs[options.pairs[0]], costs[options.pairs[-1]]
        ratio = median_ratio(last.rounds, first.rounds)
        made.bar(f"{sizes[-1]} / {sizes[0]}, {kind}", ratio, BAR, at_most=True)
    return made
