"""``python -m bench chaos_peer``: the same kills against a 1P1D node and against vLLM + NIXL 1P1D.

Requests, schedule and judging are those of ``python -m bench chaos``, whose options it takes. NIXL is at
its best here (bench/nixl_quiet.py). Nothing around two vLLM servers starts one again when it ends, so
the bench does, at once, as an operator's supervisor would. A client that got an error asks again after
a second, in both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import httpx
import psutil

from bench import chaos
from bench.chaos import Answer, Chaos, Tally
from bench.measure import table
from bench.nixl_peer import NOT_INSTALLED, NixlPair, installed
from bench.servers import ENGINE_ARGS, Server
from bench.tiny_models import tiny_llama

NODE, NIXL = "pdnode 1P1D", "vLLM + NIXL 1P1D"
DEFAULTS = (
    *("--prefill", "1", "--decode", "1", "--kinds", "engine", "worker"),
    *("--leave", "0", "--every", "20", "--timeout", "60"),
    # vLLM's own CPU worker ends when a seeded request's prompt takes two steps (0.32).
    "--greedy",
)
LOOK_S = 0.05


def main(argv: list[str]) -> int:
    options = chaos.parse([*DEFAULTS, *argv], "chaos_peer", __doc__)
    if not installed():
        sys.exit(NOT_INSTALLED)
    model = str(tiny_llama())
    with tempfile.TemporaryDirectory() as name:
        folder = options.logs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        bodies = chaos.requests(options.seed, options.greedy)
        truths = chaos.recorded(model, folder, bodies)
        peer = fire_at_nixl(model, folder, options, truths)
        node, status, leaks = chaos.fire_at_node(model, folder, options, truths)
    code = chaos.report(node, status, leaks)
    print(f"\n{side_by_side({NODE: node, NIXL: peer})}\n")
    for line in peer.tally.failed[:5]:
        print(f"{NIXL}: {line}")
    return code


def fire_at_nixl(
    model: str, folder: Path, options: argparse.Namespace, truths: list[Answer]
) -> Chaos:
    pair = NixlPair(model, folder, *ENGINE_ARGS, quiet=True)
    try:
        pair.wait_ready()
        watched = Watched({"prefill": pair.prefill, "decode": pair.decode})
        fired = Chaos(options, pair.url, truths, watched.status)
        asyncio.run(watched.while_running(fired))
        return fired
    finally:
        pair.stop()


class Watched:
    """Servers by role; each is started again when it ends."""

    def __init__(self, servers: dict[str, Server]) -> None:
        self._servers = servers
        self._families = {role: server.descendants() for role, server in servers.items()}

    async def while_running(self, fired: Chaos) -> None:
        keeping = asyncio.ensure_future(self._keep())
        try:
            await fired.run()
        finally:
            keeping.cancel()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for role, server in self._servers.items():
                if server.process.poll() is None:
                    if family := server.descendants():
                        self._families[role] = family
                    continue
                # A killed engine core leaves its worker behind, and that one the port's owner.
                for process in self._families[role]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                server.start_again()

    async def status(self) -> dict:
        """As much of /pd/status as faults need."""
        engines = [await self._engine(role, server) for role, server in self._servers.items()]
        return {"engines": engines}

    async def _engine(self, role: str, server: Server) -> dict:
        named: dict[str, list[int]] = {"EngineCore": [], "Worker": []}
        for process in server.descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                for name, pids in named.items():
                    if name in " ".join(process.cmdline()):
                        pids.append(process.pid)
        ready = all(named.values()) and await _healthy(server.url)
        return {
            "id": role,
            "role": role,
            "state": "ready" if ready else "starting",
            "pid": next(iter(named["EngineCore"]), None),
            "worker_pids": named["Worker"],
        }


async def _healthy(url: str) -> bool:
    async with httpx.AsyncClient(timeout=5) as client:
        with contextlib.suppress(httpx.HTTPError):
            return (await client.get(f"{url}/health")).status_code == 200
    return False


def side_by_side(columns: dict[str, Chaos]) -> str:
    def row(name: str, of: Callable[[Tally], object]) -> tuple:
        return (name, *(of(each.tally) for each in columns.values()))

    quiet = {
        name: silences_s(each.tally.at_s, each.faults.times_s, each.end_s)
        for name, each in columns.items()
    }
    rows = [
        ("kills", *(len(each.faults.times_s) for each in columns.values())),
        row("requests", lambda t: t.asked),
        row("failed", lambda t: len(t.failed)),
        row("  of those that ran when an engine was killed", lambda t: t.hit),
        row("  of those sent while an engine was down", lambda t: len(t.failed) - t.hit),
        row("  without a sign of life until --timeout", lambda t: t.timed_out),
        row("answered with other tokens than plain vLLM", lambda t: len(t.differ)),
        row("streams that went on after a kill", lambda t: len(t.recovery_s)),
        row("  kill to next token, s, p50", lambda t: _of(statistics.median, t.recovery_s)),
        row("  max", lambda t: _of(max, t.recovery_s)),
        ("nobody got a token after a kill for, s, p50", *map(_median, quiet.values())),
        ("  max", *(_of(max, each) for each in quiet.values())),
    ]
    return table(("", *columns), rows)


def silences_s(at_s: list[float], kills_s: list[float], end_s: float) -> list[float]:
    """After each kill, until the next or the end: the longest time in which no request got a token."""
    found = []
    for begin_s, until_s in pairwise([*kills_s, max([end_s, *at_s])]):
        inside = sorted(at for at in at_s if begin_s <= at < until_s)
        found.append(max(b - a for a, b in pairwise([begin_s, *inside, until_s])))
    return found


def _median(values: list[float]) -> str:
    return _of(statistics.median, values)


def _of(what: Callable[[list[float]], float], values: list[float]) -> str:
    return f"{what(values):.2f}" if values else "-"
