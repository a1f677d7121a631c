"""The least router that vLLM + NixlConnector needs: prefill first, its answer's parameters to decode.

``python -m bench.nixl_proxy --prefill URL --decode URL --port N --host H``. Streams bytes as they
come and parses none of them. ``X-Decode-Sent-S`` in an answer is when the decode engine was sent the
request, on CLOCK_MONOTONIC, which all processes of one machine share.
"""

from __future__ import annotations

import argparse
import time

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

DECODE_SENT = "X-Decode-Sent-S"
ASK_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
ENGINES = web.AppKey("engines", tuple)
SESSION = web.AppKey("session", ClientSession)


def prefill_body(body: dict) -> dict:
    """The same request for one token; its answer says where the KV is."""
    prefill = {k: v for k, v in body.items() if k not in ("stream_options", "min_tokens")}
    one = {"max_tokens": 1, "stream": False, "kv_transfer_params": ASK_PREFILL}
    if "max_completion_tokens" in prefill:
        one["max_completion_tokens"] = 1
    return prefill | one


async def generate(request: web.Request) -> web.StreamResponse:
    (prefill, decode), session = request.app[ENGINES], request.app[SESSION]
    body = await request.json()
    try:
        async with session.post(prefill + request.path, json=prefill_body(body)) as first:
            if first.status != 200:
                return web.Response(status=first.status, body=await first.read())
            where = (await first.json())["kv_transfer_params"]
        sent = {DECODE_SENT: f"{time.monotonic():.6f}"}
        async with session.post(
            decode + request.path, json=body | {"kv_transfer_params": where}
        ) as second:
            return await _passed_on(request, second, sent)
    except ClientError as error:
        return web.json_response({"error": {"message": repr(error)}}, status=502)


async def _passed_on(request: web.Request, answer, headers: dict[str, str]) -> web.StreamResponse:
    headers |= {"Content-Type": answer.headers.get("Content-Type", "application/json")}
    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(request)
    async for piece in answer.content.iter_any():
        await response.write(piece)
    await response.write_eof()
    return response


async def health(request: web.Request) -> web.Response:
    try:
        for engine in request.app[ENGINES]:
            async with request.app[SESSION].get(engine + "/health") as answer:
                if answer.status != 200:
                    return web.Response(status=503)
    except ClientError:
        return web.Response(status=503)
    return web.Response()


def make_app(prefill: str, decode: str) -> web.Application:
    app = web.Application(client_max_size=2**26)
    app[ENGINES] = (prefill, decode)

    async def session(app: web.Application):
        # Servers end an idle connection after 5 s, and a request sent in that moment would be lost.
        connector = TCPConnector(limit=0, force_close=True)
        async with ClientSession(connector=connector, timeout=ClientTimeout(None)) as made:
            app[SESSION] = made
            yield

    app.cleanup_ctx.append(session)
    app.router.add_post("/v1/completions", generate)
    app.router.add_post("/v1/chat/completions", generate)
    app.router.add_get("/health", health)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    web.run_app(make_app(args.prefill, args.decode), host=args.host, port=args.port, print=None)
