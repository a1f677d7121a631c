"""An engine that is to end while it is being started ends, whatever its start has come to."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdnode import engine as engine_module
from pdnode.connector.settings import ConnectorSettings
from pdnode.device import CpuDevice
from pdnode.engine import Engine, EngineState, wait_until
from pdnode.errors import EngineFailed

SOON_S = 10.0


class LateEngine(Engine):
    """Its process appears when ``asked`` and ``go`` say so, and never says that it is ready."""

    def __init__(self, folder: Path) -> None:
        device = CpuDevice(((0,),))
        spec = SimpleNamespace(
            role="decode", slot=0, engine_id="decode-0", device=device, vllm_args=()
        )
        settings = ConnectorSettings(0, "", "pdtest-none", spec.engine_id, 0, 0, 1.0, "")
        super().__init__(spec, None, settings, folder, folder, log_stats=False)
        self.asked, self.go = threading.Event(), threading.Event()
        self.child: subprocess.Popen

    code = "input()"

    def _config_for_this_boot(self):
        return None

    def _spawn(self, stack: contextlib.ExitStack, addresses: dict[str, str]):
        self.asked.set()
        assert self.go.wait(SOON_S)
        self.child = subprocess.Popen(
            [sys.executable, "-c", self.code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(self._handshake)
        return SimpleNamespace(processes=[self.child])

    def _handshake(self) -> None:
        """As vLLM's: over when the process is."""
        if self.child.wait(SOON_S):
            raise RuntimeError("engine core ended")


@pytest.mark.parametrize("way", [Engine.end, lambda engine: engine.stop(1.0)], ids=["end", "stop"])
def test_an_engine_told_to_end_before_it_has_a_process_is_killed_when_it_has(tmp_path, way):
    engine = LateEngine(tmp_path)
    engine.begin_boot()
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(engine.start)
        assert engine.asked.wait(SOON_S)
        way(engine)
        engine.go.set()
        with pytest.raises(EngineFailed, match="engine core ended"):
            starting.result(SOON_S)
    assert engine.child.returncode
    assert engine.state is EngineState.FAILED


MAKES_A_SEGMENT = """
from multiprocessing import resource_tracker, shared_memory
segment = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(f"/{segment.name}", "shared_memory")  # as if that had been killed too
print(segment.name, flush=True)
input()
"""


@pytest.mark.parametrize("way", [Engine.end, lambda engine: engine.stop(1.0)], ids=["end", "stop"])
def test_what_an_engine_made_in_shared_memory_goes_with_it_while_it_starts(tmp_path, way):
    engine = LateEngine(tmp_path)
    engine.code = MAKES_A_SEGMENT
    engine.begin_boot()
    engine.go.set()
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(engine.start)
        assert wait_until(lambda: engine.pid is not None, SOON_S)
        segment = Path("/dev/shm", engine.child.stdout.readline().strip())
        assert segment.is_file()
        way(engine)
        with pytest.raises(EngineFailed, match="engine core ended"):
            starting.result(SOON_S)
    engine.forget_memory()
    assert not segment.exists()


def test_an_engine_that_dies_before_its_first_message_is_not_waited_for(tmp_path, monkeypatch):
    waiting, over = threading.Event(), threading.Event()

    def never_answered(*_: object, **__: object) -> None:
        waiting.set()
        over.wait()

    monkeypatch.setattr(engine_module, "connect_engine_core", never_answered)
    engine = LateEngine(tmp_path)
    engine.begin_boot()
    engine._handshake = lambda: None
    engine.go.set()
    try:
        with ThreadPoolExecutor(1) as pool:
            starting = pool.submit(engine.start)
            assert waiting.wait(SOON_S)
            engine.child.kill()
            with pytest.raises(EngineFailed, match="right after its start"):
                starting.result(SOON_S)
    finally:
        over.set()
