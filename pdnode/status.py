"""The one place that says what the node looks like from outside.

``GET /pd/status`` is a contract: field names here are read by other people's checks.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ipc.records import EngineRecord
from pdnode.engine import Engine, EngineState

if TYPE_CHECKING:
    from pdnode.node import Node

OF_ENGINE = (
    "handoffs_in", "handoff_bytes", "load_failures", "stale_reads", "pins", "index_entries",
    "leases_expired", "index_full", "pool_hits", "pool_stored",
)  # fmt: skip
"""From an engine's own load line, the self-test's copies included; see ipc.records."""


def node_status(node: Node) -> dict[str, Any]:
    client = node.client
    counters = client.counters
    loads = [node.index.engine(engine.slot) for engine in node.engines]
    return {
        "ready": node.ready,
        "draining": node.draining,
        "boot_id": node.boot_id,
        "model": node.served_model,
        "uptime_s": round(time.monotonic() - node.started_s, 1),
        "flow": node.config.flow,
        "index_entries": node.config.index_entries,
        "block_size": client.view().block_size,
        "chunk_tokens": node.engines[0].vllm_config.scheduler_config.max_num_batched_tokens,
        "engines": [
            {
                "id": engine.engine_id,
                "role": engine.role,
                "state": engine.state.value,
                "draining": engine.draining,
                "pid": engine.pid,
                "worker_pids": list(engine.worker_pids),
                "device": engine.spec.device.describe(),
                "kv_blocks_total": load.blocks_total,
                "kv_blocks_free": load.blocks_free,
                **_work(engine, load),
                "kv_blocks_cached": load.blocks_cached,
                "pool_tokens": load.pool_tokens,
                "restarts": engine.restarts,
                "last_error": engine.last_error,
                "prefix_cache_queries": engine.cache_queries,
                "prefix_cache_hits": engine.cache_hits,
                **{name: getattr(load, name) for name in OF_ENGINE},
                "handoff_seconds": load.handoff_ns / 1e9,
                "constants": _constants(node, engine.slot),
            }
            for engine, load in zip(node.engines, loads, strict=True)
        ],
        "paths": _paths(node),
        "counters": {
            "requests": counters.requests,
            "reasons": dict(counters.reasons),
            "handoffs": counters.handoffs,
            "handoff_bytes": sum(load.handoff_bytes for load in loads) - node.self_test_bytes,
            "handoff_tail_bytes": sum(load.handoff_tail_bytes for load in loads)
            - node.self_test_bytes,
            "handoff_seconds": sum(load.handoff_ns for load in loads) / 1e9,
            "single_engine": counters.single_engine,
            "single_engine_reasons": dict(counters.single_engine_reasons),
            "role_changes": dict(counters.role_changes),
            "decode_first": counters.decode_first,
            "flow_reasons": dict(counters.flow_reasons)
            | {
                name: total
                for name in ("follow_no_room", "follow_yielded")
                if (total := sum(getattr(load, name) for load in loads))
            },
            "prompts_cut": counters.prompts_cut,
            "recomputed_prompt_tokens": counters.recomputed_prompt_tokens,
            "load_failures": sum(load.load_failures for load in loads),
            "prefills_deferred": sum(load.deferred for load in loads),
            "leases_expired": sum(load.leases_expired for load in loads),
            "pool_hits": sum(load.pool_hits for load in loads),
            "pool_tokens": sum(load.pool_tokens for load in loads),
            "pool_stored": sum(load.pool_stored for load in loads),
            "prefix_pulls": sum(load.prefix_pulls for load in loads),
            "prefix_tokens": sum(load.prefix_tokens for load in loads),
            "prefix_bytes": sum(load.prefix_bytes for load in loads),
            "prefix_failures": sum(load.prefix_failures for load in loads),
            "resumes": counters.resumes,
            "resume_recomputed_tokens": counters.resume_recomputed_tokens,
            "failed": counters.failed,
            "rejected": counters.rejected,
        },
    }


def _work(engine: Engine, load: EngineRecord) -> dict[str, int]:
    """What its scheduler has. A dead engine's record still says what it had when it died."""
    works = engine.state is EngineState.READY
    names = ("running", "waiting", "queued_prompt_tokens")
    return {name: getattr(load, name) if works else 0 for name in names}


def failures(node: Node) -> tuple[int, int]:
    """Failed copies and expired leases since the start."""
    loads = [node.index.engine(engine.slot) for engine in node.engines]
    return sum(load.load_failures for load in loads), sum(load.leases_expired for load in loads)


def _constants(node: Node, slot: int) -> dict[str, float] | None:
    """What placement reckons with for this engine (estimate.Constants); None: not measured yet."""
    constants = node.client.meters[slot].estimator.constants()
    return asdict(constants) if constants is not None else None


def _paths(node: Node) -> list[dict[str, Any]]:
    """``gb_per_s``: of the self-test's copy. ``handoffs``: requests that took this way since."""
    slots = {engine.engine_id: engine.slot for engine in node.engines}
    by_pair = node.client.counters.handoffs_by_pair
    return [
        {**path, "handoffs": by_pair[slots[path["from"]], slots[path["to"]]]} for path in node.paths
    ]
