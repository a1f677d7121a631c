"""Front ends over fake engine cores, each in a process of its own: vLLM's own, and pdnode's.

Both are vLLM's ``AsyncLLM`` with its tokeniser, output processor and statistics. What differs is the
client below it: vLLM's ``AsyncMPClient`` on one core, or pdnode's ``SplitClient`` on P and D cores.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from bench.fake_cores import Cores
from bench.servers import free_port
from bench.tiny_models import tiny_llama
from ipc.index import Index
from ipc.records import Role, State
from pdnode import config as node_config
from pdnode import vllm_args
from pdnode.connector.settings import ConnectorSettings
from pdnode.engine import Engine, EngineState
from pdnode.placement import NodeView
from pdnode.split_client import SplitClient
from pdnode.vllm_compat import (
    RequestOutputKind,
    SamplingParams,
    build_async_llm,
    connect_engine_core,
    engine_config,
    read_environment_once,
)

MAX_MODEL_LEN = 4096


def pin(core: int) -> None:
    """Every thread of this process onto one core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


def vllm_flags() -> list[str]:
    flags = ["--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"]
    return [*flags, "--kv-cache-memory-bytes", str(64 * 2**20), "--port", str(free_port())]


@contextmanager
def plain(cores: Cores) -> Iterator:
    """vLLM's front end over one fake core: an AsyncLLM."""
    from vllm.v1.engine.async_llm import AsyncLLM

    args = vllm_args.parse(["--model", str(tiny_llama()), *vllm_flags()])
    config = engine_config(args, None)
    llm = AsyncLLM.from_vllm_config(config, client_addresses=cores.addresses[0])
    try:
        yield llm
    finally:
        llm.shutdown()


@contextmanager
def ours(cores: Cores) -> Iterator:
    """pdnode's front end, half of the cores P, half D: an AsyncLLM over a SplitClient."""
    count = len(cores.addresses)
    config = node_config.parse([str(tiny_llama()), *_placement(count // 2), *vllm_flags()])
    for spec in config.engines:
        cores.index.set_control(
            spec.slot,
            engine_id=spec.engine_id,
            role=Role[spec.role.upper()],
            state=State.READY,
            boot_id=cores.boot_ids[spec.slot],
            restarts=0,
        )
    front = engine_config(config.frontend_args, None)
    with ExitStack() as stack:
        engines = [_engine(config, spec.slot, cores) for spec in config.engines]
        for engine in engines:
            stack.callback(engine.client.shutdown)
        caches = [engine.vllm_config.cache_config for engine in engines]
        front.cache_config.num_gpu_blocks = sum(cache.num_gpu_blocks for cache in caches)
        acks = Index.attach(cores.index.name, me=count)
        stack.callback(acks.close)
        client = SplitClient(
            config, engines, acks, NodeView((), caches[0].block_size, MAX_MODEL_LEN)
        )
        llm = build_async_llm(front, client, config.frontend_args)
        stack.callback(llm.shutdown)
        for engine in engines:
            client.listen(engine)
        read_environment_once()  # as the node does when it is up
        yield llm


def _placement(pairs: int) -> list[str]:
    first, *_, last = sorted(os.sched_getaffinity(0))
    flags = ["--prefill-cpus", str(first), "--decode-cpus", str(last), "--split", "always"]
    return [*flags, "--prefill-engines", str(pairs), "--decode-engines", str(pairs)]


def _engine(config, slot: int, cores: Cores) -> Engine:
    """An engine that is ready, because its core is a fake one and there already."""
    spec = config.engines[slot]
    settings = ConnectorSettings(os.getpid(), "", "", spec.engine_id, slot, 0, config.lease_s, "")
    template = engine_config(vllm_args.parse(spec.vllm_args), None)
    folder = cores.folder
    engine = Engine(spec, template, settings, folder, folder, log_stats=True)
    engine.client = connect_engine_core(template, **cores.addresses[slot], log_stats=True)
    engine.boot_id, engine.state = cores.boot_ids[slot], EngineState.READY
    return engine


# --- load --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    streams: int
    """Requests at a time; each stream sends its next one when one is answered."""
    requests: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Cost:
    requests_per_s: float
    cpu_us_per_token: float
    cpu_us_per_request: float


async def run(llm, load: Load) -> Cost:
    """CPU seconds are this process's, with all its threads: front end, ZeroMQ and this loop."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(300, 400) for _ in range(load.prompt_tokens)] for _ in range(load.streams)
    ]
    left = iter(range(load.requests))
    params = SamplingParams(
        temperature=0.0,
        max_tokens=load.output_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )

    async def stream(prompt: list[int]) -> None:
        for _ in left:
            tokens = 0
            asked = {"type": "token", "prompt_token_ids": prompt}
            async for output in llm.generate(asked, params, request_id=uuid.uuid4().hex):
                tokens += len(output.outputs[0].token_ids)
            assert tokens == load.output_tokens, tokens

    gc.collect()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            group.create_task(stream(prompt))
    took, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    return Cost(
        load.requests / took,
        cpu / (load.requests * load.output_tokens) * 1e6,
        cpu / load.requests * 1e6,
    )


class FrontEnd:
    """``make`` (:func:`plain`, :func:`ours`) over ``cores``, in a process on CPU core ``core``.

    The process is a fork: start all of them before this process has threads, sockets or a loop.
    """

    def __init__(self, make: Callable, cores: Cores, core: int) -> None:
        self._pipe, its_end = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(
            target=_play, args=(make, cores, core, its_end), daemon=True
        )
        self._process.start()
        its_end.close()

    def run(self, load: Load) -> Cost:
        """Raises EOFError when the process has ended; its output says why."""
        self._pipe.send(load)
        return self._pipe.recv()

    def __enter__(self) -> FrontEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def _play(make: Callable, cores: Cores, core: int, pipe) -> None:
    import uvloop

    uvloop.run(_answer(make, cores, core, pipe))


async def _answer(make: Callable, cores: Cores, core: int, pipe) -> None:
    """One :class:`Cost` for each :class:`Load`; the first one warms up."""
    with make(cores) as llm:
        pin(core)
        while True:
            load = await asyncio.to_thread(pipe.recv)
            pipe.send(await run(llm, load))
            gc.collect()
            gc.freeze()  # as vLLM's server does once it is up
