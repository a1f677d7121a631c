"""Processes of the contract suite, seen from the test: `remote.make(...)` runs `Peer.make`."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import asdict

from ipc.records import KVLayout, RegionRecord
from tests.cuda.fake import ROOT

BUDGET_S = 150.0  # A start imports torch, on a machine that may be busy.


class Refused(Exception):
    """The peer's command raised: `kind` is the name of the type."""

    def __init__(self, kind: str, text: str):
        self.kind, self.text = kind, text
        super().__init__(f"{kind}: {text}")


class Remote:
    """One process. Every command has a budget."""

    def __init__(self, backend: str, env: dict[str, str]):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda.peer", backend], cwd=ROOT, env=env,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.pid = self._answer()

    def __getattr__(self, command: str):
        def run(*args, **arguments):
            assert not args, "by name only"
            self._process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")
            self._process.stdin.flush()
            return self._answer()

        return run

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(BUDGET_S)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self):
        answer = json.loads(self._line())
        if "error" in answer:
            raise Refused(answer["error"], answer["text"])
        return answer["ok"]

    def _line(self) -> bytes:
        line, deadline = b"", time.monotonic() + BUDGET_S
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                assert ready.select(max(0, deadline - time.monotonic())), "the peer gave no answer"
                got = os.read(self._process.stdout.fileno(), 1 << 16)
                assert got, f"the peer ended with {self._process.wait(BUDGET_S)}"
                line += got
        return line


class Lab:
    """Hands out processes of one back end; those that lived through a test serve the next."""

    def __init__(self, backend: str, env: dict[str, str]):
        self.backend, self._env = backend, env
        # The others get their memory from somebody else, as it is.
        self.zeroes = backend in ("host", "cuda", "cuda-engine")
        self._idle: list[Remote] = []
        self._used: list[Remote] = []

    def peer(self) -> Remote:
        remote = self._idle.pop() if self._idle else Remote(self.backend, self._env)
        self._used.append(remote)
        return remote

    def tidy(self) -> None:
        used, self._used = self._used, []
        # Readers first: an owner must not free what is still mapped.
        for remote in reversed(used):
            if remote.alive:
                remote.reset()
                self._idle.append(remote)

    def close(self) -> None:
        for remote in self._idle + self._used:
            remote.end()


def record(name: str, layout: KVLayout, nbytes: int, **changes) -> dict:
    """What the index would say of a region, as JSON."""
    made = RegionRecord(name, nbytes, **asdict(layout), boot_id=7, generation=1)
    return {**made._asdict(), "fingerprint": "same model", **changes}
