"""One engine core as seen from the front end: start, ready, dead, stopped.

    STARTING -> LOADING -> WARMING -> READY -> DEAD
        \\__________________________/            |
                    FAILED            STOPPED <--+

An engine is an engine-core process and its workers. ``start`` may be called again after a death: it
begins a new life with a new boot id.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ipc.segment import sweep
from pdnode.connector import worker_extension
from pdnode.connector.settings import ConnectorSettings
from pdnode.errors import EngineFailed
from pdnode.reaper import private_segments, record_files, segments_of_stopped, unlink_all
from pdnode.rundir import make_private, open_log
from pdnode.vllm_compat import (
    EngineDeadError,
    KVTransferConfig,
    VllmConfig,
    connect_engine_core,
    spawn_engine_core,
)

if TYPE_CHECKING:
    from pdnode.config import EngineSpec
    from pdnode.nursery import Nursery
    from pdnode.vllm_compat import AsyncMPClient

LOG_TAIL_LINES = 20
KILL_S = 5.0
"""For the kernel to end a process that was sent SIGKILL."""
CONNECT_S = 0.1
"""How often to look whether an engine that does not answer still runs."""
LOG_LEVEL_VARIABLE = "PDNODE_ENGINE_LOGGING_LEVEL"
"""What the launcher found in VLLM_LOGGING_LEVEL, or nothing: its own terminal is quieter than that."""


class EngineState(Enum):
    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DEAD = "dead"
    FAILED = "failed"
    STOPPED = "stopped"


# os.environ and the standard streams belong to the whole process, and a child takes what it finds
# there at the moment it is started: one engine at a time.
_spawn_lock = threading.Lock()


@contextlib.contextmanager
def child_surroundings(env: dict[str, str], log_path: Path) -> Iterator[None]:
    """Processes started inside get ``env`` on top of ours, and write to ``log_path``."""
    with _spawn_lock:
        before = dict(os.environ)
        saved = [os.dup(1), os.dup(2)]
        log = open_log(log_path)
        try:
            os.environ.update(env)
            os.dup2(log, 1)
            os.dup2(log, 2)
            yield
        finally:
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
            for fd in (log, *saved):
                os.close(fd)
            os.environ.clear()
            os.environ.update(before)


def kv_transfer_config(
    engine_id: str, extra_config: dict[str, Any] | None = None
) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="PdConnector",
        kv_connector_module_path="pdnode.connector.connector",
        engine_id=engine_id,
        # Every engine can do both: a role is what placement sends it.
        kv_role="kv_both",
        kv_connector_extra_config=extra_config or {},
        # With --strict too: only the front end knows whether what could not be copied was a hand-off,
        # or a prefix that its owner had promised nobody.
        kv_load_failure_policy="recompute",
    )


STARTING = (EngineState.STARTING, EngineState.LOADING, EngineState.WARMING)


class Engine:
    def __init__(
        self,
        spec: EngineSpec,
        vllm_config: VllmConfig,
        settings: ConnectorSettings,
        run_dir: Path,
        log_dir: Path,
        *,
        log_stats: bool,
        nursery: Nursery | None = None,
    ) -> None:
        self.spec = spec
        self.role = spec.role
        self.slot = spec.slot
        self.engine_id = spec.engine_id
        self.state = EngineState.STARTING
        self.draining = False
        """An operator's word: no new work is sent here. Outlives a restart."""
        self.restarts = 0
        self.last_error: str | None = None
        self._said = 0
        """Characters of its log when it was ready."""
        self.ended_from_outside = False
        """Its last death: by somebody's signal, and not by anything it ran."""
        self.boot_id = 0
        self.vllm_config: VllmConfig = vllm_config
        self.client: AsyncMPClient
        self.log_path = log_dir / f"{spec.engine_id}.log"
        self._template = vllm_config
        self._settings = settings
        self._run_dir = run_dir
        self._log_stats = log_stats
        self._nursery = nursery
        self._manager = None
        self._ending = False
        self._answered = False
        self._ready_at_s = math.inf
        self._left_by_a_kill: set[Path] = set()
        self.worker_pids: list[int] = []
        self.requests = 0
        self.queued_tokens = 0
        self.cache_queries = 0
        self.cache_hits = 0

    # --- life -------------------------------------------------------------------------------------

    def begin_boot(self) -> None:
        """A new life, before any process of it exists: announce ``boot_id``, then ``start``."""
        self.boot_id = secrets.randbits(63) | 1
        self.state = EngineState.STARTING
        self._manager = None
        self._answered = False
        self._ready_at_s = math.inf
        self.requests = self.queued_tokens = 0

    def start(self) -> None:
        """Start the processes and wait until they serve. Blocks; for a thread of its own.

        Raises EngineFailed with the last log lines if the engine ends before it is ready.
        """
        self.vllm_config = self._config_for_this_boot()
        addresses = {
            f"{way}_address": f"ipc://{self._run_dir}/{self.engine_id}.{self.boot_id:x}.{way}"
            for way in ("input", "output")
        }
        try:
            with contextlib.ExitStack() as stack:
                self._manager = self._spawn(stack, addresses)
                # ``end`` sets the flag, then looks for processes; here it is the other way round.
                if self._ending:
                    self.kill()
            self.client = self._connect(addresses)
        except (RuntimeError, OSError) as error:  # OSError: a timeout, or the nursery was closed
            self.kill()
            self.state = EngineState.FAILED
            raise EngineFailed(
                f"{self.engine_id} ended while it started ({error}); its last lines, from "
                f"{self.log_path}:\n{self.log_tail()}"
            ) from error
        self.worker_pids = [process.pid for process in self.worker_processes()]
        self._left_by_a_kill = set()
        self._remember_segments(self.processes())
        make_private(self._run_dir)
        self.state = EngineState.WARMING

    async def prepare(self) -> None:
        """On the loop, when ``start`` is done: up to READY. Raises EngineFailed."""
        try:
            files = await self.client.collective_rpc_async(worker_extension.METHOD)
        except EngineDeadError as error:
            await asyncio.to_thread(self.kill)
            self.state = EngineState.FAILED
            raise EngineFailed(
                f"{self.engine_id} ended right after its start; its last lines, from "
                f"{self.log_path}:\n{self.log_tail()}"
            ) from error
        self._remember({Path(file) for file in files if file})
        self._ready_at_s = time.monotonic()
        self._said = len(self._log())
        self.state = EngineState.READY

    def _remember(self, files: set[Path]) -> None:
        """They would stay if the engine were killed; the reaper can read of them too."""
        self._left_by_a_kill |= files
        record_files(self._run_dir, self.engine_id, self._left_by_a_kill)

    def _remember_segments(self, processes: list[psutil.Process]) -> None:
        self._remember(set().union(*(private_segments(process.pid) for process in processes)))

    def _spawn(self, stack: contextlib.ExitStack, addresses: dict[str, str]):
        """The process exists when this returns; leaving ``stack`` waits until it has started."""
        if self._nursery is not None:
            environ = {**os.environ, **self.spec.device.env()}
            birth = self._nursery.launch(
                self.vllm_config, environ, self.log_path, **addresses, log_stats=self._log_stats
            )
            return stack.enter_context(birth)
        with child_surroundings(self.spec.device.env(), self.log_path):
            core = spawn_engine_core(self.vllm_config, **addresses, log_stats=self._log_stats)
            return stack.enter_context(core)

    def _connect(self, addresses: dict[str, str]) -> AsyncMPClient:
        """vLLM's client. It waits for the engine's first message, and for minutes if that died just
        before: so it does on a thread of its own, and we look whether there is anybody."""
        connected: Future[AsyncMPClient] = Future()

        def connect() -> None:
            try:
                connected.set_result(
                    connect_engine_core(self.vllm_config, **addresses, log_stats=self._log_stats)
                )
            except Exception as error:  # noqa: BLE001 (raised by result())
                connected.set_exception(error)

        processes = self.processes()
        threading.Thread(target=connect, name=f"connect {self.engine_id}", daemon=True).start()
        while not wait([connected], timeout=CONNECT_S).done:
            if not processes or not runs(processes[0]):
                raise RuntimeError("its process ended right after its start")
        return connected.result()

    def _config_for_this_boot(self) -> VllmConfig:
        config = copy.deepcopy(self._template)
        settings = ConnectorSettings(
            **{
                **{name: getattr(self._settings, name) for name in self._settings.__slots__},
                "engine_id": self.engine_id,
                "slot": self.slot,
                "boot_id": self.boot_id,
            }
        )
        config.kv_transfer_config = kv_transfer_config(self.engine_id, settings.to_extra_config())
        config.logging_config.log_level = os.environ.get(LOG_LEVEL_VARIABLE, "INFO")
        return config

    def stop(self, timeout_s: float) -> None:
        """TERM, deadline, KILL; the whole tree. Blocks for at most ``timeout_s`` and a little."""
        self._ending = True
        processes = self.processes()
        if self.state in STARTING:
            self.kill(processes)  # there is nothing yet that it could end in order
        if self.state is not EngineState.FAILED:
            self.state = EngineState.STOPPED
        _signal(processes[:1], signal.SIGTERM)
        wait_until(lambda: not any(map(runs, processes)), timeout_s)
        self.kill(processes)
        self.forget_memory()

    def end(self) -> None:
        """``kill``, for good: what is just being started, and has no process yet, ends as well."""
        self._ending = True
        self.kill()

    def kill(self, processes: list[psutil.Process] | None = None) -> None:
        """SIGKILL the processes (default: this engine's tree) and wait for them to be gone."""
        targets = self.processes() if processes is None else processes
        if self.state in STARTING:
            # What it has made so far nobody has written down.
            self._remember(segments_of_stopped(process.pid for process in targets))
        _signal(targets, signal.SIGKILL)
        wait_until(lambda: not any(map(runs, targets)), KILL_S, step_s=0.005)

    def forget_memory(self) -> None:
        """Unlink what the last life left in shared memory; nobody copies from it any more."""
        self._close_client()
        prefix = f"{self._settings.segment_prefix}.{self.boot_id:016x}"
        sweep(prefix, keep=lambda name: False)
        unlink_all(self._left_by_a_kill)

    async def wake(self) -> None:
        """Let an idle engine go once round its loop."""
        if self.state is EngineState.READY:
            # An abort of an id that vLLM does not know changes nothing. Of a death others tell.
            with contextlib.suppress(EngineDeadError):
                await self.client.abort_requests_async(["nobody"])

    def _close_client(self) -> None:
        client = self.__dict__.pop("client", None)
        if client is not None:
            client.shutdown()

    def was_of_use(self, ready_s: float) -> bool:
        """This life: it answered a request, or has been ready for ``ready_s`` seconds."""
        return self._answered or time.monotonic() - self._ready_at_s > ready_s

    # --- facts ------------------------------------------------------------------------------------

    @property
    def max_batched_tokens(self) -> int:
        """Of prompts, in one pass."""
        return self.vllm_config.scheduler_config.max_num_batched_tokens

    @property
    def pid(self) -> int | None:
        if self._manager is None or not self._manager.processes:
            return None
        return self._manager.processes[0].pid

    def processes(self) -> list[psutil.Process]:
        """The engine core first, then its descendants that still live."""
        pid = self.pid
        if pid is None:  # and psutil's Process(None) would be this very process
            return []
        try:
            core = psutil.Process(pid)
            return [core, *core.children(recursive=True)]
        except psutil.NoSuchProcess:
            return [psutil.Process(pid) for pid in self.worker_pids if psutil.pid_exists(pid)]

    def is_stopped(self) -> bool:
        """Any of its processes: by SIGSTOP, a terminal or a debugger."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    return True
        return False

    def worker_processes(self) -> list[psutil.Process]:
        """The engine core's children that run vLLM workers (its resource tracker is a child too)."""
        workers = []
        for process in self.processes()[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if not any("resource_tracker" in part for part in process.cmdline()):
                    workers.append(process)
        return workers

    def observe_start(self, kv_published: bool) -> EngineState:
        """Refresh STARTING -> LOADING -> WARMING from what can be seen outside."""
        if self.state in STARTING:
            before = self.state
            if kv_published:
                self.state = EngineState.WARMING
            elif self.state is EngineState.STARTING and self.worker_processes():
                self.state = EngineState.LOADING
            if self.state is not before:  # by now its processes have made more, and may be killed
                self._remember_segments(self.processes())
        return self.state

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        return "\n".join(self._log().splitlines()[-lines:])

    def last_words(self, lines: int) -> str:
        """What it logged since it was ready: an engine that was killed has said nothing of it."""
        said = self._log()[self._said :].splitlines()[-lines:]
        if not said:
            return f"nothing in {self.log_path} since it was ready"
        return "\n".join([f"last lines of {self.log_path}:", *said])

    def _log(self) -> str:
        try:
            return self.log_path.read_text(errors="replace")
        except OSError:
            return "(no log)"

    # --- load as the front end knows it, exact to the message ---------------------------------------

    def leg_sent(self, prompt_tokens: int) -> None:
        self.requests += 1
        self.queued_tokens += prompt_tokens

    def leg_answered(self, prompt_tokens: int) -> None:
        self._answered = True
        self.queued_tokens -= prompt_tokens

    def cache_seen(self, queries: int, hits: int) -> None:
        """Prompt tokens that were looked up in its prefix cache, and found."""
        self.cache_queries += queries
        self.cache_hits += hits

    def leg_over(self, prompt_tokens: int, *, answered: bool) -> None:
        self.requests -= 1
        if not answered:
            self.queued_tokens -= prompt_tokens


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def runs(process: psutil.Process) -> bool:
    """A zombie does not: its memory is free, and whoever inherited it may take seconds to reap it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float, step_s: float = 0.05) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(step_s)
    return True
