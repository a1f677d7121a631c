"""Server-sent events of vLLM's streams, cut at line feeds only.

httpx's ``iter_lines`` also cuts at characters such as U+2028 that are ordinary text inside the JSON.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator


class Cutter:
    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def events(chunks: Iterable[bytes]) -> Iterator[dict]:
    cutter = Cutter()
    for chunk in chunks:
        yield from cutter.feed(chunk)


async def events_async(chunks: AsyncIterable[bytes]) -> AsyncIterator[dict]:
    cutter = Cutter()
    async for chunk in chunks:
        for event in cutter.feed(chunk):
            yield event
