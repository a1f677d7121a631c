"""``python -m bench ipc``: `ipc` beside what one would use otherwise, in one run.

    lookup   select and insert of the index and the pool, against Redis and ZeroMQ, at 10 to 10^6
             entries; every call timed by itself, p50 and p99 of each round
    copy     block runs between two segments, against one memmove of as many bytes
    pipe     tensors from one process to another, against two queues, and memmove

Peers take turns within a round; what is printed is the median over rounds and their spread. A peer
that is not installed is left out with a sentence. The exit code is 0 whether a bar is met or not: it
says so in its line.
"""

from __future__ import annotations

import argparse
import sys

from bench import ipc_bytes, ipc_lookup
from bench.report import Report, add_output_flags, machine


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench ipc", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=1000, help="of each kind in a round")
    parser.add_argument("--only", choices=PARTS, action="append", help="may be repeated")
    add_output_flags(parser)
    args = parser.parse_args(argv)
    report = Report("ipc", "shared memory beside what one would use otherwise", machine())
    report.facts["rounds"] = (
        f"{args.rounds}; {args.calls} calls of each kind in a round, one by one"
    )
    for part in args.only or PARTS:
        PARTS[part](args, report)
    return report.finish(args)


def lookup(args: argparse.Namespace, report: Report) -> None:
    results, report.facts["peers"] = ipc_lookup.run(
        args.rounds, args.calls, lambda text: print(text, file=sys.stderr)
    )
    ipc_lookup.tabulate(results, report)


def copy(args: argparse.Namespace, report: Report) -> None:
    ipc_bytes.tabulate_copies(ipc_bytes.copies(args.rounds), report)


def pipe(args: argparse.Namespace, report: Report) -> None:
    ipc_bytes.tabulate_streams(ipc_bytes.streams(args.rounds), report)


PARTS = {"lookup": lookup, "copy": copy, "pipe": pipe}
