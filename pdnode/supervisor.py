"""Keeps engines alive: sees a death or a hang, moves the requests, starts the engine again.

READY --process ends-----------> DEAD --back-off--> STARTING ... READY
READY --no step in the budget--> DEAD (killed first)
DEAD  --no life was of use-----> FAILED: stays down, the others go on serving
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

from ipc.errors import LookupFault
from ipc.index import Index
from ipc.records import Role, State
from pdnode.engine import Engine, EngineState
from pdnode.errors import EngineFailed
from pdnode.kvpath import SHM

if TYPE_CHECKING:
    from pdnode.config import NodeConfig
    from pdnode.progress import Progress
    from pdnode.split_client import SplitClient

INDEX_STATE = {
    EngineState.STARTING: State.STARTING,
    EngineState.LOADING: State.STARTING,
    EngineState.WARMING: State.STARTING,
    EngineState.READY: State.READY,
    EngineState.DEAD: State.DEAD,
    EngineState.FAILED: State.DEAD,
    EngineState.STOPPED: State.DEAD,
}
"""What peers need to know of an engine's state, which is less than people do."""

FOLLOW_S = 0.25
"""How often the phases of a start and the progress of busy engines are looked at."""
BACKOFF_S = (0.0, 0.0, 1.0, 5.0, 15.0, 30.0)
"""Before the n-th restart in a row after a life that was of no use; then the engine stays down. One
that serves between its deaths is started again at once, however often it is killed."""
OF_USE_S = 60.0
"""A life is of use if the engine answered a request, or was ready for so long."""
KV_GRACE_S = 5.0
"""A dead engine's memory is kept this long at most for the requests that copy from it, and then as long
again for prefixes."""
STEPS_OF_A_LOOK = 3
"""Of an engine's steps, from the count that is seen while one may be looking for a prefix until that
one's copy is over: it becomes the next, and one more is scheduled ahead."""


