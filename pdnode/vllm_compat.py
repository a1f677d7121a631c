"""Every vLLM name that pdnode touches, and nothing else does.

Checked on vLLM 0.32.0 (run) and 0.33.0 (sources; `make compat VLLM=0.33.0`). vLLM calls most of
these semi-public: stable enough to build on, free to move. `tests/compat.py` reads ``TOUCHED`` and
says which name moved. No module of vLLM is patched for longer than one constructor call
(:func:`build_async_llm`, which says why), but for one default in engines' own processes
(:func:`sleep_soon`).
"""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from vllm import SamplingParams, envs
from vllm import __version__ as VLLM_VERSION
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.exceptions import GenerationError, GracefulHTTPError
from vllm.logger import init_logger
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.request import RequestStatus
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from pdnode.connector import prompt_order

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = [
    "TOUCHED",
    "VLLM_VERSION",
    "AsyncLLM",
    "AuthenticationMiddleware",
    "BatchUpdate",
    "BlockHasher",
    "BlockPool",
    "EngineCoreEventType",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineDeadError",
    "FinishReason",
    "GracefulHTTPError",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "KVTransferConfig",
    "LogitsProcessor",
    "Request",
    "RequestOutputKind",
    "RequestStatus",
    "SamplingParams",
    "SchedulerOutput",
    "VllmConfig",
    "build_async_llm",
    "cached_blocks",
    "compile_logprobs",
    "connect_engine_core",
    "drop_in_flight",
    "engine_config",
    "fail_request",
    "flush_traces",
    "init_logger",
    "open_listen_socket",
    "order_prompts",
    "process_dict_updates",
    "prompts_in_order",
    "read_environment_once",
    "scheduler_class",
    "serve",
    "sleep_soon",
    "spawn_engine_core",
    "trace_span",
]

SUPPORTED = ">=0.32,<0.34"
FLUSH_TRACES_MS = 2000
CAN_BEGIN = (RequestStatus.WAITING, RequestStatus.PREEMPTED)

ASLEEP_MS = 10
"""At most, before a message is looked for again (:func:`sleep_soon`)."""

