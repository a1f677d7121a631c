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
from pdnode.supervisor import STEPS_OF_A_LOOK, Supervisor

LAST_WORDS = "no such weights"
MAPPED = SimpleNamespace(kv_path=lambda owner, reader: "shm")
NOT_MAPPED = SimpleNamespace(kv_path=lambda owner, reader: "cuda-ipc")
KEYS = [b"first", b"second"]


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
    return CrashingEngine(spec, None, settings, folder, folder, log_stats=False)


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
        watching = Supervisor(MAPPED, engines, index, Progress())
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


def test_the_last_words_of_an_engine_are_those_since_it_was_ready(tmp_path):
    engine = crashing(0, tmp_path)
    engine.log_path.write_text("a warning while it loaded\n")
    engine._said = len(engine.log_path.read_text())
    assert engine.last_words(5) == f"nothing in {engine.log_path} since it was ready"
    with engine.log_path.open("a") as log:
        log.write("out of\nmemory\n")
    assert engine.last_words(5) == f"last lines of {engine.log_path}:\nout of\nmemory"
    assert engine.last_words(1).endswith(":\nmemory")


def test_an_engine_that_answers_between_its_deaths_is_always_started_again(index, tmp_path):
    engine = crashing(0, tmp_path)
    watching = Supervisor(None, [engine], index, Progress())

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


class Watching(Supervisor):
    looks = 0

    def _steps(self, engine: Engine) -> int:
        self.looks += 1
        return super()._steps(engine)


class Dying:
    """Engine 0 holds a prefix and dies; engine 1 serves, and looks on. ``ends``: engine 0's life is over,
    and its memory is about to be given up."""

    def __init__(self, index: Index, folder: Path, config: SimpleNamespace) -> None:
        self.engine, self.other = crashing(0, folder), crashing(1, folder)
        self.watching = Watching(config, [self.engine, self.other], index, Progress())
        self.watching.client = Client()
        for engine in (self.engine, self.other):
            engine.begin_boot()
            engine.state = EngineState.READY
            self.watching.publish(engine)
        self.looker = Index.attach(index.name, me=1)
        owner = Index.attach(index.name, me=0)
        owner.prefixes.own(blocks=4, boot_id=self.engine.boot_id, flag="--kv")
        for block, key in enumerate(KEYS):
            owner.prefixes.publish(key, block)
        owner.close()
        self.held = self.looker.prefixes.take(KEYS, 0)
        self.at_the_end: tuple[int, int] | None = None
        self.engine.forget_memory = self.ends

    @property
    def found(self) -> int:
        return self.looker.prefixes.lengths(KEYS, [0])[0]

    def ends(self) -> None:
        self.at_the_end = (self.found, self.looker.prefixes.still(self.held))

    async def until(self, condition) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        await self.watching.close()
        self.looker.close()
        self.watching._index.prefixes.unlink()


def test_a_prefix_is_hidden_before_the_memory_of_its_dead_engine_goes(index, tmp_path):
    async def scenario() -> None:
        lab = Dying(index, tmp_path, MAPPED)
        lab.watching.give_up(lab.engine, "it was killed")
        assert lab.found == len(KEYS)  # its memory can be read, and is
        await lab.until(lambda: lab.at_the_end)
        # Who had found it already may finish.
        assert lab.at_the_end == (0, len(KEYS))
        await lab.close()

    asyncio.run(scenario())


def test_a_prefix_in_memory_that_goes_with_its_engine_is_hidden_at_once(index, tmp_path):
    async def scenario() -> None:
        lab = Dying(index, tmp_path, NOT_MAPPED)
        lab.watching.give_up(lab.engine, "it was killed")
        assert lab.found == 0
        await lab.close()

    asyncio.run(scenario())


def test_memory_stays_until_a_step_that_may_be_copying_a_prefix_is_over(index, tmp_path):
    async def scenario() -> None:
        lab = Dying(index, tmp_path, MAPPED)
        lab.other.leg_sent(1)
        lab.looker.set_load(1, steps=7)
        lab.watching.give_up(lab.engine, "it was killed")
        await lab.until(lambda: not lab.found)
        lab.looker.set_load(1, steps=7 + STEPS_OF_A_LOOK - 1)
        looks = lab.watching.looks
        await lab.until(lambda: lab.watching.looks > looks + 2)
        assert lab.at_the_end is None
        lab.looker.set_load(1, steps=7 + STEPS_OF_A_LOOK)
        await lab.until(lambda: lab.at_the_end)
        await lab.close()

    asyncio.run(scenario())
