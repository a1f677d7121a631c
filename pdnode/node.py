"""Builds the node, serves, stops: one object per launcher process.

Order on the way up: listen socket, run directory and its reaper, index, engines, front end,
self-test, HTTP. The way down is the reverse, and each step has its budget.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from prometheus_client import REGISTRY

from ipc.index import Index
from ipc.pool import Pool
from pdnode import (
    admission,
    engines,
    http_routes,
    models,
    role_keeper,
    rundir,
    selftest,
    status,
    warmup,
)
from pdnode.config import NodeConfig
from pdnode.connector import worker_extension
from pdnode.engine import Engine, EngineState
from pdnode.errors import BadRole, ConfigError, EngineFailed, NodeStartError, PdNodeError
from pdnode.metrics import NodeMetrics
from pdnode.outlets import Outlets
from pdnode.placement import NodeView
from pdnode.progress import Progress
from pdnode.split_client import SplitClient
from pdnode.supervisor import Supervisor
from pdnode.transfer_log import TransferLog
from pdnode.vllm_compat import (
    build_async_llm,
    engine_config,
    fail_request,
    open_listen_socket,
    read_environment_once,
    serve,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Coroutine

    from ipc.segment import Segment
    from pdnode.nursery import Nursery
    from pdnode.vllm_compat import VllmConfig

STOP_ENGINE_S = 2.0
"""From TERM to KILL for an engine that has nothing left to finish."""

T = TypeVar("T")


class _Stopped(Exception):
    """By a signal, before the node was ready."""


class Node:
    def __init__(self, config: NodeConfig, boot_id: str, nursery: Nursery | None) -> None:
        self.config = config
        self.boot_id = boot_id
        self._nursery = nursery
        self.started_s = time.monotonic()
        self.address = ""
        self.ready = False
        self.draining = False
        self.paths: list[dict[str, Any]] = []
        self.self_test_bytes = 0
        self.vocab_size = 0
        self.engines: list[Engine] = []
        self.progress = Progress()
        self.index: Index = None
        self.acks: Index = None
        self.pools: list[Segment] = []
        self.client: SplitClient
        self._run_dir: rundir.RunDir
        self._stop = asyncio.Event()
        self.http_server: Any = None
        self.supervisor: Supervisor | None = None

    def change_role(self, engine_id: str, role: str, reason: str = "asked") -> None:
        """What placement sends the engine from now on; nothing running moves. Raises BadRole."""
        engine = next((e for e in self.engines if e.engine_id == engine_id), None)
        if engine is None or role not in ("prefill", "decode"):
            known = ", ".join(e.engine_id for e in self.engines)
            raise BadRole(
                f"no engine {engine_id!r} with a role {role!r}: engines are {known}, roles prefill and decode"
            )
        self.client.counters.role_changes[reason] += engine.role != role
        engine.role = role
        self.supervisor.publish(engine)

    async def drain_engine(self, engine_id: str, drain: bool) -> None:
        """Send the engine no new work, or again; what runs there goes on. Raises BadRole.

        One that stays down is started again by the latter.
        """
        engine = next((e for e in self.engines if e.engine_id == engine_id), None)
        if engine is None:
            known = ", ".join(e.engine_id for e in self.engines)
            raise BadRole(f"no engine {engine_id!r}: engines are {known}")
        if drain and all(e.draining or e is engine for e in self.engines):
            raise BadRole(
                f"{engine_id} is the last engine that is sent work; to stop the node, send its "
                "launcher SIGTERM"
            )
        engine.draining = drain
        if drain:
            return
        self.supervisor.try_again(engine)
        if engine.state is EngineState.READY:
            await self.client.engine_back(engine)

    @property
    def served_model(self) -> str:
        """As clients name it."""
        names = self.config.frontend_args.served_model_name
        return names[0] if names else self.config.model

    @property
    def api_keys(self) -> list[str]:
        """As vLLM reads them: the flag, else the variable."""
        given = self.config.frontend_args.api_key or [os.environ.get("VLLM_API_KEY", "")]
        return [key for key in given if key]

    # --- up ---------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Returns the launcher's exit code."""
        self._on_signals(self._stop.set)
        for warning in self.config.warnings:
            self.progress.line(f"warning: {warning}")
        args = self.config.frontend_args
        args.middleware = [*args.middleware, http_routes.MIDDLEWARE]
        address, sock = self._listen()
        self._run_dir = rundir.RunDir(self.boot_id)
        # vLLM's own sockets would lie in /tmp, where a killed engine leaves them.
        os.environ["VLLM_RPC_BASE_PATH"] = str(self._run_dir.path)
        try:
            llm = await self._unless_stopped(self._start())
            self.address = address
            # Until it serves, a signal still only sets ``_stop``.
            await self._unless_stopped(serve(llm, address, sock, args, self._serving))
            return 0
        except _Stopped:
            return 130
        finally:
            self.ready = False
            sock.close()
            await self._down()

    def _listen(self) -> tuple[str, socket.socket]:
        try:
            return open_listen_socket(self.config.frontend_args)
        except OSError as error:
            raise NodeStartError(
                f"cannot listen on {self.config.host}:{self.config.port} ({error.strerror}); choose "
                "another --port"
            ) from error

    async def _start(self):
        config = self.config
        front = await asyncio.to_thread(self._front_config)
        self.index = Index.create(
            f"{self._run_dir.segment_prefix}.index",
            engine_slots=len(config.engines) + 1,
            entries_per_engine=config.index_entries,
            node_boot_id=int(self.boot_id, 16),
        )
        self.pools = await asyncio.to_thread(self._make_pools)
        # The node writes control lines as itself, and acknowledges hand-offs that ended without a
        # reader from a slot of its own behind the engines'.
        self.acks = Index.attach(self.index.name, me=len(config.engines))
        self.engines = await asyncio.to_thread(
            engines.build, config, self._run_dir, self.index.name, self._pool_name, self._nursery
        )
        self.supervisor = Supervisor(config, self.engines, self.index, self.progress)
        async with asyncio.timeout(config.start_timeout_s) as budget:
            try:
                await self._start_engines()
            except TimeoutError:
                states = ", ".join(f"{e.engine_id} {e.state.value}" for e in self.engines)
                raise NodeStartError(
                    f"not ready after --start-timeout {config.start_timeout_s:.0f} s: {states}"
                ) from None
        assert not budget.expired()
        self._take_over_facts(front)
        self.client = SplitClient(config, self.engines, self.acks, self._shape(front))
        self.client.node = self
        self.supervisor.client = self.client
        self._outlets = Outlets(config, self.client)
        self._measure()
        llm = build_async_llm(front, self.client, config.frontend_args)
        self.client.explain = lambda request_id, error: fail_request(
            llm, request_id, error.status, str(error)
        )
        for engine in self.engines:
            self.client.listen(engine)
            self.supervisor.watch(engine)
        self.supervisor.begin()
        if config.roles == "auto":
            self.supervisor.spawn(role_keeper.keep(self))
        await self._self_test()
        await llm.reset_mm_cache()
        read_environment_once()
        return llm

    def _measure(self) -> None:
        """Our metrics beside vLLM's, and the minute's line."""
        metrics = NodeMetrics(lambda: status.node_status(self))
        REGISTRY.register(metrics)
        transfers = TransferLog(self.progress.line, lambda: status.failures(self))
        self.client.history.on_finished += [metrics.finished, transfers.finished]

    def _front_config(self) -> VllmConfig:
        """vLLM's reading of the model, for the front end. Raises ConfigError."""
        try:
            front = engine_config(self.config.frontend_args, None)
        except ValueError as error:
            raise ConfigError(" ".join(str(error).split())) from error
        tp_of = {engine.role: engine.tensor_parallel_size for engine in self.config.engines}
        models.check(front, tp_of["prefill"], tp_of["decode"])
        theirs = self.config.frontend_args.worker_extension_cls
        try:
            worker_extension.name_with(theirs)
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"--worker-extension-cls {theirs} does not go together with the node's own: {reason}"
            ) from error
        return front

    @property
    def _pool_name(self) -> str:
        return f"{self._run_dir.segment_prefix}.pool" if self.config.kv_pool_bytes else ""

    def _make_pools(self) -> list[Segment]:
        """One a rank. The run directory unlinks them at the end: they outlive every engine."""
        ranks = self.config.engines[0].tensor_parallel_size if self._pool_name else 0
        return [
            Pool.create(
                f"{self._pool_name}{rank}",
                self.config.kv_pool_bytes // ranks,
                shares=len(self.config.engines),
            )
            for rank in range(ranks)
        ]

    async def _start_engines(self) -> None:
        watcher = asyncio.ensure_future(self.supervisor.follow_starts())
        try:
            async with asyncio.TaskGroup() as group:
                for engine in self.engines:
                    group.create_task(self.supervisor.start(engine))
        except* EngineFailed as failures:
            raise failures.exceptions[0] from None
        finally:
            watcher.cancel()

    def _take_over_facts(self, front) -> None:
        """What the engines found out while they started, for vLLM's front end."""
        configs = [engine.vllm_config for engine in self.engines]
        front.model_config.max_model_len = min(c.model_config.max_model_len for c in configs)
        front.cache_config.num_gpu_blocks = sum(c.cache_config.num_gpu_blocks for c in configs)
        front.cache_config.block_size = configs[0].cache_config.block_size
        front.cache_config.effective_attention_block_size = configs[
            0
        ].cache_config.effective_attention_block_size
        self.vocab_size = front.model_config.get_vocab_size()
        asked = self.config.frontend_args.max_num_queued_reqs
        default = admission.default_bound(configs, self.config.index_entries)
        admission.set_bound(front, asked, default)

    def _shape(self, front) -> NodeView:
        return NodeView((), front.cache_config.block_size, front.model_config.max_model_len)

    async def _self_test(self) -> None:
        roles = {
            role: [e for e in self.engines if e.role == role] for role in ("prefill", "decode")
        }
        self.progress.line("self-test")
        for prefill in roles["prefill"]:
            for decode in roles["decode"]:
                result = await selftest.test_pair(self, prefill, decode, 120.0)
                kind = self.config.kv_path(prefill.spec, decode.spec)
                self.paths.append(
                    {
                        "from": prefill.engine_id,
                        "to": decode.engine_id,
                        "kind": kind,
                        "gb_per_s": result.gb_per_s,
                    }
                )
                self.progress.line(
                    f"  {prefill.engine_id} -> {decode.engine_id}  {kind}  {result.gb_per_s} GB/s"
                )
        await warmup.measure(self, 120.0)
        self.self_test_bytes = sum(self.index.engine(e.slot).handoff_bytes for e in self.engines)

    # --- serving -----------------------------------------------------------------------------------

    def _serving(self) -> bool:
        """True once the server runs and our signal handlers have replaced vLLM's."""
        if self.http_server is None or not self.http_server.started:
            return False
        self._on_signals(self._begin_stop)
        self.ready = True
        self.progress.line(f"ready: {self.address} ({time.monotonic() - self.started_s:.1f} s)")
        return True

    def _on_signals(self, action) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, action)

    def _begin_stop(self) -> None:
        if self.draining:
            self._stop_now()
            return
        self.draining = True
        self.progress.line(
            f"stopping: {self.client.unfinished} requests may finish within "
            f"{self.config.drain_timeout_s:.0f} s (again: at once)"
        )
        self._drain_task = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        deadline = time.monotonic() + self.config.drain_timeout_s
        while self.client.unfinished and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        left = self.client.unfinished
        if left:
            self.progress.line(f"--drain-timeout reached with {left} requests running; ending them")
            self.http_server.force_exit = True
        self.http_server.should_exit = True

    def _stop_now(self) -> None:
        self.http_server.force_exit = True
        self.http_server.should_exit = True
        self._expect_the_end()
        loop = asyncio.get_running_loop()
        for engine in self.engines:
            loop.run_in_executor(None, engine.end)

    # --- down ----------------------------------------------------------------------------------------

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises _Stopped, with all engines ended, if ``_stop`` is set before ``work`` is done."""
        doing = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not doing.done():
            await self._abandon(doing)
            raise _Stopped
        return await doing

    async def _abandon(self, doing: asyncio.Future) -> None:
        self.progress.line("stopping before the node was ready")
        self._expect_the_end()
        if self._nursery is not None:
            await asyncio.to_thread(self._nursery.close)
        await asyncio.gather(*(asyncio.to_thread(engine.end) for engine in self.engines))
        doing.cancel()
        # Whatever it says now is that its engines are gone.
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await doing

    def _expect_the_end(self) -> None:
        if self.supervisor is not None:
            self.supervisor.stop_replacing()
        # The server's lifespan task is cancelled, which uvicorn reports with a traceback.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    async def _down(self) -> None:
        if hasattr(self, "client"):
            self.client.shutdown()
        if hasattr(self, "_outlets"):
            await asyncio.to_thread(self._outlets.close)
        if self.supervisor is not None:
            await self.supervisor.close()
        await asyncio.gather(
            *(asyncio.to_thread(engine.stop, STOP_ENGINE_S) for engine in self.engines)
        )
        if self._nursery is not None:
            await asyncio.to_thread(self._nursery.close)
        for shared in (self.acks, self.index, *self.pools):
            if shared is not None:
                shared.close()
        self._run_dir.close()
        self.progress.close()


def run(config: NodeConfig, boot_id: str, nursery: Nursery | None) -> NoReturn:
    """The launcher's main: serve until told to stop, then end the process with its exit code."""
    import uvloop

    # Engines are started from threads of a process that has a loop and sockets: forking it is unsafe.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    for name in rundir.sweep_dead():
        print(f"pdnode: removed what the dead node {name} left behind", file=sys.stderr)

    async def main() -> NoReturn:
        try:
            code = await Node(config, boot_id, nursery).run()
        except PdNodeError as error:
            print(f"pdnode: error: {error}", file=sys.stderr)
            code = error.exit_code
        except Exception:  # noqa: BLE001 (said, as Python would)
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        # All of ours is down. What is left are vLLM's finalisers, which take seconds, and threads of
        # engines that were killed while they started, for which the loop's end would wait.
        os._exit(code)

    uvloop.run(main())
