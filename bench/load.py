"""Many streamed completions at a time, each token timed, from one event loop."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import ClientSession, ClientTimeout, TCPConnector

from bench.sse import Cutter
from bench.streams import Timed

REQUEST_S = 300.0


@asynccontextmanager
async def session(url: str) -> AsyncIterator[ClientSession]:
    connector, timeout = TCPConnector(limit=0), ClientTimeout(REQUEST_S)
    async with ClientSession(url, connector=connector, timeout=timeout) as made:
        yield made


async def ask(client: ClientSession, request: dict, timed: Timed | None = None) -> Timed:
    """Fills ``timed`` as tokens come, so that a caller who cancels has what came until then."""
    timed, cutter = timed or Timed(0.0), Cutter()
    timed.sent_s = time.monotonic()
    async with client.post("/v1/completions", json=request) as response:
        response.raise_for_status()
        async for data in response.content.iter_any():
            for event in cutter.feed(data):
                if "error" in event:
                    raise RuntimeError(str(event))
                tokens = event["choices"][0].get("token_ids") or ()
                timed.token_s += [time.monotonic()] * len(tokens)
    return timed
