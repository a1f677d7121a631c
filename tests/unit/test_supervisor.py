"""An engine that ends at every start: pauses, then it stays down, and says why."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from ipc.index import Index
from pdnode import supervisor
from pdnode.connector.settings import ConnectorSettings
from pdnode.device import CpuDevice
from pdnode.engine import Engine, EngineState, child_surroundings
from pdnode.progress import Progress

LAST_WORDS = "no such weights"


class CrashingEngine(Engine):
    """Its process says something and ends with 1, as vLLM's does when it cannot start."""

    def _config_for_this_boot(self):
        return self._template

    def _spawn(self, stack: ExitStack, addresses: dict[str, str]):
        words = f"import sys; print({LAST_WORDS!r}); sys.exit(1)"
        with child_surroundings({}, self.log_path):
            code = subprocess.run([sys.executable, "-c", words], check=False).returncode
        raise RuntimeError(f"engine core ended with {code}")


@pytest.fixture
def index():
    index = Index.create(
        f"pdtest-{secrets.token_hex(4)}.index",
        engine_slots=3,
        entries_per_engine=64,
        node_boot_id=1,
    )
    yield index
    index.close()


def crashing(slot: int, folder: Path) -> CrashingEngine:
    device = CpuDevice(((0,),))
    spec = SimpleNamespace(
        role="decode", slot=slot, engine_id=f"decode-{slot}", device=device, vllm_args=()
    )
    settings = ConnectorSettings(0, "", f"pdtest-none-{slot}", spec.engine_id, slot, 0, 1.0, "")
    return CrashingEngine(spec, None, settings, folder, folder, strict=False, log_stats=False)


class Client:
    """What the supervisor asks of the split client when engines come and go."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def engine_died(self, engine: Engine) -> None:
        self.told.append(engine.engine_id)

    def copying_from(self, slot: int) -> bool:
        return False

    async def no_engine_left(self) -> None:
        self.told.append("no engine left")


def test_a_crash_loop_ends_in_failed_with_the_last_lines(index, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "BACKOFF_S", (0.0, 0.0, 0.01, 0.01))
    engines = [crashing(0, tmp_path), crashing(1, tmp_path)]

    async def crash_both() -> Client:
        watching = supervisor.Supervisor(None, engines, index, Progress())
        watching.client = client = Client()
        for engine in engines:
            engine.state = EngineState.READY
            watching.give_up(engine, "it was killed")
            # A second report of the same death, from another of its processes.
            watching.give_up(engine, "it was killed")
        async with asyncio.timeout(30):
            while watching._tasks:
                await asyncio.sleep(0.01)
            # An operator wants to see it once more.
            watching.try_again(engines[1])
            assert engines[1].state is EngineState.DEAD
            while watching._tasks:
                await asyncio.sleep(0.01)
        await watching.close()
        watching.try_again(engines[1])
        assert not watching._tasks
        return client

    client = asyncio.run(crash_both())
    assert [engine.state for engine in engines] == [EngineState.FAILED] * 2
    assert [engine.restarts for engine in engines] == [4, 8]
    assert all(LAST_WORDS in engine.last_error for engine in engines)
    assert sorted(client.told) == ["decode-0", "decode-1", "no engine left", "no engine left"]


def test_an_engine_that_answers_between_its_deaths_is_always_started_again(index, tmp_path):
    engine = crashing(0, tmp_path)
    watching = supervisor.Supervisor(None, [engine], index, Progress())

    def pause_after_a_life(*, of_use: bool) -> float | None:
        engine.begin_boot()
        if of_use:
            engine.leg_sent(1)
            engine.leg_answered(1)
        return watching._backoff_s(engine)

    assert [pause_after_a_life(of_use=True) for _ in range(20)] == [0.0] * 20
    useless = [pause_after_a_life(of_use=False) for _ in supervisor.BACKOFF_S]
    assert useless == [*supervisor.BACKOFF_S[1:], None]
    assert pause_after_a_life(of_use=True) == 0.0
