"""What we add to vLLM's HTTP server, through its ``--middleware`` hook.

``/pd...`` routes, a key for everything but ``/health`` and the page's own files (which tell nothing
and ask for the key), no new work while the node stops, and a bound on what waits (admission).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pdnode import page
from pdnode.admission import Admission
from pdnode.errors import BadRole
from pdnode.exchange import Exchanges
from pdnode.history import KEPT, LISTED
from pdnode.status import node_status
from pdnode.vllm_compat import AuthenticationMiddleware

if TYPE_CHECKING:
    from pdnode.node import Node

MIDDLEWARE = "pdnode.http_routes.PdRoutes"
"""Import path for vLLM's ``--middleware``."""

REQUESTS = "/pd/requests/"
POSTS = {
    "/pd/role": '{"engine": "prefill-0", "role": "decode"}',
    "/pd/drain": '{"engine": "prefill-0", "drain": true}',
}
OPEN_PATHS = frozenset({"/health"})
"""For the machine's own health checks; it tells nothing."""


class PdRoutes:
    """ASGI middleware, one per app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = Admission(app)
        self._keys: AuthenticationMiddleware | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._begin(scope)
        response = self._answer(scope) if scope["type"] == "http" else None
        if response is None and scope["type"] == "http" and scope["path"] in POSTS:
            response = await self._change(Request(scope, receive))
        await (response or self._app)(scope, receive, send)

    def _begin(self, scope: Scope) -> None:
        app = scope["app"]
        # Outside of everything, the app's own error pages too.
        app.middleware_stack = Exchanges(app.middleware_stack)
        state = app.state
        self._node: Node = state.engine_client.engine_core.node
        # vLLM puts its uvicorn server here before it starts it: our handle to end it.
        self._node.http_server = state.server
        if keys := self._node.api_keys:
            self._keys = AuthenticationMiddleware(self._app, keys)

    def _answer(self, scope: Scope) -> Response | None:
        """None: vLLM's to answer."""
        path, method = scope["path"], scope["method"]
        if path == "/" and method in ("GET", "HEAD"):
            # A browser given the address alone is a person who looks for the page.
            return RedirectResponse("/pd")
        if path.rstrip("/") == "/pd" or path in page.FILES:
            return page.answer(path) if method in ("GET", "HEAD") else _not_allowed()
        if not self._may_enter(scope, path):
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        if path.startswith("/pd/") and path not in POSTS:
            if method not in ("GET", "HEAD"):
                return _not_allowed()
            return self._read(path, QueryParams(scope["query_string"]))
        if method == "POST" and self._node.draining:
            return _stopping()
        return None

    def _read(self, path: str, query: QueryParams) -> JSONResponse:
        history = self._node.client.history
        if path == "/pd/status":
            return JSONResponse(node_status(self._node))
        if path == "/pd/requests":
            limit = query.get("limit", str(LISTED))
            if not (limit.isdecimal() and limit.isascii()):
                return _bad_request(f"limit={limit!r} is not a number of requests: up to {KEPT}")
            return JSONResponse(history.listed(int(limit)))
        if path.startswith(REQUESTS):
            found = history.find(path.removeprefix(REQUESTS))
            return JSONResponse(found) if found else _no_request(path.removeprefix(REQUESTS))
        return JSONResponse({"detail": "Not Found"}, status_code=404)

    async def _change(self, request: Request) -> JSONResponse:
        if request.method != "POST":
            return _not_allowed()
        try:
            wanted = json.loads(await request.body())
            if request.url.path == "/pd/role":
                self._node.change_role(wanted["engine"], wanted["role"])
            else:
                await self._node.drain_engine(wanted["engine"], _flag(wanted, "drain"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return _bad_request(f"POST {POSTS[request.url.path]} here ({error!r})")
        except BadRole as error:
            return _bad_request(str(error))
        return JSONResponse(node_status(self._node))

    def _may_enter(self, scope: Scope, path: str) -> bool:
        # vLLM's own check covers /v1 only; its metrics, tokenizer and cache routes are as private.
        if self._keys is None or path in OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        return self._keys.verify_token(Headers(scope=scope))


def _flag(wanted: dict[str, Any], name: str) -> bool:
    """Left out, it is true. Raises TypeError: "false" in quotes is not false to Python."""
    value = wanted.get(name, True)
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, neither true nor false")
    return value


def _not_allowed() -> JSONResponse:
    return JSONResponse({"detail": "Method Not Allowed"}, status_code=405)


def _no_request(request_id: str) -> JSONResponse:
    message = (
        f"no request {request_id!r} among the last {KEPT}; give the x-request-id of its response, or "
        "the id in its body"
    )
    error = {"message": message, "type": "NotFoundError", "param": None, "code": 404}
    return JSONResponse({"error": error}, status_code=404)


def _bad_request(message: str) -> JSONResponse:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    return JSONResponse({"error": error}, status_code=400)


def _stopping() -> JSONResponse:
    message = "The node is stopping: running requests finish, new ones are not taken."
    error = {"message": message, "type": "service_unavailable", "param": None, "code": 503}
    return JSONResponse({"error": error}, status_code=503, headers={"Retry-After": "30"})
