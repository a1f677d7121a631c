"""``python -m bench cycles``: start a node and end it, at random phases, with random signals.

After every end nothing of the node may be left: no process, no segment, no socket, no run directory,
and its port is free. The next start is the next cycle. Exit code 0 only if all of that held.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from bench.leftovers import anonymous_names, names_of, still_there
from bench.servers import ENGINE_ARGS, MODEL_NAME, Node
from bench.tiny_models import tiny_llama
from pdnode import reaper, rundir

PHASES = ("planning", "starting", "loading", "warming", "serving", "draining", "restarting")
WAYS = {
    "TERM": (signal.SIGTERM,),
    "INT": (signal.SIGINT,),
    "KILL": (signal.SIGKILL,),
    "INT, INT": (signal.SIGINT, signal.SIGINT),
    "TERM, KILL": (signal.SIGTERM, signal.SIGKILL),
}
PLANNING_S = 3.0
PHASE_S = 120.0
ENDED_S = 15.0
"""From the last signal to the launcher's end; running requests are short enough to be answered."""
AT_ONCE_S = 5.0
"""The same, when it was told twice or killed."""
GONE_S = 5.0
"""From the launcher's end until its descendants are gone by themselves."""
STREAMS = 3


def wait(condition: Callable[[], bool], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {within_s} s"
        time.sleep(0.02)


def started(model: Path, log: Path) -> Node:
    # Always split: how many hand-offs there were says that all streams are on the decode engine.
    return Node(str(model), log, *ENGINE_ARGS, "--split", "always")


def reach(node: Node, phase: str) -> None:
    """Wait until the node is in ``phase``, or bring it there."""
    if phase == "planning":
        return
    if phase in ("starting", "loading", "warming"):
        wait(lambda: f"decode-0     {phase}" in _alive(node).tail(200), PHASE_S, phase)
        return
    node.wait_ready()
    for _ in range(STREAMS):
        threading.Thread(target=_stream, args=(node.url,), daemon=True).start()
    node.wait_status(lambda s: s["counters"]["handoffs"] >= STREAMS, PHASE_S, "streams")
    if phase == "draining":
        node.process.send_signal(signal.SIGTERM)
        wait(lambda: "stopping:" in node.tail(), PHASE_S, phase)
    if phase == "restarting":
        [decode] = [e for e in node.status()["engines"] if e["role"] == "decode"]
        os.kill(decode["pid"], signal.SIGKILL)
        node.wait_status(lambda s: s["engines"][-1]["state"] in ("starting", "loading"), 30, phase)


def _alive(node: Node) -> Node:
    assert node.process.poll() is None, node.tail()
    return node


def _stream(url: str) -> None:
    body = {"model": MODEL_NAME, "prompt": [300] * 200, "max_tokens": 400, "ignore_eos": True}
    # Its end is the node's, and the node's is what is looked at.
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/completions", json=body | {"stream": True}, timeout=60)


def boot_of(node: Node) -> str:
    """The node's boot id before it serves, from the mark in its children's environment, or ""."""
    for child in node.descendants():
        with contextlib.suppress(OSError):
            for item in Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0"):
                if item.startswith(f"{reaper.MARK}=".encode()):
                    return item.partition(b"=")[2].decode()
    return ""


def end(node: Node, signals: tuple[signal.Signals, ...]) -> tuple[int, float]:
    """Send them, the next when the last was heard. Returns (exit code, seconds from the last one)."""
    for number in signals[:-1]:
        node.process.send_signal(number)
        wait(lambda: "stopping" in node.tail() or node.process.poll() is not None, 10, "heard")
    begin_s = time.monotonic()
    # An ended process is not signalled: it may have ended at the first.
    node.process.send_signal(signals[-1])
    at_once = len(signals) > 1 or signals[-1] is signal.SIGKILL
    try:
        code = node.process.wait(AT_ONCE_S if at_once else ENDED_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"still there {ENDED_S:g} s after {signals}:\n{node.tail()}") from None
    return code, time.monotonic() - begin_s


def left_of(boot_id: str, anonymous: frozenset[str] = frozenset()) -> list[str]:
    """What is there of a node, now."""
    left = [f"process {process_text(pid)}" for pid in reaper.marked(boot_id)] if boot_id else []
    left += names_of(boot_id) if boot_id else []
    left += still_there(anonymous)
    if boot_id and (rundir.base_dir() / boot_id).exists():
        left.append("run directory")
    return left


def process_text(pid: int) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return f"{pid} ({command})"
    return f"{pid} (ended just now)"


def assert_gone(
    boot_id: str, anonymous: frozenset[str] = frozenset(), within_s: float = GONE_S
) -> None:
    try:
        wait(lambda: not left_of(boot_id, anonymous), within_s, "nothing left of the node")
    except AssertionError as error:
        raise AssertionError(f"{error}: {', '.join(left_of(boot_id, anonymous))}") from None


def assert_free(port: int) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))


def cycle(model: Path, log: Path, phase: str, way: str, pause_s: float = 0.0) -> tuple[int, float]:
    """One life of a node. ``pause_s``: into the phase. Raises AssertionError for what is left."""
    node = started(model, log)
    try:
        reach(node, phase)
        time.sleep(pause_s)
        boot_id = boot_of(node)
        anonymous = anonymous_names(reaper.marked(boot_id)) if boot_id else frozenset()
        code, ended_s = end(node, WAYS[way])
        assert_gone(boot_id, anonymous)
        assert_free(node.port)
        assert "Traceback" not in node.log.read_text(errors="replace"), node.tail()
        return code, ended_s
    finally:
        node.stop()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench cycles", description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    rng = random.Random(options.seed)
    model, failures = tiny_llama(), 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.count):
            phase, way = rng.choice(PHASES), rng.choice(list(WAYS))
            pause_s = rng.uniform(0, PLANNING_S if phase == "planning" else 0.5)
            what = f"{number + 1:>3}  {phase:<11} {way:<11}"
            try:
                code, ended_s = cycle(model, Path(folder, f"{number}.log"), phase, way, pause_s)
                print(f"{what} exit code {code:>4} after {ended_s:.2f} s, nothing left", flush=True)
            except AssertionError as error:
                failures += 1
                print(f"{what} FAILED: {error}", flush=True)
    print(f"{options.count} cycles, {failures} failed")
    return 1 if failures else 0