# (module, dotted name, parameters or fields that must exist). Read by tests/compat.py without
# importing vLLM, so that a version can be checked from its wheel alone.
TOUCHED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "vllm.v1.engine.core_client",
        "EngineCoreClient.make_async_mp_client",
        ("vllm_config", "executor_class", "log_stats", "client_addresses", "renderer"),
    ),
    (
        "vllm.v1.engine.core_client",
        "AsyncMPClient.__init__",
        ("vllm_config", "executor_class", "log_stats", "client_addresses"),
    ),
    ("vllm.v1.engine.core_client", "AsyncMPClient.add_request_async", ("request",)),
    ("vllm.v1.engine.core_client", "AsyncMPClient.abort_requests_async", ("request_ids",)),
    ("vllm.v1.engine.core_client", "AsyncMPClient.get_output_async", ()),
    ("vllm.v1.engine.core_client", "AsyncMPClient.call_utility_async", ("method",)),
    ("vllm.v1.engine.core_client", "MPClient.shutdown", ("timeout",)),
    (
        "vllm.v1.engine.utils",
        "launch_core_engines",
        ("vllm_config", "executor_class", "log_stats", "addresses"),
    ),
    (
        "vllm.distributed.device_communicators.shm_broadcast",
        "SpinCondition.__init__",
        ("busy_loop_s",),
    ),
    (
        "vllm.distributed.device_communicators.shm_broadcast",
        "SpinCondition.wait",
        ("timeout_ms",),
    ),
    ("vllm.distributed.device_communicators.shm_broadcast", "SpinCondition.record_read", ()),
    ("vllm.v1.engine.utils", "EngineZmqAddresses", ("inputs", "outputs")),
    ("vllm.v1.engine.utils", "CoreEngineLaunch", ("engine_manager",)),
    ("vllm.v1.engine.utils", "CoreEngineProcManager.shutdown", ("timeout",)),
    (
        "vllm.v1.engine.async_llm",
        "AsyncLLM.from_vllm_config",
        ("vllm_config", "enable_log_requests", "disable_log_stats", "aggregate_engine_logging"),
    ),
    ("vllm.v1.engine.async_llm", "AsyncLLM.reset_mm_cache", ()),
    ("vllm.v1.engine.async_llm", "AsyncLLM.check_admission", ("n",)),
    ("vllm.v1.engine.async_llm", "AsyncLLM.get_num_unfinished_requests", ()),
    ("vllm.exceptions", "GracefulHTTPError.__init__", ("message", "http_status")),
    ("vllm.exceptions", "GenerationError", ()),  # .status_code
    ("vllm.config.scheduler", "SchedulerConfig", ("max_num_seqs", "max_num_queued_reqs")),
    ("vllm.config.scheduler", "SchedulerConfig", ("policy", "scheduler_cls", "async_scheduling")),
    ("vllm.config.scheduler", "SchedulerConfig", ("enable_chunked_prefill",)),
    # .running, .waiting (a deque), .max_num_scheduled_tokens, .max_num_active_reqs, .block_size
    ("vllm.v1.core.sched.scheduler", "Scheduler.schedule", ()),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", ()),
    ("vllm.v1.core.sched.request_queue", "FCFSRequestQueue", ()),
    # .is_prefill_chunk, .num_tokens, .num_computed_tokens, .num_output_placeholders, .mm_features
    ("vllm.v1.request", "Request.num_tokens_with_spec", ()),
    (
        "vllm.v1.engine",
        "EngineCoreRequest",
        ("request_id", "prompt_token_ids", "sampling_params", "pooling_params", "prompt_embeds"),
    ),
    (
        "vllm.v1.engine",
        "EngineCoreOutput",
        (
            "request_id",
            "new_token_ids",
            "finish_reason",
            "events",
            "kv_transfer_params",
            "prefill_stats",
        ),
    ),
    (
        "vllm.v1.engine",
        "EngineCoreOutputs",
        ("engine_index", "outputs", "scheduler_stats", "timestamp"),
    ),
    ("vllm.v1.engine", "FinishReason", ("STOP", "LENGTH", "ABORT", "ERROR")),
    (
        "vllm.v1.metrics.stats",
        "PrefillStats",
        ("num_prompt_tokens", "num_computed_tokens", "num_cached_tokens"),
    ),
    ("vllm.config.kv_transfer", "KVTransferConfig", ("kv_connector_module_path", "engine_id")),
    ("vllm.config.kv_transfer", "KVTransferConfig", ("kv_load_failure_policy",)),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorBase_V1",
        (
            "get_mem_pool_context",
            "has_pending_push_work",
            "get_block_ids_with_load_errors",
            "build_connector_worker_meta",
            "wait_for_save",
            "has_pending_block_frees",
            "update_connector_output",
        ),
    ),
    # On GPUs vLLM allocates: one buffer for all layers, inside the context of the connector (here
    # none), then views of it, [blocks, heads, tokens, content] in the order of the layout.
    ("vllm.v1.worker.gpu_worker", "Worker.initialize_from_config", ("kv_cache_config",)),
    ("vllm.v1.worker.utils", "allocate_kv_cache", ("kv_cache_config", "device", "layout")),
    (
        "vllm.v1.kv_cache_interface",
        "create_kv_cache_views",
        ("raw", "num_blocks", "layout", "kernel_block_size"),
    ),
    ("vllm.v1.kv_cache_interface", "KVCacheConfig", ("num_blocks",)),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorBase_V1.register_kv_caches",
        ("kv_caches",),
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorBase_V1.start_load_kv",
        ("forward_context",),
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorBase_V1.get_num_new_matched_tokens",
        ("request", "num_computed_tokens"),
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorBase_V1.update_state_after_alloc",
        ("request", "blocks", "num_external_tokens"),
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorBase_V1.request_finished",
        ("request", "block_ids"),
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorBase_V1.get_transfer_results",
        ("finished_req_ids",),
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorBase_V1.bind_gpu_block_pool",
        ("gpu_block_pool",),
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorBase_V1.on_new_request",
        ("request",),
    ),
    (
        "vllm.v1.sample.logits_processor.interface",
        "LogitsProcessor.update_state",
        ("batch_update",),
    ),
    ("vllm.v1.sample.logits_processor.interface", "LogitsProcessor.apply", ("logits",)),
    (
        "vllm.v1.sample.logits_processor.builtin",
        "process_dict_updates",
        ("req_entries", "batch_update", "new_state"),
    ),
    (
        "vllm.v1.core.sched.output",
        "CachedRequestData",
        ("req_ids", "resumed_req_ids", "new_block_ids"),
    ),
    ("vllm.v1.core.sched.output", "SchedulerOutput", ("scheduled_cached_reqs",)),
    (
        "vllm.entrypoints.serve.middleware.authenticate",
        "AuthenticationMiddleware.verify_token",
        ("headers",),
    ),
    (
        "vllm.v1.engine.output_processor",
        "OutputProcessor.__init__",
        (),
    ),  # .request_states[id].queue
    ("vllm.v1.engine.output_processor", "RequestOutputCollector.put", ("output",)),
    ("vllm.v1.core.sched.output", "SchedulerOutput", ("num_scheduled_tokens",)),
    ("vllm.v1.core.sched.output", "SchedulerOutput", ("preempted_req_ids",)),
    ("vllm.v1.core.kv_cache_utils", "KVCacheBlock.block_hash", ()),
    ("vllm.v1.core.kv_cache_utils", "init_none_hash", ("hash_fn",)),
    (
        "vllm.v1.core.kv_cache_utils",
        "hash_block_tokens",
        ("hash_function", "parent_block_hash", "curr_block_token_ids", "extra_keys"),
    ),
    (
        "vllm.v1.core.kv_cache_utils",
        "generate_block_hash_extra_keys",
        ("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
    ),
    ("vllm.utils.hashing", "get_hash_fn_by_name", ("hash_fn_name",)),
    ("vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1.reset_cache", ()),
    ("vllm.v1.core.block_pool", "BlockPool.reset_prefix_cache", ()),
    ("vllm.v1.request", "Request.update_block_hashes", ()),
    ("vllm.v1.request", "Request.get_skip_reading_prefix_cache", ()),
    ("vllm.v1.core.block_pool", "BlockPool.cache_full_blocks", ("num_cached_blocks",)),
    ("vllm.v1.core.block_pool", "BlockPool.cache_full_blocks", ("num_full_blocks",)),
    ("vllm.v1.core.block_pool", "BlockPool.get_new_blocks", ("num_blocks",)),
    ("vllm.v1.core.block_pool", "BlockPool.get_cached_block", ("block_hash",)),
    ("vllm.config.parallel", "ParallelConfig", ("worker_extension_cls",)),
    ("vllm.v1.engine.core_client", "AsyncMPClient.collective_rpc_async", ("method",)),
    # Of a worker, by WorkerExtension: model_runner.input_batch.generators, and where its ranks meet.
    ("vllm.v1.worker.worker_base", "WorkerBase.__init__", ("distributed_init_method",)),
    ("vllm.v1.sample.metadata", "SamplingMetadata", ("generators",)),
    ("vllm.v1.worker.gpu_input_batch", "InputBatch", ()),  # .generators, .req_id_to_index
    ("vllm.v1.worker.gpu_input_batch", "CachedRequestState", ("block_ids",)),
    ("vllm.v1.core.block_pool", "BlockPool.evict_blocks", ("block_ids",)),
    ("vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager.cache_blocks", ()),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorBase_V1.bind_kv_cache_manager",
        ("kv_cache_manager",),
    ),
    (
        "vllm.v1.core.block_pool",
        "BlockPool.cache_full_blocks",
        ("request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size"),
    ),
    ("vllm.v1.core.block_pool", "BlockPool.touch", ("blocks",)),
    ("vllm.v1.core.block_pool", "BlockPool.free_blocks", ("ordered_blocks",)),
    ("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks", ()),
    (
        "vllm.entrypoints.launchers.api_server.entry",
        "build_and_serve",
        ("engine_client", "listen_address", "sock", "args"),
    ),
    ("vllm.entrypoints.launchers.launcher", "setup_server", ("args", "reuse_port")),
    ("vllm.config.model", "ModelConfig", ("get_total_num_kv_heads", "is_hybrid", "use_mla")),
    ("vllm.config.model", "ModelConfig", ("is_attention_free", "is_encoder_decoder")),
    ("vllm.config.model", "ModelConfig.is_multimodal_model", ()),
    ("vllm.engine.arg_utils", "AsyncEngineArgs.from_cli_args", ("args",)),
    ("vllm.engine.arg_utils", "EngineArgs.create_engine_config", ("usage_context",)),
    ("vllm.engine.arg_utils", "EngineArgs", ("enable_logging_iteration_details",)),
    ("vllm.v1.engine", "EngineCoreRequest", ("external_req_id", "trace_headers")),
    ("vllm.v1.engine", "EngineCoreEventType", ("QUEUED", "SCHEDULED", "PREEMPTED")),
    ("vllm.v1.engine", "EngineCoreEvent", ("type", "timestamp")),
    (
        "vllm.v1.metrics.stats",
        "SchedulerIterationDetails",
        ("num_ctx_requests", "num_ctx_tokens", "num_generation_requests", "elapsed_ms"),
    ),
    ("vllm.v1.metrics.stats", "SchedulerStats", ("iteration_details",)),
    (
        "vllm.tracing",
        "instrument_manual",
        ("span_name", "start_time", "end_time", "attributes", "context"),
    ),
    ("vllm.tracing.otel", "extract_trace_context", ("headers",)),
    ("vllm.envs", "enable_envs_cache", ()),
    (
        "vllm.v1.sample.sampler",
        "Sampler.gather_logprobs",
        ("logprobs", "num_logprobs", "token_ids"),
    ),
)


