"""``python -m bench handoff``: one request at a time, 1P1D against plain vLLM and against NIXL.

    TTFT       from sending the request to its first token
    hand-off   what the change of engines adds to the gap before the next token: token 2 - token 1
               less the stream's median gap. Behind a proxy token 1 comes from the decode engine, so
               there it is: decode engine sent - first token, less the median gap.
    KV rate    bytes over seconds of the copies in the node, as its status counts them, beside memmove
               of as many bytes on the decode engine's core between two shared segments, in the same
               minutes; of NIXL's transfers, as its own metrics count them

Plain vLLM runs on the prefill engine's cores. It, the node and NIXL at its best (bench/nixl_quiet.py)
are up together and take turns; NIXL as shipped is up alone, as it keeps cores busy also when idle.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import secrets
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from bench import nixl_peer
from bench.line_up import SERVED, add_model_flags, model_of, vllm_flags
from bench.measure import Series, median_ratio
from bench.nixl_peer import NixlPair
from bench.nixl_proxy import DECODE_SENT
from bench.report import Report, add_output_flags, machine
from bench.servers import Node, Twin
from bench.streams import Timed, ask, body, prompt
from ipc.segment import Segment
from pdnode import default_model
from pdnode.assign import parse_ids

PLAIN, NODE, NIXL, QUIET = "plain vLLM", "pdnode", "NIXL as shipped", "NIXL at its best"
PEERS = {"plain": PLAIN, "pdnode": NODE, "nixl": NIXL, "nixl-quiet": QUIET}
TOGETHER = (PLAIN, NODE, QUIET)
ASLEEP_S = 1.5
"""Between requests. vLLM's workers look for more work for a second after the last, and the peer that
was asked before runs on the same cores."""
SPAN_BYTES = 256 * 2**20
"""memmove goes through this much memory: KV lies in RAM, not in a cache."""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench handoff", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 1024, 1900])
    parser.add_argument("--output", type=int, default=32, help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    add_model_flags(parser)
    add_output_flags(parser)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    peers = [PEERS[name] for name in options.peers]
    made = Report("handoff", "one request at a time, 1P1D beside plain vLLM and NIXL")
    if not nixl_peer.installed():
        peers = [peer for peer in peers if peer not in (NIXL, QUIET)]
        made.note(nixl_peer.NOT_INSTALLED)
    made.facts = machine() | {
        "model": options.model or default_model.NAME,
        "held equal": f"{options.dtype}, cores of each engine, KV cache {options.kv_mib} MiB each, "
        f"{options.output} output tokens, {options.rounds} rounds",
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        found: dict[str, Peer] = {}
        together = [peer for peer in peers if peer in TOGETHER]
        for group in filter(None, (together, *([p] for p in peers if p not in TOGETHER))):
            found |= run_group(options, group, logs)
    fill(made, options, found)
    return made.finish(options)


# --- servers and rounds -------------------------------------------------------------------------


def start(options: argparse.Namespace, peer: str, logs: Path):
    model, flags, cpus = model_of(options), vllm_flags(options), options.cpus
    if peer == PLAIN:
        return Twin(model, logs / "plain.log", *flags, VLLM_CPU_OMP_THREADS_BIND=cpus[0])
    if peer == NODE:
        always = ("--split", "always", "--strict")
        return Node(model, logs / "node.log", *flags, *always, cpus=cpus)
    return NixlPair(model, logs, *flags, quiet=peer == QUIET, cpus=cpus)


class Peer:
    """One server's answers: {prompt tokens: one per round}."""

    def __init__(self) -> None:
        self.answers: dict[int, list[Timed]] = defaultdict(list)
        self.copy_gb_per_s: dict[int, Series] = defaultdict(Series)
        self.memmove_gb_per_s: dict[int, Series] = defaultdict(Series)

    def ttft_ms(self, tokens: int) -> Series:
        return Series([t.ttft_s * 1e3 for t in self.answers[tokens]])

    def itl_ms(self, tokens: int) -> Series:
        return Series([t.itl_s * 1e3 for t in self.answers[tokens]])

    def handoff_ms(self, tokens: int) -> Series:
        return Series([(_changed_s(t) - t.itl_s) * 1e3 for t in self.answers[tokens]])

    def handoff_itl(self, tokens: int) -> float:
        series = Series([(_changed_s(t) - t.itl_s) / t.itl_s for t in self.answers[tokens]])
        return series.median


def _changed_s(timed: Timed) -> float:
    """From the moment the decode engine could begin to its first token."""
    sent = timed.headers.get(DECODE_SENT.lower())
    return timed.gaps_s[0] if sent is None else timed.token_s[0] - float(sent)


def run_group(options: argparse.Namespace, group: list[str], logs: Path) -> dict[str, Peer]:
    with ExitStack() as stack:
        servers = {}
        for peer in group:
            servers[peer] = start(options, peer, logs)
            stack.callback(servers[peer].stop)
        for server in servers.values():
            server.wait_ready()
        found = {peer: Peer() for peer in group}
        ruler = stack.enter_context(Memmove(options.cpus[1])) if NODE in group else None
        for turn in range(-1, options.rounds):  # the first one warms up
            for tokens in options.prompts:
                for peer, server in servers.items():
                    one = _one(options, server, peer, tokens, turn, found[peer], ruler)
                    if turn >= 0:
                        found[peer].answers[tokens].append(one)
        return found


