"""A signal before the node is ready is obeyed, whatever the node is at."""

from __future__ import annotations

import asyncio
import io

import pytest

from pdnode.node import Node, _Stopped
from pdnode.progress import Progress


def starting_node() -> Node:
    node = object.__new__(Node)
    node.engines, node.supervisor, node._nursery = [], None, None
    node.progress, node._stop = Progress(io.StringIO()), asyncio.Event()
    return node


@pytest.mark.parametrize("after_s", [0.0, 0.02])
def test_what_is_going_on_is_ended(after_s: float) -> None:
    async def run() -> str:
        node, ended = starting_node(), []

        async def set_up_the_server() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)
                raise RuntimeError("its engines are gone")

        if after_s:
            asyncio.get_running_loop().call_later(after_s, node._stop.set)
        else:
            # The signal came in the moment in which the engines were ready.
            node._stop.set()
        with pytest.raises(_Stopped):
            await node._unless_stopped(set_up_the_server())
        assert ended
        return node.progress._out.getvalue()

    assert "stopping before the node was ready" in asyncio.run(run())


def test_what_is_done_is_done() -> None:
    async def run() -> int:
        async def done() -> int:
            return 7

        return await starting_node()._unless_stopped(done())

    assert asyncio.run(run()) == 7