def read_environment_once() -> None:
    """vLLM's settings from the environment stay what they are in this process.

    vLLM reads them again at every use, in the front end once or twice per token; its engine cores call
    this when they are up, its servers do not.
    """
    envs.enable_envs_cache()


def engine_config(
    args: argparse.Namespace, kv_transfer_config: KVTransferConfig | None
) -> VllmConfig:
    """vLLM's own reading of its own flags, with our connector (or none: the front end's view)."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    engine_args = AsyncEngineArgs.from_cli_args(args)
    engine_args.kv_transfer_config = kv_transfer_config
    return engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def order_prompts(config: VllmConfig) -> None:
    """Have this engine's prompts computed by their deadlines (``connector/schedulers.py``).

    For the policy of first come, first served, and vLLM's own scheduler.
    """
    kind = "AsyncScheduler" if config.scheduler_config.async_scheduling else "Scheduler"
    config.scheduler_config.scheduler_cls = f"pdnode.connector.schedulers.{kind}"


def scheduler_class(*, asynchronous: bool) -> type:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    return AsyncScheduler if asynchronous else Scheduler


def prompts_in_order(base: type) -> type:
    """``base``, asking :func:`prompt_order.next_pass` before each step.

    vLLM allows running requests to be left out of a step (it does so itself when its budget is used
    up). One is left out here by not being in ``running`` while the step is made.
    """

    class Scheduler(base):
        _gives_way = True

        def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
            prompts = [r for r in self.running if r.is_prefill_chunk]
            if not prompts and not self.waiting:
                return super().schedule(*args, **kwargs)
            room = self.kv_cache_manager.block_pool.get_num_free_blocks() * self.block_size
            if len(self.running) >= self.max_num_active_reqs:
                room = 0
            chosen = prompt_order.next_pass(
                [_prompt(r, r.num_tokens - r.num_computed_tokens) for r in prompts],
                [_prompt(r, 0, r.num_tokens < room) for r in self.waiting],
                give_way=self._gives_way,
            )
            streams = [r for r in self.running if not r.is_prefill_chunk]
            served = [prompts[i] for i in chosen.running]
            in_turn = set(chosen.running)
            held = [r for i, r in enumerate(prompts) if i not in in_turn]
            self.running[:] = [*streams, *served]
            _reorder(self.waiting, chosen.waiting)
            most, active = self.max_num_scheduled_tokens, self.max_num_active_reqs
            self.max_num_active_reqs -= len(held)
            if self.scheduler_config.enable_chunked_prefill:
                steps = sum(r.num_tokens_with_spec - r.num_computed_tokens for r in streams)
                placeholders = sum(r.num_output_placeholders for r in streams)
                self.max_num_scheduled_tokens = min(most, chosen.tokens + steps + placeholders)
            try:
                output = super().schedule(*args, **kwargs)
            finally:
                self.max_num_scheduled_tokens, self.max_num_active_reqs = most, active
                self.running.extend(held)
            # Nobody made use of it: no room after all. The next step is for those who held back.
            cached = output.scheduled_cached_reqs.resumed_req_ids
            self._gives_way = not held or bool(output.scheduled_new_reqs or cached)
            return output

    Scheduler.__name__ = Scheduler.__qualname__ = base.__name__
    return Scheduler


def _prompt(request: Request, left: int, has_room: bool = True) -> prompt_order.Prompt:
    """``left``: tokens to compute; 0: as many as the front end said."""
    params = request.sampling_params
    turn = (params.extra_args or {}).get(prompt_order.TURN) if params is not None else None
    # Who says nothing goes first: what the node itself asks.
    deadline_ms, tokens, pass_tokens = turn or (0.0, request.num_tokens, 0)
    return prompt_order.Prompt(
        deadline_ms,
        left or max(1, tokens),
        0 if request.mm_features else pass_tokens,  # a picture must fit into one pass
        has_room and (left > 0 or request.status in CAN_BEGIN),
    )


def _reorder(queue: Any, order: list[int]) -> None:
    if order != sorted(order):
        requests = list(queue)
        queue.clear()
        queue.extend(requests[i] for i in order)


def import_engine() -> None:
    """Import what a CPU engine's processes will import, so that their forks need not."""
    import transformers
    import vllm.model_executor.models.registry
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.structured_output
    import vllm.v1.worker.cpu_worker  # noqa: F401

    assert transformers.__version__