def _one(options, server, peer: str, tokens: int, turn: int, mine: Peer, ruler) -> Timed:
    before = moved(server, peer)
    ids = prompt(tokens, f"{secrets.token_hex(4)}-{turn}")
    timed = ask(server.http, body(SERVED, ids, options.output))
    time.sleep(ASLEEP_S)
    assert len(timed.token_s) == options.output, (peer, tokens, len(timed.token_s))
    if peer != PLAIN and turn >= 0:
        nbytes, seconds = (b - a for a, b in zip(before, moved(server, peer), strict=True))
        assert nbytes, f"{peer}: no hand-off of {tokens} tokens"
        mine.copy_gb_per_s[tokens].rounds.append(nbytes / seconds / 1e9)
        if peer == NODE:
            mine.memmove_gb_per_s[tokens].rounds.append(ruler.gb_per_s(int(nbytes)))
    return timed


def moved(server, peer: str) -> tuple[float, float]:
    """(bytes, seconds) of all copies of KV between engines so far."""
    if peer == PLAIN:
        return 0, 0.0
    if peer == NODE:
        counters = server.status()["counters"]
        return counters["handoff_bytes"], counters["handoff_seconds"]
    return server.kv_moved()


class Memmove:
    """Between two populated shared segments, on the decode engine's cores."""

    def __init__(self, cpus: str) -> None:
        self._cpus = [cpu for cpu in parse_ids("--cpus", cpus) if isinstance(cpu, int)]

    def __enter__(self) -> Memmove:
        name = f"pdbench-{secrets.token_hex(4)}"
        self._pair = [
            Segment.create(f"{name}.{side}", SPAN_BYTES, purpose="the benchmark", flag="--kv-mib")
            for side in "ab"
        ]
        for segment in self._pair:
            segment.populate(write=True)
        self._at = 0
        return self

    def gb_per_s(self, nbytes: int) -> float:
        nbytes = min(nbytes, SPAN_BYTES)
        if self._at + nbytes > SPAN_BYTES:
            self._at = 0
        target, source = (segment.address + self._at for segment in self._pair)
        self._at += nbytes
        took: list[float] = []

        def move() -> None:
            os.sched_setaffinity(0, self._cpus)
            begin = time.perf_counter()
            ctypes.memmove(target, source, nbytes)
            took.append(time.perf_counter() - begin)

        thread = threading.Thread(target=move)
        thread.start()
        thread.join()
        return nbytes / took[0] / 1e9

    def __exit__(self, *_: object) -> None:
        for segment in self._pair:
            segment.unlink()
            segment.close()


# --- what it says -------------------------------------------------------------------------------


def fill(made: Report, options: argparse.Namespace, found: dict[str, Peer]) -> None:
    sizes = options.prompts
    columns = [f"{n} tokens" for n in sizes]
    figures = (("TTFT", Peer.ttft_ms), ("median ITL", Peer.itl_ms), ("hand-off", Peer.handoff_ms))
    for title, figure in figures:
        table = made.table(title, columns, unit="ms", log=title == "TTFT")
        for peer, mine in found.items():
            if title != "hand-off" or peer != PLAIN:
                table.row(peer, [figure(mine, n) for n in sizes])
    rates = made.table("KV copy", columns, unit="GB/s")
    for peer, mine in found.items():
        if peer != PLAIN:
            rates.row(peer, [mine.copy_gb_per_s[n] for n in sizes])
    if NODE in found:
        rates.row("memmove", [found[NODE].memmove_gb_per_s[n] for n in sizes])
        bars(made, found, sizes)


def bars(made: Report, found: dict[str, Peer], sizes: list[int]) -> None:
    node, longest = found[NODE], max(sizes)
    if PLAIN in found:
        worst = max(
            median_ratio(node.ttft_ms(n).rounds, found[PLAIN].ttft_ms(n).rounds) for n in sizes
        )
        made.bar("TTFT, pdnode / plain vLLM, worst length", worst, 1.03, at_most=True)
    what = f"hand-off at {longest} tokens"
    made.bar(f"{what}, in ITLs", node.handoff_itl(longest), 0.25, at_most=True)
    for peer, limit in ((QUIET, 1 / 4), (NIXL, 1 / 8)):
        if peer in found:
            theirs = found[peer].handoff_ms(longest).rounds
            ratio = median_ratio(node.handoff_ms(longest).rounds, theirs)
            made.bar(f"{what}, pdnode / {peer}", ratio, limit, at_most=True)
    copy = node.copy_gb_per_s[longest]
    if QUIET in found:
        ratio = median_ratio(copy.rounds, found[QUIET].copy_gb_per_s[longest].rounds)
        made.bar(f"KV copy at {longest} tokens, pdnode / {QUIET}", ratio, 4, at_most=False)
    ratio = median_ratio(copy.rounds, node.memmove_gb_per_s[longest].rounds)
    made.bar(f"KV copy / memmove at {longest} tokens", ratio, 0.85, at_most=False)
