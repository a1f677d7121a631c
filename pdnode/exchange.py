"""One HTTP request and its answer, seen from outside everything else the server does.

Gives every response an ``x-request-id`` (the client's own, or a new one) and remembers when the
request's head was here and when the first and the last byte of the answer left.
"""

from __future__ import annotations

import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdnode.timeline import Timeline

HEADER = "x-request-id"
MAX_ID = 200
"""Characters of a client's id by which its request can be found."""


@dataclass(slots=True, eq=False)
class Exchange:
    """Times: seconds of CLOCK_MONOTONIC."""

    request_id: str
    path: str
    received: float = field(default_factory=time.monotonic)
    received_at: float = field(default_factory=time.time)
    """The same moment on the wall clock (Unix seconds)."""
    status: int | None = None
    streams: bool = False
    """Answered token by token: the first byte is the first token's."""
    first_byte: float | None = None
    last_byte: float | None = None
    timelines: list[Timeline] = field(default_factory=list)
    """What the engines were asked for it: one, or one per prompt and ``n``."""


current: ContextVar[Exchange | None] = ContextVar("pdnode_exchange", default=None)
"""Of the request being answered in this task, and in the tasks that it starts."""


class Exchanges:
    """ASGI: around the whole app, so that an error page has its id too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER)
        exchange = Exchange(given or uuid.uuid4().hex, scope["path"])

        async def send_noting(message: Message) -> None:
            _note(exchange, message)
            await send(message)

        token = current.set(exchange)
        try:
            await self._app(scope, receive, send_noting)
        finally:
            current.reset(token)
            exchange.last_byte = exchange.last_byte or time.monotonic()


def _note(exchange: Exchange, message: Message) -> None:
    if message["type"] == "http.response.start":
        message.setdefault("headers", [])
        headers = MutableHeaders(scope=message)
        # vLLM's --enable-request-id-headers sets one itself.
        exchange.request_id = headers.setdefault(HEADER, exchange.request_id)
        exchange.status = message["status"]
        exchange.streams = headers.get("content-type", "").startswith("text/event-stream")
    elif message["type"] == "http.response.body":
        if message.get("body") and exchange.first_byte is None:
            exchange.first_byte = time.monotonic()
        if not message.get("more_body"):
            exchange.last_byte = time.monotonic()