def compile_logprobs(device: Any = "cpu") -> None:
    """Compile what vLLM else compiles for a process's first request for logprobs, in seconds during
    which no stream of that engine goes on. For every size of batch and vocabulary.

    What was compiled holds for the number of threads that torch had, and for forks of the process.
    """
    import torch
    from vllm.v1.sample.sampler import Sampler

    with torch.inference_mode():
        logprobs = torch.zeros(1, 512, device=device)
        torch._dynamo.mark_dynamic(logprobs, 1)
        tokens = torch.zeros(1, dtype=torch.int64, device=device)
        Sampler.gather_logprobs(logprobs, 1, tokens)


def cached_blocks(kv_cache_manager: Any, request_id: str) -> int:
    """How many of the request's first blocks vLLM counts as put into its prefix cache.

    For models with one group of layers, the only ones that our connector takes.
    """
    (manager,) = kv_cache_manager.coordinator.single_type_managers
    return manager.num_cached_block.get(request_id, 0)


def drop_in_flight(request: Request) -> None:
    """What the device computes of a request now is not to be told: it began from a load that failed.

    vLLM drops the output of the step that loaded. With asynchronous scheduling there is one more
    under way, and vLLM 0.32 would hand on its token. The same three fields as in its own
    ``Scheduler._preempt_request``.
    """
    request.drop_stale_output = True
    request.num_stale_output_tokens = request.num_in_flight_tokens
    request.num_output_placeholders = 0


