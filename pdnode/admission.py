"""The door: what may wait has a bound, and what is over it is told so before anything is begun.

The bounds are vLLM's own flags, and vLLM looks at them too. It does so when a prompt has been
tokenised: of a thousand requests that come at once, all pass. Here those on their way are counted,
and the answer is one that a client may act on: 503 with ``Retry-After``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdnode.vllm_compat import GracefulHTTPError

if TYPE_CHECKING:
    from pdnode.vllm_compat import AsyncLLM, VllmConfig

WORK = ("/v1/", "/generate", "/inference/", "/pooling", "/score", "/classify", "/rerank", "/v2/")
"""Paths that become requests to engines."""

RETRY_AFTER_S = 1
"""Something ends within a second on a node that is full; a client backs off by itself after that."""


def default_bound(engines: Iterable[VllmConfig], index_entries: int) -> int:
    """Requests in the node at once: what its engines can run, and as much again to wait.

    Not more than one engine can have entries for in the index, unless they could run more.
    """
    running = sum(config.scheduler_config.max_num_seqs for config in engines)
    return min(2 * running, max(running, index_entries))


def set_bound(front: VllmConfig, asked: int | None, default: int) -> None:
    """``asked``: --max-num-queued-reqs, where 0 means none."""
    front.scheduler_config.max_num_queued_reqs = default if asked is None else asked or None


class Admission:
    """ASGI middleware; the innermost of ours."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_work(scope):
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope["app"].state.engine_client)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        self._inside += 1
        try:
            await self._app(scope, receive, _with_retry_after(send))
        finally:
            self._inside -= 1

    def _refusal(self, llm: AsyncLLM) -> JSONResponse | None:
        not_begun = max(0, self._inside - llm.get_num_unfinished_requests())
        try:
            llm.check_admission(1 + not_begun)
        except GracefulHTTPError as error:
            llm.engine_core.counters.rejected += 1
            return _refused(error)
        return None


def _is_work(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith(WORK)


def _refused(error: GracefulHTTPError) -> JSONResponse:
    """As vLLM's own handler writes it."""
    status = error.http_status
    body = {"message": str(error), "type": status.phrase, "param": None, "code": status.value}
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return JSONResponse({"error": body}, status_code=status.value, headers=headers)


def _with_retry_after(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 503:
            header = (b"retry-after", b"%d" % RETRY_AFTER_S)
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await send(message)

    return sending
