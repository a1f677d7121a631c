"""A server for the page that answers with recorded JSON: 8P8D needs no eight GPUs to be drawn.

The page and its headers are the product's own (pdnode.page); only the numbers are recorded.
"""

from __future__ import annotations

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pdnode import page

HERE = Path(__file__).parent


def recorded(name: str) -> dict:
    return json.loads((HERE / f"{name}.json").read_text())


def widened(status: dict, prefill: int, decode: int) -> dict:
    """A recorded 1P1D status as if there had been more engines, each with its own numbers."""
    wide = copy.deepcopy(status)
    models = {engine["role"]: engine for engine in status["engines"]}
    wide["engines"] = [
        {
            **models[role],
            "id": f"{role}-{i}",
            "device": f"GPU {i + (8 if role == 'decode' else 0)} (H100 80GB)",
            "kv_blocks_free": models[role]["kv_blocks_total"] * (9 - i) // 10,
            "running": 3 * i,
            "prefix_cache_queries": 1000,
            "prefix_cache_hits": 100 * i,
        }
        for role, n in (("prefill", prefill), ("decode", decode))
        for i in range(n)
    ]
    [path] = status["paths"]
    wide["paths"] = [
        {
            **path,
            "from": f"prefill-{p}",
            "to": f"decode-{d}",
            "gb_per_s": 250 + p + d,
            "handoffs": p * d,
        }
        for p in range(prefill)
        for d in range(decode)
    ]
    return wide


class StandIn:
    """Serves until closed. ``status`` and ``requests`` may be changed while it does."""

    def __init__(self, status: dict, requests: dict, key: str = "") -> None:
        self.status, self.requests, self.key = status, requests, key
        self.posts: list[tuple[str, dict]] = []
        self.held: tuple[str, threading.Event] | None = None
        """Requests for a path with a refused key are answered when the event is set."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer._get(self)

            def do_POST(self) -> None:
                outer._post(self)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _get(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.path in page.FILES:
            answer = page.answer(handler.path)
            self._send(handler, 200, bytes(answer.body), dict(answer.headers))
        elif not self._may(handler):
            if self.held and self.held[0] == handler.path and handler.headers["authorization"]:
                self.held[1].wait()
            self._json(handler, 401, {"error": "Unauthorized"})
        else:
            shown = {"/pd/status": self.status, "/pd/requests": self.requests}
            self._json(handler, 200, shown[handler.path])

    def _post(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        self.posts.append((handler.path, body))
        [engine] = [e for e in self.status["engines"] if e["id"] == body["engine"]]
        if handler.path == "/pd/role":
            engine["role"] = body["role"]
        else:
            engine["draining"] = body["drain"]
        self._json(handler, 200, self.status)

    def _may(self, handler: BaseHTTPRequestHandler) -> bool:
        return not self.key or handler.headers["authorization"] == f"Bearer {self.key}"

    def _json(self, handler: BaseHTTPRequestHandler, code: int, value: dict) -> None:
        headers = {"content-type": "application/json"}
        self._send(handler, code, json.dumps(value).encode(), headers)

    @staticmethod
    def _send(handler, code: int, body: bytes, headers: dict[str, str]) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            if name != "content-length":
                handler.send_header(name, value)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def close(self) -> None:
        if self.held:
            self.held[1].set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
