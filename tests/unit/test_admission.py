"""The door of the node: vLLM's own check of its own flag, asked before anything is begun."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from vllm.v1.engine.async_llm import AsyncLLM

from bench.tiny_models import tiny_llama
from pdnode import admission, vllm_args
from pdnode.vllm_compat import engine_config

WORK = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/pooling")


@pytest.fixture(scope="module")
def front():
    return engine_config(vllm_args.parse(["--model", str(tiny_llama())]), None)


class Server:
    """An app whose answers wait for ``go``; ``unfinished`` is what vLLM would have begun."""

    def __init__(self, front, *, bound: int) -> None:
        self.unfinished = 0
        self.counters = SimpleNamespace(rejected=0)
        admission.set_bound(front, bound, 1)
        llm = SimpleNamespace(
            scheduler_config=front.scheduler_config,
            admission_stats=None,
            engine_core=SimpleNamespace(counters=self.counters),
            get_num_unfinished_requests=lambda: self.unfinished,
            get_num_queued_tokens=lambda: 0,
            _record_admission_rejection=lambda reason: None,
        )
        llm.check_admission = lambda n: AsyncLLM.check_admission(llm, n)
        self.status = 200
        self.go = asyncio.Event()
        self.app = Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])])
        self.app.state.engine_client = llm
        self.app.add_middleware(admission.Admission)
        transport = httpx.ASGITransport(self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://node")

    async def _answer(self, request) -> JSONResponse:
        if request.method == "POST":
            await self.go.wait()
        return JSONResponse({}, status_code=self.status)


async def burst(server: Server, count: int) -> list[httpx.Response]:
    asked = [asyncio.ensure_future(server.http.post(WORK[i % 4])) for i in range(count)]
    while sum(one.done() for one in asked) < count - 3:
        await asyncio.sleep(0)
    server.go.set()
    return list(await asyncio.gather(*asked))


def test_of_a_burst_only_as_many_as_the_bound_are_let_in(front):
    async def run():
        server = Server(front, bound=3)
        answers = await burst(server, 20)
        assert [a.status_code for a in answers] == [200] * 3 + [503] * 17
        assert server.counters.rejected == 17
        refused = answers[-1]
        assert refused.headers["retry-after"] == "1"
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == (503, None)
        assert "busy" in error["message"]
        # They are over: there is room again.
        assert (await server.http.post(WORK[0])).status_code == 200

    asyncio.run(run())


def test_what_vllm_has_begun_is_not_counted_twice_and_other_routes_not_at_all(front):
    async def run():
        server = Server(front, bound=3)
        server.go.set()
        server.unfinished = 2
        assert (await server.http.post(WORK[0])).status_code == 200
        server.unfinished = 3
        assert (await server.http.post(WORK[0])).status_code == 503
        assert (await server.http.post("/tokenize")).status_code == 200
        assert (await server.http.get("/v1/models")).status_code == 200

    asyncio.run(run())


def test_vllms_own_503_says_when_to_come_again_too(front):
    async def run():
        server = Server(front, bound=3)
        server.go.set()
        server.status = 503
        assert (await server.http.post(WORK[0])).headers["retry-after"] == "1"

    asyncio.run(run())


def test_the_bound_is_vllms_flag_with_a_default_and_0_for_none(front):
    for asked, bound in ((None, 77), (5, 5), (0, None)):
        admission.set_bound(front, asked, 77)
        assert front.scheduler_config.max_num_queued_reqs == bound
    seqs = front.scheduler_config.max_num_seqs
    assert admission.default_bound([front, front], 10**6) == 4 * seqs
    assert admission.default_bound([front, front], 1) == 2 * seqs
