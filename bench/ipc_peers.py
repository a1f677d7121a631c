"""What the index is measured against: a Redis on a Unix socket, a ZeroMQ request/reply.

All hold the same records under the same ids. No peer is handicapped: no persistence, no TCP,
no serializer (a record is 64 packed bytes), one server process that does nothing else.
"""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

RECORD = struct.Struct("=8Q")
READY_S = 20.0
LEASE_MS = 60_000


def record(n: int) -> bytes:
    """Owner, generation, boot, first block, blocks, tokens ready, tokens total, first token."""
    return RECORD.pack(0, 1, 7, n, 16, 2048, 2048, 5)


class Missing(Exception):
    """The peer is not on this machine; the message says what would have to be installed."""


class RedisPeer:
    """One database per table size. A 30-line client, much quicker than the packaged one below."""

    name = "Redis, Unix socket"

    def __init__(self, folder: Path) -> None:
        server = shutil.which("redis-server")
        if server is None:
            raise Missing("redis-server is not on PATH (Debian: apt install redis-server)")
        path = folder / "redis.sock"
        command = [server, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", folder]
        self._process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
        self._socket = socket.socket(socket.AF_UNIX)
        _connect(self._socket, path, self._process)
        self._in = self._socket.makefile("rb")
        self.version = self.ask(b"INFO", b"server").split(b"redis_version:")[1].split()[0].decode()

    def ask(self, *words: bytes) -> bytes | None:
        self._socket.sendall(_request(words))
        return self._answer()

    def _answer(self) -> bytes | None:
        line = self._in.readline()
        if line[:1] == b"$":
            size = int(line[1:])
            return None if size < 0 else self._in.read(size + 2)[:-2]
        if line[:1] == b"-":
            raise RuntimeError(line.decode())
        return line[1:-2]

    def use(self, database: int) -> None:
        self.ask(b"SELECT", str(database).encode())

    def fill(self, ids: Iterable[str]) -> None:
        batch = [_request((b"SET", id_.encode(), record(n))) for n, id_ in enumerate(ids)]
        for at in range(0, len(batch), 1000):
            part = batch[at : at + 1000]
            self._socket.sendall(b"".join(part))
            for _ in part:
                self._answer()

    def select(self, id_: str) -> tuple | None:
        raw = self.ask(b"GET", id_.encode())
        return None if raw is None else RECORD.unpack(raw)

    def insert(self, id_: str) -> None:
        self.ask(b"SET", id_.encode(), record(3), b"PX", str(LEASE_MS).encode())

    def remove(self, id_: str) -> None:
        self.ask(b"DEL", id_.encode())

    def close(self) -> None:
        self._in.close()
        self._socket.close()
        _end(self._process)


class RedisPyPeer(RedisPeer):
    """As above with the client that people use."""

    name = "Redis, redis-py"

    def __init__(self, folder: Path) -> None:
        try:
            import redis
        except ImportError:
            raise Missing("redis-py is not installed (pip install redis)") from None
        path = folder / "redis-py"
        path.mkdir()
        super().__init__(path)
        self.version, socket_path = redis.__version__, str(path / "redis.sock")
        self._clients = [redis.Redis(unix_socket_path=socket_path, db=n) for n in range(3)]
        self._client = self._clients[0]

    def use(self, database: int) -> None:
        super().use(database)
        self._client = self._clients[database]

    def select(self, id_: str) -> tuple | None:
        raw = self._client.get(id_)
        return None if raw is None else RECORD.unpack(raw)

    def insert(self, id_: str) -> None:
        self._client.set(id_, record(3), px=LEASE_MS)

    def remove(self, id_: str) -> None:
        self._client.delete(id_)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        super().close()


class ZmqPeer:
    """A dictionary in another Python process, asked by REQ over ipc://."""

    name = "ZeroMQ REQ/REP"

    def __init__(self, folder: Path) -> None:
        try:
            import zmq
        except ImportError:
            raise Missing("pyzmq is not installed (pip install pyzmq)") from None
        path = folder / "zmq.sock"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.ipc_peers", str(path)],
            cwd=Path(__file__).resolve().parent.parent,
        )
        self.version, self._context = zmq.zmq_version(), zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.connect(f"ipc://{path}")
        self._ask(b"U\0")  # Answered once the server is there.

    def _ask(self, message: bytes) -> bytes:
        self._socket.send(message)
        return self._socket.recv()

    def use(self, database: int) -> None:
        self._ask(b"U" + bytes([database]))

    def fill(self, ids: Iterable[str]) -> None:
        self._ask(b"F" + "\n".join(ids).encode())

    def select(self, id_: str) -> tuple | None:
        raw = self._ask(b"S" + id_.encode())
        return RECORD.unpack(raw) if raw else None

    def insert(self, id_: str) -> None:
        self._ask(b"I" + record(3) + id_.encode())

    def remove(self, id_: str) -> None:
        self._ask(b"R" + id_.encode())

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()
        _end(self._process)


def serve_zmq(path: str) -> None:
    import zmq

    socket_ = zmq.Context().socket(zmq.REP)
    socket_.bind(f"ipc://{path}")
    tables: dict[int, dict[bytes, bytes]] = {}
    table: dict[bytes, bytes] = {}
    while True:
        message, answer = socket_.recv(), b""
        kind, rest = message[:1], message[1:]
        if kind == b"S":
            answer = table.get(rest, b"")
        elif kind == b"I":
            table[rest[RECORD.size :]] = rest[: RECORD.size]
        elif kind == b"F":
            table.update((id_, record(n)) for n, id_ in enumerate(rest.split(b"\n")))
        elif kind == b"R":
            table.pop(rest, None)
        elif kind == b"U":
            table = tables.setdefault(rest[0], {})
        socket_.send(answer)


def _request(words: Iterable[bytes]) -> bytes:
    words = list(words)
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


def _connect(sock: socket.socket, path: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            return sock.connect(str(path))
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    serve_zmq(sys.argv[1])