class Supervisor:
    """One per node, on its loop. ``client`` is set once the front end exists."""

    def __init__(
        self, config: NodeConfig, engines: list[Engine], index: Index, progress: Progress
    ) -> None:
        self.client: SplitClient
        self._config = config
        self._engines = engines
        self._index = index
        self._progress = progress
        self._pidfds: dict[int, list[int]] = {}
        self._tasks: set[asyncio.Task] = set()
        self._useless: dict[int, int] = {engine.slot: 0 for engine in engines}
        self._seen_steps: dict[int, tuple[int, float]] = {}
        self._starting: dict[str, asyncio.Lock] = {}
        self._closing = False

    # --- start ------------------------------------------------------------------------------------

    async def start(self, engine: Engine) -> None:
        """A new life of the engine, up to READY. Raises EngineFailed."""
        engine.begin_boot()
        # What its last life left in the index is no longer true.
        self._index.sweep(engine.slot)
        self.publish(engine)
        self._progress.state(engine.engine_id, engine.state.value)
        async with contextlib.AsyncExitStack() as stack:
            # vLLM measures a GPU's free memory while it starts: two engines at once would each count
            # the other's. Cores do not mind.
            for gpu in engine.spec.device.exclusive_while_starting():
                await stack.enter_async_context(self._starting.setdefault(gpu, asyncio.Lock()))
            await asyncio.to_thread(engine.start)
            # It may be ready before anybody looks again.
            self._progress.state(engine.engine_id, engine.state.value)
            await engine.prepare()
        self.publish(engine)
        self._progress.state(engine.engine_id, engine.state.value)

    async def follow_starts(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_S)
            for engine in self._engines:
                engine.observe_start(self._kv_published(engine))
                self._progress.state(engine.engine_id, engine.state.value)

    def _kv_published(self, engine: Engine) -> bool:
        try:
            region = self._index.region(engine.slot, 0)
        except LookupFault:
            return False
        return region is not None and region.boot_id == engine.boot_id

    def publish(self, engine: Engine) -> None:
        self._index.set_control(
            engine.slot,
            engine_id=engine.engine_id,
            role=Role[engine.role.upper()],
            state=INDEX_STATE[engine.state],
            boot_id=engine.boot_id,
            restarts=engine.restarts,
        )

    # --- death ------------------------------------------------------------------------------------

    def watch(self, engine: Engine) -> None:
        """See the death of any of the engine's processes in the moment it happens."""
        loop = asyncio.get_running_loop()
        fds = self._pidfds.setdefault(engine.slot, [])
        for pid in (engine.pid, *engine.worker_pids):
            try:
                fds.append(os.pidfd_open(pid))
            except ProcessLookupError:
                loop.call_soon(self.give_up, engine, "one of its processes ended")
        for fd in fds:
            loop.add_reader(fd, self.give_up, engine, "one of its processes ended")

    def _unwatch(self, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        for fd in self._pidfds.pop(engine.slot, ()):
            loop.remove_reader(fd)
            os.close(fd)

    def give_up(self, engine: Engine, why: str, *, from_outside: bool = False) -> None:
        """What it runs goes on elsewhere, and it is started again. The first call of a life counts.

        ``from_outside``: none of its requests can be the cause.
        """
        self._unwatch(engine)
        if engine.state is not EngineState.READY or self._closing:
            return
        engine.state = EngineState.DEAD
        if not self._is_read_when_dead(engine):
            self._index.prefixes.hide(engine.slot)
        engine.ended_from_outside = from_outside
        engine.last_error = f"{why}; {engine.last_words(5)}"
        self.publish(engine)
        self._progress.state(engine.engine_id, engine.state.value)
        self.spawn(self._replace(engine))

    async def _replace(self, engine: Engine) -> None:
        # All of it must be dead before its memory is read or its requests run elsewhere.
        await asyncio.to_thread(engine.kill)
        await self.client.engine_died(engine)
        await self._kv_copied(engine)
        await self._prefixes_copied(engine)
        await asyncio.to_thread(engine.forget_memory)
        self._index.prefixes.forget(engine.slot)
        await self._restart(engine)

    async def _kv_copied(self, engine: Engine) -> None:
        """The requests that resume from this engine's memory have it, or have had their chance."""
        await _until(lambda: not self.client.copying_from(engine.slot))

    async def _prefixes_copied(self, engine: Engine) -> None:
        """Nobody finds what it held any more, and who has found some copied it in the same step."""
        self._index.prefixes.hide(engine.slot)
        if not self._is_read_when_dead(engine):
            return
        seen: dict[tuple[int, int], int] = {}

        def may_copy(other: Engine) -> bool:
            if other.state is not EngineState.READY or not other.requests:
                return False
            steps = self._steps(other)
            first = seen.setdefault((other.slot, other.boot_id), steps) if steps >= 0 else steps
            return steps < first + STEPS_OF_A_LOOK

        await _until(lambda: not [other for other in self._engines if may_copy(other)])

    def _is_read_when_dead(self, engine: Engine) -> bool:
        """By peers that map its memory, until that is given up; a GPU's goes with its engine."""
        paths = (self._config.kv_path(engine.spec, other.spec) for other in self._engines)
        return SHM in paths

    def _steps(self, engine: Engine) -> int:
        """-1: being written just now."""
        try:
            return self._index.engine(engine.slot).steps
        except LookupFault:
            return -1

    async def _restart(self, engine: Engine) -> None:
        while (pause_s := self._backoff_s(engine)) is not None:
            await asyncio.sleep(pause_s)
            engine.restarts += 1
            follower = asyncio.ensure_future(self.follow_starts())
            try:
                await self.start(engine)
            except EngineFailed as error:
                engine.last_error = str(error)
                continue
            finally:
                follower.cancel()
            self.watch(engine)
            self.client.listen(engine)
            await self.client.engine_back(engine)
            return
        engine.state = EngineState.FAILED
        self.publish(engine)
        self._progress.line(
            f"{engine.engine_id} was started again {len(BACKOFF_S)} times in a row, and no life answered a "
            f"request or lasted {OF_USE_S:.0f} s; it stays down: {engine.last_error}"
        )
        if all(other.state is EngineState.FAILED for other in self._engines):
            await self.client.no_engine_left()

    def try_again(self, engine: Engine) -> None:
        """An operator's word that the cause is mended: a FAILED engine has all its chances again."""
        if engine.state is not EngineState.FAILED or self._closing:
            return
        self._useless[engine.slot] = 0
        engine.state = EngineState.DEAD
        self.publish(engine)
        self._progress.state(engine.engine_id, engine.state.value)
        self.spawn(self._restart(engine))

    def _backoff_s(self, engine: Engine) -> float | None:
        """None: it has had all its chances."""
        useless = 0 if engine.was_of_use(OF_USE_S) else self._useless[engine.slot]
        self._useless[engine.slot] = useless + 1
        return BACKOFF_S[useless] if useless < len(BACKOFF_S) else None

    # --- hang -------------------------------------------------------------------------------------

    async def watch_progress(self) -> None:
        """Eject an engine that has work and has made no step for ``--health-timeout``.

        Progress, not an answer to a ping: a stopped worker leaves its engine core answering, and a
        long prefill is made of steps.
        """
        while True:
            await asyncio.sleep(FOLLOW_S)
            for engine in self._engines:
                if engine.state is EngineState.READY and self._hangs(engine):
                    stopped = engine.is_stopped()
                    self.give_up(
                        engine,
                        f"no step for --health-timeout {self._config.health_timeout_s:.0f} s"
                        + (", as it was stopped by a signal" if stopped else ""),
                        from_outside=stopped,
                    )
                elif self._holds_idly(engine):
                    await engine.wake()

    def _holds_idly(self, engine: Engine) -> bool:
        """It keeps KV for readers and sleeps: nobody else would tell it that a lease ran out."""
        try:
            return not engine.requests and bool(self._index.engine(engine.slot).pins)
        except LookupFault:
            return False

    def _hangs(self, engine: Engine) -> bool:
        now, steps = time.monotonic(), self._steps(engine)
        if steps < 0:
            return False
        seen, since = self._seen_steps.get(engine.slot, (-1, now))
        if not engine.requests or steps != seen:
            self._seen_steps[engine.slot] = (steps, now)
            return False
        return now - since > self._config.health_timeout_s

    # --- tasks ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The front end exists and the engines are watched: look for hangs from now on."""
        self.spawn(self.watch_progress())

    def spawn(self, work: Coroutine) -> None:
        """A task that ends with the node; its failure is said."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._progress.line(f"supervision failed: {task.exception()!r}")

    def stop_replacing(self) -> None:
        """Engines that end from now on are meant to."""
        self._closing = True

    async def close(self) -> None:
        self.stop_replacing()
        for engine in self._engines:
            self._unwatch(engine)
        for task in [*self._tasks]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _until(condition: Callable[[], bool]) -> None:
    """Or until a dead engine's memory has been kept for long enough."""
    deadline = time.monotonic() + KV_GRACE_S
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
