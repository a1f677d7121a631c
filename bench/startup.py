"""``python -m bench startup``: ready and memory of a 1P1D node beside plain vLLM.

ready     from starting the process to /health; plain vLLM once on the prefill engine's cores, the node, in
          turns; every start finds the files in the page cache after the first, which is not
          counted
memory    proportional set size (every shared page counted once) of all processes, idle after one
          long prompt each; the node beside two plain engines
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
import time
from pathlib import Path

import psutil

from bench.kept import add_work_flags
from bench.line_up import SERVED, add_model_flags, model_of, vllm_flags
from bench.measure import Series, median_ratio
from bench.report import Report, add_output_flags, machine
from bench.servers import Node, Server, Twin
from bench.streams import ask, body, prompt

PLAIN, NODE = "plain vLLM", "pdnode 1P1D"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench startup", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=1900, help="tokens, before memory is read")
    add_model_flags(parser)
    add_work_flags(parser)
    add_output_flags(parser)
    return parser.parse_args(argv)


def start(options: argparse.Namespace, name: str, folder: Path) -> Server:
    model, flags = model_of(options), vllm_flags(options)
    if name == NODE:
        return Node(model, folder / "node.log", *flags, cpus=options.cpus)
    bind = {"VLLM_CPU_OMP_THREADS_BIND": options.cpus[0]}
    return Twin(model, folder / "plain.log", *flags, **bind)


def one(options: argparse.Namespace, name: str, folder: Path) -> tuple[float, float]:
    """(seconds to ready, MiB when idle)."""
    begin_s = time.monotonic()
    server = start(options, name, folder)
    try:
        server.wait_ready()
        ready_s = time.monotonic() - begin_s
        ask(server.http, body(SERVED, prompt(options.prompt, secrets.token_hex(8)), 8))
        return ready_s, memory_mib(server)
    finally:
        server.stop()


def memory_mib(server: Server) -> float:
    family = [psutil.Process(server.process.pid), *server.descendants()]
    return sum(process.memory_full_info().pss for process in family) / 2**20


def main(argv: list[str]) -> int:
    options = parse(argv)
    ready = {name: Series() for name in (PLAIN, NODE)}
    memory = {name: Series() for name in (PLAIN, NODE)}
    with tempfile.TemporaryDirectory() as folder:
        logs = options.work or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        for turn in range(options.rounds + 1):
            for name in ready if turn else (PLAIN,):
                ready_s, mib = one(options, name, logs)
                if turn:
                    ready[name].rounds.append(ready_s)
                    memory[name].rounds.append(mib)
    made = Report("startup", "ready and memory of 1P1D beside plain vLLM")
    made.facts = machine() | {"held equal": f"model, {options.dtype}, {options.kv_mib} MiB of KV"}
    table = made.table("start", ("ready, s", "memory, MiB"))
    for name in ready:
        table.row(name, [ready[name], memory[name]])
    ratio = median_ratio(ready[NODE].rounds, ready[PLAIN].rounds)
    made.bar("ready, 1P1D / one plain engine", ratio, 1.25, at_most=True)
    beyond = memory[NODE].median / (2 * memory[PLAIN].median) - 1
    made.bar("memory of 1P1D beyond two plain engines", beyond, 0.05, at_most=True)
    return made.finish(options)
