"""The servers that a 1P1D node is measured against on the same cores, and itself.

pdnode          P on the first of --cpus, D on the second
one engine      plain vLLM over both, its chunk size swept
default cores   plain vLLM on the cores it chooses itself, which leaves one to its front end; swept
engine a core   one plain engine per core behind pdnode's front end (--split never), chunk swept;
                prompts in vLLM's order (--prompt-order arrival)
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.kept import Kept, add_work_flags
from bench.servers import Node, Server, Twin
from pdnode import default_model

SERVED = "bench"
CHUNKS = (128, 512, 2048)
MAX_REQUESTS = 32
"""At once in one engine."""


@dataclass(frozen=True)
class Entrant:
    name: str
    kind: str
    start_with: Callable[[Path], Server]
    """Its log -> the server."""

    def measure(self, logs: Path, figures: Callable[[str], Coroutine[Any, Any, Any]]) -> Any:
        """Start it, and return what ``figures(url)`` gives."""
        server = self.start_with(logs / f"{self.kind.replace(' ', '-')}.log")
        try:
            server.wait_ready()
            return asyncio.run(figures(server.url))
        finally:
            server.stop()


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id (default: the embedded SmolLM2-135M)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-mib", type=int, default=512, help="KV cache of each engine")
    parser.add_argument(
        "--cpus",
        nargs=2,
        default=("0", "1"),
        metavar=("P", "D"),
        help="cores of the prefill and of the decode engine, such as 0-3 4-7",
    )


def add_line_up_flags(parser: argparse.ArgumentParser) -> None:
    """What all of them run, which of them, and where their figures are kept."""
    add_model_flags(parser)
    add_work_flags(parser)
    parser.add_argument("--chunks", type=int, nargs="+", default=CHUNKS, help="tokens in a step")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="of the configurations; default all"
    )


def vllm_flags(options: argparse.Namespace) -> list[str]:
    flags = ["--dtype", options.dtype, "--max-model-len", "2048", "--enforce-eager"]
    flags += ["--kv-cache-memory-bytes", str(options.kv_mib * 2**20)]
    # vLLM refuses chunks of fewer tokens than requests.
    flags += ["--max-num-seqs", str(MAX_REQUESTS)]
    return [*flags, "--served-model-name", SERVED]


def model_of(options: argparse.Namespace) -> str:
    return options.model or str(default_model.ensure())


def line_up(options: argparse.Namespace) -> list[Entrant]:
    model, flags = model_of(options), vllm_flags(options)

    def node(*more: str) -> Callable[[Path], Server]:
        return lambda log: Node(model, log, *flags, *more, cpus=options.cpus)

    def plain(chunk: str, cpus: str) -> Callable[[Path], Server]:
        bind = {"VLLM_CPU_OMP_THREADS_BIND": cpus}
        return lambda log: Twin(model, log, *flags, "--max-num-batched-tokens", chunk, **bind)

    entrants = [Entrant("pdnode", "pdnode", node())]
    for chunk in map(str, options.chunks):
        never = node(
            "--split", "never", "--prompt-order", "arrival", "--max-num-batched-tokens", chunk
        )
        over_both, auto = plain(chunk, ",".join(options.cpus)), plain(chunk, "auto")
        entrants.append(Entrant(f"one engine, chunk {chunk}", "one engine", over_both))
        entrants.append(Entrant(f"default cores, chunk {chunk}", "default cores", auto))
        entrants.append(Entrant(f"engine a core, chunk {chunk}", "engine a core", never))
    if options.only:
        entrants = [e for e in entrants if any(e.name.startswith(name) for name in options.only)]
    return entrants


def measure_each(
    options: argparse.Namespace, figures: Callable[[str], Coroutine[Any, Any, Any]]
) -> dict[str, tuple[str, Any]]:
    """name -> (kind, what ``figures(url)`` gave) of each that runs, or is kept in --work."""
    kept, found = Kept(options.work), {}
    with tempfile.TemporaryDirectory() as folder:
        logs = options.work or Path(folder)
        for entrant in line_up(options):
            measure = partial(entrant.measure, logs, figures)
            found[entrant.name] = (entrant.kind, kept.get(entrant.name, measure))
    return found
