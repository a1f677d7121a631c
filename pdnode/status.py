"""The node's own routes, and the one place that says what the node looks like from outside.

``GET /pd/status`` is a contract: field names here are read by other people's checks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

if TYPE_CHECKING:
    from pdnode.node import Node

MIDDLEWARE = "pdnode.status.PdRoutes"
"""Import path for vLLM's ``--middleware``: the hook that brings our routes into its server."""


def node_status(node: Node) -> dict[str, Any]:
    client = node.client
    counters = client.counters
    loads = [node.index.engine(engine.slot) for engine in node.engines]
    return {
        "ready": node.ready,
        "draining": node.draining,
        "boot_id": node.boot_id,
        "engines": [
            {
                "id": engine.engine_id,
                "role": engine.role,
                "state": engine.state.value,
                "pid": engine.pid,
                "worker_pids": list(engine.worker_pids),
                "device": engine.spec.device.describe(),
                "kv_blocks_total": load.blocks_total,
                "kv_blocks_free": load.blocks_free,
                "running": load.running,
                "waiting": load.waiting,
                "restarts": engine.restarts,
                "last_error": engine.last_error,
            }
            for engine, load in zip(node.engines, loads, strict=True)
        ],
        "paths": node.paths,
        "counters": {
            "requests": counters.requests,
            "handoffs": counters.handoffs,
            "handoff_bytes": sum(load.handoff_bytes for load in loads) - node.self_test_bytes,
            "handoff_seconds": sum(load.handoff_ns for load in loads) / 1e9,
            "single_engine": counters.single_engine,
            "single_engine_reasons": dict(counters.single_engine_reasons),
            "recomputed_prompt_tokens": counters.recomputed_prompt_tokens
            + sum(load.recomputed_tokens for load in loads),
            "load_failures": sum(load.load_failures for load in loads),
            "leases_expired": sum(load.leases_expired for load in loads),
            "resumes": counters.resumes,
            "resume_recomputed_tokens": counters.resume_recomputed_tokens,
            "failed": counters.failed,
        },
    }


class PdRoutes:
    """ASGI middleware in vLLM's app: answers ``/pd...`` and refuses new work while draining."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "lifespan"):
            await self._app(scope, receive, send)
            return
        state = scope["app"].state
        node: Node = state.engine_client.engine_core.node
        if scope["type"] == "lifespan":
            # vLLM puts its uvicorn server here before it starts it: our handle to end it.
            node.http_server = state.server
            await self._app(scope, receive, send)
            return
        response = self._answer(node, scope)
        if response is None:
            await self._app(scope, receive, send)
        else:
            await response(scope, receive, send)

    def _answer(self, node: Node, scope: Scope) -> JSONResponse | None:
        path, method = scope["path"], scope["method"]
        if path == "/pd/status" and method == "GET":
            return JSONResponse(node_status(node))
        if method == "POST" and path.startswith("/v1/") and node.draining:
            return JSONResponse(
                {
                    "error": {
                        "message": "The node is stopping: running requests finish, new ones are "
                        "not taken.",
                        "type": "service_unavailable",
                        "param": None,
                        "code": 503,
                    }
                },
                status_code=503,
                headers={"Retry-After": "30"},
            )
        return None
