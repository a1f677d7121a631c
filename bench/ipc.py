"""``python -m bench ipc``: `ipc` beside what one would use otherwise, in one run.

    lookup   select and insert of the index and the pool, against Redis and ZeroMQ, at 10 to 10^6
             entries; every call timed by itself, p50 and p99 of each round
    copy     block runs between two segments, against one memmove of as many bytes
    pipe     tensors from one process to another, against two queues, and memmove

Peers take turns within a round; what is printed is the median over rounds and their spread. The
exit code is 0 whether a bar is met or not: it says so in its line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path

from bench import ipc_bytes, ipc_lookup

PARTS = ("lookup", "copy", "pipe")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench ipc", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=1000, help="of each kind in a round")
    parser.add_argument("--only", choices=PARTS, action="append", help="may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rounds to FILE")
    args = parser.parse_args(argv)
    found = {"machine": machine(), "rounds": args.rounds}
    print(found["machine"])
    for part in args.only or PARTS:
        found[part] = PART[part](args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def machine() -> str:
    return (
        f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f} before the start"
    )


def lookup(args: argparse.Namespace) -> dict:
    results = ipc_lookup.run(args.rounds, args.calls, lambda text: print(text, file=sys.stderr))
    print("\n" + ipc_lookup.report(results), flush=True)
    return ipc_lookup.to_json(results)


def copy(args: argparse.Namespace) -> dict:
    results = ipc_bytes.copies(args.rounds)
    print("\n" + ipc_bytes.report_copies(results), flush=True)
    return {str(k): {n: s.to_json() for n, s in cell.items()} for k, cell in results.items()}


def pipe(args: argparse.Namespace) -> dict:
    results = ipc_bytes.streams(args.rounds)
    print("\n" + ipc_bytes.report_streams(results), flush=True)
    return {name: {str(k): s.to_json() for k, s in cell.items()} for name, cell in results.items()}


PART = {"lookup": lookup, "copy": copy, "pipe": pipe}
