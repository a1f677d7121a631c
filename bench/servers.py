"""Real servers, for tests and benches: a node of ours and its twin (plain vLLM with the same arguments).

Start waits for health AND watches the child; stop is TERM, deadline, KILL; every wait has a budget.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent
MODEL_NAME = "tiny"
MAX_MODEL_LEN = 2048
# float32: two kernels round differently, and in float32 that decides no greedy token.
ENGINE_ARGS = (
    *("--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"),
    *("--kv-cache-memory-bytes", str(256 * 2**20), "--served-model-name", MODEL_NAME),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    "--enable-prompt-tokens-details",
    # Random weights would fill a grammar's optional white space for ever.
    "--structured-outputs-config",
    '{"backend": "xgrammar", "disable_any_whitespace": true}',
)
"""What a twin and its node have in common, for the tiny model."""

START_S = 300.0
STOP_S = 30.0
COUNTED_S = 0.1


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Server:
    """A child process that serves HTTP on a loopback port."""

    def __init__(self, argv: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.log = log
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, *argv, "--port", str(self.port), "--host", "127.0.0.1"]
        self._env = {**os.environ, **(env or {})}
        log.write_bytes(b"")
        self.process = self._spawned()
        # Servers end an idle connection after 5 s, and a request sent in that moment would be lost.
        headers = {"Connection": "close"}
        self.http = httpx.Client(base_url=self.url, timeout=120.0, headers=headers)

    def _spawned(self) -> subprocess.Popen:
        with self.log.open("ab") as out:
            return subprocess.Popen(
                self._command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._env,
                cwd=ROOT,
                start_new_session=True,
            )

    def start_again(self) -> None:
        """A new process on the same port, after the last one has ended."""
        assert self.process.poll() is not None
        self.process = self._spawned()

    def wait_ready(self, timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            code = self.process.poll()
            assert code is None, f"ended with {code} before it was ready:\n{self.tail()}"
            with contextlib.suppress(httpx.TransportError):
                if self.http.get("/health").status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(f"not ready within {timeout_s} s:\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = STOP_S) -> int:
        """Ask, wait, kill. Returns the exit code of the asked process."""
        family = self.descendants()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait(10)
        # Plain vLLM leaves its engine behind when its server is killed; never ours to leave.
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.http.close()
        return code


class Node(Server):
    """``launcher.py`` with one core per role, as two cores allow."""

    def __init__(
        self,
        model: str,
        log: Path,
        *args: str,
        prefill: int = 1,
        decode: int = 1,
        cpus: Sequence[str] = ("0", "1"),
        **env: str,
    ) -> None:
        placement = ["--prefill-cpus", cpus[0], "--decode-cpus", cpus[1]]
        placement += ["--prefill-engines", str(prefill), "--decode-engines", str(decode)]
        super().__init__(["launcher.py", model, *placement, *args], log, env)

    def status(self) -> dict:
        return self.http.get("/pd/status").raise_for_status().json()

    def free_blocks(self) -> list[int]:
        return [engine["kv_blocks_free"] for engine in self.status()["engines"]]

    def wait_status(self, condition, timeout_s: float, what: str) -> dict:
        """Ask until ``condition`` holds; AssertionError when ``timeout_s`` is used up.

        Of one question that takes long, only ``COUNTED_S`` counts: a machine that stands still for a
        second, this process or the node, has not been seen to miss anything.
        """
        left_s, asked_s = timeout_s, time.monotonic()
        while not condition(status := self.status()):
            assert left_s > 0, f"{what}: not within {timeout_s} s: {status}"
            time.sleep(0.02)
            now_s = time.monotonic()
            left_s -= min(now_s - asked_s, COUNTED_S)
            asked_s = now_s
        return status


class Twin(Server):
    """One plain vLLM engine. Its core count is one, as each of the node's engines has."""

    def __init__(self, model: str, log: Path, *args: str, **env: str) -> None:
        super().__init__(
            ["-m", "vllm.entrypoints.launchers.api_server.entry", "--model", model, *args],
            log,
            {"VLLM_CPU_OMP_THREADS_BIND": "0", **env},
        )