class BlockHasher:
    """vLLM's names of a prompt's full blocks, one at a time, as its engines compute them all."""

    def __init__(self, vllm_config: VllmConfig, block_size: int) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import init_none_hash

        self._hash = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        self._block_size = block_size
        init_none_hash(self._hash)

    def of(self, request: EngineCoreRequest) -> Iterator[bytes]:
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens

        tokens, size = request.prompt_token_ids or (), self._block_size
        parent, media = None, 0
        for end in range(size, len(tokens) + 1, size):
            extra, media = generate_block_hash_extra_keys(request, end - size, end, media)
            parent = hash_block_tokens(self._hash, parent, tokens[end - size : end], extra)
            yield parent


def sleep_soon(after_s: float) -> None:
    """In this process and its forks, who waits for another process's message looks for it in a loop
    for ``after_s``, and then sleeps until it is told.

    vLLM (0.32) loops for a second, so all through each step, yielding its core every time. Where
    engines share cores that is dear: Linux gives a task that yielded its turn again when the others
    have had theirs (4 ms and more, seen on 6.18), while one that slept is let in at once.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    loop = SpinCondition.wait

    def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
        now_s, usual_s = time.monotonic(), self.busy_loop_s
        if self.last_read + after_s < now_s <= self.last_read + usual_s:
            # In vLLM's second, a wake-up that is lost (the socket may still be connecting) must not
            # cost more than a moment.
            timeout_ms = ASLEEP_MS if timeout_ms is None else min(timeout_ms, ASLEEP_MS)
            self.busy_loop_s = 0
        try:
            loop(self, timeout_ms)
        finally:
            self.busy_loop_s = usual_s

    SpinCondition.wait = wait


@contextmanager
def spawn_engine_core(
    vllm_config: VllmConfig, *, input_address: str, output_address: str, log_stats: bool
) -> Iterator[Any]:
    """Start one engine-core process; yields its process manager once the process exists.

    Leaving the context waits for the engine's handshake (weights loaded, KV allocated, warmed) and
    raises RuntimeError if the process ends before. Entering and leaving must be on one thread.
    """
    from vllm.v1.engine.utils import EngineZmqAddresses, launch_core_engines
    from vllm.v1.executor import Executor

    addresses = EngineZmqAddresses(inputs=[input_address], outputs=[output_address])
    with launch_core_engines(
        vllm_config, Executor.get_class(vllm_config), log_stats, addresses
    ) as launch:
        yield launch.engine_manager


def connect_engine_core(
    vllm_config: VllmConfig, *, input_address: str, output_address: str, log_stats: bool
) -> AsyncMPClient:
    """vLLM's client for one engine core that somebody else started.

    Blocks until the engine's ready message, which also updates ``vllm_config`` (blocks, max length).
    """
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.executor import Executor

    return AsyncMPClient(
        vllm_config,
        Executor.get_class(vllm_config),
        log_stats,
        client_addresses={"input_address": input_address, "output_address": output_address},
    )


def build_async_llm(
    vllm_config: VllmConfig, client: EngineCoreClient, args: argparse.Namespace
) -> AsyncLLM:
    """vLLM's front end over a client of ours.

    ``AsyncLLM`` has no parameter for its client: it calls one factory, once, in its constructor. The
    factory is replaced for that one call, on this thread, and put back.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import EngineCoreClient

    def factory(*_: Any, renderer: Any = None, **__: Any) -> EngineCoreClient:
        # What AsyncMPClient does once its processes exist: ours exist already.
        if renderer is not None:
            renderer.start_mm_warmup_in_background()
        return client

    with patch.object(EngineCoreClient, "make_async_mp_client", staticmethod(factory)):
        return AsyncLLM.from_vllm_config(
            vllm_config,
            enable_log_requests=args.enable_log_requests,
            disable_log_stats=args.disable_log_stats,
            aggregate_engine_logging=args.aggregate_engine_logging,
        )


