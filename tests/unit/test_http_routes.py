"""The routes' own rules, without engines: who may enter, and what every response carries."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from pdnode import exchange
from pdnode.exchange import Exchanges
from pdnode.history import History
from pdnode.http_routes import PdRoutes

KEY = "sesame"
SEEN: list[exchange.Exchange] = []


async def _broken(request: Any) -> None:
    raise RuntimeError("a bug")


async def _streamed(request: Any) -> StreamingResponse:
    SEEN.append(exchange.current.get())

    async def pieces():
        # In a task of its own: the request is known there too.
        assert exchange.current.get() is SEEN[-1]
        yield b""
        yield b"one"
        yield b"two"

    return StreamingResponse(pieces(), media_type="text/event-stream")


async def _own_id(request: Any) -> PlainTextResponse:
    return PlainTextResponse("", headers={"x-request-id": "the-servers"})


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Starlette:
    routes = [
        Route("/broken", _broken),
        Route("/streamed", _streamed),
        Route("/own", _own_id),
        Route("/metrics", lambda _: PlainTextResponse("")),
        Route("/health", lambda _: PlainTextResponse("")),
    ]
    app = Starlette(routes=routes)
    client = SimpleNamespace(history=History(["prefill-0"]))
    node = SimpleNamespace(api_keys=[KEY], draining=False, client=client, http_server=None)
    app.state.engine_client = SimpleNamespace(engine_core=SimpleNamespace(node=node))
    app.state.server = None
    app.add_middleware(PdRoutes)
    return app


def get(app: Starlette, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        sent = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

        async def receive() -> dict:
            return next(sent)

        async def send(message: dict) -> None:
            pass

        if not isinstance(app.middleware_stack, Exchanges):
            await app({"type": "lifespan", "app": app, "state": {}}, receive, send)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize("path", ["/pd", "/pd/", "/pd/page.js", "/pd/page.css", "/health"])
def test_the_page_and_health_need_no_key(app: Starlette, path: str) -> None:
    assert get(app, path).status_code == 200


@pytest.mark.parametrize("path", ["/pd/status", "/pd/requests", "/pd/requests/x", "/metrics"])
def test_what_tells_of_the_node_needs_the_key(app: Starlette, path: str) -> None:
    refused = get(app, path)
    assert refused.status_code == 401
    assert refused.headers["x-request-id"]


def test_with_the_key_the_list_is_told(app: Starlette) -> None:
    answer = get(app, "/pd/requests", authorization=f"Bearer {KEY}")
    assert answer.json()["requests"] == []
    assert get(app, "/pd/nowhere", authorization=f"Bearer {KEY}").status_code == 404
    assert get(app, "/pd/status", "POST", authorization=f"Bearer {KEY}").status_code == 405
    assert get(app, "/pd/drain", authorization=f"Bearer {KEY}").status_code == 405
    assert get(app, "/pd", "POST").status_code == 405


@pytest.mark.parametrize("path", ["/broken", "/nowhere", "/streamed", "/pd", "/pd/status"])
def test_every_response_has_one_id(app: Starlette, path: str) -> None:
    auth = {"authorization": f"Bearer {KEY}"} if path != "/pd/status" else {}
    assert len(get(app, path, **auth).headers.get_list("x-request-id")) == 1
    mine = get(app, path, **auth, **{"x-request-id": "mine"})
    assert mine.headers.get_list("x-request-id") == ["mine"]


def test_an_id_that_the_server_gave_is_the_one_to_ask_for(app: Starlette) -> None:
    answer = get(app, "/own", authorization=f"Bearer {KEY}")
    assert answer.headers.get_list("x-request-id") == ["the-servers"]


def test_the_first_byte_is_the_first_that_is_there(app: Starlette) -> None:
    assert get(app, "/streamed", authorization=f"Bearer {KEY}").text == "onetwo"
    seen = SEEN[-1]
    assert seen.streams
    assert seen.received <= seen.first_byte <= seen.last_byte
