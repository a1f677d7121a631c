"""The bench's proxy for vLLM + NIXL: prefill first, then decode is told where the KV is."""

from __future__ import annotations

import asyncio
import json

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from bench.nixl_proxy import DECODE_SENT, make_app

WHERE = {"remote_engine_id": "P", "remote_block_ids": [[3, 4]]}
ASKED = {"prompt": "x", "max_tokens": 9, "stream": True, "stream_options": {}, "min_tokens": 4}


class Engine:
    """Answers every completion with ``text``, and keeps what it was asked."""

    def __init__(self, text: str, status: int = 200) -> None:
        self.asked: list[dict] = []
        self._text, self._status = text, status

    async def __aenter__(self) -> Engine:
        app = web.Application()
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_get("/health", self._answer)
        self._server = TestServer(app)
        await self._server.start_server()
        self.url = str(self._server.make_url("")).rstrip("/")
        return self

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json() if request.can_read_body else {})
        return web.Response(text=self._text, status=self._status, content_type="application/json")

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()


async def through(prefill: Engine, decode: Engine) -> tuple[int, str, str | None]:
    async with (
        prefill,
        decode,
        TestClient(TestServer(make_app(prefill.url, decode.url))) as client,
        client.post("/v1/completions", json=ASKED) as answer,
    ):
        return answer.status, await answer.text(), answer.headers.get(DECODE_SENT)


def test_decode_is_told_where_prefill_left_the_kv():
    prefill, decode = Engine(json.dumps({"kv_transfer_params": WHERE})), Engine("data: 1\n\n")
    status, text, sent = asyncio.run(through(prefill, decode))
    assert (status, text) == (200, "data: 1\n\n")
    assert float(sent or 0) > 0
    (first,), (second,) = prefill.asked, decode.asked
    assert first["max_tokens"] == 1
    assert first["stream"] is False
    assert first["kv_transfer_params"]["do_remote_decode"]
    assert not {"min_tokens", "stream_options"} & first.keys()
    assert second == ASKED | {"kv_transfer_params": WHERE}


def test_what_prefill_refuses_is_not_asked_of_decode():
    prefill, decode = Engine("no", status=400), Engine("")
    assert asyncio.run(through(prefill, decode))[:2] == (400, "no")
    assert not decode.asked


def test_an_engine_that_is_gone_is_a_bad_gateway():
    async def gone() -> int:
        async with Engine("") as decode:
            app = make_app("http://127.0.0.1:9", decode.url)
            async with (
                TestClient(TestServer(app)) as client,
                client.post("/v1/completions", json=ASKED) as answer,
            ):
                return answer.status

    assert asyncio.run(gone()) == 502
