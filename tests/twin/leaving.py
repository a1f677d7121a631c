"""Clients that hang up: a request over a bare socket, which is closed at a chosen moment."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

from bench.servers import Node

SOCKET_S = 30.0


@contextlib.contextmanager
def hanging_up(node: Node, body: dict, path: str = "/v1/completions") -> Iterator[socket.socket]:
    """The request is sent; leaving the context closes the connection, answered or not."""
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", node.port), timeout=SOCKET_S) as connection:
        connection.sendall(head.encode() + payload)
        yield connection


def read_chunks(connection: socket.socket, count: int) -> bytes:
    """Read until ``count`` chunks of the stream have come."""
    received = b""
    while received.count(b"data: {") < count:
        piece = connection.recv(65536)
        assert piece, f"the stream ended after {received!r}"
        received += piece
    return received