class RequestFailed(GenerationError, GracefulHTTPError):
    """``AsyncLLM.generate`` passes on the one kind as it is; vLLM's streams answer the other without a
    traceback in the log."""

    def __init__(self, message: str, status: HTTPStatus) -> None:
        Exception.__init__(self, message)
        self.message = message
        self.http_status = self.status_code = status


def fail_request(llm: AsyncLLM, request_id: str, status: int, message: str) -> None:
    """Make the request's ``generate`` raise, for vLLM's server to answer with this status and message.

    An output with finish reason ERROR must follow: it frees what vLLM keeps of the request, but all
    that it would tell the client is "Internal server error".
    """
    state = llm.output_processor.request_states.get(request_id)
    if state is not None and state.queue is not None:
        state.queue.put(RequestFailed(message, HTTPStatus(status)))


def trace_span(
    name: str,
    begin_ns: int,
    end_ns: int,
    attributes: dict[str, Any],
    trace_headers: Mapping[str, str] | None,
) -> None:
    """A finished OpenTelemetry span, through the tracer that --otlp-traces-endpoint set up.

    Times are Unix nanoseconds; ``trace_headers``: the client's, whose span becomes the parent.
    """
    from vllm.tracing import extract_trace_context, instrument_manual

    context = extract_trace_context(trace_headers)
    instrument_manual(name, begin_ns, end_ns, attributes, context)


def flush_traces() -> None:
    """Send the spans that are still held. vLLM leaves that to an exit handler, which we skip."""
    from opentelemetry.trace import get_tracer_provider

    flush = getattr(get_tracer_provider(), "force_flush", None)
    if flush is not None:
        flush(FLUSH_TRACES_MS)


def open_listen_socket(args: argparse.Namespace) -> tuple[str, socket.socket]:
    """Bind the HTTP port before anything is started, as vLLM does. Raises OSError."""
    from vllm.entrypoints.launchers.launcher import setup_server

    return setup_server(args, reuse_port=False)


async def serve(
    llm: AsyncLLM,
    address: str,
    sock: socket.socket,
    args: argparse.Namespace,
    on_serving: Callable[[], bool],
) -> None:
    """vLLM's OpenAI server until it is told to exit.

    ``on_serving`` is asked until it is True: it puts our signal handlers in the place of vLLM's,
    which exist only once its server runs.
    """
    import asyncio

    from vllm.entrypoints.launchers.api_server.entry import build_and_serve

    serving = asyncio.ensure_future(build_and_serve(llm, address, sock, args))
    loop = asyncio.get_running_loop()

    async def wait_for_app() -> None:
        while not serving.done() and not on_serving():
            await asyncio.sleep(0.01)

    watcher = loop.create_task(wait_for_app())
    try:
        shutdown = await serving
        await shutdown
    finally:
        watcher.cancel()
